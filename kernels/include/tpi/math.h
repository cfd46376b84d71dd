// exp and log of the contract (section 8): one source for every width. Coefficients and cutoffs: docs/op-schemas.md.
#pragma once
#include "tpi/vec.h"

namespace tpi {
namespace TPI_NS {

inline vf vexp(vf x) {
  // rint by adding 1.5 * 2^23, whose low bits then hold the integer. Adding n to p's exponent field is (p * 2^h) * 2^(n-h)
  // wherever the result is used: between the cutoffs it is a normal number.
  const vf magic = set1(0x1.8p+23f);
  vf shifted = add(mul(x, set1(0x1.715476p+0f)), magic);
  vf n = sub(shifted, magic);
  vf r = fma(n, set1(-0x1.62e4p-1f), x);
  r = fma(n, set1(-0x1.7f7d1cp-20f), r);
  vf p = set1(0x1.a0d2cep-13f);
  p = fma(p, r, set1(0x1.6e879cp-10f));
  p = fma(p, r, set1(0x1.11121p-7f));
  p = fma(p, r, set1(0x1.555382p-5f));
  p = fma(p, r, set1(0x1.555554p-3f));
  p = fma(p, r, set1(0x1p-1f));
  p = fma(p, mul(r, r), r);
  p = add_exponent(add(p, set1(1.0f)), shifted);
  p = select(lt(x, set1(-0x1.5d4p+6f)), zero(), p);
  return select(le(x, set1(0x1.62e42ep+6f)), p, add(x, set1(from_bits(0x7F800000u))));  // +inf, or NaN for NaN
}

inline vf vlog(vf x) {
  vf m, e;
  split_exponent(x, &m, &e);
  vm small = lt(m, set1(0x1.6a09e6p-1f));
  e = select(small, sub(e, set1(1.0f)), e);
  m = select(small, add(m, m), m);
  vf f = sub(m, set1(1.0f));
  vf z = mul(f, f);
  vf y = set1(0x1.204376p-4f);
  y = fma(y, f, set1(-0x1.d7a37p-4f));
  y = fma(y, f, set1(0x1.de4a34p-4f));
  y = fma(y, f, set1(-0x1.fcba9ep-4f));
  y = fma(y, f, set1(0x1.23d37ep-3f));
  y = fma(y, f, set1(-0x1.555ca0p-3f));
  y = fma(y, f, set1(0x1.999d58p-3f));
  y = fma(y, f, set1(-0x1.fffff8p-3f));
  y = fma(y, f, set1(0x1.555554p-2f));
  y = mul(y, f);
  y = mul(y, z);
  y = fma(e, set1(-0x1.bd0106p-13f), y);
  y = fma(set1(-0.5f), z, y);
  y = add(f, y);
  y = fma(e, set1(0x1.63p-1f), y);
  const vf inf = set1(from_bits(0x7F800000u));
  y = select(eq(x, inf), inf, y);
  y = select(lt(x, set1(0x1p-126f)), select(lt(x, zero()), set1(from_bits(kNanBits)), neg(inf)), y);
  return select(is_nan(x), x, y);
}

}  // namespace TPI_NS
}  // namespace tpi
