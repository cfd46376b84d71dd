// RMSNorm, its input gradient and its weight gradient; the residual add.
#include "elementwise.h"
#include "lane_tree.h"

namespace tpi {
namespace TPI_NS {
namespace {

// Rows this short are taken W at a time, so that one vector div and sqrt serves W rows.
constexpr i64 kShortRow = 1024;
inline i64 rows_together(i64 H) { return H <= kShortRow ? W : 1; }

struct Rows {
  i64 inner, outer_stride, inner_stride;
  i64 operator()(i64 row) const { return row / inner * outer_stride + row % inner * inner_stride; }
};

template <class T>
void norm_forward(const T* x, Rows xs, const T* residual, Rows rs, const T* w, float eps, T* y, T* residual_out,
                  float* rstd, i64 H, i64 first, i64 last) {
  const i64 together = rows_together(H);
  for (i64 row = first; row < last; row += together) {
    const int n = int(last - row < together ? last - row : together);
    const T* source[W];
    float r[W] = {};
    for (int i = 0; i < n; ++i) {
      const T* a = x + xs(row + i);
      if (residual != nullptr) {
        const T* b = residual + rs(row + i);
        T* s = residual_out + (row + i) * H;
        for_columns(0, H, [&](i64 j, int m) TPI_INLINE {
          store_part(s + j, add(load_part(a + j, m), load_part(b + j, m)), m);
        });
        a = s;
      }
      source[i] = a;
      r[i] = lane_tree(H, [&](i64 j, int m) TPI_INLINE {
        vf v = load_part(a + j, m);
        return mul(v, v);
      });
    }
    vf mean = div(load(r), set1(float(H)));
    store(r, canonical(div(set1(1.0f), sqrt(add(mean, set1(eps))))));
    store_n(rstd + row, load(r), n);
    for (int i = 0; i < n; ++i) {
      const vf scale = set1(r[i]);
      const T* a = source[i];
      T* out = y + (row + i) * H;
      for_columns(0, H, [&](i64 j, int m) TPI_INLINE {
        vf v = round_as(T(), mul(load_part(a + j, m), scale));
        store_part(out + j, mul(v, load_part(w + j, m)), m);
      });
    }
  }
}

template <class T>
void norm_backward(const T* dy, Rows dys, const T* x, Rows xs, const T* w, const float* rstd, const T* dskip, T* dx,
                   i64 H, i64 first, i64 last) {
  const i64 together = rows_together(H);
  for (i64 row = first; row < last; row += together) {
    const int n = int(last - row < together ? last - row : together);
    float c[W] = {};
    for (int i = 0; i < n; ++i) {
      const T *d = dy + dys(row + i), *a = x + xs(row + i);
      const vf scale = set1(rstd[row + i]);
      c[i] = lane_tree(H, [&](i64 j, int m) TPI_INLINE {
        vf g = mul(load_part(d + j, m), load_part(w + j, m));
        // The lanes past a tail stay +0 even if rstd is not finite.
        vf h = mul(load_part(a + j, m), scale);
        return m == W ? mul(g, h) : select(first_n(m), mul(g, h), zero());
      });
    }
    store(c, div(load(c), set1(float(H))));
    for (int i = 0; i < n; ++i) {
      const T *d = dy + dys(row + i), *a = x + xs(row + i), *skip = dskip + (row + i) * H;
      T* out = dx + (row + i) * H;
      const vf scale = set1(rstd[row + i]), mean = set1(c[i]);
      for_columns(0, H, [&](i64 j, int m) TPI_INLINE {
        vf g = mul(load_part(d + j, m), load_part(w + j, m));
        vf h = mul(load_part(a + j, m), scale);
        vf v = mul(scale, fma(neg(h), mean, g));
        if (dskip != nullptr) v = add(round_as(T(), v), load_part(skip + j, m));
        store_part(out + j, v, m);
      });
    }
  }
}

// Columns that the weight gradient is worked on at a time.
constexpr i64 kGradientColumns = 1024;

// acc = fma(dy, n, acc), n = rounded(x * r).
template <class T>
void accumulate(const T* dy, const T* x, float r, i64 width, float* acc) {
  const vf scale = set1(r);
  for_columns(0, width, [&](i64 j, int m) TPI_INLINE {
    vf n = round_as(T(), mul(load_part(x + j, m), scale));
    store_part(acc + j, fma(load_part(dy + j, m), n, load_part((const float*)acc + j, m)), m);
  });
}

// One token's weight gradient summed over heads: leaves of heads chained, a tree over leaves.
template <class T>
struct HeadSum {
  const T *dy, *x;
  i64 dy_head, x_head;
  const float* rstd;
  i64 leaf, width;

