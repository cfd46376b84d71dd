// Register tiles and scratch shared by the attention kernels. Every sum is one chain per element, so the bits depend on
// neither the tile sizes nor the register width.
#pragma once
#include <cstdlib>

#include "elementwise.h"
#include "tpi/math.h"

namespace tpi {
namespace TPI_NS {

constexpr int kBlock = int(kKvBlock);
constexpr int kGroup = 16;  // positions that always share a page
constexpr int kGroups = kBlock / kGroup;
constexpr int kGroupVectors = kGroup / W;
constexpr int kTileRows = W == 16 ? 12 : 6;
constexpr int kTileVectors = W == 4 ? 4 : 2;
constexpr i64 kMaxHeadDim = 256;
// Rows of f32 scratch: a constant stride keeps the addresses of a tile's rows in one register, and one that is no multiple
// of a page's size spreads them over the cache sets.
constexpr i64 kRowStride = kMaxHeadDim + 16;

// Vectors of one row in a tile of R rows: few rows take more, to hide the latency of fma.
constexpr int tile_vectors(int R) {
  int n = 8;
  while (n > kTileVectors && n * R > kTileRows * kTileVectors) n /= 2;
  return n;
}

constexpr i64 round_up(i64 n, i64 to) { return (n + to - 1) / to * to; }
inline i64 least(i64 a, i64 b) { return a < b ? a : b; }
inline i64 most(i64 a, i64 b) { return a > b ? a : b; }

// [lo, hi) inside a block.
struct Span {
  i32 lo, hi;
  bool empty() const { return lo >= hi; }
};
inline Span clip(i64 first, i64 last, i64 base) {
  Span s = {i32(least(most(first - base, 0), kBlock)), i32(least(most(last - base, 0), kBlock))};
  return s.empty() ? Span{0, 0} : s;
}
inline Span hull(const Span* s, i64 n) {
  Span all = {kBlock, 0};
  for (i64 i = 0; i < n; ++i)
    if (!s[i].empty()) all = {s[i].lo < all.lo ? s[i].lo : all.lo, s[i].hi > all.hi ? s[i].hi : all.hi};
  return all;
}

// Positions of the keys that a query sees, and of the queries that see a key, before clipping to those that exist.
inline i64 first_key(i64 position, i64 window) { return window > 0 ? most(0, position - window + 1) : 0; }
inline i64 end_query(i64 position, i64 window) { return window > 0 ? position + window : INT64_MAX; }

template <int N>
struct Int {
  static constexpr int value = N;
};
// f(Int<rows>) for 1 <= rows <= R.
template <int R, class F>
inline void with_rows(int rows, F f) {
  if (rows == R) {
    f(Int<R>());
  } else if constexpr (R > 1) {
    with_rows<R - 1>(rows, f);
  }
}
// f(first, Int<R>) over tiles that cut n rows evenly.
template <class F>
inline void for_tiles(i64 n, F f) {
  const i64 tiles = (n + kTileRows - 1) / kTileRows;
  for (i64 t = 0; t < tiles; ++t) {
    const i64 first = n * t / tiles;
    with_rows<kTileRows>(int(n * (t + 1) / tiles - first), [&](auto rows) { f(first, rows); });
  }
}

// A prefetch of other memory, called at every step of a tile.
struct NoFetch {
  void operator()(int, i64) const {}
};

// s[r][c] = (chain over d of q[r][d] * k[d][c]) * scale, N vectors of columns from `group` on; k[g] points at row 0 of the
// g-th group of 16 columns. fetch(g, d) once for every group and d.
template <int R, int N, class T, class Fetch>
TPI_INLINE inline void scores_tile(const float* q, i64 D, const T* const* k, i64 k_ld, float scale, float* s, int group,
                                   Fetch fetch) {
  constexpr int kPointers = N / kGroupVectors;
  const T* row[kPointers];
  for (int i = 0; i < kPointers; ++i) row[i] = k[group + i];
  vf acc[R][N];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) acc[r][n] = zero();
  for (i64 d = 0; d < D; ++d) {
    vf b[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) b[n] = load_as(row[n / kGroupVectors] + n % kGroupVectors * W);
#pragma GCC unroll 8
    for (int i = 0; i < kPointers; ++i) {
      row[i] += k_ld;
      fetch(group + i, d);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const vf a = set1(q[r * kRowStride + d]);
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) acc[r][n] = fma(a, b[n], acc[r][n]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) store(s + r * kBlock + group * kGroup + n * W, mul(acc[r][n], set1(scale)));
}

// The scores of R rows with the groups of columns that hold `columns`; s is [R][128].
template <int R, class T, class Fetch = NoFetch>
TPI_INLINE inline void scores(const float* q, i64 D, const T* const* k, i64 k_ld, float scale, Span columns, float* s,
                              Fetch fetch = Fetch()) {
  constexpr int N = tile_vectors(R), kStep = N / kGroupVectors;
  int g = columns.lo / kGroup;
  const int end = (columns.hi + kGroup - 1) / kGroup;
  for (; g + kStep <= end; g += kStep) scores_tile<R, N>(q, D, k, k_ld, scale, s, g, fetch);
  for (; g < end; ++g) scores_tile<R, kGroupVectors>(q, D, k, k_ld, scale, s, g, fetch);
}

// o[r][c] = fma(o[r][c], alpha[r], t), t = chain over j in span[r] of p[r * RS + j * JS] * v[j][c], N vectors of columns.
// A j outside span[r] is not multiplied: v may hold NaN or infinity there. fetch(j, c) for every j and 16th column c.
template <int R, int N, int RS, int JS, class T, class Fetch>
TPI_INLINE inline void weighted_tile(const float* p, const Span* span, Span all, Span common, const T* const* v, i64 v_ld,
                                     i64 column, const float* alpha, float* o, i64 o_ld, Fetch fetch) {
  vf acc[R][N];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) acc[r][n] = zero();
  int j = all.lo;
  while (j < all.hi) {
    const T* row = v[j / kGroup] + j % kGroup * v_ld + column;
    const int group_end = (j / kGroup + 1) * kGroup;
    if (j >= common.lo && j < common.hi) {
      const int end = group_end < common.hi ? group_end : common.hi;
      for (; j < end; ++j, row += v_ld) {
        vf b[N];
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) b[n] = load_as(row + n * W);
#pragma GCC unroll 8
        for (int c = 0; c < N * W; c += kGroup) fetch(j, column + c);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
          const vf a = set1(p[r * RS + j * JS]);
#pragma GCC unroll 8
          for (int n = 0; n < N; ++n) acc[r][n] = fma(a, b[n], acc[r][n]);
        }
      }
    } else {
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        if (j < span[r].lo || j >= span[r].hi) continue;
        const vf a = set1(p[r * RS + j * JS]);
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) acc[r][n] = fma(a, load_as(row + n * W), acc[r][n]);
      }
      ++j;
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    const vf a = set1(alpha[r]);
    float* out = o + r * o_ld + column;
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) store(out + n * W, fma(load(out + n * W), a, acc[r][n]));
  }
}

