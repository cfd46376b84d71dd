// What the elementwise and row-reduction kernels share: dtype dispatch, the split of work over threads, column loops.
#pragma once
#include <omp.h>

#include "tpi/vec.h"

// A column loop inlines its body twice: with n == W known to the compiler, and for the tail.
#define TPI_INLINE __attribute__((always_inline))

namespace tpi {
namespace TPI_NS {

// Below this many elements a parallel region costs more than it saves.
constexpr i64 kSerialWork = 32768;

template <class F>
inline int for_dtype(int dtype, F f) {
  switch (dtype) {
    case TPI_F32: return f(float());
    case TPI_BF16: return f(bf16());
    case TPI_F16: return f(f16());
    default: return TPI_BAD_DTYPE;
  }
}

inline bool is_power_of_two(i64 n) { return n > 0 && (n & (n - 1)) == 0; }

// Spans of a row of n tokens, n > 0: as many as asked, as far as n can be halved exactly, so that a rank that owns an
// aligned part of the row cuts it alike.
inline i64 span_count(i64 n, i64 spans) { return spans < (n & -n) ? spans : (n & -n); }

// f(first, last) on disjoint ranges that cover [0, units). `work` is the whole cost in element-sized steps.
template <class F>
inline void parallel_for(i64 units, i64 work, F f) {
  if (units < 2 || work < kSerialWork || omp_get_max_threads() == 1) {
    FloatEnv env;
    f(i64(0), units);
    return;
  }
#pragma omp parallel
  {
    FloatEnv env;
    const i64 thread = omp_get_thread_num(), threads = omp_get_num_threads();
    f(units * thread / threads, units * (thread + 1) / threads);
  }
}

// f(row, first, last) over the columns of every row; few rows are cut in column pieces so that all threads have work.
template <class F>
inline void parallel_rows(i64 rows, i64 columns, i64 work, F f) {
  constexpr i64 kPiece = 1024;
  const i64 piece = rows >= 4 * omp_get_max_threads() ? (columns < 1 ? 1 : columns) : kPiece;
  const i64 pieces = (columns + piece - 1) / piece;
  parallel_for(rows * pieces, work, [&](i64 begin, i64 end) {
    for (i64 unit = begin; unit < end; ++unit) {
      const i64 row = unit / pieces, first = unit % pieces * piece;
      f(row, first, columns - first < piece ? columns : first + piece);
    }
  });
}

// body(j, n): columns j … j + n - 1, 1 <= n <= W.
template <class Body>
inline void for_columns(i64 first, i64 last, Body body) {
  i64 j = first;
  for (; j + W <= last; j += W) body(j, W);
  if (j < last) body(j, int(last - j));
}

template <class T>
TPI_INLINE inline vf load_part(const T* p, int n) {
  return n == W ? load_as(p) : load_as_n(p, n);
}
template <class T>
TPI_INLINE inline void store_part(T* p, vf a, int n) {
  if (n == W)
    store_as(p, a);
  else
    store_as_n(p, a, n);
}

}  // namespace TPI_NS
}  // namespace tpi
