// One small vector type for every instruction set, so that each kernel is written once and gives the same bits at each
// width. A kernel file is compiled once per level, with TPI_NS naming the namespace (portable, wide, widest).
// W is the number of f32 lanes. Nothing here reorders or contracts: fma is always one rounding, add and mul always two.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "tpi/contract.h"
#include "tpi/isa.h"

#if defined(TPI_EMULATE_AVX512) && defined(TPI_ISA_AVX512)
#include "avx512_emulated.h"
#elif defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace tpi {

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

constexpr uint32_t kNanBits = 0x7FC00000u;

static inline float from_bits(uint32_t u) {
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
static inline uint32_t to_bits(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  return u;
}

}  // namespace tpi

namespace tpi {
namespace TPI_NS {

// Round to nearest even with subnormals flushed (inputs and results), for the lifetime of the object and the calling
// thread only. Floating-point state is per thread: every worker of a parallel region needs its own.
class FloatEnv {
 public:
#if defined(__x86_64__)
  FloatEnv() : saved_(_mm_getcsr()) {
    _mm_setcsr(0x1F80u | 0x8000u | 0x0040u);
    fence();
  }
  ~FloatEnv() {
    fence();
    _mm_setcsr(saved_);
  }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  FloatEnv() {
    __asm__ volatile("mrs %0, fpcr" : "=r"(saved_));
    uint64_t flush = 1ull << 24;
    __asm__ volatile("msr fpcr, %0" ::"r"(flush));
    fence();
  }
  ~FloatEnv() {
    fence();
    __asm__ volatile("msr fpcr, %0" ::"r"(saved_));
  }

 private:
  uint64_t saved_;
#else
#error "mindspeed_tpi: kernels are written for x86-64 and aarch64"
#endif
 public:
  FloatEnv(const FloatEnv&) = delete;
  FloatEnv& operator=(const FloatEnv&) = delete;

