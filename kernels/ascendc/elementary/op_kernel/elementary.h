// exp and log of float32: the vector unit's Exp and Ln.
#pragma once

#include "../../rows.h"

namespace tpi {

template <bool log>
class Elementary : public Rows {
 public:
  __aicore__ inline explicit Elementary(const RowTiling& tiling) : Rows(tiling) { Init(4, 4); }

  __aicore__ inline void Run(GM_ADDR x, GM_ADDR y) {
    GlobalTensor<float> x_gm, y_gm;
    x_gm.SetGlobalBuffer((__gm__ float*)x, uint64_t(t_.rows) * t_.columns);
    y_gm.SetGlobalBuffer((__gm__ float*)y, uint64_t(t_.rows) * t_.columns);
    EachTile([&](uint32_t first, uint32_t rows) {
      for (uint32_t p = 0; p < Panels(); ++p) {
        const uint64_t at = uint64_t(first) * t_.columns + p * t_.panel;
        Shape(rows, Width(p));
        Load<float>(Tile(0), x_gm[at], t_.columns);
        if constexpr (log) {
          Logarithm(Tile(0), Tile(0));
        } else {
          Exponential(Tile(0), Tile(0));
        }
        Save<float>(y_gm[at], Tile(0), t_.columns);
      }
    });
  }
};

}  // namespace tpi

template <bool log>
__global__ __aicore__ void elementary(GM_ADDR x, GM_ADDR y, RowTiling tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  tpi::Elementary<log>(tiling).Run(x, y);
}
