// Each operator's checked arguments handed to its kernel. `take` (generated) has compared ranks, sizes, dtypes and devices;
// here remain the values that would lead a kernel outside an operand, and how an operand lies in memory.
#include "operators.h"

#include <cstring>
#include <memory>
#include <new>
#include <vector>

namespace tpi::binding {
namespace {

// The rows of a gradient chain (docs/op-schemas.md, Conventions).
struct Chain {
  std::vector<i64> first, length;
  i64 stride = 1;
  bool valid = true;

  Chain(const Operand& row_offsets, i64 tokens, i64 batch) {
    if (!row_offsets.given()) {
      stride = batch;
      for (i64 b = 0; b < batch; ++b) first.push_back(b);
      length.assign(size_t(batch), tokens / batch);
      return;
    }
    const i64* offsets = row_offsets.vector<i64>();
    const i64 rows = row_offsets.size(0) - 1;
    for (i64 r = 0; r < rows; ++r) {
      first.push_back(offsets[r]);
      length.push_back(offsets[r + 1] - offsets[r]);
      valid = valid && length.back() >= 0;
    }
    valid = valid && offsets[0] >= 0 && offsets[rows] <= tokens;
  }
  i64 rows() const { return i64(first.size()); }
};

bool ascending(const i64* offsets, i64 count, i64 limit) {
  for (i64 i = 1; i < count; ++i)
    if (offsets[i] < offsets[i - 1]) return false;
  return offsets[0] >= 0 && offsets[count - 1] <= limit;
}

bool all_below(const i64* values, i64 count, i64 low, i64 limit) {
  for (i64 i = 0; i < count; ++i)
    if (values[i] < low || values[i] >= limit) return false;
  return true;
}

// Attention's lines (first query, queries, position, first key, keys) stay within the tokens; on `disjoint`, so do their keys.
bool lines_valid(const i32* seqs, i64 lines, i64 stride, i64 queries, i64 keys, bool disjoint) {
  std::vector<std::array<i64, 3>> runs;
  i64 group = -1;  // first key of the line before, if it has any: neighbours that share it are one group
  for (i64 r = 0; r < lines; ++r) {
    const i32* line = seqs + 5 * r;
    for (int i = 0; i < 5; ++i)
      if (line[i] < 0) return false;
    if (line[1] > 0 && line[0] + (line[1] - i64(1)) * stride >= queries) return false;
    if (line[4] > 0 && line[3] + (line[4] - i64(1)) * stride >= keys) return false;
    if (i64(line[2]) + line[1] > kIntLimit) return false;
    if (!disjoint || line[4] == 0) {
      group = -1;
      continue;
    }
    const i64 end = line[3] + line[4] * stride;
    if (group == line[3]) {
      runs.back()[2] = std::max(runs.back()[2], end);
    } else {
      runs.push_back({line[3] % stride, line[3], end});
    }
    group = line[3];
  }
  std::sort(runs.begin(), runs.end());
  for (size_t i = 1; i < runs.size(); ++i)
    if (runs[i][0] == runs[i - 1][0] && runs[i][1] < runs[i - 1][2]) return false;
  return true;
}

void zero(const Result& result) { std::memset(result.data(), 0, size_t(result.count() * result.item())); }
void fill(const Result& result, float value) { std::fill_n(result.data<float>(), result.count(), value); }

// x weightᵀ + bias, x [M, K] and weight [N, K] dense in K; or x weight, weight [K, N] dense in N.
int product(int dtype, const Rows& x, i64 n, i64 k, const char* w, i64 ldw, const char* bias, bool transposed, i64 leaf,
            i64 leaves, bool paired, const Result& y) {
  if (transposed)
    return tpi_linear(dtype, y.code, x.data, x.stride, w, ldw, bias, y.data(), n, x.count, n, k, leaf, leaves, paired);
  return tpi_linear_dx(dtype, y.code, x.data, x.stride, w, ldw, y.data(), n, x.count, k, n, leaf, leaves, paired);
}

// The rows of a grouped product that belong to no expert are 0.
template <class Call>
bool zero_unowned(const Call& c, const i64* offsets, i64 columns) {
  if (!ascending(offsets, c.E + 1, c.P)) return false;
  const Result& y = c.result.value;
  const i64 row = columns * y.item();
  std::memset(y.template data<char>(), 0, size_t(offsets[0] * row));
  std::memset(y.template data<char>() + offsets[c.E] * row, 0, size_t((c.P - offsets[c.E]) * row));
  return true;
}

}  // namespace

// ---- linear ----

int run(linear_call& c) {
  const Rows x = c.x.rows();
  if (!c.bias.given() && c.weight.stored_transposed())
    return product(c.dtype_S, x, c.N, c.K, c.weight.data(), c.weight.stride(1), nullptr, false, c.leaf, c.leaves, false,
                   c.result.value);
  const Rows w = c.weight.rows();
  return product(c.dtype_S, x, c.N, c.K, w.data, w.stride, c.bias.vector<char>(), true, c.leaf, c.leaves, false,
                 c.result.value);
}

int run(linear_dx_call& c) {
  const Rows dy = c.dy.rows();
  if (c.weight.stored_transposed())
    return product(c.dtype_S, dy, c.K, c.N, c.weight.data(), c.weight.stride(1), nullptr, true, c.leaf, c.leaves, c.paired,
                   c.result.value);
  const Rows w = c.weight.rows();
  return product(c.dtype_S, dy, c.K, c.N, w.data, w.stride, nullptr, false, c.leaf, c.leaves, c.paired, c.result.value);
}

int run(linear_dw_call& c) {
  Rows dy = c.dy.rows(), x = c.x.rows();
  const Chain chain(c.row_offsets, c.T, c.batch);
  if (!chain.valid) return TPI_BAD_INDEX;
  if (c.grad.stored_transposed()) {  // a product's factors commute
    std::swap(dy, x);
    std::swap(c.N, c.K);
  }
  return tpi_linear_dw(c.dtype_S, dy.data, dy.stride, x.data, x.stride, reinterpret_cast<float*>(c.grad.data()), c.K, c.N, c.K,
                       chain.rows(), chain.first.data(), chain.length.data(), chain.stride, c.spans, c.carry);
}

int run(linear_db_call& c) {
  const Rows dy = c.dy.rows();
  const Chain chain(c.row_offsets, c.T, c.batch);
  if (!chain.valid) return TPI_BAD_INDEX;
  return tpi_linear_db(c.dtype_S, dy.data, dy.stride, c.grad.vector<float>(), c.N, chain.rows(), chain.first.data(),
                       chain.length.data(), chain.stride, c.spans);
}

int run(grouped_linear_call& c) {
  const Rows x = c.x.rows();
  const Heads w = c.weight.heads();
  const i64* offsets = c.offsets.vector<i64>();
  if (!zero_unowned(c, offsets, c.N)) return TPI_BAD_INDEX;
  return tpi_grouped_linear(c.dtype_S, c.result.value.code, x.data, x.stride, w.data, w.token_stride, w.head_stride,
                            c.result.value.data(), c.N, offsets, c.E, c.N, c.K, c.leaf, c.leaves);
}

int run(grouped_linear_dx_call& c) {
  const Rows dy = c.dy.rows();
  const Heads w = c.weight.heads();
  const i64* offsets = c.offsets.vector<i64>();
  if (!zero_unowned(c, offsets, c.K)) return TPI_BAD_INDEX;
  return tpi_grouped_linear_dx(c.dtype_S, c.result.value.code, dy.data, dy.stride, w.data, w.token_stride, w.head_stride,
                               c.result.value.data(), c.K, offsets, c.E, c.N, c.K, c.leaf, c.leaves, c.paired);
}

int run(tree_sum_call& c) {
  const i64 columns = std::max<i64>(c.N, 1);
  return tpi_tree_sum(c.result.value.code, c.bias.given() ? c.dtype_U : 0, c.parts.vector<float>(), c.R, c.bias.vector<char>(),
                      c.result.value.data(), c.result.value.count() / columns, c.N);
}

// ---- attention ----

int run(attention_call& c) {
  const Heads q = c.q.heads(), k = c.k.heads(), v = c.v.heads();
  const i32* seqs = c.seqs.vector<i32>();
  if (!lines_valid(seqs, c.lines, c.stride, c.Tq, c.Tk, false)) return TPI_BAD_INDEX;
  zero(c.result.out);
  fill(c.result.m, -std::numeric_limits<float>::infinity());
  zero(c.result.l);
  return tpi_attention(c.dtype_S, q.data, q.token_stride, q.head_stride, k.data, k.token_stride, k.head_stride, v.data,
                       v.token_stride, v.head_stride, c.result.out.data(), c.Hq * c.D, c.D, c.result.m.data<float>(),
                       c.result.l.data<float>(), c.Tq, seqs, c.lines, c.stride, c.Hq, c.Hk, c.D, c.scale, c.window,
                       c.segment_blocks);
}

int run(attention_backward_call& c) {
  const Heads dout = c.dout.heads(), q = c.q.heads(), k = c.k.heads(), v = c.v.heads(), out = c.out.heads();
  const float *m = c.m.vector<float>(), *l = c.l.vector<float>();
  const i32* seqs = c.seqs.vector<i32>();
  if (!lines_valid(seqs, c.lines, c.stride, c.Tq, c.Tk, true)) return TPI_BAD_INDEX;
  zero(c.result.dq);
  zero(c.result.dk);
  zero(c.result.dv);
  return tpi_attention_backward(
      c.dtype_S, dout.data, dout.token_stride, dout.head_stride, q.data, q.token_stride, q.head_stride, k.data, k.token_stride,
      k.head_stride, v.data, v.token_stride, v.head_stride, out.data, out.token_stride, out.head_stride, m, l, c.Tq,
      c.result.dq.data(), c.Hq * c.D, c.D, c.result.dk.data(), c.result.dv.data(), c.Hk * c.D, c.D, c.partial, seqs, c.lines,
      c.stride, c.Hq, c.Hk, c.D, c.scale, c.window, c.segment_blocks);
}

int run(paged_cache_write_call& c) {
  const Heads k = c.k.heads(), v = c.v.heads();
  const i64* slots = c.slot_mapping.vector<i64>();
  if (!all_below(slots, c.slots, std::numeric_limits<i64>::min(), c.blocks * c.page)) return TPI_BAD_INDEX;
  return tpi_paged_cache_write(c.dtype_S, k.data, k.token_stride, k.head_stride, v.data, v.token_stride, v.head_stride,
                               c.kv_cache.data(), c.kv_cache.stride(0), c.kv_cache.stride(1), c.page, slots, c.slots, c.Hk, c.D);
}

int run(paged_attention_call& c) {
  const Heads q = c.q.heads();
  const Rows pages = c.block_table.rows();
  const i32 *starts = c.query_start_loc.vector<i32>(), *lengths = c.seq_lens.vector<i32>();
  for (i64 r = 0; r < c.R; ++r)
    if (starts[r] < 0 || starts[r] > starts[r + 1] || starts[r + 1] > c.T || starts[r + 1] - starts[r] > lengths[r])
      return TPI_BAD_INDEX;
  zero(c.result.value);
  return tpi_paged_attention(c.dtype_S, q.data, q.token_stride, q.head_stride, c.kv_cache.data(), c.kv_cache.stride(0),
                             c.kv_cache.stride(1), c.page, reinterpret_cast<const i32*>(pages.data), pages.stride, c.width,
                             c.blocks, starts, lengths, c.R, c.result.value.data(), c.Hq * c.D, c.D, c.Hq, c.Hk, c.D, c.scale,
                             c.window, c.segment_blocks);
}

// ---- norm, rotary, activation, embedding ----

namespace {

// [*, H] as outer × inner rows; three dimensions may lie with two strides.
struct Normed {
  char* data;
  i64 outer, outer_stride, inner, inner_stride;