 private:
  // The compiler does not know that arithmetic reads the control register: keep loads and stores on their side of it.
  static void fence() { __asm__ volatile("" ::: "memory"); }
};

// ---- scalar conversions (tails, portable path) ----
inline float widen(float x) { return x; }
inline float widen(bf16 x) { return from_bits(uint32_t(x.bits) << 16); }
inline float widen(f16 x) {
  uint32_t sign = uint32_t(x.bits & 0x8000u) << 16, e = (x.bits >> 10) & 31u, m = x.bits & 1023u;
  if (e == 31) return from_bits(sign | 0x7F800000u | (m << 13));
  if (e == 0) {
    if (m == 0) return from_bits(sign);
    int shift = __builtin_clz(m) - 21;  // bring the leading one to bit 10
    m = (m << shift) & 1023u;
    return from_bits(sign | (uint32_t(113 - shift) << 23) | (m << 13));
  }
  return from_bits(sign | ((e + 112u) << 23) | (m << 13));
}
inline bool is_nan_bits(uint32_t u) { return (u & 0x7FFFFFFFu) > 0x7F800000u; }
inline void narrow(float x, float* out) {
  uint32_t u = to_bits(x);
  *out = is_nan_bits(u) ? from_bits(kNanBits) : x;
}
inline void narrow(float x, bf16* out) {
  uint32_t u = to_bits(x);
  out->bits = is_nan_bits(u) ? 0x7FC0u : uint16_t((u + 0x7FFFu + ((u >> 16) & 1u)) >> 16);
}
inline void narrow(float x, f16* out) {
  uint32_t u = to_bits(x), sign = (u >> 16) & 0x8000u, a = u & 0x7FFFFFFFu;
  if (a > 0x7F800000u) {
    out->bits = 0x7E00u;
  } else if (a >= 0x477FF000u) {  // 65520 and above round to infinity
    out->bits = uint16_t(sign | 0x7C00u);
  } else if (a >= 0x38800000u) {  // normal halves
    out->bits = uint16_t(sign | ((a - 0x38000000u + 0xFFFu + ((a >> 13) & 1u)) >> 13));
  } else if (a >= 0x33000000u) {  // subnormal halves, kept
    int shift = 126 - int(a >> 23);
    uint32_t m = (a & 0x7FFFFFu) | 0x800000u, half = 1u << (shift - 1), q = m >> shift, rest = m & ((1u << shift) - 1);
    out->bits = uint16_t(sign | (q + ((rest > half || (rest == half && (q & 1u))) ? 1u : 0u)));
  } else {
    out->bits = uint16_t(sign);
  }
}
template <class T>
inline T narrow_to(float x) {
  T out;
  narrow(x, &out);
  return out;
}

// ---- vectors ----
#if defined(TPI_ISA_AVX512)
constexpr int W = 16;
struct vf {
  __m512 v;
};
struct vm {
  __mmask16 v;
};
inline vf zero() { return {_mm512_setzero_ps()}; }
inline vf set1(float x) { return {_mm512_set1_ps(x)}; }
inline vf load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, vf a) { _mm512_storeu_ps(p, a.v); }
inline vf fma(vf a, vf b, vf c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline vf add(vf a, vf b) { return {_mm512_add_ps(a.v, b.v)}; }
inline vf sub(vf a, vf b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline vf mul(vf a, vf b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline vf div(vf a, vf b) { return {_mm512_div_ps(a.v, b.v)}; }
inline vf sqrt(vf a) { return {_mm512_sqrt_ps(a.v)}; }
inline vf rint(vf a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline vm lt(vf a, vf b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)}; }
inline vm le(vf a, vf b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LE_OQ)}; }
inline vm gt(vf a, vf b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ)}; }
inline vm eq(vf a, vf b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ)}; }
inline vm is_nan(vf a) { return {_mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q)}; }
inline vf select(vm m, vf a, vf b) { return {_mm512_mask_blend_ps(m.v, b.v, a.v)}; }
inline bool any(vm m) { return m.v != 0; }
inline vm first_n(int n) { return {__mmask16(n >= 16 ? 0xFFFFu : ((1u << n) - 1u))}; }
inline vf load_n(const float* p, int n) { return {_mm512_maskz_loadu_ps(first_n(n).v, p)}; }
inline void store_n(float* p, vf a, int n) { _mm512_mask_storeu_ps(p, first_n(n).v, a.v); }
inline vf max_raw(vf a, vf b) { return {_mm512_max_ps(a.v, b.v)}; }
inline vf neg(vf a) {
  return {_mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(a.v), _mm512_set1_epi32(int(0x80000000u))))};
}
// The low bits of n's representation added to a's exponent field.
inline vf add_exponent(vf a, vf n) {
  __m512i e = _mm512_slli_epi32(_mm512_castps_si512(n.v), 23);
  return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a.v), e))};
}
inline void split_exponent(vf a, vf* mantissa, vf* exponent) {
  __m512i u = _mm512_castps_si512(a.v);
  *exponent = {_mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_srli_epi32(u, 23), _mm512_set1_epi32(126)))};
  u = _mm512_or_si512(_mm512_and_si512(u, _mm512_set1_epi32(0x007FFFFF)), _mm512_set1_epi32(0x3F000000));
  *mantissa = {_mm512_castsi512_ps(u)};
}
inline vf load_as(const bf16* p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
}
inline vf load_as(const f16* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
inline void store_as(bf16* p, vf a) {
  __m512i u = _mm512_castps_si512(a.v);
  __m512i r = _mm512_add_epi32(u, _mm512_set1_epi32(0x7FFF));
  r = _mm512_add_epi32(r, _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1)));
  r = _mm512_srli_epi32(r, 16);
  r = _mm512_mask_blend_epi32(is_nan(a).v, r, _mm512_set1_epi32(0x7FC0));
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(r));
}
inline void store_as(f16* p, vf a) {
  __m256i h = _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512i r = _mm512_mask_blend_epi32(is_nan(a).v, _mm512_cvtepu16_epi32(h), _mm512_set1_epi32(0x7E00));
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(r));
}
inline vf round_as(bf16, vf a) {
  __m512i u = _mm512_castps_si512(a.v);
  __m512i r = _mm512_add_epi32(u, _mm512_set1_epi32(0x7FFF));
  r = _mm512_add_epi32(r, _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1)));
  r = _mm512_and_si512(r, _mm512_set1_epi32(int(0xFFFF0000u)));
  return select(is_nan(a), a, vf{_mm512_castsi512_ps(r)});
}
inline vf round_as(f16, vf a) {
  return {_mm512_cvtph_ps(_mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC))};
}
inline void transpose(vf r[W]) {
  __m512 t[16], s[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(r[i].v, r[i + 1].v);
    t[i + 1] = _mm512_unpackhi_ps(r[i].v, r[i + 1].v);
  }
  for (int i = 0; i < 16; i += 4) {
    s[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(t[i]), _mm512_castps_pd(t[i + 2])));
    s[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(t[i]), _mm512_castps_pd(t[i + 2])));
    s[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(t[i + 1]), _mm512_castps_pd(t[i + 3])));
    s[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(t[i + 1]), _mm512_castps_pd(t[i + 3])));
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_f32x4(s[i], s[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_f32x4(s[i], s[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_f32x4(s[i + 8], s[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_f32x4(s[i + 8], s[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    r[i].v = _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88);
    r[i + 8].v = _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd);
    r[i + 4].v = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12].v = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

#elif defined(TPI_ISA_AVX2)
constexpr int W = 8;
struct vf {
  __m256 v;
};
struct vm {
  __m256 v;
};
inline vf zero() { return {_mm256_setzero_ps()}; }
inline vf set1(float x) { return {_mm256_set1_ps(x)}; }
inline vf load(const float* p) { return {_mm256_loadu_ps(p)}; }
inline void store(float* p, vf a) { _mm256_storeu_ps(p, a.v); }
inline vf fma(vf a, vf b, vf c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline vf add(vf a, vf b) { return {_mm256_add_ps(a.v, b.v)}; }
inline vf sub(vf a, vf b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline vf mul(vf a, vf b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline vf div(vf a, vf b) { return {_mm256_div_ps(a.v, b.v)}; }
inline vf sqrt(vf a) { return {_mm256_sqrt_ps(a.v)}; }
inline vf rint(vf a) { return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline vm lt(vf a, vf b) { return {_mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ)}; }
inline vm le(vf a, vf b) { return {_mm256_cmp_ps(a.v, b.v, _CMP_LE_OQ)}; }
inline vm gt(vf a, vf b) { return {_mm256_cmp_ps(a.v, b.v, _CMP_GT_OQ)}; }
inline vm eq(vf a, vf b) { return {_mm256_cmp_ps(a.v, b.v, _CMP_EQ_OQ)}; }
inline vm is_nan(vf a) { return {_mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q)}; }
inline vf select(vm m, vf a, vf b) { return {_mm256_blendv_ps(b.v, a.v, m.v)}; }
inline bool any(vm m) { return _mm256_movemask_ps(m.v) != 0; }
inline vm first_n(int n) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return {_mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n), lane))};
}
inline vf load_n(const float* p, int n) { return {_mm256_maskload_ps(p, _mm256_castps_si256(first_n(n).v))}; }
inline void store_n(float* p, vf a, int n) { _mm256_maskstore_ps(p, _mm256_castps_si256(first_n(n).v), a.v); }
inline vf max_raw(vf a, vf b) { return {_mm256_max_ps(a.v, b.v)}; }
inline vf neg(vf a) { return {_mm256_xor_ps(a.v, _mm256_set1_ps(-0.0f))}; }
inline vf add_exponent(vf a, vf n) {
  __m256i e = _mm256_slli_epi32(_mm256_castps_si256(n.v), 23);
  return {_mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a.v), e))};
}
inline void split_exponent(vf a, vf* mantissa, vf* exponent) {
  __m256i u = _mm256_castps_si256(a.v);
  *exponent = {_mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_srli_epi32(u, 23), _mm256_set1_epi32(126)))};
  u = _mm256_or_si256(_mm256_and_si256(u, _mm256_set1_epi32(0x007FFFFF)), _mm256_set1_epi32(0x3F000000));
  *mantissa = {_mm256_castsi256_ps(u)};
}
inline vf load_as(const bf16* p) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16))};
}
inline vf load_as(const f16* p) { return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p))}; }
inline __m128i low_halves(__m256i r) {  // the low 16 bits of each dword (dwords < 65536)
  return _mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_packus_epi32(r, r), 0x08));
}
inline void store_as(bf16* p, vf a) {
  __m256i u = _mm256_castps_si256(a.v);
  __m256i r = _mm256_add_epi32(u, _mm256_set1_epi32(0x7FFF));
  r = _mm256_add_epi32(r, _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1)));
  r = _mm256_srli_epi32(r, 16);
  r = _mm256_blendv_epi8(r, _mm256_set1_epi32(0x7FC0), _mm256_castps_si256(is_nan(a).v));
  _mm_storeu_si128((__m128i*)p, low_halves(r));
}
inline void store_as(f16* p, vf a) {
  __m256i h = _mm256_cvtepu16_epi32(_mm256_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  h = _mm256_blendv_epi8(h, _mm256_set1_epi32(0x7E00), _mm256_castps_si256(is_nan(a).v));
  _mm_storeu_si128((__m128i*)p, low_halves(h));
}
inline vf round_as(bf16, vf a) {
  __m256i u = _mm256_castps_si256(a.v);
  __m256i r = _mm256_add_epi32(u, _mm256_set1_epi32(0x7FFF));
  r = _mm256_add_epi32(r, _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1)));
  r = _mm256_and_si256(r, _mm256_set1_epi32(int(0xFFFF0000u)));
  return select(is_nan(a), a, vf{_mm256_castsi256_ps(r)});
}
inline vf round_as(f16, vf a) {
  return {_mm256_cvtph_ps(_mm256_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC))};
}
inline void transpose(vf r[W]) {
  __m256 t[8], s[8];
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i].v, r[i + 1].v);
    t[i + 1] = _mm256_unpackhi_ps(r[i].v, r[i + 1].v);
  }
  for (int i = 0; i < 8; i += 4) {
    s[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    s[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xEE);
    s[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    s[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xEE);
  }
  for (int i = 0; i < 4; ++i) {
    r[i].v = _mm256_permute2f128_ps(s[i], s[i + 4], 0x20);
    r[i + 4].v = _mm256_permute2f128_ps(s[i], s[i + 4], 0x31);
  }
}

#else  // NEON and portable: four lanes
constexpr int W = 4;
#if defined(TPI_ISA_NEON)
struct vf {
  float32x4_t v;
};
struct vm {
  uint32x4_t v;
};
inline vf zero() { return {vdupq_n_f32(0.0f)}; }
inline vf set1(float x) { return {vdupq_n_f32(x)}; }
inline vf load(const float* p) { return {vld1q_f32(p)}; }
inline void store(float* p, vf a) { vst1q_f32(p, a.v); }
inline vf fma(vf a, vf b, vf c) { return {vfmaq_f32(c.v, a.v, b.v)}; }
inline vf add(vf a, vf b) { return {vaddq_f32(a.v, b.v)}; }
inline vf sub(vf a, vf b) { return {vsubq_f32(a.v, b.v)}; }
inline vf mul(vf a, vf b) { return {vmulq_f32(a.v, b.v)}; }
inline vf div(vf a, vf b) { return {vdivq_f32(a.v, b.v)}; }
inline vf sqrt(vf a) { return {vsqrtq_f32(a.v)}; }
inline vf rint(vf a) { return {vrndnq_f32(a.v)}; }
inline vm lt(vf a, vf b) { return {vcltq_f32(a.v, b.v)}; }
inline vm le(vf a, vf b) { return {vcleq_f32(a.v, b.v)}; }
inline vm gt(vf a, vf b) { return {vcgtq_f32(a.v, b.v)}; }
inline vm eq(vf a, vf b) { return {vceqq_f32(a.v, b.v)}; }
inline vm is_nan(vf a) { return {vmvnq_u32(vceqq_f32(a.v, a.v))}; }
inline vf select(vm m, vf a, vf b) { return {vbslq_f32(m.v, a.v, b.v)}; }
inline bool any(vm m) { return vmaxvq_u32(m.v) != 0; }
inline vf max_raw(vf a, vf b) { return select(gt(a, b), a, b); }
inline vf neg(vf a) { return {vnegq_f32(a.v)}; }
inline vm first_n(int n) {
  const uint32_t lane[4] = {0, 1, 2, 3};
  return {vcltq_u32(vld1q_u32(lane), vdupq_n_u32(uint32_t(n)))};
}
inline vf add_exponent(vf a, vf n) {
  uint32x4_t e = vshlq_n_u32(vreinterpretq_u32_f32(n.v), 23);
  return {vreinterpretq_f32_u32(vaddq_u32(vreinterpretq_u32_f32(a.v), e))};
}
inline void split_exponent(vf a, vf* mantissa, vf* exponent) {
  uint32x4_t u = vreinterpretq_u32_f32(a.v);
  *exponent = {vcvtq_f32_s32(vsubq_s32(vreinterpretq_s32_u32(vshrq_n_u32(u, 23)), vdupq_n_s32(126)))};
  *mantissa = {vreinterpretq_f32_u32(vorrq_u32(vandq_u32(u, vdupq_n_u32(0x007FFFFFu)), vdupq_n_u32(0x3F000000u)))};
}
inline vf load_as(const bf16* p) {
  return {vreinterpretq_f32_u32(vshll_n_u16(vld1_u16((const uint16_t*)p), 16))};
}
inline vf load_as(const f16* p) { return {vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t*)p)))}; }
inline void store_as(bf16* p, vf a) {
  uint32x4_t u = vreinterpretq_u32_f32(a.v);
  uint32x4_t r = vaddq_u32(vaddq_u32(u, vdupq_n_u32(0x7FFFu)), vandq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(1u)));
  r = vbslq_u32(is_nan(a).v, vdupq_n_u32(0x7FC0u), vshrq_n_u32(r, 16));
  vst1_u16((uint16_t*)p, vmovn_u32(r));
}
inline void store_as(f16* p, vf a) {
  uint32x4_t h = vmovl_u16(vreinterpret_u16_f16(vcvt_f16_f32(a.v)));
  h = vbslq_u32(is_nan(a).v, vdupq_n_u32(0x7E00u), h);
  vst1_u16((uint16_t*)p, vmovn_u32(h));
}
inline vf round_as(bf16, vf a) {
  uint32x4_t u = vreinterpretq_u32_f32(a.v);
  uint32x4_t r = vaddq_u32(vaddq_u32(u, vdupq_n_u32(0x7FFFu)), vandq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(1u)));
  return select(is_nan(a), a, vf{vreinterpretq_f32_u32(vandq_u32(r, vdupq_n_u32(0xFFFF0000u)))});
}
inline vf round_as(f16, vf a) { return {vcvt_f32_f16(vcvt_f16_f32(a.v))}; }
inline void transpose(vf r[W]) {
  float32x4x2_t a = vtrnq_f32(r[0].v, r[1].v), b = vtrnq_f32(r[2].v, r[3].v);
  r[0].v = vcombine_f32(vget_low_f32(a.val[0]), vget_low_f32(b.val[0]));
  r[1].v = vcombine_f32(vget_low_f32(a.val[1]), vget_low_f32(b.val[1]));
  r[2].v = vcombine_f32(vget_high_f32(a.val[0]), vget_high_f32(b.val[0]));
  r[3].v = vcombine_f32(vget_high_f32(a.val[1]), vget_high_f32(b.val[1]));
}
#else  // portable: the compiler's own four-lane vectors
// What has no vector operator is a loop in a function of its own: this path is for CPUs that are too old to matter, and
// inlining its loops everywhere would make it the slowest to compile.
#define TPI_OUTLINE static __attribute__((noinline, unused))
typedef float f4 __attribute__((vector_size(16)));
typedef int32_t i4 __attribute__((vector_size(16)));
typedef uint32_t u4 __attribute__((vector_size(16)));
struct vf {
  f4 v;
};
struct vm {
  i4 v;
};
#define TPI_LANES(expr)                  \
  vf r;                                  \
  for (int i = 0; i < 4; ++i) r.v[i] = (expr); \
  return r