// The same for all columns, a multiple of W.
template <int R, int RS, int JS, class T, class Fetch = NoFetch>
TPI_INLINE inline void weighted(const float* p, const Span* span, const T* const* v, i64 v_ld, i64 columns,
                                const float* alpha, float* o, i64 o_ld, Fetch fetch = Fetch()) {
  constexpr int N = tile_vectors(R);
  const Span all = hull(span, R);
  Span common = all;
  for (int r = 0; r < R; ++r) {
    if (span[r].lo > common.lo) common.lo = span[r].lo;
    if (span[r].hi < common.hi) common.hi = span[r].hi;
  }
  i64 c = 0;
  for (; c + N * W <= columns; c += N * W)
    weighted_tile<R, N, RS, JS>(p, span, all, common, v, v_ld, c, alpha, o, o_ld, fetch);
  for (; c < columns; c += W) weighted_tile<R, 1, RS, JS>(p, span, all, common, v, v_ld, c, alpha, o, o_ld, fetch);
}

// ---- scratch: f32 copies of a block ----
// Row-major [rows][kRowStride], columns past D up to a multiple of W are +0.
template <class T>
inline void load_row(const T* from, i64 D, float* to) {
  for_columns(0, D, [&](i64 c, int n) { store(to + c, load_part(from + c, n)); });
}
// d-major, [group][d][16]: `count` positions from position `first` of the block; from(j) is the row of position j.
// Other positions of the groups that are touched become +0.
template <class From>
inline void load_transposed(Span span, i64 D, From from, float* to) {
  for (int j = span.lo / kGroup * kGroup; j < round_up(span.hi, kGroup); j += W) {
    float* group = to + j / kGroup * kGroup * D + j % kGroup;
    for_columns(0, D, [&](i64 d, int n) {
      vf r[W];
      for (int i = 0; i < W; ++i) r[i] = j + i >= span.lo && j + i < span.hi ? load_part(from(j + i) + d, n) : zero();
      transpose(r);
      for (int i = 0; i < n; ++i) store(group + (d + i) * kGroup, r[i]);
    });
  }
}

// Memory that a thread keeps from call to call.
class Arena {
 public:
  ~Arena() { std::free(memory_); }
  // Room for n floats, or null.
  float* reserve(i64 n) {
    if (n > size_ || !memory_) {
      n = most(n, 1);
      std::free(memory_);
      memory_ = static_cast<float*>(std::aligned_alloc(64, size_t(round_up(n * i64(sizeof(float)), 64))));
      size_ = memory_ ? n : 0;
    }
    return memory_;
  }

 private:
  float* memory_ = nullptr;
  i64 size_ = 0;
};

inline Arena& thread_arena() {
  static thread_local Arena arena;
  return arena;
}

// f(task, scratch) for every task, with `floats` of scratch a thread; the order of tasks is free.
template <class F>
inline int for_tasks(i64 tasks, i64 floats, bool tiny, F f) {
  if (tiny || tasks < 2 || omp_get_max_threads() == 1) {
    FloatEnv env;
    float* scratch = thread_arena().reserve(floats);
    if (!scratch) return TPI_NO_MEMORY;
    for (i64 task = 0; task < tasks; ++task) f(task, scratch);
    return TPI_OK;
  }
  int status = TPI_OK;
#pragma omp parallel
  {
    FloatEnv env;
    float* scratch = thread_arena().reserve(floats);
    if (!scratch) {
#pragma omp atomic write
      status = TPI_NO_MEMORY;
    }
#pragma omp for schedule(dynamic, 1)
    for (i64 task = 0; task < tasks; ++task)
      if (scratch) f(task, scratch);
  }
  return status;
}

}  // namespace TPI_NS
}  // namespace tpi