  void operator()(i64 first, i64 leaves, float* out) const {
    if (leaves > 1) {
      float right[kGradientColumns];
      (*this)(first, leaves / 2, out);
      (*this)(first + leaves / 2, leaves / 2, right);
      for (i64 j = 0; j < width; ++j) out[j] += right[j];
      return;
    }
    for (i64 j = 0; j < width; ++j) out[j] = 0.0f;
    for (i64 h = first * leaf; h < (first + 1) * leaf; ++h)
      accumulate(dy + h * dy_head, x + h * x_head, rstd[h], width, out);
  }
};

// The weight gradient of columns [first, first + width), width <= kGradientColumns.
template <class T>
struct WeightGradient {
  const T *dy, *x;
  i64 lddy, ldx;
  const float* rstd;
  i64 first, width;
  i64 token0, token_stride, span;  // the current row

  void span_chain(i64 index, float* acc) const {
    for (i64 j = 0; j < width; ++j) acc[j] = 0.0f;
    for (i64 k = index * span; k < (index + 1) * span; ++k) {
      const i64 token = token0 + k * token_stride;
      accumulate(dy + token * lddy + first, x + token * ldx + first, rstd[token], width, acc);
    }
  }

  void span_tree(i64 span0, i64 spans, float* out) const {
    if (spans == 1) return span_chain(span0, out);
    float right[kGradientColumns];
    span_tree(span0, spans / 2, out);
    span_tree(span0 + spans / 2, spans / 2, right);
    for (i64 j = 0; j < width; ++j) out[j] += right[j];
  }
};

}  // namespace
}  // namespace TPI_NS
}  // namespace tpi

using namespace tpi;
using namespace tpi::TPI_NS;

TPI_EXPORT(rms_norm)
(int dtype, const void* x, i64 x_so, i64 x_si, const void* residual, i64 r_so, i64 r_si, const void* w, float eps,
 void* y, void* residual_out, float* rstd, i64 n_outer, i64 n_inner, i64 H) {
  return for_dtype(dtype, [&](auto tag) {
    using T = decltype(tag);
    parallel_for(n_outer * n_inner, n_outer * n_inner * H, [&](i64 first, i64 last) {
      norm_forward((const T*)x, {n_inner, x_so, x_si}, (const T*)residual, {n_inner, r_so, r_si}, (const T*)w, eps,
                   (T*)y, (T*)residual_out, rstd, H, first, last);
    });
    return int(TPI_OK);
  });
}

TPI_EXPORT(rms_norm_backward)
(int dtype, const void* dy, i64 dy_so, i64 dy_si, const void* x, i64 x_so, i64 x_si, const void* w, const float* rstd,
 const void* dskip, void* dx, i64 n_outer, i64 n_inner, i64 H) {
  return for_dtype(dtype, [&](auto tag) {
    using T = decltype(tag);
    parallel_for(n_outer * n_inner, n_outer * n_inner * H, [&](i64 first, i64 last) {
      norm_backward((const T*)dy, {n_inner, dy_so, dy_si}, (const T*)x, {n_inner, x_so, x_si}, (const T*)w, rstd,
                    (const T*)dskip, (T*)dx, H, first, last);
    });
    return int(TPI_OK);
  });
}

