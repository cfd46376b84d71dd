// Gradients of a mixture of experts: of the routing weights at an expert's output, and of the router's logits.
#include "gemm.h"
#include "lane_tree.h"
#include "tpi/math.h"

namespace tpi {
namespace TPI_NS {
namespace {
using namespace gemm;

// out[p] = tree over leaves of chain over f of g[p][f] * a[p][f], for `rows` <= W rows: lanes are rows.
template <class T>
void row_products(const Reduction& red, const float* g, i64 ldg, const T* a, i64 lda, i64 rows, float* out) {
  constexpr int C = kColumns<T>, G = kColumns<float>;
  float stack[64][W];
  auto level = [&](int l) { return stack[l]; };
  vf acc[1][1];
  i64 leaf = 0, f = 0;
  for (;; ++leaf) {
    const i64 end = min_of((leaf + 1) * red.leaf, red.n);
    tile_clear(acc);
    for (; f < end; f += C) {
      vf at[C], gt[C / G][G];
      const bool inside = rows == W && f + C <= red.n;
      if (inside)
        load_transposed(a + f, lda, at);
      else
        load_transposed_part(a + f, lda, rows, min_of(red.n - f, C), at);
      for (int i = 0; i < C / G; ++i) {
        const i64 first = f + i * G;
        if (inside)
          load_transposed(g + first, ldg, gt[i]);
        else
          load_transposed_part(g + first, ldg, rows, max_of(min_of(red.n - first, G), 0), gt[i]);
      }
      for (int j = 0; j < min_of(end - f, C); ++j) acc[0][0] = fma(gt[j / G][j % G], at[j], acc[0][0]);
    }
    f = end;
    if (end == red.n) break;
    tile_push(leaf, level, acc);
  }
  tile_root(red, leaf, level, acc);
  store_part(out, acc[0][0], int(rows));
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
    if (renormalize) {
      sum = zero();
      for (i64 i = 0; i < topk; ++i) sum = add(sum, set1(value[i]));
      if (sigmoid) sum = add(sum, set1(eps));
    } else if (!sigmoid) {
      values(logits, experts, max, dlogits);
      sum = set1(lane_tree(experts, [&](i64 j, int n) { return load_part((const float*)dlogits + j, n); }));
    }
    if (renormalize || !sigmoid)
      for (i64 i = 0; i < topk; ++i) mean = fma(set1(d[i]), div(set1(value[i]), sum), mean);
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
    const Reduction red(F, leaf, leaves);
    parallel_for(div_up(P, W), 2 * P * F, [&](i64 begin, i64 end) {
      for (i64 first = begin * W; first < min_of(end * W, P); first += W) {
        const i64 rows = min_of(P - first, W);
        row_products(red, g + first * ldg, ldg, (const T*)a + first * lda, lda, rows, dweights + first);
        for (i64 p = first; p < first + rows; ++p)
          for_columns(0, F, [&](i64 f, int n) TPI_INLINE {
            store_part((T*)da + p * ldda + f, mul(set1(weights[p]), load_part(g + p * ldg + f, n)), n);
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
