// The balanced tree continued over f32 partial sums that other ranks (or other calls) have made.
#include "elementwise.h"

using namespace tpi;
using namespace tpi::TPI_NS;

namespace tpi {
namespace TPI_NS {
namespace {

// Root of the tree over parts [first, first + count), count a power of two.
vf subtree(const float* p, i64 stride, i64 first, i64 count, int n) {
  if (count == 1) return load_part(p + first * stride, n);
  return add(subtree(p, stride, first, count / 2, n), subtree(p, stride, first + count / 2, count / 2, n));
}

template <class O, class B>
void tree_sum_rows(const float* parts, i64 count, const B* bias, O* y, i64 M, i64 N) {
  parallel_rows(M, N, M * N * count, [&](i64 row, i64 first, i64 last) {
    for_columns(first, last, [&](i64 j, int n) TPI_INLINE {
      vf sum = subtree(parts + row * N + j, M * N, 0, count, n);
      if (bias) sum = add(sum, load_part(bias + j, n));
      store_part(y + row * N + j, sum, n);
    });
  });
}

}  // namespace
}  // namespace TPI_NS
}  // namespace tpi

TPI_EXPORT(tree_sum)
(int dtype, int bias_dtype, const float* parts, i64 count, const void* bias, void* y, i64 M, i64 N) {
  if (!is_power_of_two(count)) return TPI_BAD_SHAPE;
  if (!bias) N *= M, M = 1;  // one long row, whatever the tensor's last dimension
  return for_dtype(dtype, [&](auto out) {
    return for_dtype(bias_dtype, [&](auto tag) {
      tree_sum_rows(parts, count, (const decltype(tag)*)bias, (decltype(out)*)y, M, N);
      return int(TPI_OK);
    });
  });
}
