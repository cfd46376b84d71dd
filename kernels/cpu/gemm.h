// The reduction engine of the linear operators: C[r][l] = tree over leaves of chain over k of A[r][k] * B[l][k].
// A's rows are broadcast, B's lanes fill vectors. Blocking and threads never change the order of one element's sum.
// Operands are packed in dwords: one element widened to f32, or two bf16 that one instruction multiplies (Singles, Pairs).
#pragma once
#include <cstdlib>
#include <utility>

#include "elementwise.h"

namespace tpi {
namespace TPI_NS {
namespace gemm {

// Rows of a register tile 1, 2 or 3 vectors wide: accumulators, vectors of B and one broadcast fill the registers.
#if defined(TPI_ISA_AVX512)
constexpr int kTileRows[4] = {0, 16, 14, 8};
#elif defined(TPI_ISA_AVX2)
constexpr int kTileRows[4] = {0, 12, 6, 4};
#elif defined(TPI_ISA_NEON)
constexpr int kTileRows[4] = {0, 16, 12, 8};
#else
constexpr int kTileRows[4] = {0, 4, 2, 1};
#endif

constexpr i64 kBlockK = 256;         // largest piece of the reduction that is packed at a time
constexpr int kInnerLevels = 8;      // log2(kBlockK)
constexpr i64 kChunkBlocks = W == 16 ? 4 : 1;  // blocks of the reduction that are packed at a time
constexpr i64 kBlockLanes = 768;     // lanes of B packed at a time
constexpr i64 kBlockRows = 768;      // rows of C in flight
constexpr i64 kPackRows = 8 * kTileRows[2] < 96 ? 96 : 8 * kTileRows[2];  // rows of A packed at a time
constexpr i64 kResident = 64 * 1024;  // floats of B that stay in the L2 cache: packed once
constexpr i64 kInPlaceLanes = 128;   // up to here an f32 A is read in place

inline i64 min_of(i64 a, i64 b) { return a < b ? a : b; }
inline i64 max_of(i64 a, i64 b) { return a > b ? a : b; }
inline i64 div_up(i64 a, i64 b) { return (a + b - 1) / b; }
inline i64 round_up(i64 a, i64 b) { return div_up(a, b) * b; }

// Per-thread scratch, 64-byte aligned, kept between calls. Null when memory is short.
class Scratch {
 public:
  ~Scratch() { std::free(p_); }
  float* get(i64 floats) {
    if (floats > size_) {
      std::free(p_);
      size_ = round_up(floats, 1024);
      p_ = static_cast<float*>(std::aligned_alloc(64, size_t(size_) * sizeof(float)));
      if (!p_) size_ = 0;
    }
    return p_;
  }

 private:
  float* p_ = nullptr;
  i64 size_ = 0;
};
inline float* scratch(i64 floats) {
  static thread_local Scratch s;
  return s.get(floats);
}

// The leaves of a reduction over n elements and how the engine walks it. The tree is a binary counter: after leaf g the
// running sum takes in one stored partial per trailing one bit of g, and is stored one level above the last of them.
struct Reduction {
  bool carry = false;  // the (one) chain continues from values the caller gives
  i64 n, leaf, block;
  i64 half;     // n / 2 when paired: [gate; up], a leaf is one of gate's and then one of up's; else 0
  int levels;   // stored levels: bits of the last leaf that has elements
  int inner;    // of these, levels that complete inside a block
  bool padded;  // leaves beyond 2^levels exist; all are +0

