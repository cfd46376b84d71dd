// The lane tree of the contract (section 8): 64 accumulators, element j added to lane j mod 64, then a tree over adjacent
// lanes. The 64 lanes are 64 / W registers, so the bits do not depend on the register width.
#pragma once
#include "tpi/vec.h"

namespace tpi {
namespace TPI_NS {

constexpr int kLaneVectors = int(kLanes) / W;

// Sums of adjacent pairs, in index order: a0+a1, a2+a3, ..., b0+b1, b2+b3, ...
#if defined(TPI_ISA_AVX512)
inline vf pair_sums(vf a, vf b) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
  return {_mm512_add_ps(_mm512_permutex2var_ps(a.v, even, b.v), _mm512_permutex2var_ps(a.v, odd, b.v))};
}
#elif defined(TPI_ISA_AVX2)
inline vf pair_sums(vf a, vf b) {
  __m256d sums = _mm256_castps_pd(_mm256_hadd_ps(a.v, b.v));
  return {_mm256_castpd_ps(_mm256_permute4x64_pd(sums, 0xD8))};
}
#elif defined(TPI_ISA_NEON)
inline vf pair_sums(vf a, vf b) { return {vpaddq_f32(a.v, b.v)}; }
#else
inline vf pair_sums(vf a, vf b) {
  return {f4{a.v[0] + a.v[1], a.v[2] + a.v[3], b.v[0] + b.v[1], b.v[2] + b.v[3]}};
}
#endif

inline float first_lane(vf a) {
  float t[W];
  store(t, a);
  return t[0];
}

struct LaneSum {
  vf lanes[kLaneVectors];

  LaneSum() {
    for (int v = 0; v < kLaneVectors; ++v) lanes[v] = zero();
  }

  float root() const {
    vf t[kLaneVectors];
    for (int v = 0; v < kLaneVectors; ++v) t[v] = lanes[v];
#pragma GCC unroll 4
    for (int n = kLaneVectors / 2; n > 0; n /= 2)
#pragma GCC unroll 8
      for (int v = 0; v < n; ++v) t[v] = pair_sums(t[2 * v], t[2 * v + 1]);
#pragma GCC unroll 4
    for (int n = W; n > 1; n /= 2) t[0] = pair_sums(t[0], t[0]);
    return first_lane(t[0]);
  }
};

// term(j, n) gives the terms j … j + n - 1 (1 <= n <= W) in the first n lanes and +0 in the others.
template <class Term>
inline float lane_tree(i64 count, Term term) {
  LaneSum sum;
  i64 j = 0;
  for (; j + kLanes <= count; j += kLanes) {
#pragma GCC unroll 16
    for (int v = 0; v < kLaneVectors; ++v) sum.lanes[v] = add(sum.lanes[v], term(j + v * W, W));
  }
  for (int v = 0; j < count; ++v, j += W)
    sum.lanes[v] = add(sum.lanes[v], term(j, count - j < W ? int(count - j) : W));
  return sum.root();
}

}  // namespace TPI_NS
}  // namespace tpi
