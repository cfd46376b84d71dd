// linear, its gradients, and their grouped (mixture of experts) forms. Semantics: docs/op-schemas.md.
#include <type_traits>

#include "gemm.h"

extern "C" bool tpi_use_dot;  // dispatch.cpp

namespace tpi {
namespace TPI_NS {
namespace gemm {

// Up to how many tokens the lanes are features and the weight is streamed; beyond it lanes are tokens. A 16-bit weight
// must be widened anyway, which a panel does once for all tokens.
constexpr i64 kInRegisters = 4;
template <class T>
constexpr i64 kFewTokens = 32;
template <>
constexpr i64 kFewTokens<float> = kInRegisters;

// Results for the caller: [lanes = tokens] x [rows = output features], transposed on the way out.
template <class TO, class T>
struct TokenMajorOut {
  TO* y;
  i64 ld;
  const T* bias;
  void operator()(i64 n0, i64 features, i64 m0, i64 tokens, const float* c, i64 c_ld) const {
    for (i64 n = 0; n < features; n += W)
      for (i64 m = 0; m < tokens; m += W) {
        const int width = int(min_of(features - n, W));
        vf t[W];
        for (int i = 0; i < W; ++i) t[i] = i < width ? load(c + (n + i) * c_ld + m) : zero();
        transpose(t);
        for (int j = 0; j < min_of(tokens - m, W); ++j) put(m0 + m + j, n0 + n, t[j], width);
      }
  }
  void put(i64 m, i64 n, vf value, int width) const {
    if (bias) value = add(value, load_part(bias + n, width));
    store_part(y + m * ld + n, value, width);
  }
};

// Results with lanes = the dense dimension.
template <class TO>
struct RowMajorOut {
  TO* y;
  i64 ld;
  void operator()(i64 r0, i64 rows, i64 l0, i64 lanes, const float* c, i64 c_ld) const {
    for (i64 r = 0; r < rows; ++r)
      for_columns(0, lanes, [&](i64 l, int n) { store_part(y + (r0 + r) * ld + l0 + l, load(c + r * c_ld + l), n); });
  }
};
struct AddTo {
  float* grad;
  i64 ld;
  void operator()(i64 r0, i64 rows, i64 l0, i64 lanes, const float* c, i64 c_ld) const {
    for (i64 r = 0; r < rows; ++r)
      for_columns(0, lanes, [&](i64 l, int n) {
        float* g = grad + (r0 + r) * ld + l0 + l;
        store_part(g, add(load_part(g, n), load(c + r * c_ld + l)), n);
      });
  }
};

// A chain that is carried on: read from the gradient, and left there.
struct ReadFrom {
  const float* grad;
  i64 ld;
  void operator()(i64 r0, i64 rows, i64 l0, i64 lanes, float* c, i64 c_ld) const {
    for (i64 r = 0; r < rows; ++r)
      for_columns(0, c_ld, [&](i64 l, int n) {
        store_n(c + r * c_ld + l, l < lanes ? load_n(grad + (r0 + r) * ld + l0 + l, int(min_of(lanes - l, n))) : zero(), n);
      });
  }
};

// Fetches the weight's next rows in the order they lie in memory while the current ones are read a cache line of each
// at a time: with that many short streams the hardware's prefetcher starts too late. Rows too long for the L2 cache go
// without.
class Ahead {
 public:
  template <class T>
  Ahead(const T* w, i64 ldw, i64 columns, i64 rows)
      : next_(reinterpret_cast<const char*>(w + rows * ldw)),
        on_(rows && ldw == columns && rows * columns * i64(sizeof(T)) <= kAheadBytes) {}
  TPI_INLINE void fetch(i64 lines) {
    if (!on_) return;
    for (i64 i = 0; i < lines; ++i, next_ += 64) __builtin_prefetch(next_);
  }

