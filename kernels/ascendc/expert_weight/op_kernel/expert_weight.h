// expert_weight_backward (docs/op-schemas.md): dweights = tree over leaves of the lane tree of round(g a); da = rounded(w g).
#pragma once

#include "../../rows.h"

namespace tpi {

template <typename T>
class ExpertWeight : public Rows {
 public:
  __aicore__ inline explicit ExpertWeight(const RowTiling& tiling) : Rows(tiling) { Init(4, sizeof(T)); }

  __aicore__ inline void Run(GM_ADDR g, GM_ADDR a, GM_ADDR weights, GM_ADDR dweights, GM_ADDR da, uint32_t leaf, uint32_t leaves) {
    const uint64_t count = uint64_t(t_.rows) * t_.columns;
    GlobalTensor<float> g_gm, weights_gm, dweights_gm;
    GlobalTensor<T> a_gm, da_gm;
    g_gm.SetGlobalBuffer((__gm__ float*)g, count);
    weights_gm.SetGlobalBuffer((__gm__ float*)weights, t_.rows);
    dweights_gm.SetGlobalBuffer((__gm__ float*)dweights, t_.rows);
    a_gm.SetGlobalBuffer((__gm__ T*)a, count);
    da_gm.SetGlobalBuffer((__gm__ T*)da, count);
    const int32_t slots = t_.slots();
    EachTile([&](uint32_t first, uint32_t rows) {
      LoadVector(Vector(0), weights_gm[first], rows);
      SpreadRows(Spread(0), Vector(0));
      for (uint32_t l = 0; l < leaves; ++l) {
        const uint32_t begin = l * leaf < t_.columns ? l * leaf : t_.columns, end = begin + leaf < t_.columns ? begin + leaf : t_.columns;
        ClearLanes(Lanes(0));
        for (uint32_t at = begin; at < end; at += t_.panel) {
          const uint64_t where = uint64_t(first) * t_.columns + at;
          Shape(rows, end - at < t_.panel ? end - at : t_.panel);
          Load<float>(Tile(0), g_gm[where], t_.columns);
          Load<T>(Tile(1), a_gm[where], t_.columns);
          Times(Tile(1), Tile(0), Tile(1));
          AddToLanes(Lanes(0), Tile(1));
          TimesRow(Tile(0), Tile(0), Spread(0));
          Save<T>(da_gm[where], Tile(0), t_.columns);
        }
        SumLanes(Vector(1 + l), Lanes(0));
      }
      for (uint32_t apart = 1; apart < leaves; apart *= 2)
        for (uint32_t l = 0; l < leaves; l += 2 * apart) {
          PipeBarrier<PIPE_V>();
          Add(Vector(1 + l), Vector(1 + l), Vector(1 + l + apart), slots);
        }
      SaveVector(dweights_gm[first], Vector(1), rows);
    });
  }
};

}  // namespace tpi

template <typename T>
__global__ __aicore__ void expert_weight_backward(GM_ADDR g, GM_ADDR a, GM_ADDR weights, GM_ADDR dweights, GM_ADDR da, uint32_t leaf,
                                                  uint32_t leaves, RowTiling tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  tpi::ExpertWeight<T>(tiling).Run(g, a, weights, dweights, da, leaf, leaves);
}