inline vf set1(float x) { return {f4{x, x, x, x}}; }
inline vf zero() { return set1(0.0f); }
inline vf load(const float* p) {
  vf r;
  std::memcpy(&r.v, p, 16);
  return r;
}
inline void store(float* p, vf a) { std::memcpy(p, &a.v, 16); }
TPI_OUTLINE vf fma(vf a, vf b, vf c) { TPI_LANES(std::fmaf(a.v[i], b.v[i], c.v[i])); }
inline vf add(vf a, vf b) { return {a.v + b.v}; }
inline vf sub(vf a, vf b) { return {a.v - b.v}; }
inline vf mul(vf a, vf b) { return {a.v * b.v}; }
inline vf div(vf a, vf b) { return {a.v / b.v}; }
TPI_OUTLINE vf sqrt(vf a) { TPI_LANES(std::sqrt(a.v[i])); }
TPI_OUTLINE vf rint(vf a) { TPI_LANES(std::nearbyintf(a.v[i])); }
inline vm lt(vf a, vf b) { return {a.v < b.v}; }
inline vm le(vf a, vf b) { return {a.v <= b.v}; }
inline vm gt(vf a, vf b) { return {a.v > b.v}; }
inline vm eq(vf a, vf b) { return {a.v == b.v}; }
inline vm is_nan(vf a) { return {a.v != a.v}; }
inline vf select(vm m, vf a, vf b) { return {(f4)(((i4)a.v & m.v) | ((i4)b.v & ~m.v))}; }
inline bool any(vm m) { return (m.v[0] | m.v[1] | m.v[2] | m.v[3]) != 0; }
inline vf max_raw(vf a, vf b) { return select(gt(a, b), a, b); }
inline vf neg(vf a) { return {(f4)((i4)a.v ^ i4{INT32_MIN, INT32_MIN, INT32_MIN, INT32_MIN})}; }
inline vm first_n(int n) { return {i4{0, 1, 2, 3} < i4{n, n, n, n}}; }
inline vf add_exponent(vf a, vf n) { return {(f4)((u4)a.v + ((u4)n.v << 23))}; }
inline void split_exponent(vf a, vf* mantissa, vf* exponent) {
  for (int i = 0; i < 4; ++i) {
    uint32_t u = to_bits(a.v[i]);
    exponent->v[i] = float(int(u >> 23) - 126);
    mantissa->v[i] = from_bits((u & 0x007FFFFFu) | 0x3F000000u);
  }
}
TPI_OUTLINE vf load_as(const bf16* p) { TPI_LANES(widen(p[i])); }
TPI_OUTLINE vf load_as(const f16* p) { TPI_LANES(widen(p[i])); }
TPI_OUTLINE void store_as(bf16* p, vf a) {
  for (int i = 0; i < 4; ++i) narrow(a.v[i], p + i);
}
TPI_OUTLINE void store_as(f16* p, vf a) {
  for (int i = 0; i < 4; ++i) narrow(a.v[i], p + i);
}
TPI_OUTLINE vf round_as(bf16, vf a) { TPI_LANES(widen(narrow_to<bf16>(a.v[i]))); }
TPI_OUTLINE vf round_as(f16, vf a) { TPI_LANES(widen(narrow_to<f16>(a.v[i]))); }
inline void transpose(vf r[W]) {
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < i; ++j) {
      float t = r[i].v[j];
      r[i].v[j] = r[j].v[i];
      r[j].v[i] = t;
    }
}
#undef TPI_LANES
#undef TPI_OUTLINE
#endif
inline vf load_n(const float* p, int n) {
  float t[4] = {0, 0, 0, 0};
  std::memcpy(t, p, size_t(n) * 4);
  return load(t);
}
inline void store_n(float* p, vf a, int n) {
  float t[4];
  store(t, a);
  std::memcpy(p, t, size_t(n) * 4);
}
#endif