 private:
  static constexpr i64 kAheadBytes = 96 * 1024;
  const char* next_;
  bool on_;
};

constexpr i64 kAhead = 512;

// M tokens (x widened to f32, [M][K]) against features [n, n + rows), rows <= G * W: y[m][G * W]. The weight is read
// once, transposed in registers.
template <class F, int M, int G>
void in_registers(const F& format, const Reduction& red, const float* x, const typename F::Source* w, i64 ldw, i64 rows,
                  float* y) {
  using T = typename F::Source;
  constexpr int C = F::kLoad, S = 64 / (C * F::kElements * int(sizeof(T)));  // the weight moves by cache lines
  float stack[64][M * G * W];
  auto level = [&](int l) { return stack[l]; };
  vf acc[M][G];
  // Columns [k, k + count) of the v-th W features; `inside`: a whole transpose may be read.
  auto columns = [&](int v, i64 k, i64 count, bool inside) TPI_INLINE {
    const T* p = w + v * W * ldw;
    vf t[C];
    if (inside)
      format.load(p, ldw, k, t);
    else
      format.load_part_of(p, ldw, rows - v * W, k, t);
#pragma GCC unroll 32
    for (int j = 0; j < C; ++j)
      if (j < count)
#pragma GCC unroll 4
        for (int m = 0; m < M; ++m) acc[m][v] = F::Step::step(set1(x[m * red.n + k + j]), t[j], acc[m][v]);
  };
  const bool full = rows == G * W;
  const i64 row_bytes = format.n * i64(sizeof(T));
  // kAhead bytes further along W rows, or in the rows after these.
  auto fetch = [&](int v, i64 k) TPI_INLINE {
    const i64 at = k * F::kElements * i64(sizeof(T)) + kAhead, row = at < row_bytes ? v * W : (v + G) * W;
    const char* p = reinterpret_cast<const char*>(w + row * ldw) + (at < row_bytes ? at : at - row_bytes);
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) __builtin_prefetch(p + i * ldw * i64(sizeof(T)));
  };
  i64 g = 0, k = 0;
  for (;; ++g) {
    const i64 end = min_of((g + 1) * red.leaf, red.n);
    tile_clear(acc);
    if (full) {
      for (; k + S * C <= end; k += S * C)
#pragma GCC unroll 2
        for (int v = 0; v < G; ++v) {
          fetch(v, k);
#pragma GCC unroll 4
          for (int s = 0; s < S; ++s) columns(v, k + s * C, C, true);
        }
    }
    for (; k < end; k += C)
#pragma GCC unroll 2
      for (int v = 0; v < G; ++v) columns(v, k, end - k, full && (k + C) * F::kElements <= format.n);
    k = end;
    if (end == red.n) break;
    tile_push(g, level, acc);
  }
  tile_root(red, g, level, acc);
  tile_store(y, acc);
}
template <int M, class F, class Out>
void in_registers(i64 tokens, const F& format, const Reduction& red, const float* x, const typename F::Source* w,
                  i64 ldw, i64 m0, i64 n0, i64 n1, const Out& out) {
  if constexpr (M > 1) {
    if (tokens < M) return in_registers<M - 1>(tokens, format, red, x, w, ldw, m0, n0, n1, out);
  }
  constexpr int G = W == 16 ? 1 : 2;  // 16 rows: of more streams the hardware loses track
  for (i64 n = n0; n < n1;) {
    float y[M * G * W];
    const bool wide = n1 - n >= G * W;
    const i64 width = wide ? G * W : W, rows = min_of(n1 - n, width);
    (wide ? in_registers<F, M, G> : in_registers<F, M, 1>)(format, red, x, w + n * ldw, ldw, rows, y);
    for (int m = 0; m < M; ++m)
      for_columns(0, rows, [&](i64 i, int lanes) { out.put(m0 + m, n + i, load(y + m * width + i), lanes); });
    n += rows;
  }
}

// The same for more tokens: kPanelBytes of every row of the weight are transposed to a panel in the L1 cache, for all
// tokens. `panel` has room for panel_floats(): the panel itself, then the stored levels and results of each group of
// tokens.
constexpr i64 kPanelBytes = 256, kPanelWidth = 2 * W, kPanelTokens = kTileRows[2];
constexpr i64 kPanelTile = kPanelTokens * kPanelWidth;
template <class F>
constexpr i64 kPanelColumns = kPanelBytes / (F::kElements * sizeof(typename F::Source));
template <class F>
i64 panel_floats(const Reduction& red, i64 tokens) {
  return kPanelColumns<F> * kPanelWidth + div_up(tokens, kPanelTokens) * (red.levels + 1) * kPanelTile;
}
template <class F, class Out>
void over_panels(i64 tokens, const F& format, Reduction red, const float* x, float* panel, const typename F::Source* w,
                 i64 ldw, i64 m0, i64 n0, i64 n1, const Out& out) {
  red.inner = 0;  // a panel ends where its leaf ends, or before
  const i64 groups = div_up(tokens, kPanelTokens), group_size = (red.levels + 1) * kPanelTile;
  float* sums = panel + kPanelColumns<F> * kPanelWidth;
  auto first = [&](i64 g) { return tokens * g / groups; };
  for (i64 n = n0; n < n1; n += kPanelWidth) {
    const i64 rows = min_of(n1 - n, kPanelWidth);
    Ahead ahead(w + n * ldw, ldw, format.n, rows);
    i64 k0 = 0;
    do {
      const i64 k1 = min_of(min_of(k0 + kPanelColumns<F>, (k0 / red.leaf + 1) * red.leaf), red.n);
      ahead.fetch(rows * (k1 - k0) * F::kElements * i64(sizeof(typename F::Source)) / 64);
      format.pack_lanes({w, ldw, true}, n, rows, k0, k1 - k0, panel, kPanelWidth);
      for (i64 g = 0; g < groups; ++g)
        tile_of<typename F::Step, 2>(int(first(g + 1) - first(g)))(red, k0, k1, x + first(g) * red.n + k0, red.n, panel,
                                                                   sums + g * group_size, kPanelTile);
      k0 = k1;
    } while (k0 < red.n);
    for (i64 g = 0; g < groups; ++g)
      for (i64 m = first(g); m < first(g + 1); ++m) {
        const float* y = sums + g * group_size + red.levels * kPanelTile + (m - first(g)) * kPanelWidth;
        for_columns(0, rows, [&](i64 i, int lanes) { out.put(m0 + m, n + i, load(y + i), lanes); });
      }
  }
}

// y for tokens [m0, m1) and features [n0, n1).
template <class F, class Out>
bool linear_part(const F& format, const Reduction& red, const typename F::Source* x, i64 ldx,
                 const typename F::Source* w, i64 ldw, i64 m0, i64 m1, i64 n0, i64 n1, const Out& out) {
  const i64 tokens = m1 - m0;
  if (tokens > kFewTokens<typename F::Source> || red.half)
    return reduce_block(format, red, {w, ldw, true}, n0, n1, {x, ldx, true}, m0, m1, out);
  const i64 x_size = round_up(tokens * red.n + W, 16);
  float* wide = scratch(x_size + (tokens > kInRegisters ? panel_floats<F>(red, tokens) : 0));
  if (!wide) return false;
  format.pack_rows({x, ldx, true}, m0, tokens, 0, red.n, wide, red.n);
  if (tokens > kInRegisters)
    over_panels(tokens, format, red, wide, wide + x_size, w, ldw, m0, n0, n1, out);
  else
    in_registers<kInRegisters>(tokens, format, red, wide, w, ldw, m0, n0, n1, out);
  return true;
}

// run(format, reduction): pairs of bf16 where `dot` is in use.
template <class T, class Run>
auto with_format(const Reduction& red, const Run& run) {
#if defined(TPI_DOT)
  if constexpr (std::is_same<T, bf16>::value) {
    if (tpi_use_dot && red.can_pair()) return run(Pairs{red.n}, red.in_pairs());
  }
#endif
  return run(Singles<T>{red.n}, red);
}

// The tokens of a group (all of them, or an expert's) and their weight.
template <class Part>
int for_groups(const i64* offsets, i64 groups, i64 columns, double products_per_token, const Part& part) {
  for (i64 e = 0; e < groups; ++e)
    if (offsets[e] > offsets[e + 1]) return TPI_BAD_SHAPE;
  const i64 total = offsets[groups] - offsets[0];
  if (total == 0 || columns == 0) return TPI_OK;
  const double products = double(total) * products_per_token;
  return for_each_task(products, [&](auto next) {
    const i64 threads = omp_get_num_threads(), target = groups == 1 ? threads : 4 * threads;
    i64 task = 0, mine = next();
    for (i64 e = 0; e < groups; ++e) {
      const i64 first = offsets[e], tokens = offsets[e + 1] - first;
      if (tokens == 0) continue;
      const Cut cut(tokens, columns, div_up(target * tokens, total));
      for (i64 m = 0; m < tokens; m += cut.m)
        for (i64 n = 0; n < columns; n += cut.n) {
          if (task++ != mine) continue;
          if (!part(e, first + m, first + min_of(m + cut.m, tokens), n, min_of(n + cut.n, columns)))
            return int(TPI_NO_MEMORY);
          mine = next();
        }
    }
    return int(TPI_OK);
  });
}

template <class F>
int for_dtypes(int dtype, int out_dtype, F f) {
  return for_dtype(dtype, [&](auto in) { return for_dtype(out_dtype, [&](auto out) { return f(in, out); }); });
}

inline int linear(int dtype, int out_dtype, const void* x, i64 ldx, const void* w, i64 expert_stride, i64 ldw,
                  const void* bias, void* y, i64 ldy, const i64* offsets, i64 experts, i64 N, i64 K, i64 leaf,
                  i64 leaves, bool paired) {
  if (N < 0 || !Reduction::valid(K, leaf, leaves, paired)) return TPI_BAD_SHAPE;
  return for_dtypes(dtype, out_dtype, [&](auto in, auto result) -> int {
    using T = decltype(in);
    using TO = decltype(result);
    const Reduction red(K, leaf, leaves, paired);
    const TokenMajorOut<TO, T> out{static_cast<TO*>(y), ldy, static_cast<const T*>(bias)};
    return with_format<T>(red, [&](const auto& format, const Reduction& steps) {
      return for_groups(offsets, experts, N, double(N) * double(K), [&](i64 e, i64 m0, i64 m1, i64 n0, i64 n1) {
        const T* we = static_cast<const T*>(w) + e * expert_stride;
        return linear_part(format, steps, static_cast<const T*>(x), ldx, we, ldw, m0, m1, n0, n1, out);
      });
    });
  });
}

inline int linear_dx(int dtype, int out_dtype, const void* dy, i64 lddy, const void* w, i64 expert_stride, i64 ldw,
                     void* dx, i64 lddx, const i64* offsets, i64 experts, i64 N, i64 K, i64 leaf, i64 leaves,
                     bool paired) {
  if (K < 0 || !Reduction::valid(N, leaf, leaves, paired)) return TPI_BAD_SHAPE;
  return for_dtypes(dtype, out_dtype, [&](auto in, auto result) -> int {
    using T = decltype(in);
    using TO = decltype(result);
    const Reduction red(N, leaf, leaves, paired);
    const RowMajorOut<TO> out{static_cast<TO*>(dx), lddx};
    return with_format<T>(red, [&](const auto& format, const Reduction& steps) {
      return for_groups(offsets, experts, K, double(N) * double(K), [&](i64 e, i64 m0, i64 m1, i64 k0, i64 k1) {
        const T* we = static_cast<const T*>(w) + e * expert_stride;
        return reduce_block(format, steps, {static_cast<const T*>(dy), lddy, true}, m0, m1, {we, ldw, false}, k0, k1,
                            out);
      });
    });
  });
}

inline bool valid_rows(i64 rows, const i64* row_len, i64 spans) {
  if (rows < 0 || !is_power_of_two(spans)) return false;
  for (i64 r = 0; r < rows; ++r)
    if (row_len[r] < 0) return false;
  return true;
}

}  // namespace gemm
}  // namespace TPI_NS
}  // namespace tpi

