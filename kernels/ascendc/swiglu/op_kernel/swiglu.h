// swiglu (docs/op-schemas.md): y = rounded((g / (1 + exp(-g))) * u), x = [g, u]. Elementwise: tiles of 4,096 elements, twice buffered.
#pragma once

#include "../../common.h"
#include "../op_host/tiling.h"

namespace tpi {

template <typename T>
class Swiglu {
 public:
  __aicore__ inline Swiglu(GM_ADDR x, GM_ADDR y, const SwigluTiling& tiling) : t_(tiling) {
    x_.SetGlobalBuffer((__gm__ T*)x, uint64_t(t_.rows) * t_.columns * 2);
    y_.SetGlobalBuffer((__gm__ T*)y, uint64_t(t_.rows) * t_.columns);
    pipe_.InitBuffer(in_, 2, 2 * SwigluTiling::kTile * sizeof(T));
    pipe_.InitBuffer(out_, 2, SwigluTiling::kTile * sizeof(T));
    pipe_.InitBuffer(work_, 3 * SwigluTiling::kTile * 4);
  }

  __aicore__ inline void Run() {
    const uint32_t across = (t_.columns + t_.tile_columns - 1) / t_.tile_columns;
    const uint32_t tiles = (t_.rows + t_.tile_rows - 1) / t_.tile_rows * across;
    for (uint32_t tile = GetBlockIdx(); tile < tiles; tile += GetBlockNum()) {
      const uint32_t row = tile / across * t_.tile_rows, column = tile % across * t_.tile_columns;
      const uint32_t rows = t_.rows - row, columns = t_.columns - column;
      Tile(row, column, rows < t_.tile_rows ? rows : t_.tile_rows, columns < t_.tile_columns ? columns : t_.tile_columns);
    }
  }

 private:
  __aicore__ inline void Tile(uint32_t row, uint32_t column, uint32_t rows, uint32_t columns) {
    // Rows lie block-aligned in UB; their tails hold padding, which is computed and dropped.
    constexpr uint32_t block = 32 / sizeof(T);
    const uint32_t pitch = (columns + block - 1) / block * block;
    const int32_t count = rows * pitch;
    LocalTensor<T> in = in_.template AllocTensor<T>();
    const uint64_t start = uint64_t(row) * 2 * t_.columns + column;
    CopyIn(in, x_[start], rows, columns, 2 * t_.columns, pitch);
    CopyIn(in[SwigluTiling::kTile], x_[start + t_.columns], rows, columns, 2 * t_.columns, pitch);
    in_.EnQue(in);
    in = in_.template DeQue<T>();
    LocalTensor<float> gate = work_.template Get<float>(), up = gate[SwigluTiling::kTile], e = gate[2 * SwigluTiling::kTile];
    if constexpr (IsSameType<T, float>::value) {
      Muls(gate, in, 1.0f, count);
      Muls(up, in[SwigluTiling::kTile], 1.0f, count);
    } else {
      Cast(gate, in, RoundMode::CAST_NONE, count);
      Cast(up, in[SwigluTiling::kTile], RoundMode::CAST_NONE, count);
    }
    in_.FreeTensor(in);
    PipeBarrier<PIPE_V>();
    Muls(e, gate, -1.0f, count);
    PipeBarrier<PIPE_V>();
    Exp(e, e, count);
    PipeBarrier<PIPE_V>();
    Adds(e, e, 1.0f, count);
    PipeBarrier<PIPE_V>();
    Div(gate, gate, e, count);
    PipeBarrier<PIPE_V>();
    Mul(gate, gate, up, count);
    PipeBarrier<PIPE_V>();
    LocalTensor<T> out = out_.template AllocTensor<T>();
    if constexpr (IsSameType<T, float>::value) {
      Muls(out, gate, 1.0f, count);
    } else {
      Cast(out, gate, RoundMode::CAST_RINT, count);
    }
    out_.EnQue(out);
    out = out_.template DeQue<T>();
    CopyOut(y_[uint64_t(row) * t_.columns + column], out, rows, columns, t_.columns, pitch);
    out_.FreeTensor(out);
    PipeBarrier<PIPE_V>();  // the next tile overwrites the work buffers
  }

  const SwigluTiling t_;
  TPipe pipe_;
  TQue<TPosition::VECIN, 1> in_;
  TQue<TPosition::VECOUT, 1> out_;
  TBuf<TPosition::VECCALC> work_;
  GlobalTensor<T> x_, y_;
};

}  // namespace tpi

template <typename T>
__global__ __aicore__ void swiglu(GM_ADDR x, GM_ADDR y, SwigluTiling tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  tpi::Swiglu<T>(x, y, tiling).Run();
}
