// The shared expert's gate: its output times the sigmoid of one logit a token, and the gradients.
#include "elementwise.h"
#include "lane_tree.h"
#include "tpi/math.h"

namespace tpi {
namespace TPI_NS {
namespace {
inline vf sigmoid(float logit) { return div(set1(1.0f), add(set1(1.0f), vexp(neg(set1(logit))))); }
}  // namespace
}  // namespace TPI_NS
}  // namespace tpi

using namespace tpi;
using namespace tpi::TPI_NS;

TPI_EXPORT(sigmoid_gate)(int dtype, const void* y, i64 ldy, const float* logits, void* out, i64 T, i64 H) {
  return for_dtype(dtype, [&](auto tag) {
    using E = decltype(tag);
    parallel_rows(T, H, T * H, [&](i64 t, i64 first, i64 last) {
      const vf gate = sigmoid(logits[t]);
      for_columns(first, last, [&](i64 j, int n) TPI_INLINE {
        store_part((E*)out + t * H + j, mul(load_part((const E*)y + t * ldy + j, n), gate), n);
      });
    });
    return int(TPI_OK);
  });
}

TPI_EXPORT(sigmoid_gate_backward)
(int dtype, const void* dout, i64 lddout, const void* y, i64 ldy, const float* logits, void* dy, float* dlogits, i64 T,
 i64 H) {
  return for_dtype(dtype, [&](auto tag) {
    using E = decltype(tag);
    parallel_for(T, 2 * T * H, [&](i64 begin, i64 end) {
      for (i64 t = begin; t < end; ++t) {
        const E *d = (const E*)dout + t * lddout, *v = (const E*)y + t * ldy;
        const vf gate = sigmoid(logits[t]);
        const float sum = lane_tree(H, [&](i64 j, int n) { return mul(load_part(d + j, n), load_part(v + j, n)); });
        store_part(dlogits + t, mul(set1(sum), mul(gate, sub(set1(1.0f), gate))), 1);
        for_columns(0, H, [&](i64 j, int n) TPI_INLINE {
          store_part((E*)dy + t * H + j, mul(load_part(d + j, n), gate), n);
        });
      }
    });
    return int(TPI_OK);
  });
}