using namespace tpi;
using namespace tpi::TPI_NS;
using namespace tpi::TPI_NS::gemm;

TPI_EXPORT(linear)(int dtype, int out_dtype, const void* x, i64 ldx, const void* w, i64 ldw, const void* bias, void* y,
                   i64 ldy, i64 M, i64 N, i64 K, i64 leaf, i64 leaves, int paired) {
  const i64 offsets[2] = {0, M};
  return gemm::linear(dtype, out_dtype, x, ldx, w, 0, ldw, bias, y, ldy, offsets, 1, N, K, leaf, leaves, paired != 0);
}

TPI_EXPORT(grouped_linear)(int dtype, int out_dtype, const void* x, i64 ldx, const void* w, i64 expert_stride, i64 ldw,
                           void* y, i64 ldy, const i64* offsets, i64 experts, i64 N, i64 K, i64 leaf, i64 leaves) {
  return gemm::linear(dtype, out_dtype, x, ldx, w, expert_stride, ldw, nullptr, y, ldy, offsets, experts, N, K, leaf,
                      leaves, false);
}

TPI_EXPORT(linear_dx)(int dtype, int out_dtype, const void* dy, i64 lddy, const void* w, i64 ldw, void* dx, i64 lddx,
                      i64 M, i64 N, i64 K, i64 leaf, i64 leaves, int paired) {
  const i64 offsets[2] = {0, M};
  return gemm::linear_dx(dtype, out_dtype, dy, lddy, w, 0, ldw, dx, lddx, offsets, 1, N, K, leaf, leaves, paired != 0);
}

