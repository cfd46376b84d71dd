// tree_sum (docs/op-schemas.md): the tree over `parts` subtree roots that lie side by side, + bias, rounded.
#pragma once

#include "../../rows.h"

namespace tpi {

template <typename Bias, typename Out>
class TreeSum : public Rows {
 public:
  __aicore__ inline explicit TreeSum(const RowTiling& tiling) : Rows(tiling) { Init(4, sizeof(Out)); }

  __aicore__ inline void Run(GM_ADDR parts, GM_ADDR bias, GM_ADDR y, uint32_t count) {
    const uint64_t size = uint64_t(t_.rows) * t_.columns;
    GlobalTensor<float> parts_gm;
    GlobalTensor<Bias> bias_gm;
    GlobalTensor<Out> y_gm;
    parts_gm.SetGlobalBuffer((__gm__ float*)parts, count * size);
    bias_gm.SetGlobalBuffer((__gm__ Bias*)bias, t_.columns);
    y_gm.SetGlobalBuffer((__gm__ Out*)y, size);
    EachTile([&](uint32_t first, uint32_t rows) {
      for (uint32_t p = 0; p < Panels(); ++p) {
        const uint64_t at = uint64_t(first) * t_.columns + p * t_.panel;
        Shape(rows, Width(p));
        uint32_t depth = 0;  // tiles 0 … depth - 1 are finished subtrees that wait for their right neighbours
        for (uint32_t i = 0; i < count; ++i) {
          Load<float>(Tile(depth), parts_gm[i * size + at], t_.columns);
          for (uint32_t rest = i; rest & 1; rest >>= 1, --depth) Plus(Tile(depth - 1), Tile(depth - 1), Tile(depth));
          ++depth;
        }
        if (bias != nullptr) {
          Shape(1, Width(p));
          Load<Bias>(Tile(1), bias_gm[p * t_.panel], t_.columns);
          Shape(rows, Width(p));
          PlusAcross(Tile(0), Tile(0), Tile(1));
        }
        Save<Out>(y_gm[at], Tile(0), t_.columns);
      }
    });
  }
};

}  // namespace tpi

template <typename Bias, typename Out>
__global__ __aicore__ void tree_sum(GM_ADDR parts, GM_ADDR bias, GM_ADDR y, uint32_t count, RowTiling tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  tpi::TreeSum<Bias, Out>(tiling).Run(parts, bias, y, count);
}
