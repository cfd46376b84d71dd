// Attention over token-major queries, keys and values (training, packed sequences): docs/op-schemas.md, "Attention".
#include "attention_forward.h"

namespace tpi {
namespace TPI_NS {
namespace {

template <class T>
struct TokenMajor {
  const T *k, *v;
  i64 k_ts, k_hs, v_ts, v_hs;
  const i32* seqs;
  i64 stride;
  i64 D;

  Line line(i64 i) const {
    const i32* s = seqs + 5 * i;
    return {s[0], s[1], s[2], s[4]};
  }

  template <class F>
  void view(const Line&, i64 index, i64 head, i64 block, Span span, i64, float* scratch, F f) const {
    const i64 first = seqs[5 * index + 3] + block * kBlock * stride;
    float* values = scratch + kBlock * D;
    load_transposed(span, D, [&](int j) { return k + (first + j * stride) * k_ts + head * k_hs; }, scratch);
    for (int j = span.lo; j < span.hi; ++j)
      load_row(v + (first + j * stride) * v_ts + head * v_hs, D, values + j * kRowStride);
    f(scratch_view(scratch, values, D));
  }
};

}  // namespace
}  // namespace TPI_NS
}  // namespace tpi

TPI_EXPORT(attention)
(int dtype, const void* q, i64 q_ts, i64 q_hs, const void* k, i64 k_ts, i64 k_hs, const void* v, i64 v_ts, i64 v_hs,
 void* out, i64 o_ts, i64 o_hs, float* m, float* l, i64 ml_hs, const i32* seqs, i64 n_seqs, i64 stride, i64 Hq, i64 Hk,
 i64 D, float scale, i64 window, i64 segment_blocks) {
  using namespace tpi;
  using namespace tpi::TPI_NS;
  const Heads heads = {Hq, Hk, D, scale, window, segment_blocks};
  if (!heads.valid() || stride < 1) return TPI_BAD_SHAPE;
  return for_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    const TokenMajor<T> source = {static_cast<const T*>(k), static_cast<const T*>(v), k_ts, k_hs, v_ts, v_hs, seqs,
                                  stride, D};
    const Output<T> output = {static_cast<T*>(out), o_ts, o_hs, m, l, ml_hs};
    return Forward<T, TokenMajor<T>>(source, heads, static_cast<const T*>(q), q_ts, q_hs, output).run(n_seqs);
  });
}
