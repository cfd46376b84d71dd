// sigmoid_gate (docs/op-schemas.md): y = rounded(x s), s = 1 / (1 + exp(-logit)), a logit a row. Backward: dx = rounded(dout s),
// dlogit = lane tree of round(dout x), times s (1 - s).
#pragma once

#include "../../rows.h"

namespace tpi {

template <typename T>
class SigmoidGate : public Rows {
 public:
  __aicore__ inline SigmoidGate(const RowTiling& tiling, GM_ADDR x, GM_ADDR logits) : Rows(tiling) {
    Init(sizeof(T), sizeof(T));
    x_.SetGlobalBuffer((__gm__ T*)x, uint64_t(t_.rows) * t_.columns);
    logits_.SetGlobalBuffer((__gm__ float*)logits, t_.rows);
  }

  __aicore__ inline void Forward(GM_ADDR y) {
    GlobalTensor<T> y_gm;
    y_gm.SetGlobalBuffer((__gm__ T*)y, uint64_t(t_.rows) * t_.columns);
    EachTile([&](uint32_t first, uint32_t rows) {
      Gate(first, rows);
      for (uint32_t p = 0; p < Panels(); ++p) {
        const uint64_t at = uint64_t(first) * t_.columns + p * t_.panel;
        Shape(rows, Width(p));
        Load<T>(Tile(0), x_[at], t_.columns);
        TimesRow(Tile(0), Tile(0), Spread(0));
        Save<T>(y_gm[at], Tile(0), t_.columns);
      }
    });
  }

  __aicore__ inline void Backward(GM_ADDR dout, GM_ADDR dx, GM_ADDR dlogits) {
    GlobalTensor<T> dout_gm, dx_gm;
    GlobalTensor<float> dlogits_gm;
    dout_gm.SetGlobalBuffer((__gm__ T*)dout, uint64_t(t_.rows) * t_.columns);
    dx_gm.SetGlobalBuffer((__gm__ T*)dx, uint64_t(t_.rows) * t_.columns);
    dlogits_gm.SetGlobalBuffer((__gm__ float*)dlogits, t_.rows);
    const LocalTensor<float> gate = Vector(0), sum = Vector(1), slope = Vector(2);
    EachTile([&](uint32_t first, uint32_t rows) {
      Gate(first, rows);
      ClearLanes(Lanes(0));
      for (uint32_t p = 0; p < Panels(); ++p) {
        const uint64_t at = uint64_t(first) * t_.columns + p * t_.panel;
        Shape(rows, Width(p));
        Load<T>(Tile(0), dout_gm[at], t_.columns);
        Load<T>(Tile(1), x_[at], t_.columns);
        Times(Tile(1), Tile(0), Tile(1));
        AddToLanes(Lanes(0), Tile(1));
        TimesRow(Tile(0), Tile(0), Spread(0));
        Save<T>(dx_gm[at], Tile(0), t_.columns);
      }
      SumLanes(sum, Lanes(0));
      const int32_t slots = t_.slots();
      PipeBarrier<PIPE_V>();
      Muls(slope, gate, -1.0f, slots);
      PipeBarrier<PIPE_V>();
      Adds(slope, slope, 1.0f, slots);
      PipeBarrier<PIPE_V>();
      Mul(slope, gate, slope, slots);
      PipeBarrier<PIPE_V>();
      Mul(sum, sum, slope, slots);
      SaveVector(dlogits_gm[first], sum, rows);
    });
  }

 private:
  // s of each row, in Vector(0) and, eight times, in Spread(0).
  __aicore__ inline void Gate(uint32_t first, uint32_t rows) {
    const LocalTensor<float> gate = Vector(0), sum = Vector(1);
    const int32_t slots = t_.slots();
    LoadVector(sum, logits_[first], rows);
    PipeBarrier<PIPE_V>();
    Muls(sum, sum, -1.0f, slots);
    PipeBarrier<PIPE_V>();
    Exp(sum, sum, slots);
    PipeBarrier<PIPE_V>();
    Adds(sum, sum, 1.0f, slots);
    Duplicate(gate, 1.0f, slots);
    PipeBarrier<PIPE_V>();
    Div(gate, gate, sum, slots);
    SpreadRows(Spread(0), gate);
  }

  GlobalTensor<T> x_;
  GlobalTensor<float> logits_;
};

}  // namespace tpi

template <typename T>
__global__ __aicore__ void sigmoid_gate(GM_ADDR x, GM_ADDR logits, GM_ADDR y, RowTiling tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  tpi::SigmoidGate<T>(tiling, x, logits).Forward(y);
}

template <typename T>
__global__ __aicore__ void sigmoid_gate_backward(GM_ADDR dout, GM_ADDR x, GM_ADDR logits, GM_ADDR dx, GM_ADDR dlogits, RowTiling tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  tpi::SigmoidGate<T>(tiling, x, logits).Backward(dout, dx, dlogits);
}