TPI_EXPORT(grouped_linear_dx)(int dtype, int out_dtype, const void* dy, i64 lddy, const void* w, i64 expert_stride,
                              i64 ldw, void* dx, i64 lddx, const i64* offsets, i64 experts, i64 N, i64 K, i64 leaf,
                              i64 leaves, int paired) {
  return gemm::linear_dx(dtype, out_dtype, dy, lddy, w, expert_stride, ldw, dx, lddx, offsets, experts, N, K, leaf,
                         leaves, paired != 0);
}

TPI_EXPORT(linear_dw)(int dtype, const void* dy, i64 lddy, const void* x, i64 ldx, float* grad, i64 ldg, i64 N, i64 K,
                      i64 rows, const i64* row_first, const i64* row_len, i64 row_stride, i64 spans, int carry) {
  if (N < 0 || K < 0 || (carry && (rows != 1 || spans != 1)) || !valid_rows(rows, row_len, spans)) return TPI_BAD_SHAPE;
  return for_dtype(dtype, [&](auto in) -> int {
    using T = decltype(in);
    double tokens = 0;
    for (i64 r = 0; r < rows; ++r) tokens += double(row_len[r]);
    const AddTo out{grad, ldg};
    const i64 offsets[2] = {0, N};
    return for_groups(offsets, 1, K, tokens * double(K), [&](i64, i64 n0, i64 n1, i64 k0, i64 k1) {
      for (i64 r = 0; r < rows; ++r) {
        if (row_len[r] == 0) continue;
        const Operand<T> a{static_cast<const T*>(dy) + row_first[r] * lddy, row_stride * lddy, false};
        const Operand<T> b{static_cast<const T*>(x) + row_first[r] * ldx, row_stride * ldx, false};
        const i64 count = span_count(row_len[r], spans);
        Reduction red(row_len[r], row_len[r] / count, count);
        red.carry = carry != 0;
        if (!with_format<T>(red, [&](const auto& format, const Reduction& steps) {
              return carry ? reduce_block(format, steps, a, n0, n1, b, k0, k1, RowMajorOut<float>{grad, ldg}, ReadFrom{grad, ldg})
                           : reduce_block(format, steps, a, n0, n1, b, k0, k1, out);
            }))
          return false;
      }
      return true;
    });
  });
}

