// Runs every operator of the C ABI on fixed inputs, for each instruction set of this build and 1 and 2 threads, and
// prints one FNV-1a hash a case (and the instruction sets on stderr). The lines must not depend on instruction set, threads or architecture.
// Exit status: 0 equal bits; 1 a case differs (named on stderr) or an operator fails.
// Build: link with the objects of kernels/cpu (all levels and dispatch.cpp) and OpenMP; runs under qemu-user.
#include <omp.h>

#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "tpi/contract.h"

#define TPI_OP(name, params, args) extern "C" int tpi_##name params;
#include "tpi/ops.def"
#undef TPI_OP
extern "C" const char* tpi_isa_available(int i);
extern "C" int tpi_set_isa(const char* name);

namespace {

const int kDtypes[] = {TPI_F32, TPI_BF16, TPI_F16};
const char* const kDtypeNames[] = {"f32", "bf16", "f16"};

uint64_t mix(uint64_t x) {  // splitmix64
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// Elements with random sign and mantissa and an exponent in [low, high], written as bits: no arithmetic in the driver.
class Buffer {
 public:
  Buffer(int dtype, i64 n) : size_(dtype == TPI_F32 ? 4 : 2), bytes_(size_t(n) * size_) {}
  Buffer(int dtype, i64 n, uint64_t seed, int low = -4, int high = 0) : Buffer(dtype, n) {
    static const int kMantissa[] = {23, 7, 10}, kBias[] = {127, 127, 15};
    for (i64 i = 0; i < n; ++i) {
      const uint64_t h = mix(seed * 1000003u + uint64_t(i));
      const uint32_t exponent = uint32_t(kBias[dtype] + low + int((h >> 32) % uint64_t(high - low + 1)));
      const uint32_t mantissa = uint32_t(h) & ((1u << kMantissa[dtype]) - 1);
      const uint32_t sign = uint32_t(h >> 63) << (size_ * 8 - 1);
      const uint32_t bits = sign | exponent << kMantissa[dtype] | mantissa;
      std::memcpy(bytes_.data() + size_t(i) * size_, &bits, size_);  // little endian
    }
  }
  operator void*() { return bytes_.data(); }
  operator const void*() const { return bytes_.data(); }
  float* f32() { return (float*)bytes_.data(); }
  Buffer& positive() {
    for (size_t i = size_ - 1; i < bytes_.size(); i += size_) bytes_[i] &= 0x7F;
    return *this;
  }
  uint64_t hash(uint64_t h) const {
    for (unsigned char b : bytes_) h = (h ^ b) * 0x100000001B3u;
    return h;
  }

 private:
  size_t size_;
  std::vector<unsigned char> bytes_;
};

struct Ints {
  std::vector<i64> v;
  Ints(i64 n, uint64_t seed, i64 low, i64 high) : v(size_t(n)) {
    for (i64 i = 0; i < n; ++i) v[size_t(i)] = low + i64(mix(seed * 7919u + uint64_t(i)) % uint64_t(high - low + 1));
  }
  operator const i64*() const { return v.data(); }
};

class Cases {
 public:
  std::vector<std::string> lines;
  bool failed = false;

  void run() {
    linear();
    grouped_linear();
    tree();
    attention();
    norm();
    rope();
    swiglu();
    embedding();
    vocab();
    moe();
    elementary();
  }

 private:
  void add(const char* op, const std::string& what, int status, const std::vector<const Buffer*>& outputs) {
    if (status != TPI_OK) {
      std::fprintf(stderr, "%s %s: status %d\n", op, what.c_str(), status);
      failed = true;
    }
    uint64_t h = 0xCBF29CE484222325u;
    for (const Buffer* b : outputs) h = b->hash(h);
    char text[24];
    std::snprintf(text, sizeof text, "%016" PRIx64, h);
    lines.push_back(std::string(op) + " " + what + " " + text);
  }

  static std::string shape(std::initializer_list<i64> sizes) {
    std::string s;
    for (i64 n : sizes) s += (s.empty() ? "" : "x") + std::to_string(n);
    return s;
  }

  void linear() {
    struct {
      i64 M, N, K, leaf, leaves, spans;
    } const shapes[] = {{1, 33, 64, 8, 8, 1}, {3, 17, 40, 5, 8, 2}, {16, 96, 512, 64, 8, 8}, {67, 130, 1000, 125, 8, 4}};
    for (int d : kDtypes)
      for (auto& s : shapes) {
        const std::string what = std::string(kDtypeNames[d]) + " " + shape({s.M, s.N, s.K});
        Buffer x(d, s.M * s.K, 1), w(d, s.N * s.K, 2), bias(d, s.N, 3), dy(d, s.M * s.N, 4);
        Buffer y(d, s.M * s.N), wide(TPI_F32, s.M * s.N), dx(d, s.M * s.K);
        add("linear", what, tpi_linear(d, d, x, s.K, w, s.K, bias, y, s.N, s.M, s.N, s.K, s.leaf, s.leaves, 0), {&y});
        add("linear", what + " to f32",
            tpi_linear(d, TPI_F32, x, s.K, w, s.K, nullptr, wide, s.N, s.M, s.N, s.K, s.leaf, s.leaves, 0), {&wide});
        add("linear", what + " paired",
            tpi_linear(d, d, x, s.K, w, s.K, bias, y, s.N, s.M, s.N, s.K, s.K / 2, 1, 1), {&y});
        const i64 leaf = (s.N + 7) / 8;
        add("linear_dx", what, tpi_linear_dx(d, d, dy, s.N, w, s.K, dx, s.K, s.M, s.N, s.K, leaf, 8, 0), {&dx});
        if (s.N % 2 == 0)
          add("linear_dx", what + " paired",
              tpi_linear_dx(d, d, dy, s.N, w, s.K, dx, s.K, s.M, s.N, s.K, s.N / 2, 1, 1), {&dx});
        const i64 first[] = {0, s.M / 3}, length[] = {s.M / 3, s.M - s.M / 3};
        Buffer dw(TPI_F32, s.N * s.K, 5), db(TPI_F32, s.N, 6);
        add("linear_dw", what,
            tpi_linear_dw(d, dy, s.N, x, s.K, dw.f32(), s.K, s.N, s.K, 2, first, length, 1, s.spans, 0), {&dw});
        add("linear_dw", what + " carry",
            tpi_linear_dw(d, dy, s.N, x, s.K, dw.f32(), s.K, s.N, s.K, 1, first, length, 1, 1, 1), {&dw});
        add("linear_db", what, tpi_linear_db(d, dy, s.N, db.f32(), s.N, 2, first, length, 1, s.spans), {&db});
      }
  }

  void grouped_linear() {
    const i64 experts = 4, N = 48, K = 136, offsets[] = {0, 5, 5, 26, 40}, T = 40;
    for (int d : kDtypes) {
      const std::string what = std::string(kDtypeNames[d]) + " " + shape({experts, T, N, K});
      Buffer x(d, T * K, 1), w(d, experts * N * K, 2), dy(d, T * N, 3), y(d, T * N), dx(TPI_F32, T * K);
      add("grouped_linear", what,
          tpi_grouped_linear(d, d, x, K, w, N * K, K, y, N, offsets, experts, N, K, K / 8, 8), {&y});
      add("grouped_linear_dx", what,
          tpi_grouped_linear_dx(d, TPI_F32, dy, N, w, N * K, K, dx, K, offsets, experts, N, K, N / 16, 8, 1),
          {&dx});
    }
  }

  void tree() {
    for (int d : kDtypes)
      for (i64 M : {3, 40}) {
        const i64 N = 1003, parts = 4;
        const std::string what = std::string(kDtypeNames[d]) + " " + shape({parts, M, N});
        Buffer x(TPI_F32, parts * M * N, 1), bias(d, N, 2), y(d, M * N);
        add("tree_sum", what, tpi_tree_sum(d, d, x.f32(), parts, nullptr, y, M, N), {&y});
        add("tree_sum", what + " bias", tpi_tree_sum(d, d, x.f32(), parts, bias, y, M, N), {&y});
      }
  }

  void attention() {
    // Lines: first query, queries, position, first key, keys. Two packed sequences; the second one is a chunk.
    const i32 packed[] = {0, 70, 0, 0, 70, 70, 90, 210, 70, 300}, interleaved[] = {0, 140, 0, 0, 140, 1, 140, 0, 1, 140};
    struct {
      const i32* seqs;
      i64 lines, stride, Tq, Tk, Hq, Hk, D, window, segment_blocks;
    } const cases[] = {{packed, 2, 1, 160, 370, 2, 1, 64, 0, 16},
                       {packed, 2, 1, 160, 370, 3, 1, 40, 150, 2},
                       {interleaved, 2, 2, 280, 280, 4, 2, 16, 0, 1}};
    for (int d : kDtypes) {
      for (auto& c : cases) {
        const std::string what = std::string(kDtypeNames[d]) + " " + shape({c.Tq, c.Tk, c.Hq, c.Hk, c.D}) + " window " +
                                 std::to_string(c.window);
        const i64 q_ts = c.Hq * c.D, k_ts = c.Hk * c.D;
        const float scale = 0.125f;
        Buffer q(d, c.Tq * q_ts, 1), k(d, c.Tk * k_ts, 2), v(d, c.Tk * k_ts, 3), dout(d, c.Tq * q_ts, 4);
        Buffer out(d, c.Tq * q_ts), m(TPI_F32, c.Hq * c.Tq), l(TPI_F32, c.Hq * c.Tq);
        add("attention", what,
            tpi_attention(d, q, q_ts, c.D, k, k_ts, c.D, v, k_ts, c.D, out, q_ts, c.D, m.f32(), l.f32(), c.Tq, c.seqs,
                          c.lines, c.stride, c.Hq, c.Hk, c.D, scale, c.window, c.segment_blocks),
            {&out, &m, &l});
        for (int partial : {0, 1}) {
          const int grad_dtype = partial ? TPI_F32 : d;
          Buffer dq(d, c.Tq * q_ts), dk(grad_dtype, c.Tk * k_ts), dv(grad_dtype, c.Tk * k_ts);
          add("attention_backward", what + (partial ? " partial" : ""),
              tpi_attention_backward(d, dout, q_ts, c.D, q, q_ts, c.D, k, k_ts, c.D, v, k_ts, c.D, out, q_ts, c.D,
                                     m.f32(), l.f32(), c.Tq, dq, q_ts, c.D, dk, dv, k_ts, c.D, partial, c.seqs, c.lines,
                                     c.stride, c.Hq, c.Hk, c.D, scale, c.window, c.segment_blocks),
              {&dq, &dk, &dv});
        }
      }
      for (i64 page : {16, 256}) {
        const i64 Hq = 4, Hk = 2, D = 64, length0 = 37, length1 = 421, blocks0 = (length0 + page - 1) / page,
                  blocks = blocks0 + (length1 + page - 1) / page, T = length0 + length1;
        const std::string what = std::string(kDtypeNames[d]) + " page " + std::to_string(page);
        const i64 head_stride = page * 2 * D, block_stride = Hk * head_stride;
        Buffer k(d, T * Hk * D, 1), v(d, T * Hk * D, 2), q(d, 6 * Hq * D, 3), cache(d, blocks * block_stride);
        std::vector<i64> slots;
        for (i64 t = 0; t < length0; ++t) slots.push_back(t);
        for (i64 t = 0; t < length1; ++t) slots.push_back(blocks0 * page + t);
        slots[3] = -1;
        add("paged_cache_write", what,
            tpi_paged_cache_write(d, k, Hk * D, D, v, Hk * D, D, cache, block_stride, head_stride, page, slots.data(), T,
                                  Hk, D),
            {&cache});
        const i64 table_stride = blocks;
        std::vector<i32> table(size_t(2 * table_stride));
        for (i64 b = 0; b < blocks; ++b) {
          table[size_t(b)] = i32(b);
          table[size_t(table_stride + b)] = i32(b + blocks0 < blocks ? b + blocks0 : 0);
        }
        const i32 starts[] = {0, 5, 6}, lengths[] = {i32(length0), i32(length1)};
        for (i64 window : {0, 100}) {
          Buffer out(d, 6 * Hq * D);
          add("paged_attention", what + " window " + std::to_string(window),
              tpi_paged_attention(d, q, Hq * D, D, cache, block_stride, head_stride, page, table.data(), table_stride,
                                  table_stride, 1 << 20,
                                  starts, lengths, 2, out, Hq * D, D, Hq, Hk, D, 0.125f, window, 2),
              {&out});
        }
      }
    }
  }

  void norm() {
    struct {
      i64 outer, inner, H, spans;
    } const shapes[] = {{3, 1, 77, 1}, {9, 1, 4096, 8}, {13, 6, 128, 2}, {40, 5, 200, 4}};
    for (int d : kDtypes)
      for (auto& s : shapes) {
        const std::string what = std::string(kDtypeNames[d]) + " " + shape({s.outer, s.inner, s.H});
        const i64 rows = s.outer * s.inner, inner = s.H + 3, outer = s.inner * inner + 5, n = rows * s.H;
        Buffer x(d, s.outer * outer, 1), residual(d, s.outer * outer, 2), w(d, s.H, 3), dy(d, s.outer * outer, 4);
        Buffer y(d, n), residual_out(d, n), rstd(TPI_F32, rows), dx(d, n), skip(d, n, 5), dw(TPI_F32, s.H, 6);
        add("rms_norm", what,
            tpi_rms_norm(d, x, outer, inner, nullptr, 0, 0, w, 1e-6f, y, nullptr, rstd.f32(), s.outer, s.inner, s.H),
            {&y, &rstd});
        add("rms_norm_backward", what,
            tpi_rms_norm_backward(d, dy, outer, inner, x, outer, inner, w, rstd.f32(), nullptr, dx, s.outer, s.inner,
                                  s.H),
            {&dx});
        add("rms_norm_backward", what + " skip",
            tpi_rms_norm_backward(d, dy, outer, inner, x, outer, inner, w, rstd.f32(), skip, dx, s.outer, s.inner, s.H),
            {&dx});
        const i64 first[] = {0, s.outer / 2}, length[] = {s.outer / 2, s.outer - s.outer / 2};
        add("rms_norm_dw", what,
            tpi_rms_norm_dw(d, dy, outer, x, outer, rstd.f32(), dw.f32(), s.H, 2, first, length, 1, s.spans), {&dw});
        Buffer terms(TPI_F32, s.outer * s.H), sum(d, n);
        add("head_terms", what,
            tpi_head_terms(d, dy, outer, inner, x, outer, inner, rstd.f32(), terms.f32(), s.outer, s.inner, s.H),
            {&terms});
        add("residual_add", what, tpi_residual_add(d, x, inner, residual, inner, sum, rows, s.H), {&sum});
        add("rms_norm", what + " residual",
            tpi_rms_norm(d, x, outer, inner, residual, outer, inner, w, 1e-6f, y, residual_out, rstd.f32(), s.outer,
                         s.inner, s.H),
            {&y, &residual_out, &rstd});
      }
  }

  void rope() {
    struct {
      i64 T, H, D, rotary;
    } const shapes[] = {{3, 2, 20, 14}, {29, 9, 128, 128}};
    for (int d : kDtypes)
      for (auto& s : shapes)
        for (int inverse : {0, 1}) {
          const i64 positions = 50, half = s.rotary / 2;
          Buffer x(d, s.T * s.H * s.D, 1), y(d, s.T * s.H * s.D);
          Buffer cos(TPI_F32, positions * half, 2), sin(TPI_F32, positions * half, 3);
          const Ints at(s.T, 4, 0, positions - 1);
          add("rope", std::string(kDtypeNames[d]) + " " + shape({s.T, s.H, s.D, s.rotary}) + (inverse ? " inverse" : ""),
              tpi_rope(d, x, s.H * s.D, s.D, y, s.H * s.D, s.D, cos.f32(), sin.f32(), half, positions, at, s.T, s.H, s.D,
                       s.rotary, inverse),
              {&y});
        }
  }

  void swiglu() {
    struct {
      i64 M, F;
    } const shapes[] = {{3, 45}, {2, 6001}};
    for (int d : kDtypes)
      for (auto& s : shapes) {
        const std::string what = std::string(kDtypeNames[d]) + " " + shape({s.M, s.F});
        Buffer x(d, s.M * 2 * s.F, 1, -4, 4), dy(d, s.M * s.F, 2), y(d, s.M * s.F), dx(d, s.M * 2 * s.F);
        add("swiglu", what, tpi_swiglu(d, x, 2 * s.F, y, s.F, s.M, s.F), {&y});
        add("swiglu_backward", what, tpi_swiglu_backward(d, dy, s.F, x, 2 * s.F, dx, 2 * s.F, s.M, s.F), {&dx});
      }
  }

  void embedding() {
    const i64 T = 70, H = 500, start = 10, rows = 31, vocabulary = 50;
    const Ints ids(T, 1, 0, vocabulary - 1);
    for (int d : kDtypes) {
      const std::string what = std::string(kDtypeNames[d]) + " " + shape({T, H});
      Buffer w(d, rows * H, 2), out(d, T * H), dy(d, T * H, 3), grad(TPI_F32, rows * H, 4);
      add("embedding", what, tpi_embedding(d, w, H, ids, out, T, H, start, rows, vocabulary), {&out});
      const i64 first[] = {0, 1}, length[] = {T / 2, T / 2};
      add("embedding_dw", what, tpi_embedding_dw(d, dy, H, ids, grad.f32(), H, H, start, rows, 2, first, length, 2),
          {&grad});
    }
  }

  void vocab() {
    struct {
      i64 T, V, leaf, leaves;
    } const shapes[] = {{5, 300, 40, 8}, {1, 20000, 640, 32}, {11, 5003, 626, 8}};
    for (auto& s : shapes)
      for (bool with_temperature : {false, true}) {
        const std::string what = shape({s.T, s.V}) + (with_temperature ? " temperature" : "");
        Buffer logits(TPI_F32, s.T * s.V, 1, -3, 3), temperatures(TPI_F32, s.T, 2, -1, 1), g(TPI_F32, s.T, 3);
        Buffer M(TPI_F32, s.T), S(TPI_F32, s.T), E(TPI_F32, s.T), logprob(TPI_F32, s.T), entropy(TPI_F32, s.T);
        Buffer g_entropy(TPI_F32, s.T, 4);
        const float* temperature = with_temperature ? temperatures.positive().f32() : nullptr;
        const Ints tokens(s.T, 5, 90, 110 + s.V);
        add("vocab_max", what, tpi_vocab_max(logits.f32(), s.V, temperature, s.T, s.V, M.f32()), {&M});
        add("vocab_sums", what,
            tpi_vocab_sums(logits.f32(), s.V, temperature, s.T, s.V, M.f32(), s.leaf, s.leaves, S.f32(), nullptr), {&S});
        add("vocab_sums", what + " entropy",
            tpi_vocab_sums(logits.f32(), s.V, temperature, s.T, s.V, M.f32(), s.leaf, s.leaves, S.f32(), E.f32()),
            {&S, &E});
        add("vocab_logprob", what,
            tpi_vocab_logprob(logits.f32(), s.V, temperature, s.T, s.V, tokens, 100, M.f32(), S.f32(), E.f32(),
                              logprob.f32(), entropy.f32()),
            {&logprob, &entropy});
        for (int d : kDtypes) {
          Buffer grad(d, s.T * s.V);
          add("vocab_logprob_backward", what + " " + kDtypeNames[d],
              tpi_vocab_logprob_backward(logits.f32(), s.V, temperature, s.T, s.V, tokens, 100, M.f32(), S.f32(),
                                         entropy.f32(), g.f32(), d == TPI_F16 ? nullptr : g_entropy.f32(), d, grad, s.V),
              {&grad});
        }
      }
  }

  void moe() {
    struct {
      i64 T, experts, topk;
      int score, renormalize;
      i64 groups, topk_groups;
      float scaling;
    } const routers[] = {{7, 13, 3, 0, 0, 1, 1, 1.0f},
                         {300, 128, 8, 0, 1, 1, 1, 1.0f},
                         {30, 60, 6, 1, 0, 1, 1, 2.5f},
                         {150, 256, 8, 1, 1, 8, 4, 2.5f}};
    for (auto& r : routers) {
      Buffer logits(TPI_F32, r.T * r.experts, 1, -3, 2), bias(TPI_F32, r.experts, 2), weights(TPI_F32, r.T * r.topk);
      Buffer ids(TPI_F32, r.T * r.topk);  // int32
      add("moe_route", shape({r.T, r.experts, r.topk, r.score, r.renormalize, r.groups}),
          tpi_moe_route(logits.f32(), r.experts, r.score ? bias.f32() : nullptr, r.T, r.experts, r.topk, r.score,
                        r.renormalize, r.groups, r.topk_groups, r.scaling, 1e-20f, weights.f32(), (i32*)ids.f32()),
          {&weights, &ids});
      Buffer dweights(TPI_F32, r.T * r.topk, 3), dlogits(TPI_F32, r.T * r.experts);
      add("moe_route_backward", shape({r.T, r.experts, r.topk, r.score, r.renormalize}),
          tpi_moe_route_backward(dweights.f32(), logits.f32(), r.experts, (i32*)ids.f32(), r.T, r.experts, r.topk,
                                 r.score, r.renormalize, r.scaling, 1e-20f, dlogits.f32()),
          {&dlogits});
    }
    const i64 T = 25, topk = 5, H = 350, P = 60;
    const Ints slots(T * topk, 3, -3, P - 1);
    for (int d : kDtypes) {
      Buffer y(d, P * H, 4), weights(TPI_F32, T * topk, 5), out(d, T * H);
      add("moe_combine", std::string(kDtypeNames[d]) + " " + shape({T, topk, H}),
          tpi_moe_combine(d, y, H, slots, weights.f32(), T, topk, H, out, H), {&out});
    }
    const i64 F = 360;
    for (int d : kDtypes) {
      const std::string what = std::string(kDtypeNames[d]) + " " + shape({P, F});
      Buffer g(TPI_F32, P * F, 1), a(d, P * F, 2), weights(TPI_F32, P, 3), dweights(TPI_F32, P), da(d, P * F);
      add("expert_weight_backward", what,
          tpi_expert_weight_backward(d, g.f32(), F, a, F, weights.f32(), P, F, F / 8, 8, dweights.f32(), da, F),
          {&dweights, &da});
      Buffer logits(TPI_F32, P, 4, -3, 2), dout(d, P * F, 5), out(d, P * F), dlogits(TPI_F32, P);
      add("sigmoid_gate", what, tpi_sigmoid_gate(d, a, F, logits.f32(), out, P, F), {&out});
      add("sigmoid_gate_backward", what,
          tpi_sigmoid_gate_backward(d, dout, F, a, F, logits.f32(), out, dlogits.f32(), P, F), {&out, &dlogits});
    }
  }

  void elementary() {
    const i64 n = 40003;
    Buffer x(TPI_F32, n, 1, -10, 7), y(TPI_F32, n);
    add("exp", "random", tpi_exp(x.f32(), y.f32(), n), {&y});
    add("log", "random", tpi_log(x.f32(), y.f32(), n), {&y});
    const uint32_t special[] = {0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC12345, 0xFFC00001, 0x00000001, 0x80400000,
                                0x00800000, 0x3F800000, 0xC2AE8000, 0xC2AEA001, 0x42B17217, 0x42B17218, 0x7F7FFFFF};
    constexpr i64 count = sizeof(special) / sizeof(special[0]);
    std::memcpy(x.f32(), special, sizeof special);
    Buffer z(TPI_F32, count);
    add("exp", "special", tpi_exp(x.f32(), z.f32(), count), {&z});
    add("log", "special", tpi_log(x.f32(), z.f32(), count), {&z});
  }
};

}  // namespace

int main() {
  std::vector<std::string> expected;
  bool equal = true;
  for (int i = 0; const char* isa = tpi_isa_available(i); ++i) {
    std::fprintf(stderr, "%s\n", isa);
    for (int threads : {1, 2}) {
      if (tpi_set_isa(isa) != 0) return 1;
      omp_set_num_threads(threads);
      Cases cases;
      cases.run();
      equal = equal && !cases.failed;
      if (expected.empty()) expected = cases.lines;
      for (size_t k = 0; k < expected.size(); ++k)
        if (cases.lines[k] != expected[k]) {
          std::fprintf(stderr, "%s, %d threads: %s, expected %s\n", isa, threads, cases.lines[k].c_str(),
                       expected[k].c_str() + expected[k].rfind(' ') + 1);
          equal = false;
        }
    }
  }
  for (const std::string& line : expected) std::puts(line.c_str());
  return equal ? 0 : 1;
}
