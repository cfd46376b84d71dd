// Rotary position embedding: pairs (i, i + rotary_dim / 2) turned by the angle tables; the rest of a head is copied.
#include "elementwise.h"

namespace tpi {
namespace TPI_NS {
namespace {

template <class T>
void rotate_head(const T* x, T* y, const float* cos, const float* sin, i64 D, i64 half, bool inverse) {
  for_columns(0, half, [&](i64 i, int n) TPI_INLINE {
    vf a = load_part(x + i, n), b = load_part(x + half + i, n);
    vf c = load_part(cos + i, n), s = load_part(sin + i, n);
    if (inverse) s = neg(s);
    store_part(y + i, fma(a, c, neg(mul(b, s))), n);
    store_part(y + half + i, fma(b, c, mul(a, s)), n);
  });
  if (x != y && D > 2 * half) std::memcpy(y + 2 * half, x + 2 * half, size_t(D - 2 * half) * sizeof(T));
}

}  // namespace
}  // namespace TPI_NS
}  // namespace tpi

using namespace tpi;
using namespace tpi::TPI_NS;

TPI_EXPORT(rope)
(int dtype, const void* x, i64 x_ts, i64 x_hs, void* y, i64 y_ts, i64 y_hs, const float* cos, const float* sin, i64 ld,
 i64 table_rows, const i64* positions, i64 T, i64 H, i64 D, i64 rotary_dim, int inverse) {
  if (rotary_dim < 0 || rotary_dim > D || rotary_dim % 2 != 0) return TPI_BAD_SHAPE;
  for (i64 t = 0; t < T; ++t)
    if (positions[t] < 0 || positions[t] >= table_rows) return TPI_BAD_INDEX;
  return for_dtype(dtype, [&](auto tag) {
    using E = decltype(tag);
    parallel_for(T, T * H * D, [&](i64 first, i64 last) {
      for (i64 t = first; t < last; ++t)
        for (i64 h = 0; h < H; ++h)
          rotate_head((const E*)x + t * x_ts + h * x_hs, (E*)y + t * y_ts + h * y_hs, cos + positions[t] * ld,
                      sin + positions[t] * ld, D, rotary_dim / 2, inverse != 0);
    });
    return int(TPI_OK);
  });
}