TPI_EXPORT(rms_norm_dw)
(int dtype, const void* dy, i64 lddy, const void* x, i64 ldx, const float* rstd, float* grad, i64 H, i64 rows,
 const i64* row_first, const i64* row_len, i64 row_stride, i64 spans) {
  if (!is_power_of_two(spans)) return TPI_BAD_SHAPE;
  return for_dtype(dtype, [&](auto tag) {
    using Gradient = WeightGradient<decltype(tag)>;
    using T = decltype(tag);
    i64 tokens = 0;
    for (i64 r = 0; r < rows; ++r) tokens += row_len[r];
    // Threads own columns, whole cache lines of them; no sum is ever split.
    constexpr i64 kLine = 16;
    i64 columns = (H / omp_get_max_threads() + kLine - 1) / kLine * kLine;
    columns = columns < kLine ? kLine : columns > kGradientColumns ? kGradientColumns : columns;
    parallel_for((H + columns - 1) / columns, tokens * H, [&](i64 begin, i64 end) {
      Gradient g = {(const T*)dy, (const T*)x, lddy, ldx, rstd, 0, 0, 0, row_stride, 0};
      for (i64 unit = begin; unit < end; ++unit) {
        g.first = unit * columns;
        g.width = H - g.first < columns ? H - g.first : columns;
        for (i64 r = 0; r < rows; ++r) {
          if (row_len[r] <= 0) continue;
          const i64 count = span_count(row_len[r], spans);
          g.token0 = row_first[r];
          g.span = row_len[r] / count;
          float total[kGradientColumns];
          g.span_tree(0, count, total);
          float* out = grad + g.first;
          for_columns(0, g.width, [&](i64 j, int m) TPI_INLINE {
            store_part(out + j, add(load_part(out + j, m), load_part((const float*)total + j, m)), m);
          });
        }
      }
    });
    return int(TPI_OK);
  });
}

TPI_EXPORT(head_terms)
(int dtype, const void* dy, i64 dy_ts, i64 dy_hs, const void* x, i64 x_ts, i64 x_hs, const float* rstd, float* terms,
 i64 T, i64 heads, i64 D) {
  if (heads < 1) return TPI_BAD_SHAPE;
  return for_dtype(dtype, [&](auto tag) {
    using E = decltype(tag);
    const i64 leaves = heads & -heads;
    parallel_for(T, T * heads * D, [&](i64 first, i64 last) {
      for (i64 t = first; t < last; ++t)
        for (i64 d = 0; d < D; d += kGradientColumns) {
          const i64 width = D - d < kGradientColumns ? D - d : kGradientColumns;
          const HeadSum<E> sum = {(const E*)dy + t * dy_ts + d, (const E*)x + t * x_ts + d, dy_hs, x_hs,
                                  rstd + t * heads, heads / leaves, width};
          float total[kGradientColumns];
          sum(0, leaves, total);
          for_columns(0, width, [&](i64 j, int n) TPI_INLINE {
            store_part(terms + t * D + d + j, load_part((const float*)total + j, n), n);
          });
        }
    });
    return int(TPI_OK);
  });
}

TPI_EXPORT(residual_add)(int dtype, const void* x, i64 ldx, const void* y, i64 ldy, void* out, i64 M, i64 N) {
  return for_dtype(dtype, [&](auto tag) {
    using T = decltype(tag);
    parallel_rows(M, N, M * N, [&](i64 row, i64 first, i64 last) {
      const T *a = (const T*)x + row * ldx, *b = (const T*)y + row * ldy;
      for_columns(first, last, [&](i64 j, int n) TPI_INLINE {
        store_part((T*)out + row * N + j, add(load_part(a + j, n), load_part(b + j, n)), n);
      });
    });
    return int(TPI_OK);
  });
}
