// Gradients of a mixture of experts: of the routing weights at an expert's output, and of the router's logits.
#include "gemm.h"
#include "lane_tree.h"
#include "tpi/math.h"

namespace tpi {
namespace TPI_NS {
namespace {
using namespace gemm;

// Tree over leaves of the lane tree of the products g[f] * a[f], each rounded: a binary counter of leaf sums.
template <class T>
float row_product(const float* g, const T* a, i64 n, i64 leaf, i64 leaves) {
  float level[64];
  for (i64 i = 0;; ++i) {
    const i64 first = min_of(i * leaf, n), last = min_of(first + leaf, n);
    float sum = lane_tree(last - first, [&](i64 j, int count) TPI_INLINE {
      return mul(load_part(g + first + j, count), load_part(a + first + j, count));
    });
    int l = 0;
    for (; i >> l & 1; ++l) sum = level[l] + sum;
    if (i + 1 == leaves) return narrow_to<float>(sum);
    level[l] = sum;
  }
}

constexpr i64 kMaxExperts = 1024;

struct RouterGradient {
  i64 experts, topk;
  bool sigmoid, renormalize;
  float scaling, eps;

  // value[i] = exp(z - max) or the sigmoid of z.
  void values(const float* z, i64 n, float max, float* value) const {
    for_columns(0, n, [&](i64 j, int m) TPI_INLINE {
      vf x = load_part(z + j, m), one = set1(1.0f);
      store_part(value + j, sigmoid ? div(one, add(one, vexp(neg(x)))) : vexp(sub(x, set1(max))), m);
    });
  }

  int operator()(const float* dweights, const float* logits, const i32* ids, float* dlogits) const {
    float max = logits[0], z[kMaxExperts], value[kMaxExperts], d[kMaxExperts];
    for (i64 e = 0; e < experts; ++e) {
      if (is_nan_bits(to_bits(logits[e]))) return TPI_NAN_ROUTER;
      max = logits[e] > max ? logits[e] : max;
    }
    for (i64 i = 0; i < topk; ++i) {
      if (ids[i] < 0 || ids[i] >= experts) return TPI_BAD_INDEX;
      z[i] = logits[ids[i]];
    }
    values(z, topk, max, value);
    const float* const chosen = value;
    for_columns(0, topk, [&](i64 i, int n) TPI_INLINE {
      vf x = load_part(dweights + i, n);
      store_part(d + i, scaling == 1.0f ? x : mul(x, set1(scaling)), n);
    });
    std::memset(dlogits, 0, size_t(experts) * sizeof(float));

    vf sum = set1(1.0f), mean = zero();  // the denominator, and the weighted mean of d under p = value / sum
    const auto total = [](const float* x, i64 n) {
      return set1(lane_tree(n, [&](i64 j, int m) TPI_INLINE { return load_part(x + j, m); }));
    };
    if (renormalize) {
      sum = total(chosen, topk);
      if (sigmoid) sum = add(sum, set1(eps));
    } else if (!sigmoid) {
      values(logits, experts, max, dlogits);
      sum = total(dlogits, experts);
    }
    if (renormalize || !sigmoid)
      mean = set1(lane_tree(topk, [&](i64 i, int n) TPI_INLINE {
        vf p = div(load_part(chosen + i, n), sum);  // past the last, whatever its p, d is +0 ...
        vf term = mul(load_part((const float*)d + i, n), p);
        return n == W ? term : select(first_n(n), term, zero());  // ... but 0 / 0 is not
      }));
    if (!renormalize && !sigmoid)
      for_columns(0, experts, [&](i64 j, int n) TPI_INLINE {
        store_part(dlogits + j, mul(div(load_part((const float*)dlogits + j, n), sum), sub(zero(), mean)), n);
      });
    for_columns(0, topk, [&](i64 i, int n) TPI_INLINE {
      vf v = load_part(chosen + i, n), x = load_part((const float*)d + i, n);
      if (sigmoid) {
        if (renormalize) x = div(sub(x, mean), sum);
        x = mul(x, mul(v, sub(set1(1.0f), v)));
      } else {
        x = mul(div(v, sum), sub(x, mean));
      }
      store_part(d + i, x, n);
    });
    for (i64 i = 0; i < topk; ++i) dlogits[ids[i]] = d[i];
    return TPI_OK;
  }
};

}  // namespace
}  // namespace TPI_NS
}  // namespace tpi

using namespace tpi;
using namespace tpi::TPI_NS;

TPI_EXPORT(expert_weight_backward)
(int dtype, const float* g, i64 ldg, const void* a, i64 lda, const float* weights, i64 P, i64 F, i64 leaf, i64 leaves,
 float* dweights, void* da, i64 ldda) {
  if (!Reduction::valid(F, leaf, leaves)) return TPI_BAD_SHAPE;
  return for_dtype(dtype, [&](auto tag) {
    using T = decltype(tag);
    parallel_for(P, 2 * P * F, [&](i64 first, i64 last) {
      for (i64 p = first; p < last; ++p) {
        const float* row = g + p * ldg;
        dweights[p] = row_product(row, (const T*)a + p * lda, F, leaf, leaves);
        for_columns(0, F, [&](i64 f, int n) TPI_INLINE {
          store_part((T*)da + p * ldda + f, mul(set1(weights[p]), load_part(row + f, n)), n);
        });
      }
    });
    return int(TPI_OK);
  });
}

TPI_EXPORT(moe_route_backward)
(const float* dweights, const float* logits, i64 ld, const i32* ids, i64 T, i64 experts, i64 topk, int score,
 int renormalize, float scaling, float eps, float* dlogits) {
  if (experts < 1 || experts > kMaxExperts || topk < 1 || topk > experts || score < 0 || score > 1) return TPI_BAD_SHAPE;
  const RouterGradient gradient = {experts, topk, score == 1, renormalize != 0, scaling, eps};
  int status = TPI_OK;
  parallel_for(T, T * experts * 4, [&](i64 first, i64 last) {
    for (i64 t = first; t < last; ++t) {
      const int token_status = gradient(dweights + t * topk, logits + t * ld, ids + t * topk, dlogits + t * experts);
      if (token_status != TPI_OK) {
#pragma omp atomic write
        status = token_status;
      }
    }
  });
  return status;
}