// ---- transposing loads ----
// out[j] lane i = the j-th dword of row i; a row is 4 dwords at p + i * row_bytes. Reading 16 bytes of W rows at a time
// leaves only the transpose inside 16-byte groups, which costs half the shuffles of a W x W transpose.
#if defined(TPI_ISA_AVX512)
inline void load_quad(const void* p, i64 row_bytes, vf out[4]) {
  __m512 r[4], t[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const char* row = static_cast<const char*>(p) + i * row_bytes;
    r[i] = _mm512_castps128_ps512(_mm_loadu_ps((const float*)row));
    r[i] = _mm512_insertf32x4(r[i], _mm_loadu_ps((const float*)(row + 4 * row_bytes)), 1);
    r[i] = _mm512_insertf32x4(r[i], _mm_loadu_ps((const float*)(row + 8 * row_bytes)), 2);
    r[i] = _mm512_insertf32x4(r[i], _mm_loadu_ps((const float*)(row + 12 * row_bytes)), 3);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 4; i += 2) {
    t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    out[2 * i].v = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(t[i]), _mm512_castps_pd(t[i + 2])));
    out[2 * i + 1].v = _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(t[i]), _mm512_castps_pd(t[i + 2])));
  }
}
#elif defined(TPI_ISA_AVX2)
inline void load_quad(const void* p, i64 row_bytes, vf out[4]) {
  __m256 r[4], t[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const char* row = static_cast<const char*>(p) + i * row_bytes;
    r[i] = _mm256_castps128_ps256(_mm_loadu_ps((const float*)row));
    r[i] = _mm256_insertf128_ps(r[i], _mm_loadu_ps((const float*)(row + 4 * row_bytes)), 1);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 4; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    out[2 * i].v = _mm256_castpd_ps(_mm256_unpacklo_pd(_mm256_castps_pd(t[i]), _mm256_castps_pd(t[i + 2])));
    out[2 * i + 1].v = _mm256_castpd_ps(_mm256_unpackhi_pd(_mm256_castps_pd(t[i]), _mm256_castps_pd(t[i + 2])));
  }
}
#else
inline void load_quad(const void* p, i64 row_bytes, vf out[4]) {
  for (int i = 0; i < 4; ++i) std::memcpy(&out[i].v, static_cast<const char*>(p) + i * row_bytes, 16);
  transpose(out);
}
#endif
// The elements of a dword that holds two bf16, widened: even the low one, odd the high one.
#if defined(TPI_ISA_AVX512)
inline vf even(vf a) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(a.v), 16))}; }
inline vf odd(vf a) {
  return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(a.v), _mm512_set1_epi32(int(0xFFFF0000u))))};
}
#elif defined(TPI_ISA_AVX2)
inline vf even(vf a) { return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(a.v), 16))}; }
inline vf odd(vf a) {
  return {_mm256_castsi256_ps(_mm256_and_si256(_mm256_castps_si256(a.v), _mm256_set1_epi32(int(0xFFFF0000u))))};
}
#elif defined(TPI_ISA_NEON)
inline vf even(vf a) { return {vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_f32(a.v), 16))}; }
inline vf odd(vf a) {
  return {vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(a.v), vdupq_n_u32(0xFFFF0000u)))};
}
#else
inline vf even(vf a) { return {(f4)((i4)a.v << 16)}; }
inline vf odd(vf a) { return {(f4)(((i4)a.v >> 16) << 16)}; }
#endif