  Reduction(i64 n_, i64 leaf_, i64 leaves, bool paired = false)
      : n(n_), leaf(max_of(leaf_, 1) * (paired ? 2 : 1)), block(leaf), half(paired ? n / 2 : 0), levels(0), inner(0) {
    i64 used = max_of(div_up(n, leaf), 1);
    while ((i64(1) << levels) < used) ++levels;
    padded = leaves > (i64(1) << levels);
    if (leaf > kBlockK) {
      block = round_up(div_up(leaf, div_up(leaf, kBlockK)), 16);  // pieces of one leaf
    } else {
      while (inner < levels && 2 * block <= kBlockK) block *= 2, ++inner;
    }
  }
  // The same over pairs of elements; `can_pair`: no pair straddles two leaves, or gate and up.
  bool can_pair() const { return half ? leaf % 4 == 0 : leaf % 2 == 0 || n <= leaf; }
  Reduction in_pairs() const {
    Reduction pairs(div_up(n, 2), div_up(leaf, 2), i64(1) << levels, false);
    pairs.half = half / 2;
    pairs.padded = padded;
    pairs.carry = carry;
    return pairs;
  }
  // Block boundaries: whole groups of leaves, or pieces that never straddle two leaves.
  i64 block_end(i64 k) const { return min_of(n, min_of(k + block, leaf > kBlockK ? (k / leaf + 1) * leaf : n)); }
  i64 chunk_end(i64 k, i64 chunk) const {
    if (chunk >= n) return n;
    for (const i64 limit = k + chunk; k < n && block_end(k) <= limit;) k = block_end(k);
    return k;
  }
  // f(k, source, count) for the runs of [k0, k1) that lie together in memory, at `source`.
  template <class F>
  void for_runs(i64 k0, i64 k1, const F& f) const {
    if (!half) return f(k0, k0, k1 - k0);
    const i64 part = leaf / 2;
    for (i64 k = k0; k < k1;) {
      const i64 g = k / part, end = min_of((g + 1) * part, k1);
      f(k, g % 2 * half + g / 2 * part + k % part, end - k);
      k = end;
    }
  }
  static bool valid(i64 n, i64 leaf, i64 leaves, bool paired = false) {
    if (n < 0 || leaf < 0 || !is_power_of_two(leaves)) return false;
    return paired ? n == 2 * leaf * leaves : div_up(n, leaves) <= leaf;
  }
};

// One step of a chain over a dword of each operand.
struct Fma {
  static TPI_INLINE vf step(vf a, vf b, vf c) { return fma(a, b, c); }
};
#if defined(TPI_DOT)
struct Dot {
  static TPI_INLINE vf step(vf a, vf b, vf c) { return dot(a, b, c); }
};
#endif

// acc += A * B over `n` steps. A: R rows with the given stride. B: [n][P * W].
template <class Step, int R, int P>
TPI_INLINE inline void chain(const float* a, i64 stride, const float* b, i64 n, vf (&acc)[R][P]) {
  constexpr int Q = (R + 3) / 4;
  const float* base[Q];
#pragma GCC unroll 8
  for (int q = 0; q < Q; ++q) base[q] = a + 4 * q * stride;
#pragma GCC unroll 4
  for (i64 k = 0; k < n; ++k) {
    vf bv[P];
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) bv[p] = load(b + p * W);
#pragma GCC unroll 32
    for (int r = 0; r < R; ++r) {
      vf av = set1(base[r / 4][(r % 4) * stride + k]);
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) acc[r][p] = Step::step(av, bv[p], acc[r][p]);
    }
    b += P * W;
  }
}

template <int R, int P>
TPI_INLINE inline void tile_clear(vf (&acc)[R][P]) {
#pragma GCC unroll 32
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) acc[r][p] = zero();
}
template <int R, int P>
TPI_INLINE inline void tile_load(const float* s, vf (&acc)[R][P]) {
#pragma GCC unroll 32
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) acc[r][p] = load(s + (r * P + p) * W);
}
template <int R, int P>
TPI_INLINE inline void tile_store(float* s, const vf (&acc)[R][P]) {
#pragma GCC unroll 32
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) store(s + (r * P + p) * W, acc[r][p]);
}
template <int R, int P>
TPI_INLINE inline void tile_merge(const float* left, vf (&acc)[R][P]) {
#pragma GCC unroll 32
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) acc[r][p] = add(load(left + (r * P + p) * W), acc[r][p]);
}
template <int R, int P>
TPI_INLINE inline void tile_add_zero(vf (&acc)[R][P]) {
#pragma GCC unroll 32
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) acc[r][p] = add(acc[r][p], zero());
}
// Stores the value of leaf g (not the last) in the tree; level(l) is the storage of level l.
template <int R, int P, class Level>
TPI_INLINE inline void tile_push(i64 g, Level level, vf (&acc)[R][P]) {
  int l = 0;
  for (; g >> l & 1; ++l) tile_merge(level(l), acc);
  tile_store(level(l), acc);
}
// The root, from the value of the last leaf g. Empty leaves to the right add +0, which matters for -0.
template <int R, int P, class Level>
TPI_INLINE inline void tile_root(const Reduction& red, i64 g, Level level, vf (&acc)[R][P]) {
  for (int l = 0; l < red.levels; ++l) {
    if (g >> l & 1)
      tile_merge(level(l), acc);
    else
      tile_add_zero(acc);
  }
  if (red.padded) tile_add_zero(acc);
}

