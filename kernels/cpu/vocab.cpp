// Log-probability of chosen tokens over a (shard of a) vocabulary: maximum, sums, the result and its gradient.
#include <cstdlib>

#include "elementwise.h"
#include "lane_tree.h"
#include "tpi/math.h"

namespace tpi {
namespace TPI_NS {
namespace {

// z = logits / temperature of one row, or the logits themselves.
struct Row {
  const float* logits;
  bool divides;
  vf temperature;

  Row(const float* logits_, i64 ld, const float* temperature_, i64 row)
      : logits(logits_ + row * ld),
        divides(temperature_ != nullptr),
        temperature(set1(divides ? temperature_[row] : 1.0f)) {}

  TPI_INLINE vf z(i64 j, int n) const {
    vf v = load_part(logits + j, n);
    return divides ? div(v, temperature) : v;
  }
};

inline float horizontal_max(vf a) {
  float t[W];
  store(t, a);
  vf m = set1(t[0]);
  for (int i = 1; i < W; ++i) m = vmax(m, set1(t[i]));
  return first_lane(m);
}

// The maximum does not depend on its order, so the registers are as many as hide the latency.
float max_of(const Row& row, i64 first, i64 last) {
  constexpr int kRegisters = 4;
  const vf lowest = set1(from_bits(0xFF800000u));
  vf m[kRegisters] = {lowest, lowest, lowest, lowest};
  i64 j = first;
  for (; j + kRegisters * W <= last; j += kRegisters * W)
#pragma GCC unroll 4
    for (int v = 0; v < kRegisters; ++v) m[v] = vmax(m[v], row.z(j + v * W, W));
  for_columns(j, last, [&](i64 k, int n) TPI_INLINE { m[0] = vmax(m[0], select(first_n(n), row.z(k, n), lowest)); });
  return horizontal_max(vmax(vmax(m[0], m[1]), vmax(m[2], m[3])));
}

float leaf_sum(const Row& row, vf max, i64 first, i64 last) {
  return lane_tree(last - first, [&](i64 j, int n) TPI_INLINE {
    vf e = vexp(sub(row.z(first + j, n), max));
    return n == W ? e : select(first_n(n), e, zero());
  });
}

void leaf_sums_entropy(const Row& row, vf max, i64 first, i64 last, float* sum, float* entropy) {
  LaneSum s, t;
  int v = 0;
  for_columns(first, last, [&](i64 j, int n) TPI_INLINE {
    vf d = sub(row.z(j, n), max), e = vexp(d);
    vf term = select(eq(e, zero()), zero(), mul(e, d));
    if (n != W) {
      e = select(first_n(n), e, zero());
      term = select(first_n(n), term, zero());
    }
    s.lanes[v] = add(s.lanes[v], e);
    t.lanes[v] = add(t.lanes[v], term);
    v = (v + 1) % kLaneVectors;
  });
  *sum = s.root();
  *entropy = t.root();
}

// The tree over n = 2^k leaves, in place.
float leaf_tree(float* x, i64 n) {
  for (; n > 1; n /= 2)
    for (i64 i = 0; i < n / 2; ++i) x[i] = x[2 * i] + x[2 * i + 1];
  return narrow_to<float>(x[0]);
}

struct Gradient {
  Row row;
  vf max, sum, log_sum, entropy, grad, grad_entropy;
  bool with_entropy;

  TPI_INLINE vf operator()(i64 j, int n, float onehot) const {
    vf d = sub(row.z(j, n), max), p = div(vexp(d), sum);
    vf t = mul(sub(p, set1(onehot)), grad);
    if (with_entropy) {
      vf term = mul(p, add(sub(d, log_sum), entropy));
      t = fma(grad_entropy, select(eq(p, zero()), zero(), term), t);
    }
    return row.divides ? div(t, row.temperature) : t;
  }
};

}  // namespace
}  // namespace TPI_NS
}  // namespace tpi

using namespace tpi;
using namespace tpi::TPI_NS;

TPI_EXPORT(vocab_max)(const float* logits, i64 ld, const float* temperature, i64 T, i64 V, float* M) {
  // Few rows are cut in pieces, whose maxima are then compared.
  const i64 threads = omp_get_max_threads(), pieces = T >= 4 * threads || T * V < kSerialWork ? 1 : 4 * threads;
  const i64 piece = (V + pieces - 1) / pieces;
  float* partial = pieces == 1 ? M : (float*)std::malloc(size_t(T * pieces) * sizeof(float));
  if (partial == nullptr && T > 0) return TPI_NO_MEMORY;
  parallel_for(T * pieces, T * V, [&](i64 begin, i64 end) {
    for (i64 unit = begin; unit < end; ++unit) {
      const i64 first = unit % pieces * piece, last = first + piece < V ? first + piece : V;
      partial[unit] = max_of(Row(logits, ld, temperature, unit / pieces), first, last);
    }
  });
  FloatEnv env;
  for (i64 t = 0; t < T; ++t) {
    const Row parts(partial, pieces, nullptr, t);
    M[t] = narrow_to<float>(max_of(parts, 0, pieces) + 0.0f);
  }
  if (pieces != 1) std::free(partial);
  return TPI_OK;
}

