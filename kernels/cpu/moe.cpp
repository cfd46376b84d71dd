// Mixture of experts: the router's choice with its weights, and the weighted sum of the chosen experts' outputs.
#include "elementwise.h"
#include "lane_tree.h"
#include "tpi/math.h"

namespace tpi {
namespace TPI_NS {
namespace {

constexpr i64 kMaxExperts = 1024;

struct Router {
  i64 experts, topk;
  bool sigmoid, renormalize;
  i64 groups, topk_groups;
  float scaling, eps;
  const float* bias;

  // The k largest keys, ties to the smaller index; `chosen` ascending. No key is NaN.
  static void choose(const float* key, const bool* candidate, i64 n, i64 k, i32* chosen) {
    i64 found = 0;
    for (i64 i = 0; i < n; ++i) {
      if (candidate != nullptr && !candidate[i]) continue;
      i64 at = found < k ? found++ : k;
      if (at == k) {
        if (!(key[i] > key[chosen[k - 1]])) continue;
        at = k - 1;
      }
      for (; at > 0 && key[i] > key[chosen[at - 1]]; --at) chosen[at] = chosen[at - 1];
      chosen[at] = i32(i);
    }
    for (i64 i = 1; i < k; ++i) {
      const i32 id = chosen[i];
      i64 at = i;
      for (; at > 0 && chosen[at - 1] > id; --at) chosen[at] = chosen[at - 1];
      chosen[at] = id;
    }
  }

  void choose_grouped(const float* key, i32* ids) const {
    const i64 size = experts / groups;
    float score[kMaxExperts];
    for (i64 g = 0; g < groups; ++g) {
      i32 best[2];
      choose(key + g * size, nullptr, size, 2, best);
      score[g] = key[g * size + best[0]] + key[g * size + best[1]];
    }
    i32 kept[kMaxExperts];
    choose(score, nullptr, groups, topk_groups, kept);
    bool candidate[kMaxExperts] = {};
    for (i64 i = 0; i < topk_groups; ++i)
      for (i64 e = 0; e < size; ++e) candidate[kept[i] * size + e] = true;
    choose(key, candidate, experts, topk, ids);
  }

  int operator()(const float* logits, float* weights, i32* ids) const {
    float value[kMaxExperts], key[kMaxExperts];  // value: exp(z - M) or the sigmoid
    bool nan = false;
    for_columns(0, experts, [&](i64 j, int n) TPI_INLINE {
      vf z = load_part(logits + j, n), k = z;
      if (sigmoid) {
        vf s = div(set1(1.0f), add(set1(1.0f), vexp(neg(z))));
        k = bias != nullptr ? add(s, load_part(bias + j, n)) : s;
        store_part(value + j, s, n);
      }
      nan = nan || any(is_nan(z)) || any(is_nan(k));
      store_part(key + j, k, n);
    });
    if (nan) return TPI_NAN_ROUTER;
    if (groups > 1)
      choose_grouped(key, ids);
    else
      choose(key, nullptr, experts, topk, ids);

    if (!sigmoid) {
      float max = key[0];
      for (i64 e = 1; e < experts; ++e) max = key[e] > max ? key[e] : max;
      for_columns(0, experts, [&](i64 j, int n) TPI_INLINE {
        store_part(value + j, vexp(sub(load_part((const float*)key + j, n), set1(max))), n);
      });
    }
    for (i64 i = 0; i < topk; ++i) weights[i] = value[ids[i]];
    const auto sum = [](const float* x, i64 n) {
      return lane_tree(n, [&](i64 j, int m) TPI_INLINE { return load_part(x + j, m); });
    };
    const float denominator = !renormalize && !sigmoid ? sum(value, experts)
                              : sigmoid                ? sum(weights, topk) + eps
                                                       : sum(weights, topk);
    for_columns(0, topk, [&](i64 i, int n) TPI_INLINE {
      vf w = load_part((const float*)weights + i, n);
      if (!sigmoid || renormalize) w = div(w, set1(denominator));
      if (scaling != 1.0f) w = mul(w, set1(scaling));
      store_part(weights + i, w, n);
    });
    return TPI_OK;
  }
};

}  // namespace
}  // namespace TPI_NS
}  // namespace tpi

using namespace tpi;
using namespace tpi::TPI_NS;

TPI_EXPORT(moe_route)
(const float* logits, i64 ld, const float* bias, i64 T, i64 experts, i64 topk, int score, int renormalize, i64 groups,
 i64 topk_groups, float scaling, float eps, float* weights, i32* ids) {
  if (experts < 1 || experts > kMaxExperts || topk < 1 || topk > experts || score < 0 || score > 1 || groups < 1)
    return TPI_BAD_SHAPE;
  const bool sigmoid = score == 1;
  if (!sigmoid && (groups > 1 || bias != nullptr)) return TPI_BAD_SHAPE;
  if (groups > 1 && (experts % groups != 0 || experts / groups < 2 || topk_groups < 1 || topk_groups > groups ||
                     topk_groups * (experts / groups) < topk))
    return TPI_BAD_SHAPE;
  const Router route = {experts, topk, sigmoid, renormalize != 0, groups, topk_groups, scaling, eps, bias};
  int status = TPI_OK;
  parallel_for(T, T * experts * 4, [&](i64 first, i64 last) {
    for (i64 t = first; t < last; ++t) {
      const int token_status = route(logits + t * ld, weights + t * topk, ids + t * topk);
      if (token_status != TPI_OK) {
#pragma omp atomic write
        status = token_status;
      }
    }
  });
  return status;
}

TPI_EXPORT(moe_combine)
(int dtype, const void* y, i64 ldy, const i64* slots, const float* weights, i64 T, i64 topk, i64 H, void* out,
 i64 ldo) {
  return for_dtype(dtype, [&](auto tag) {
    using E = decltype(tag);
    parallel_rows(T, H, T * topk * H, [&](i64 t, i64 first, i64 last) {
      const i64* slot = slots + t * topk;
      const float* weight = weights + t * topk;
      for_columns(first, last, [&](i64 j, int n) TPI_INLINE {
        vf acc = zero();
        for (i64 k = 0; k < topk; ++k)
          if (slot[k] >= 0) acc = fma(set1(weight[k]), load_part((const E*)y + slot[k] * ldy + j, n), acc);
        store_part((E*)out + t * ldo + j, acc, n);
      });
    });
    return int(TPI_OK);
  });
}