// Two steps of a chain in one instruction of AVX512-BF16: c + a b for the high bf16 of each dword, then for the low one,
// each with one rounding, subnormals flushed (contract section 2). Whether the CPU has it, and whether it is faster
// there, dispatch.cpp finds out.
#if defined(TPI_ISA_AVX512)
#define TPI_DOT
inline vf swap_halves(vf a) { return {_mm512_castsi512_ps(_mm512_rol_epi32(_mm512_castps_si512(a.v), 16))}; }
// The bf16 in the upper halves of the dwords of `high` and `low`, as pairs.
inline vf join_halves(vf high, vf low) {
  return {_mm512_castsi512_ps(
      _mm512_or_si512(_mm512_castps_si512(high.v), _mm512_srli_epi32(_mm512_castps_si512(low.v), 16)))};
}
#if defined(TPI_EMULATE_AVX512)
inline vf dot(vf a, vf b, vf c) { return fma(even(a), even(b), fma(odd(a), odd(b), c)); }
#else
inline vf dot(vf a, vf b, vf c) {  // assembly: the level's compiler flags leave the extension out
  __asm__("vdpbf16ps %2, %1, %0" : "+v"(c.v) : "v"(a.v), "v"(b.v));
  return c;
}
#endif
#endif

// ---- common to every width ----
// NaN in either operand gives NaN (max_raw alone would drop one of them by operand order).
inline vf vmax(vf a, vf b) { return select(is_nan(a), a, select(is_nan(b), b, max_raw(a, b))); }
inline vf canonical(vf a) { return select(is_nan(a), set1(from_bits(kNanBits)), a); }
// One rounding to T, kept in f32; T's value only selects the overload.
inline vf round_as(float, vf a) { return a; }
inline vf load_as(const float* p) { return load(p); }
inline void store_as(float* p, vf a) { store(p, canonical(a)); }
inline vf load_as_n(const float* p, int n) { return load_n(p, n); }
inline void store_as_n(float* p, vf a, int n) { store_n(p, canonical(a), n); }
// The first n lanes (0 <= n <= W); the others read as +0. Never touches memory past p[n - 1].
template <class T>
inline vf load_as_n(const T* p, int n) {
  T t[W] = {};
  std::memcpy(t, p, size_t(n) * sizeof(T));
  return load_as(t);
}
template <class T>
inline void store_as_n(T* p, vf a, int n) {
  T t[W];
  store_as(t, a);
  std::memcpy(p, t, size_t(n) * sizeof(T));
}

}  // namespace TPI_NS
}  // namespace tpi