// One register tile over the block [k0, k1). `outer` holds this tile's stored levels inner, inner + 1, …, and then the
// running sum of an unfinished leaf or, after the last block, the result; `stride` floats from one to the next.
template <class Step, int R, int P>
void tile(const Reduction& red, i64 k0, i64 k1, const float* a, i64 a_stride, const float* b, float* outer,
          i64 stride) {
  alignas(64) float near[kInnerLevels * R * P * W];  // levels below `inner`
  float* total = outer + (red.levels - red.inner) * stride;
  auto level = [&](int l) { return l < red.inner ? near + l * (R * P * W) : outer + (l - red.inner) * stride; };
  vf acc[R][P];
  i64 g = k0 / red.leaf;
  if (k0 % red.leaf || red.carry)
    tile_load(total, acc);
  else
    tile_clear(acc);
  for (i64 k = k0;; ++g) {
    i64 leaf_end = (g + 1) * red.leaf, end = min_of(leaf_end, k1);
    chain<Step, R, P>(a + (k - k0), a_stride, b + (k - k0) * (P * W), end - k, acc);
    if (end == red.n) {
      tile_root(red, g, level, acc);
      tile_store(total, acc);
      return;
    }
    if (end < leaf_end) {
      tile_store(total, acc);
      return;
    }
    tile_push(g, level, acc);
    if (end == k1) return;
    tile_clear(acc);
    k = end;
  }
}
using Tile = void (*)(const Reduction&, i64, i64, const float*, i64, const float*, float*, i64);
template <class Step, int P, int... R>
Tile tile_among(int rows, std::integer_sequence<int, R...>) {
  static constexpr Tile kTiles[] = {tile<Step, R + 1, P>...};
  return kTiles[rows - 1];
}
template <class Step, int P>
inline Tile tile_of(int rows) {
  return tile_among<Step, P>(rows, std::make_integer_sequence<int, kTileRows[P]>());
}

// ---- packing ----
// Columns that one transposing load covers.
template <class T>
constexpr int kColumns = W;
template <>
constexpr int kColumns<float> = 4;
template <>
constexpr int kColumns<bf16> = 8;

// out[c] = src[0 … W-1][c].
TPI_INLINE inline void load_transposed(const f16* src, i64 ld, vf (&out)[W]) {
#pragma GCC unroll 16
  for (int i = 0; i < W; ++i) out[i] = load_as(src + i * ld);
  transpose(out);
}
TPI_INLINE inline void load_transposed(const float* src, i64 ld, vf (&out)[4]) {
  load_quad(src, ld * i64(sizeof(float)), out);
}
TPI_INLINE inline void load_transposed(const bf16* src, i64 ld, vf (&out)[8]) {
  vf r[4];
  load_quad(src, ld * i64(sizeof(bf16)), r);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    out[2 * i] = even(r[i]);
    out[2 * i + 1] = odd(r[i]);
  }
}
// The same at an edge: only `rows` x `columns` elements are read, the others are +0.
template <class T>
__attribute__((noinline)) void load_transposed_part(const T* src, i64 ld, i64 rows, i64 columns,
                                                    vf (&out)[kColumns<T>]) {
  T t[W][kColumns<T>] = {};
  for (i64 i = 0; i < min_of(rows, W); ++i) std::memcpy(t[i], src + i * ld, size_t(columns) * sizeof(T));
  load_transposed(t[0], kColumns<T>, out);
}

