// exp and log of the contract over arrays.
#include "elementwise.h"
#include "tpi/math.h"

using namespace tpi;
using namespace tpi::TPI_NS;

TPI_EXPORT(exp)(const float* x, float* y, i64 n) {
  parallel_rows(1, n, n, [&](i64, i64 first, i64 last) {
    for_columns(first, last, [&](i64 j, int m) TPI_INLINE { store_part(y + j, vexp(load_part(x + j, m)), m); });
  });
  return TPI_OK;
}

TPI_EXPORT(log)(const float* x, float* y, i64 n) {
  parallel_rows(1, n, n, [&](i64, i64 first, i64 last) {
    for_columns(first, last, [&](i64 j, int m) TPI_INLINE { store_part(y + j, vlog(load_part(x + j, m)), m); });
  });
  return TPI_OK;
}
