// residual_add (docs/op-schemas.md): rounded(x + y).
#pragma once

#include "../../rows.h"

namespace tpi {

template <typename T>
class ResidualAdd : public Rows {
 public:
  __aicore__ inline explicit ResidualAdd(const RowTiling& tiling) : Rows(tiling) { Init(sizeof(T), sizeof(T)); }

  __aicore__ inline void Run(GM_ADDR x, GM_ADDR y, GM_ADDR out) {
    const uint64_t count = uint64_t(t_.rows) * t_.columns;
    GlobalTensor<T> x_gm, y_gm, out_gm;
    x_gm.SetGlobalBuffer((__gm__ T*)x, count);
    y_gm.SetGlobalBuffer((__gm__ T*)y, count);
    out_gm.SetGlobalBuffer((__gm__ T*)out, count);
    EachTile([&](uint32_t first, uint32_t rows) {
      for (uint32_t p = 0; p < Panels(); ++p) {
        const uint64_t at = uint64_t(first) * t_.columns + p * t_.panel;
        Shape(rows, Width(p));
        Load<T>(Tile(0), x_gm[at], t_.columns);
        Load<T>(Tile(1), y_gm[at], t_.columns);
        Plus(Tile(0), Tile(0), Tile(1));
        Save<T>(out_gm[at], Tile(0), t_.columns);
      }
    });
  }
};

}  // namespace tpi

template <typename T>
__global__ __aicore__ void residual_add(GM_ADDR x, GM_ADDR y, GM_ADDR out, RowTiling tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  tpi::ResidualAdd<T>(tiling).Run(x, y, out);
}