// dst[c][r] = src[r][c]; rows are padded with +0 to a multiple of W.
template <class T>
void pack_transposed(const T* src, i64 ld, i64 rows, i64 columns, float* dst, i64 dst_ld) {
  constexpr int C = kColumns<T>, kEdge = 64;
  for (i64 r = 0; r < rows; r += W) {
    const T* s = src + r * ld;
    float* d = dst + r;
    if (rows - r < W) {  // the last rows: a copy of them, padded
      T copy[W][kEdge] = {};
      for (i64 c = 0; c < columns; c += kEdge) {
        const i64 count = min_of(columns - c, kEdge);
        for (i64 i = 0; i < min_of(rows - r, W); ++i) std::memcpy(copy[i], s + i * ld + c, size_t(count) * sizeof(T));
        pack_transposed(copy[0], kEdge, W, count, d + c * dst_ld, dst_ld);
      }
      return;
    }
    i64 c = 0;
    for (; c + C <= columns; c += C) {
      vf t[C];
      load_transposed(s + c, ld, t);
#pragma GCC unroll 32
      for (int i = 0; i < C; ++i) store(d + (c + i) * dst_ld, t[i]);
    }
    if (c < columns) {
      vf t[C];
      load_transposed_part(s + c, ld, W, columns - c, t);
      for (int i = 0; i < columns - c; ++i) store(d + (c + i) * dst_ld, t[i]);
    }
  }
}
// dst[r][c] = src[r][c]; columns are padded with +0 to a multiple of W.
template <class T>
void pack_copied(const T* src, i64 ld, i64 rows, i64 columns, float* dst, i64 dst_ld) {
  for (i64 r = 0; r < rows; ++r, src += ld, dst += dst_ld) {
    i64 c = 0;
    for (; c + W <= columns; c += W) store(dst + c, load_as(src + c));
    if (c < columns) store(dst + c, load_as_n(src + c, int(columns - c)));
  }
}

// A matrix indexed [i][k]: dense in k (ld from i to i + 1) or dense in i (ld from k to k + 1).
template <class T>
struct Operand {
  const T* p;
  i64 ld;
  bool k_dense;
  const T* at(i64 i, i64 k) const { return k_dense ? p + i * ld + k : p + k * ld + i; }
};

// How the elements of a reduction of length n fill dwords. k, count and columns are in dwords, n in elements.
template <class T>
struct Singles {
  using Source = T;
  using Step = Fma;
  static constexpr int kElements = 1;
  static constexpr bool kInPlace = sizeof(T) == sizeof(float);
  static constexpr i64 kNarrowest = 1;   // vectors of the only panel when the lanes fill one
  static constexpr int kLoad = kColumns<T>;  // dwords of a row that one transposing load covers
  i64 n;

  // dst[i][k] for rows [i0, i0 + rows)
  void pack_rows(const Operand<T>& m, i64 i0, i64 rows, i64 k, i64 count, float* dst, i64 ld) const {
    if (m.k_dense)
      pack_copied(m.at(i0, k), m.ld, rows, count, dst, ld);
    else
      pack_transposed(m.at(i0, k), m.ld, count, rows, dst, ld);
  }
  // dst[k][i] for lanes [i0, i0 + lanes)
  void pack_lanes(const Operand<T>& m, i64 i0, i64 lanes, i64 k, i64 count, float* dst, i64 ld) const {
    if (m.k_dense)
      pack_transposed(m.at(i0, k), m.ld, lanes, count, dst, ld);
    else
      pack_copied(m.at(i0, k), m.ld, count, lanes, dst, ld);
  }
  // out[c] = columns k + c of W rows of a k-dense matrix; `part` reads no more than `rows` rows and n columns.
  TPI_INLINE void load(const T* row, i64 ld, i64 k, vf (&out)[kLoad]) const { load_transposed(row + k, ld, out); }
  void load_part_of(const T* row, i64 ld, i64 rows, i64 k, vf (&out)[kLoad]) const {
    load_transposed_part(row + k, ld, rows, min_of(n - k, kLoad), out);
  }
};

#if defined(TPI_DOT)
// Element 2i in the upper half of dword i, which `dot` takes first. An odd n ends with +0 in rows and -0 in lanes: their
// product leaves every sum as it is, zeros of both signs included.
struct Pairs {
  using Source = bf16;
  using Step = Dot;
  static constexpr int kElements = 2;
  static constexpr bool kInPlace = false;
  static constexpr i64 kNarrowest = 2;  // fewer tiles to compile
  static constexpr int kLoad = 4;
  static constexpr uint16_t kRowEnd = 0, kLaneEnd = 0x8000;
  i64 n;