  explicit Normed(const Operand& x) {
    if (x.t->ndim == 3) {
      const Heads h = x.heads();
      *this = Normed(h.data, x.size(0), h.token_stride, x.size(1), h.head_stride);
    } else {
      const Rows r = x.rows();
      *this = Normed(r.data, r.count, r.stride, 1, 0);
    }
  }

 private:
  Normed(char* data, i64 outer, i64 outer_stride, i64 inner, i64 inner_stride)
      : data(data), outer(outer), outer_stride(outer_stride), inner(inner), inner_stride(inner_stride) {}
};

}  // namespace

int run(rms_norm_call& c) {
  const Normed x(c.x);
  return tpi_rms_norm(c.dtype_S, x.data, x.outer_stride, x.inner_stride, nullptr, 0, 0, c.weight.vector(), c.eps,
                      c.result.y.data(), nullptr, c.result.rstd.data<float>(), x.outer, x.inner, c.H);
}

int run(add_rms_norm_call& c) {
  const Normed x(c.x), residual(c.residual);
  return tpi_rms_norm(c.dtype_S, x.data, x.outer_stride, x.inner_stride, residual.data, residual.outer_stride,
                      residual.inner_stride, c.weight.vector(), c.eps, c.result.y.data(), c.result.residual_out.data(),
                      c.result.rstd.data<float>(), x.outer, x.inner, c.H);
}

int run(rms_norm_backward_call& c) {
  const Normed dy(c.dy), x(c.x);
  return tpi_rms_norm_backward(c.dtype_S, dy.data, dy.outer_stride, dy.inner_stride, x.data, x.outer_stride, x.inner_stride,
                               c.weight.vector(), c.rstd.vector<float>(), c.dskip.vector(), c.result.value.data(), x.outer,
                               x.inner, c.H);
}

int run(rms_norm_dw_call& c) {
  const float* rstd = c.rstd.vector<float>();
  float* grad = c.grad.vector<float>();
  const Chain chain(c.row_offsets, c.T, c.batch);
  if (!chain.valid) return TPI_BAD_INDEX;
  if (c.star.count == 0) {
    const Rows dy = c.dy.rows(), x = c.x.rows();
    return tpi_rms_norm_dw(c.dtype_S, dy.data, dy.stride, x.data, x.stride, rstd, grad, c.H, chain.rows(), chain.first.data(),
                           chain.length.data(), chain.stride, c.spans);
  }
  const Heads dy = c.dy.heads(), x = c.x.heads();
  const std::unique_ptr<float[]> terms(new (std::nothrow) float[size_t(c.T * c.H) + 1]);
  if (!terms) return TPI_NO_MEMORY;
  const int status = tpi_head_terms(c.dtype_S, dy.data, dy.token_stride, dy.head_stride, x.data, x.token_stride, x.head_stride,
                                    rstd, terms.get(), c.T, c.star.sizes[0], c.H);
  if (status != TPI_OK) return status;
  return tpi_linear_db(TPI_F32, terms.get(), c.H, grad, c.H, chain.rows(), chain.first.data(), chain.length.data(),
                       chain.stride, c.spans);
}

int run(head_terms_call& c) {
  const Heads dy = c.dy.heads(), x = c.x.heads();
  return tpi_head_terms(c.dtype_S, dy.data, dy.token_stride, dy.head_stride, x.data, x.token_stride, x.head_stride,
                        c.rstd.vector<float>(), c.result.value.data<float>(), c.T, c.heads, c.D);
}

int run(residual_add_call& c) {
  const Rows x = c.x.rows(), y = c.y.rows();
  return tpi_residual_add(c.dtype_S, x.data, x.stride, y.data, y.stride, c.result.value.data(), x.count, c.H);
}

int run(rope_call& c) {
  const Heads x = c.x.heads();
  return tpi_rope(c.dtype_S, x.data, x.token_stride, x.head_stride, c.result.value.data(), c.H * c.D, c.D,
                  c.cos.vector<float>(), c.sin.vector<float>(), c.half, c.P, c.positions.vector<i64>(), c.T, c.H, c.D,
                  2 * c.half, c.inverse);
}

int run(swiglu_call& c) {
  const Rows x = c.x.rows();
  return tpi_swiglu(c.dtype_S, x.data, x.stride, c.result.value.data(), c.F, x.count, c.F);
}

int run(swiglu_backward_call& c) {
  const Rows dy = c.dy.rows(), x = c.x.rows();
  return tpi_swiglu_backward(c.dtype_S, dy.data, dy.stride, x.data, x.stride, c.result.value.data(), 2 * c.F, x.count, c.F);
}

int run(embedding_call& c) {
  const Rows w = c.weight.rows();
  return tpi_embedding(c.dtype_S, w.data, w.stride, c.ids.vector<i64>(), c.result.value.data(), c.ids.count(), c.H,
                       c.vocab_start, c.rows, c.vocab_size);
}

int run(embedding_dw_call& c) {
  const Rows dy = c.dy.rows();
  const Chain chain(c.row_offsets, c.T, c.batch);
  if (!chain.valid) return TPI_BAD_INDEX;
  return tpi_embedding_dw(c.dtype_S, dy.data, dy.stride, c.ids.vector<i64>(), c.grad.vector<float>(), c.H, c.H, c.vocab_start,
                          c.rows, chain.rows(), chain.first.data(), chain.length.data(), chain.stride);
}

// ---- logprob of chosen tokens ----

int run(vocab_max_call& c) {
  const Rows z = c.logits.rows();
  return tpi_vocab_max(reinterpret_cast<float*>(z.data), z.stride, c.temperature.vector<float>(), c.T, c.V,
                       c.result.value.data<float>());
}

int run(vocab_sums_call& c) {
  const Rows z = c.logits.rows();
  return tpi_vocab_sums(reinterpret_cast<float*>(z.data), z.stride, c.temperature.vector<float>(), c.T, c.V,
                        c.max.vector<float>(), c.leaf, c.leaves, c.result.S.data<float>(),
                        c.entropy ? c.result.E.data<float>() : nullptr);
}

int run(vocab_logprob_call& c) {
  const Rows z = c.logits.rows();
  return tpi_vocab_logprob(reinterpret_cast<float*>(z.data), z.stride, c.temperature.vector<float>(), c.T, c.V,
                           c.tokens.vector<i64>(), c.vocab_start, c.max.vector<float>(), c.S.vector<float>(),
                           c.e ? c.E.vector<float>() : nullptr, c.result.logprob.data<float>(),
                           c.e ? c.result.entropy.data<float>() : nullptr);
}

int run(vocab_logprob_backward_call& c) {
  const Rows z = c.logits.rows();
  return tpi_vocab_logprob_backward(reinterpret_cast<float*>(z.data), z.stride, c.temperature.vector<float>(), c.T, c.V,
                                    c.tokens.vector<i64>(), c.vocab_start, c.max.vector<float>(), c.S.vector<float>(),
                                    c.e ? c.entropy.vector<float>() : nullptr, c.grad_logprob.vector<float>(),
                                    c.grad_entropy.vector<float>(), c.result.value.code, c.result.value.data(), c.V);
}

int run(token_logprob_call& c) {
  const Rows z = c.logits.rows();
  const float *logits = reinterpret_cast<float*>(z.data), *temperature = c.temperature.vector<float>();
  const i64* tokens = c.tokens.vector<i64>();
  if (!all_below(tokens, c.T, 0, c.V)) return TPI_BAD_INDEX;
  float *max = c.result.max.data<float>(), *S = c.result.S.data<float>();
  float* entropy = c.entropy ? c.result.entropy.data<float>() : nullptr;  // holds E, then the entropy
  int status = tpi_vocab_max(logits, z.stride, temperature, c.T, c.V, max);
  if (status != TPI_OK) return status;
  status = tpi_vocab_sums(logits, z.stride, temperature, c.T, c.V, max, c.leaf, c.leaves, S, entropy);
  if (status != TPI_OK) return status;
  return tpi_vocab_logprob(logits, z.stride, temperature, c.T, c.V, tokens, 0, max, S, entropy,
                           c.result.logprob.data<float>(), entropy);
}

// ---- mixture of experts ----

int run(moe_route_call& c) {
  const Rows z = c.logits.rows();
  return tpi_moe_route(reinterpret_cast<float*>(z.data), z.stride, c.expert_bias.vector<float>(), c.T, c.E, c.topk,
                       int(c.score), c.renormalize, c.groups, c.topk_groups, c.scaling, c.eps, c.result.weights.data<float>(),
                       c.result.ids.data<i32>());
}

int run(moe_route_backward_call& c) {
  const Rows z = c.logits.rows();
  return tpi_moe_route_backward(c.dweights.vector<float>(), reinterpret_cast<float*>(z.data), z.stride, c.ids.vector<i32>(),
                                c.T, c.E, c.k, int(c.score), c.renormalize, c.scaling, c.eps, c.result.value.data<float>());
}

int run(moe_combine_call& c) {
  const Rows y = c.y.rows();
  const i64* slots = c.slots.vector<i64>();
  if (!all_below(slots, c.T * c.k, std::numeric_limits<i64>::min(), c.P)) return TPI_BAD_INDEX;
  return tpi_moe_combine(c.dtype_S, y.data, y.stride, slots, c.weights.vector<float>(), c.T, c.k, c.H, c.result.value.data(),
                         c.H);
}

int run(expert_weight_backward_call& c) {
  const Rows g = c.g.rows(), a = c.a.rows();
  return tpi_expert_weight_backward(c.dtype_S, reinterpret_cast<float*>(g.data), g.stride, a.data, a.stride,
                                    c.weights.vector<float>(), c.P, c.F, c.leaf, c.leaves, c.result.dweights.data<float>(),
                                    c.result.da.data(), c.F);
}

int run(sigmoid_gate_call& c) {
  const Rows y = c.y.rows();
  return tpi_sigmoid_gate(c.dtype_S, y.data, y.stride, c.logits.vector<float>(), c.result.value.data(), y.count, c.H);
}

int run(sigmoid_gate_backward_call& c) {
  const Rows dout = c.dout.rows(), y = c.y.rows();
  return tpi_sigmoid_gate_backward(c.dtype_S, dout.data, dout.stride, y.data, y.stride, c.logits.vector<float>(),
                                   c.result.dy.data(), c.result.dlogits.data<float>(), y.count, c.H);
}

// ---- exp and log ----

int run(exp_call& c) { return tpi_exp(c.x.vector<float>(), c.result.value.data<float>(), c.x.count()); }
int run(log_call& c) { return tpi_log(c.x.vector<float>(), c.result.value.data<float>(), c.x.count()); }

}  // namespace tpi::binding

// The i-th result of this thread's last call; the tensor argument tells whose tensors to return.
TPI_EXPORTED __tvm_ffi_pending(void*, const TVMFFIAny* args, int32_t, TVMFFIAny* returned) {
  TVM_FFI_SAFE_CALL_BEGIN();
  const auto i = reinterpret_cast<const tvm::ffi::AnyView*>(args)[0].cast<int>();
  *reinterpret_cast<tvm::ffi::Any*>(returned) = std::move(tpi::binding::pending(i));
  TVM_FFI_SAFE_CALL_END();
}