TPI_EXPORT(linear_db)(int dtype, const void* dy, i64 lddy, float* grad, i64 N, i64 rows, const i64* row_first,
                      const i64* row_len, i64 row_stride, i64 spans) {
  if (N < 0 || !valid_rows(rows, row_len, spans)) return TPI_BAD_SHAPE;
  return for_dtype(dtype, [&](auto in) -> int {
    using T = decltype(in);
    constexpr int V = 8;
    i64 tokens = 0;
    for (i64 r = 0; r < rows; ++r) tokens += row_len[r];
    // columns [n, n + width), width <= V * W
    auto columns = [&](i64 n, i64 width) {
      const int vectors = int(div_up(width, W));
      auto lanes = [&](int v) { return int(min_of(width - v * W, W)); };
      for (i64 r = 0; r < rows; ++r) {
        if (row_len[r] == 0) continue;
        const i64 count = span_count(row_len[r], spans);
        const Reduction red(row_len[r], row_len[r] / count, count);
        const T* p = static_cast<const T*>(dy) + row_first[r] * lddy + n;
        const i64 step = row_stride * lddy;
        float stack[64][V * W];
        auto level = [&](int l) { return stack[l]; };
        vf acc[V][1];
        i64 g = 0;
        for (i64 t = 0;; ++g) {
          const i64 end = min_of((g + 1) * red.leaf, red.n);
          tile_clear(acc);
          if (width == V * W) {
            for (; t < end; ++t, p += step)
#pragma GCC unroll 8
              for (int v = 0; v < V; ++v) acc[v][0] = add(acc[v][0], load_as(p + v * W));
          } else {
            for (; t < end; ++t, p += step)
              for (int v = 0; v < vectors; ++v) acc[v][0] = add(acc[v][0], load_part(p + v * W, lanes(v)));
          }
          if (end == red.n) break;
          tile_push(g, level, acc);
        }
        tile_root(red, g, level, acc);
        for (int v = 0; v < vectors; ++v) {
          float* out = grad + n + v * W;
          store_part(out, add(load_part(out, lanes(v)), acc[v][0]), lanes(v));
        }
      }
    };
    parallel_for(div_up(N, V * W), N * tokens, [&](i64 begin, i64 end) {
      for (i64 u = begin; u < end; ++u) columns(u * V * W, min_of(N - u * V * W, V * W));
    });
    return TPI_OK;
  });
}