  i64 elements(i64 k, i64 count) const { return min_of(2 * count, n - 2 * k); }
  void pack_rows(const Operand<bf16>& m, i64 i0, i64 rows, i64 k, i64 count, float* dst, i64 ld) const {
    if (m.k_dense) return pack_swapped(m.at(i0, 2 * k), m.ld, rows, elements(k, count), dst, ld);
    float joined[W * kPackRows];
    for (i64 c = 0; c < count; c += W) {
      const i64 n = min_of(count - c, W);
      pack_joined(m.at(i0, 2 * (k + c)), m.ld, elements(k + c, n), rows, kRowEnd, joined, kPackRows);
      pack_transposed(joined, kPackRows, n, rows, dst + c, ld);
    }
  }
  void pack_lanes(const Operand<bf16>& m, i64 i0, i64 lanes, i64 k, i64 count, float* dst, i64 ld) const {
    if (m.k_dense)
      pack_pairs_transposed(m.at(i0, 2 * k), m.ld, lanes, elements(k, count), dst, ld);
    else
      pack_joined(m.at(i0, 2 * k), m.ld, elements(k, count), lanes, kLaneEnd, dst, ld);
  }
  TPI_INLINE void load(const bf16* row, i64 ld, i64 k, vf (&out)[kLoad]) const {
    load_quad(row + 2 * k, ld * i64(sizeof(bf16)), out);
#pragma GCC unroll 4
    for (int i = 0; i < kLoad; ++i) out[i] = swap_halves(out[i]);
  }
  __attribute__((noinline)) void load_part_of(const bf16* row, i64 ld, i64 rows, i64 k, vf (&out)[kLoad]) const {
    bf16 t[W][2 * kLoad];
    fill(t[0], W * 2 * kLoad, kLaneEnd);
    for (i64 i = 0; i < min_of(rows, W); ++i)
      std::memcpy(t[i], row + i * ld + 2 * k, size_t(elements(k, kLoad)) * sizeof(bf16));
    load(t[0], 2 * kLoad, 0, out);
  }

 private:
  static void fill(bf16* p, i64 count, uint16_t bits) {
    for (i64 i = 0; i < count; ++i) p[i].bits = bits;
  }
  // dst[r][k / 2] = src[r][k, k + 1]
  static void pack_swapped(const bf16* src, i64 ld, i64 rows, i64 columns, float* dst, i64 dst_ld) {
    for (i64 r = 0; r < rows; ++r, src += ld, dst += dst_ld) {
      i64 c = 0;
      for (; c + 2 * W <= columns; c += 2 * W)
        store(dst + c / 2, swap_halves(tpi::TPI_NS::load(reinterpret_cast<const float*>(src + c))));
      if (c < columns) {
        bf16 t[2 * W];
        fill(t, 2 * W, kRowEnd);
        std::memcpy(t, src + c, size_t(columns - c) * sizeof(bf16));
        store(dst + c / 2, swap_halves(tpi::TPI_NS::load(reinterpret_cast<const float*>(t))));
      }
    }
  }
  // dst[k / 2][c] = src[k, k + 1][c]; columns are padded to a multiple of W.
  static void pack_joined(const bf16* src, i64 ld, i64 rows, i64 columns, uint16_t end, float* dst, i64 dst_ld) {
    const vf missing = set1(widen(bf16{end}));
    for (i64 r = 0; r < rows; r += 2, src += 2 * ld, dst += dst_ld)
      for_columns(0, columns, [&](i64 c, int n) TPI_INLINE {
        store(dst + c, join_halves(load_part(src + c, n), r + 1 < rows ? load_part(src + ld + c, n) : missing));
      });
  }
  // dst[k / 2][r] = src[r][k, k + 1]; rows are padded to a multiple of W.
  void pack_pairs_transposed(const bf16* src, i64 ld, i64 rows, i64 columns, float* dst, i64 dst_ld) const {
    constexpr i64 kEdge = 64;
    for (i64 r = 0; r < rows; r += W, src += W * ld, dst += W) {
      i64 c = 0;
      if (rows - r >= W)
        for (; c + 2 * kLoad <= columns; c += 2 * kLoad) {
          vf t[kLoad];
          load(src + c, ld, 0, t);
#pragma GCC unroll 4
          for (int i = 0; i < kLoad; ++i) store(dst + (c / 2 + i) * dst_ld, t[i]);
        }
      for (; c < columns; c += kEdge) {  // the last rows, or columns: a copy of them, padded
        bf16 copy[W][kEdge];
        fill(copy[0], W * kEdge, kLaneEnd);
        const i64 count = min_of(columns - c, kEdge);
        for (i64 i = 0; i < min_of(rows - r, W); ++i) std::memcpy(copy[i], src + i * ld + c, size_t(count) * sizeof(bf16));
        for (i64 j = 0; j < count; j += 2 * kLoad) {
          vf t[kLoad];
          load(copy[0] + j, kEdge, 0, t);
          for (i64 i = 0; i < min_of(kLoad, div_up(count - j, 2)); ++i) store(dst + ((c + j) / 2 + i) * dst_ld, t[i]);
        }
      }
    }
  }
};
#endif