TPI_EXPORT(vocab_sums)
(const float* logits, i64 ld, const float* temperature, i64 T, i64 V, const float* M, i64 leaf, i64 leaves, float* S,
 float* E) {
  if (leaf < 1 || !is_power_of_two(leaves) || leaf * leaves < V) return TPI_BAD_SHAPE;
  const i64 units = T * leaves;
  float* sums = (float*)std::malloc(size_t(units + 1) * 2 * sizeof(float));
  if (sums == nullptr) return TPI_NO_MEMORY;
  float* entropies = sums + units;
  parallel_for(units, T * V * 2, [&](i64 begin, i64 end) {
    for (i64 unit = begin; unit < end; ++unit) {
      const i64 row = unit / leaves, first = unit % leaves * leaf;
      i64 last = first + leaf < V ? first + leaf : V;
      if (last < first) last = first;
      const Row r(logits, ld, temperature, row);
      if (E != nullptr)
        leaf_sums_entropy(r, set1(M[row]), first, last, sums + unit, entropies + unit);
      else
        sums[unit] = leaf_sum(r, set1(M[row]), first, last);
    }
  });
  FloatEnv env;
  for (i64 t = 0; t < T; ++t) {
    S[t] = leaf_tree(sums + t * leaves, leaves);
    if (E != nullptr) E[t] = leaf_tree(entropies + t * leaves, leaves);
  }
  std::free(sums);
  return TPI_OK;
}

TPI_EXPORT(vocab_logprob)
(const float* logits, i64 ld, const float* temperature, i64 T, i64 V, const i64* tokens, i64 vocab_start,
 const float* M, const float* S, const float* E, float* logprob, float* entropy) {
  FloatEnv env;
  for_columns(0, T, [&](i64 t, int n) TPI_INLINE {
    const vf log_sum = vlog(load_part(S + t, n));
    float chosen[W] = {}, owned[W] = {};
    for (int i = 0; i < n; ++i) {
      const i64 column = tokens[t + i] - vocab_start;
      if (column < 0 || column >= V) continue;
      owned[i] = 1.0f;
      chosen[i] = logits[(t + i) * ld + column];
    }
    vf z = load(chosen);
    if (temperature != nullptr) z = div(z, load_part(temperature + t, n));
    vf value = sub(sub(z, load_part(M + t, n)), log_sum);
    store_part(logprob + t, select(eq(load(owned), zero()), zero(), value), n);
    if (E != nullptr) store_part(entropy + t, sub(log_sum, div(load_part(E + t, n), load_part(S + t, n))), n);
  });
  return TPI_OK;
}

TPI_EXPORT(vocab_logprob_backward)
(const float* logits, i64 ld, const float* temperature, i64 T, i64 V, const i64* tokens, i64 vocab_start,
 const float* M, const float* S, const float* entropy, const float* g, const float* g_entropy, int out_dtype,
 void* dlogits, i64 ldd) {
  return for_dtype(out_dtype, [&](auto tag) {
    using O = decltype(tag);
    parallel_rows(T, V, T * V * 2, [&](i64 t, i64 first, i64 last) {
      const bool with_entropy = g_entropy != nullptr;
      const Gradient gradient = {Row(logits, ld, temperature, t),
                                 set1(M[t]),
                                 set1(S[t]),
                                 vlog(set1(S[t])),
                                 set1(with_entropy ? entropy[t] : 0.0f),
                                 neg(set1(g[t])),
                                 neg(set1(with_entropy ? g_entropy[t] : 0.0f)),
                                 with_entropy};
      O* out = (O*)dlogits + t * ldd;
      const i64 token = tokens[t] - vocab_start;
      const bool has_token = token >= first && token < last;
      const vf at_token = has_token ? gradient(token, 1, 1.0f) : zero();  // before `out` may overwrite its logit
      for_columns(first, last, [&](i64 j, int n) TPI_INLINE { store_part(out + j, gradient(j, n, 0.0f), n); });
      if (has_token) store_as_n(out + token, at_token, 1);
    });
    return int(TPI_OK);
  });
}
