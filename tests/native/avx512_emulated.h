// The AVX-512 intrinsics of the kernels on a CPU with AVX2 only: SIMDe's (https://github.com/simd-everywhere/simde, Debian's
// libsimde-dev), and here those that SIMDe 0.7 lacks, after Intel's intrinsics guide. For tests/native/hashes.py.
#pragma once
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>

#include <cstdint>
#include <cstring>

#pragma GCC diagnostic ignored "-Wignored-attributes"  // vector types as template arguments

namespace emulated {

template <class To, class From>
inline To bits(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}
template <class T, int N>
struct Lanes {
  T at[N];
};

inline __m512 cvtepi32_ps(__m512i a) {
  const auto half = bits<Lanes<__m256i, 2>>(a);
  return bits<__m512>(Lanes<__m256, 2>{{_mm256_cvtepi32_ps(half.at[0]), _mm256_cvtepi32_ps(half.at[1])}});
}
inline __m512i cvtepu16_epi32(__m256i a) {
  const auto half = bits<Lanes<__m128i, 2>>(a);
  return bits<__m512i>(Lanes<__m256i, 2>{{_mm256_cvtepu16_epi32(half.at[0]), _mm256_cvtepu16_epi32(half.at[1])}});
}
inline __m256i cvtepi32_epi16(__m512i a) {
  const auto wide = bits<Lanes<uint32_t, 16>>(a);
  Lanes<uint16_t, 16> low;
  for (int i = 0; i < 16; ++i) low.at[i] = uint16_t(wide.at[i]);
  return bits<__m256i>(low);
}
inline __m512 cvtph_ps(__m256i a) {
  const auto half = bits<Lanes<__m128i, 2>>(a);
  return bits<__m512>(Lanes<__m256, 2>{{_mm256_cvtph_ps(half.at[0]), _mm256_cvtph_ps(half.at[1])}});
}
template <int kRounding>
inline __m256i cvtps_ph(__m512 a) {
  const auto half = bits<Lanes<__m256, 2>>(a);
  return bits<__m256i>(
      Lanes<__m128i, 2>{{_mm256_cvtps_ph(half.at[0], kRounding), _mm256_cvtps_ph(half.at[1], kRounding)}});
}
inline __m512 maskz_loadu_ps(uint16_t mask, const void* p) {
  Lanes<uint32_t, 16> lanes = {};
  for (int i = 0; i < 16; ++i)
    if (mask >> i & 1) std::memcpy(&lanes.at[i], (const char*)p + 4 * i, 4);
  return bits<__m512>(lanes);
}
inline void mask_storeu_ps(void* p, uint16_t mask, __m512 a) {
  const auto lanes = bits<Lanes<uint32_t, 16>>(a);
  for (int i = 0; i < 16; ++i)
    if (mask >> i & 1) std::memcpy((char*)p + 4 * i, &lanes.at[i], 4);
}
inline __m512 shuffle_f32x4(__m512 a, __m512 b, int choice) {
  const auto x = bits<Lanes<__m128, 4>>(a), y = bits<Lanes<__m128, 4>>(b);
  return bits<__m512>(Lanes<__m128, 4>{
      {x.at[choice & 3], x.at[choice >> 2 & 3], y.at[choice >> 4 & 3], y.at[choice >> 6 & 3]}});
}

}  // namespace emulated

#undef _mm512_cvtepi32_ps
#define _mm512_cvtepi32_ps emulated::cvtepi32_ps
#undef _mm512_cvtepu16_epi32
#define _mm512_cvtepu16_epi32 emulated::cvtepu16_epi32
#undef _mm512_cvtepi32_epi16
#define _mm512_cvtepi32_epi16 emulated::cvtepi32_epi16
#undef _mm512_cvtph_ps
#define _mm512_cvtph_ps emulated::cvtph_ps
#undef _mm512_cvtps_ph
#define _mm512_cvtps_ph(a, rounding) emulated::cvtps_ph<rounding>(a)
#undef _mm512_maskz_loadu_ps
#define _mm512_maskz_loadu_ps emulated::maskz_loadu_ps
#undef _mm512_mask_storeu_ps
#define _mm512_mask_storeu_ps emulated::mask_storeu_ps
#undef _mm512_shuffle_f32x4
#define _mm512_shuffle_f32x4 emulated::shuffle_f32x4