// C for rows [r0, r1) and lanes [l0, l1) on the calling thread. finish(r, rows, l, lanes, c, ld) takes the results of a
// panel, c[rows][ld]; begin(the same), where a chain is carried on, gives its values so far. False when memory is short.
//
// Loops, outermost first: lanes, rows in flight, a chunk of the reduction (B packed for all lanes), kPackRows rows of A
// (packed in blocks, for the L2 cache), a panel of B, a block (panel and tile in the L1 cache), tiles. So that the stored
// levels of a panel's tiles are used again while they are near; with one chunk they are all there is.
inline void nothing_before(i64, i64, i64, i64, float*, i64) {}
template <class F, class Finish, class Begin = decltype(&nothing_before)>
bool reduce_block(const F& format, const Reduction& red, const Operand<typename F::Source>& A, i64 r0, i64 r1,
                  const Operand<typename F::Source>& B, i64 l0, i64 l1, const Finish& finish,
                  const Begin& begin = &nothing_before) {
  using Step = typename F::Step;
  const i64 lanes_max = max_of(round_up(min_of(l1 - l0, kBlockLanes), W), F::kNarrowest * W);
  const i64 chunk = lanes_max * red.n <= kResident ? max_of(red.n, 1) : kChunkBlocks * red.block;
  const bool one_chunk = red.n <= chunk;
  const bool in_place = F::kInPlace && A.k_dense && !red.half && l1 - l0 <= kInPlaceLanes;
  const i64 rows_max = one_chunk ? r1 - r0 : min_of(r1 - r0, kBlockRows);
  const i64 part_max = min_of(rows_max, kPackRows);
  const i64 pack_ld = round_up(red.block, 16) + 16;  // off the power-of-two strides that share cache sets
  const i64 blocks = div_up(min_of(red.n, chunk), red.block) + (red.leaf > kBlockK ? min_of(red.n, chunk) / red.leaf : 0);
  const i64 b_size = lanes_max * min_of(red.n, chunk);
  const i64 a_size = in_place ? 0 : part_max * pack_ld * blocks;
  const i64 level_size = one_chunk ? part_max * 3 * W : rows_max * lanes_max;
  float* b_pack = scratch(round_up(b_size, 16) + a_size + (red.levels - red.inner + 1) * level_size);
  if (!b_pack) return false;
  float* a_pack = b_pack + round_up(b_size, 16);
  float* sums = a_pack + a_size;
  float* totals = sums + (red.levels - red.inner) * level_size;

  for (i64 lb = l0; lb < l1; lb += kBlockLanes) {
    const i64 lanes = min_of(l1 - lb, kBlockLanes), vectors = div_up(lanes, W);
    // Panels two vectors wide; an odd count starts with one of three (or is one of kNarrowest).
    auto panel_vectors = [&](i64 v) { return vectors == 1 ? F::kNarrowest : v == 0 && vectors % 2 ? 3 : 2; };
    auto pack_b = [&](i64 c0, i64 c1) {
      for (i64 v = 0; v < vectors; v += panel_vectors(v)) {
        const i64 width = panel_vectors(v) * W, l = lb + v * W, n = min_of(l1 - l, width);
        float* d = b_pack + v * W * (c1 - c0);
        red.for_runs(c0, c1, [&](i64 k, i64 source, i64 count) {
          format.pack_lanes(B, l, n, source, count, d + (k - c0) * width, width);
        });
      }
    };
    for (i64 rb = r0; rb < r1; rb += rows_max) {
      const i64 rows = min_of(r1 - rb, rows_max);
      const auto for_panels = [&](const auto& f) {
        for (i64 v = 0; v < vectors; v += panel_vectors(v)) {
          const i64 width = panel_vectors(v) * W;
          f(rb, rows, lb + v * W, min_of(lanes - v * W, width), totals + v * W * rows, width);
        }
      };
      if (red.carry && !one_chunk) for_panels(begin);
      i64 c0 = 0;
      do {
        const i64 c1 = min_of(red.n, red.chunk_end(c0, chunk));
        if (!one_chunk || rb == r0) pack_b(c0, c1);
        for (i64 rp = 0; rp < rows; rp += kPackRows) {
          const i64 part = min_of(rows - rp, kPackRows);
          if (!in_place) {
            float* d = a_pack;
            for (i64 k0 = c0; k0 < c1; k0 = red.block_end(k0), d += part * pack_ld)
              red.for_runs(k0, red.block_end(k0), [&](i64 k, i64 source, i64 count) {
                format.pack_rows(A, rb + rp, part, source, count, d + (k - k0), pack_ld);
              });
          }
          for (i64 v = 0; v < vectors; v += panel_vectors(v)) {
            const int P = int(panel_vectors(v)), width = P * W;
            const i64 groups = div_up(part, kTileRows[P]);
            if (red.carry && one_chunk) begin(rb + rp, part, lb + v * W, min_of(lanes - v * W, width), totals, width);
            float* const panel_sums = one_chunk ? sums : sums + v * W * rows + rp * width;
            i64 k0 = c0;
            const float* a_block = a_pack;
            do {
              const i64 k1 = red.block_end(k0);
              const float* bv = b_pack + v * W * (c1 - c0) + (k0 - c0) * width;
              for (i64 i = 0; i < groups; ++i) {
                const i64 r = part * i / groups;
                const int R = int(part * (i + 1) / groups - r);
                const float* ar = in_place ? reinterpret_cast<const float*>(A.at(rb + rp + r, k0)) : a_block + r * pack_ld;
                const i64 a_ld = in_place ? A.ld : pack_ld;
                Tile tile = nullptr;
                if (P == 2)
                  tile = tile_of<Step, 2>(R);
                else if (P == 3)
                  tile = tile_of<Step, 3>(R);
                else if constexpr (F::kNarrowest == 1)
                  tile = tile_of<Step, 1>(R);
                tile(red, k0, k1, ar, a_ld, bv, panel_sums + r * width, level_size);
              }
              a_block += part * pack_ld;
              k0 = k1;
            } while (k0 < c1);
            if (one_chunk) finish(rb + rp, part, lb + v * W, min_of(lanes - v * W, width), totals, width);
          }
        }
        c0 = c1;
      } while (c0 < red.n);
      if (!one_chunk) for_panels(finish);
    }
  }
  return true;
}

