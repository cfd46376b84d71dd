// rms_norm_backward (docs/op-schemas.md): g = dy w, h = x r, c = lane tree of round(g h) / H, dx = rounded(r (g - h c)); with a skip,
// rounded(rounded(dx) + dskip). Rows pass twice; the second time L2 serves them.
#pragma once

#include "../../rows.h"

namespace tpi {

template <typename T>
class RmsNormBackward : public Rows {
 public:
  __aicore__ inline explicit RmsNormBackward(const RowTiling& tiling) : Rows(tiling) { Init(sizeof(T), sizeof(T)); }

  __aicore__ inline void Run(GM_ADDR dy, GM_ADDR x, GM_ADDR weight, GM_ADDR rstd, GM_ADDR dskip, GM_ADDR dx) {
    const uint64_t count = uint64_t(t_.rows) * t_.columns;
    dy_.SetGlobalBuffer((__gm__ T*)dy, count);
    x_.SetGlobalBuffer((__gm__ T*)x, count);
    weight_.SetGlobalBuffer((__gm__ T*)weight, t_.columns);
    GlobalTensor<T> dx_gm, skip_gm;
    dx_gm.SetGlobalBuffer((__gm__ T*)dx, count);
    skip_gm.SetGlobalBuffer((__gm__ T*)dskip, count);
    GlobalTensor<float> rstd_gm;
    rstd_gm.SetGlobalBuffer((__gm__ float*)rstd, t_.rows);
    const LocalTensor<float> g = Tile(0), h = Tile(1), c = Vector(1);
    const int32_t slots = t_.slots();
    EachTile([&](uint32_t first, uint32_t rows) {
      LoadVector(Vector(0), rstd_gm[first], rows);
      SpreadRows(Spread(0), Vector(0));
      ClearLanes(Lanes(0));
      for (uint32_t p = 0; p < Panels(); ++p) {
        Terms(first, rows, p);
        Times(g, g, h);
        AddToLanes(Lanes(0), g);
      }
      SumLanes(c, Lanes(0));
      PipeBarrier<PIPE_V>();
      Duplicate(Vector(2), float(t_.columns), slots);
      PipeBarrier<PIPE_V>();
      Div(c, c, Vector(2), slots);
      SpreadRows(Spread(1), c);
      for (uint32_t p = 0; p < Panels(); ++p) {
        const uint64_t at = uint64_t(first) * t_.columns + p * t_.panel;
        Terms(first, rows, p);
        TimesRow(h, h, Spread(1));
        Minus(g, g, h);
        TimesRow(g, g, Spread(0));
        if (dskip != nullptr) {
          Round<T>(g);
          Load<T>(h, skip_gm[at], t_.columns);
          Plus(g, g, h);
        }
        Save<T>(dx_gm[at], g, t_.columns);
      }
    });
  }

 private:
  // g and h of a panel.
  __aicore__ inline void Terms(uint32_t first, uint32_t rows, uint32_t p) {
    const uint64_t at = uint64_t(first) * t_.columns + p * t_.panel;
    Shape(1, Width(p));
    Load<T>(Tile(2), weight_[p * t_.panel], t_.columns);
    Shape(rows, Width(p));
    Load<T>(Tile(0), dy_[at], t_.columns);
    TimesAcross(Tile(0), Tile(0), Tile(2));
    Load<T>(Tile(1), x_[at], t_.columns);
    TimesRow(Tile(1), Tile(1), Spread(0));
  }

  GlobalTensor<T> dy_, x_, weight_;
};

}  // namespace tpi

template <typename T>
__global__ __aicore__ void rms_norm_backward(GM_ADDR dy, GM_ADDR x, GM_ADDR weight, GM_ADDR rstd, GM_ADDR dskip, GM_ADDR dx, RowTiling tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  tpi::RmsNormBackward<T>(tiling).Run(dy, x, weight, rstd, dskip, dx);
}
