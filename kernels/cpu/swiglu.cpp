// SwiGLU of [gate, up] halves and its gradient.
#include "elementwise.h"
#include "tpi/math.h"

namespace tpi {
namespace TPI_NS {
namespace {
constexpr i64 kSwigluCost = 4;  // elements of plain work that one exp and one division weigh
}  // namespace
}  // namespace TPI_NS
}  // namespace tpi

using namespace tpi;
using namespace tpi::TPI_NS;

TPI_EXPORT(swiglu)(int dtype, const void* x, i64 ldx, void* y, i64 ldy, i64 M, i64 F) {
  return for_dtype(dtype, [&](auto tag) {
    using T = decltype(tag);
    parallel_rows(M, F, M * F * kSwigluCost, [&](i64 row, i64 first, i64 last) {
      const T *gate = (const T*)x + row * ldx, *up = gate + F;
      T* out = (T*)y + row * ldy;
      for_columns(first, last, [&](i64 j, int n) TPI_INLINE {
        vf g = load_part(gate + j, n), u = load_part(up + j, n);
        vf e = vexp(neg(g));
        store_part(out + j, mul(div(g, add(set1(1.0f), e)), u), n);
      });
    });
    return int(TPI_OK);
  });
}

TPI_EXPORT(swiglu_backward)
(int dtype, const void* dy, i64 lddy, const void* x, i64 ldx, void* dx, i64 lddx, i64 M, i64 F) {
  return for_dtype(dtype, [&](auto tag) {
    using T = decltype(tag);
    parallel_rows(M, F, M * F * kSwigluCost, [&](i64 row, i64 first, i64 last) {
      const T *gate = (const T*)x + row * ldx, *up = gate + F, *grad = (const T*)dy + row * lddy;
      T *dgate = (T*)dx + row * lddx, *dup = dgate + F;
      for_columns(first, last, [&](i64 j, int n) TPI_INLINE {
        vf g = load_part(gate + j, n), u = load_part(up + j, n), d = load_part(grad + j, n);
        vf one = set1(1.0f), sum = add(one, vexp(neg(g)));
        vf q = div(one, sum), a = div(g, sum);
        store_part(dup + j, mul(d, a), n);
        store_part(dgate + j, mul(mul(d, u), fma(a, sub(one, q), q)), n);
      });
    });
    return int(TPI_OK);
  });
}