// ---- threads ----
constexpr double kSerialProducts = 50e3;  // multiply-adds below which starting threads costs more than it saves

// run(i) for i in [0, n), one thread when the work is small. Returns the first failing status, in no promised order.
template <class Run>
int for_each_task(double products, const Run& run) {
  int status = TPI_OK;
  if (products < kSerialProducts || omp_get_max_threads() == 1) {
    FloatEnv env;
    i64 next = 0;
    return run([&] { return next++; });
  }
  i64 shared = 0;
#pragma omp parallel
  {
    FloatEnv env;
    int mine = run([&] {
      i64 i;
#pragma omp atomic capture
      i = shared++;
      return i;
    });
    if (mine != TPI_OK) {
#pragma omp atomic write
      status = mine;
    }
  }
  return status;
}

// How an [m, n] result is cut in about `parts` rectangles: sizes of a rectangle.
struct Cut {
  i64 m, n;
  Cut(i64 M, i64 N, i64 parts) : m(M), n(N) {
    double best = 0;
    for (i64 i = 1; i <= parts; ++i) {
      i64 cm = min_of(M, round_up(div_up(M, i), 2 * W)), cn = min_of(N, round_up(div_up(N, parts / i), 32));
      double cost = double(cm) * double(cn) + 8.0 * double(cm + cn);  // products, then what is packed for them
      if (i == 1 || cost < best) best = cost, m = cm, n = cn;
    }
  }
};

}  // namespace gemm
}  // namespace TPI_NS
}  // namespace tpi
