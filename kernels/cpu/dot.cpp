// Whether bf16 products may and should use vdpbf16ps on this CPU.
#include "tpi/isa.h"
#if defined(TPI_ISA_AVX512)
#include <chrono>

#include "elementwise.h"

namespace tpi {
namespace TPI_NS {

// The contract's chain equals the instruction for pairs of every kind: normal numbers whose sums cancel or underflow,
// zeros, subnormals, infinities, NaN.
inline bool dot_has_the_bits() {
  constexpr int kRounds = 256;
  const uint16_t special[8] = {0x0000, 0x8000, 0x0001, 0x807F, 0x7F80, 0xFF80, 0x7FC0, 0x0080};
  uint64_t state = 1;
  auto next = [&] { return state = state * 6364136223846793005u + 1442695040888963407u, uint32_t(state >> 32); };
  auto element = [&]() -> uint32_t {
    const uint32_t h = next();
    if (h % 16 == 0) return special[h >> 4 & 7];
    const uint32_t exponent = h & 0x10000 ? 127 - 2 + (h >> 17 & 3) : 64 - 2 + (h >> 17 & 3);  // products near 1, or 2^-126
    return (h & 0x8000) | exponent << 7 | (h >> 24 & 0x7F);
  };
  vf chain = zero(), dots = zero();
  for (int round = 0; round < kRounds; ++round) {
    float a[W], b[W];
    for (int i = 0; i < W; ++i) {
      a[i] = from_bits(element() << 16 | element());
      b[i] = from_bits(element() << 16 | element());
    }
    const vf x = load(a), y = load(b);
    if (round % 8 == 0) chain = dots = zero();
    chain = fma(even(x), even(y), fma(odd(x), odd(y), chain));
    dots = dot(x, y, dots);
    float c[W], d[W];
    store_as(c, chain);
    store_as(d, dots);
    if (std::memcmp(c, d, sizeof c)) return false;
  }
  return true;
}

#if !defined(TPI_EMULATE_AVX512)
// Seconds of a loop of independent steps, the best of a few.
template <class Step>
inline double best_time(const Step& step) {
  constexpr int kChains = 12, kSteps = 1000;
  double best = 1;
  for (int attempt = 0; attempt < 5; ++attempt) {
    vf acc[kChains];
    for (vf& a : acc) a = zero();
    vf x = set1(0x1p-10f);
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < kSteps; ++i) {
      __asm__ volatile("" : "+v"(x.v));
#pragma GCC unroll 12
      for (int c = 0; c < kChains; ++c) acc[c] = step(x, acc[c]);
    }
#pragma GCC unroll 12
    for (int c = 0; c < kChains; ++c) __asm__ volatile("" ::"v"(acc[c].v));
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (seconds < best) best = seconds;
  }
  return best;
}
#endif

}  // namespace TPI_NS
}  // namespace tpi

using namespace tpi::TPI_NS;

// Called where the CPU has AVX512-BF16. 0: other bits than the chain's; 1: its bits, but two fma are faster; 2: use it.
extern "C" int tpi_dot__widest() {
  FloatEnv env;
  if (!dot_has_the_bits()) return 0;
#if defined(TPI_EMULATE_AVX512)
  return 1;
#else
  const double dots = best_time([](vf x, vf acc) { return dot(x, x, acc); });
  const double fmas = best_time([](vf x, vf acc) { return fma(x, x, acc); });
  return dots <= 2 * fmas ? 2 : 1;
#endif
}
#endif
