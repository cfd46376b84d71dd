// swiglu_backward (docs/op-schemas.md): q = 1 / (1 + e), a = g / (1 + e), t = a (1 - q) + q; dg = rounded((dy u) t), du = rounded(dy a).
#pragma once

#include "../../rows.h"

namespace tpi {

template <typename T>
class SwigluBackward : public Rows {
 public:
  __aicore__ inline explicit SwigluBackward(const RowTiling& tiling) : Rows(tiling) { Init(sizeof(T), sizeof(T)); }

  __aicore__ inline void Run(GM_ADDR dy, GM_ADDR x, GM_ADDR dx) {
    const uint32_t f = t_.columns;
    GlobalTensor<T> dy_gm, x_gm, dx_gm;
    dy_gm.SetGlobalBuffer((__gm__ T*)dy, uint64_t(t_.rows) * f);
    x_gm.SetGlobalBuffer((__gm__ T*)x, uint64_t(t_.rows) * f * 2);
    dx_gm.SetGlobalBuffer((__gm__ T*)dx, uint64_t(t_.rows) * f * 2);
    EachTile([&](uint32_t first, uint32_t rows) {
      for (uint32_t p = 0; p < Panels(); ++p) {
        const uint64_t at = uint64_t(first) * f + p * t_.panel, pair = uint64_t(first) * f * 2 + p * t_.panel;
        const LocalTensor<float> d = Tile(0), g = Tile(1), u = Tile(2), sum = Tile(3), q = Tile(4);
        Shape(rows, Width(p));
        Load<T>(d, dy_gm[at], f);
        Load<T>(g, x_gm[pair], 2 * f);
        Load<T>(u, x_gm[pair + f], 2 * f);
        Sigmoid(q, sum, g);
        Over(g, g, sum);  // a
        Times(sum, d, g);
        Save<T>(dx_gm[pair + f], sum, 2 * f);
        Times(d, d, u);
        TimesScalar(u, q, -1.0f);
        PlusScalar(u, u, 1.0f);  // 1 - q
        Times(g, g, u);
        Plus(g, g, q);
        Times(d, d, g);
        Save<T>(dx_gm[pair], d, 2 * f);
      }
    });
  }
};

}  // namespace tpi

template <typename T>
__global__ __aicore__ void swiglu_backward(GM_ADDR dy, GM_ADDR x, GM_ADDR dx, RowTiling tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  tpi::SwigluBackward<T>(tiling).Run(dy, x, dx);
}
