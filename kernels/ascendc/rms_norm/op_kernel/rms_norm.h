// rms_norm (docs/op-schemas.md): S = lane tree of round(x * x), r = 1 / sqrt(S / H + eps), y = rounded(rounded(x * r) * w).
//
// A vector core takes tiles of rows; all rows of a tile go through one instruction, 64 columns at a time, a repeat a row. The 64
// lanes are one row of `acc_`: chunk after chunk is added (the lane tree's sequential part), BlockReduceSum twice is its tree.
#pragma once

#include "../../common.h"
#include "../op_host/tiling.h"

namespace tpi {

template <typename T>
class RmsNorm {
 public:
  __aicore__ inline RmsNorm(GM_ADDR x, GM_ADDR weight, GM_ADDR y, GM_ADDR rstd, const RmsNormTiling& tiling)
      : t_(tiling), pitch_(tiling.panel_pitch()) {
    x_.SetGlobalBuffer((__gm__ T*)x, uint64_t(t_.rows) * t_.columns);
    y_.SetGlobalBuffer((__gm__ T*)y, uint64_t(t_.rows) * t_.columns);
    weight_.SetGlobalBuffer((__gm__ T*)weight, t_.columns);
    rstd_.SetGlobalBuffer((__gm__ float*)rstd, t_.rows);
    const uint32_t slots = t_.row_slots(), panel = t_.tile_rows * pitch_;
    pipe_.InitBuffer(in_, 2, panel * sizeof(T));
    pipe_.InitBuffer(out_, 2, panel * sizeof(T));
    pipe_.InitBuffer(rstd_out_, 2, slots * 4);
    pipe_.InitBuffer(row_buffer_, t_.panels() * panel * 4);
    pipe_.InitBuffer(weight_buffer_, t_.panels() * pitch_ * 4);
    pipe_.InitBuffer(square_buffer_, panel * 4);
    pipe_.InitBuffer(acc_buffer_, slots * 64 * 4);
    pipe_.InitBuffer(part_buffer_, slots * 8 * 4);
    pipe_.InitBuffer(scale_buffer_, slots * 8 * 4);
    pipe_.InitBuffer(word_buffer_, slots * 3 * 4);
    row_ = row_buffer_.template Get<float>();
    w_ = weight_buffer_.template Get<float>();
    square_ = square_buffer_.template Get<float>();
    acc_ = acc_buffer_.template Get<float>();
    part_ = part_buffer_.template Get<float>();
    scale_ = scale_buffer_.template Get<float>();
    sum_ = word_buffer_.template Get<float>();
    length_ = sum_[slots];
    one_ = sum_[2 * slots];
  }

  __aicore__ inline void Run() {
    const uint32_t tiles = (t_.rows + t_.tile_rows - 1) / t_.tile_rows;
    if (GetBlockIdx() >= tiles) return;
    Duplicate(length_, float(t_.columns), t_.row_slots());
    Duplicate(one_, 1.0f, t_.row_slots());
    for (uint32_t p = 0; p < t_.panels(); ++p) Load(weight_, w_[p * pitch_], p, 0, 1);
    for (uint32_t tile = GetBlockIdx(); tile < tiles; tile += GetBlockNum()) {
      const uint32_t first = tile * t_.tile_rows, left = t_.rows - first;
      Tile(first, left < t_.tile_rows ? left : t_.tile_rows);
    }
  }

 private:
  __aicore__ inline uint32_t Width(uint32_t panel) const {
    const uint32_t left = t_.columns - panel * RmsNormTiling::kPanel;
    return left < RmsNormTiling::kPanel ? left : RmsNormTiling::kPanel;
  }
  __aicore__ inline LocalTensor<float> Panel(uint32_t p) const { return row_[p * t_.tile_rows * pitch_]; }

  // Panel p of `rows` rows, in float32.
  __aicore__ inline void Load(const GlobalTensor<T>& from, const LocalTensor<float>& to, uint32_t p, uint32_t first, uint32_t rows) {
    const uint32_t width = Width(p);
    LocalTensor<T> in = in_.template AllocTensor<T>();
    CopyIn(in, from[uint64_t(first) * t_.columns + p * RmsNormTiling::kPanel], rows, width, t_.columns, pitch_);
    in_.EnQue(in);
    in = in_.template DeQue<T>();
    for (uint32_t c = 0; c * 64 < width; ++c) Widen(to[c * 64], in[c * 64], ChunkLanes(width, c), rows, pitch_, pitch_);
    in_.FreeTensor(in);
  }

  __aicore__ inline void Tile(uint32_t first, uint32_t rows) {
    const uint8_t stride = pitch_ / 8;
    const uint32_t slots = t_.row_slots();
    Duplicate(acc_, 0.0f, slots * 64);
    for (uint32_t p = 0; p < t_.panels(); ++p) {
      const LocalTensor<float> x = Panel(p);
      Load(x_, x, p, first, rows);
      PipeBarrier<PIPE_V>();
      for (uint32_t c = 0; c * 64 < Width(p); ++c)
        Mul(square_[c * 64], x[c * 64], x[c * 64], ChunkLanes(Width(p), c), rows, BinaryRepeatParams(1, 1, 1, stride, stride, stride));
      for (uint32_t c = 0; c * 64 < Width(p); ++c) {
        PipeBarrier<PIPE_V>();
        Add(acc_, acc_, square_[c * 64], ChunkLanes(Width(p), c), rows, BinaryRepeatParams(1, 1, 1, 8, 8, stride));
      }
    }
    PipeBarrier<PIPE_V>();
    BlockReduceSum(part_, acc_, slots, 64, 1, 1, 8);
    PipeBarrier<PIPE_V>();
    BlockReduceSum(sum_, part_, slots / 8, 64, 1, 1, 8);
    PipeBarrier<PIPE_V>();
    Div(sum_, sum_, length_, slots);
    PipeBarrier<PIPE_V>();
    Adds(sum_, sum_, t_.eps, slots);
    PipeBarrier<PIPE_V>();
    Sqrt(sum_, sum_, slots);
    PipeBarrier<PIPE_V>();
    LocalTensor<float> rstd = rstd_out_.template AllocTensor<float>();
    Div(rstd, one_, sum_, slots);
    PipeBarrier<PIPE_V>();
    Brcb(scale_, rstd, slots / 8, BrcbRepeatParams(1, 8));
    rstd_out_.EnQue(rstd);
    rstd = rstd_out_.template DeQue<float>();
    CopyOut(rstd_[first], rstd, 1, rows, rows, slots);
    rstd_out_.FreeTensor(rstd);
    PipeBarrier<PIPE_V>();
    for (uint32_t p = 0; p < t_.panels(); ++p) Scale(p, first, rows, stride);
  }

  __aicore__ inline void Scale(uint32_t p, uint32_t first, uint32_t rows, uint8_t stride) {
    const LocalTensor<float> x = Panel(p);
    const uint32_t width = Width(p), chunks = (width + 63) / 64;
    LocalTensor<T> out = out_.template AllocTensor<T>();
    for (uint32_t c = 0; c < chunks; ++c)
      Mul(x[c * 64], x[c * 64], scale_, ChunkLanes(width, c), rows, BinaryRepeatParams(1, 1, 0, stride, stride, 1));
    PipeBarrier<PIPE_V>();
    if constexpr (!IsSameType<T, float>::value) {  // the normalised value is rounded before the weight
      for (uint32_t c = 0; c < chunks; ++c) Narrow(out[c * 64], x[c * 64], ChunkLanes(width, c), rows, pitch_, pitch_);
      PipeBarrier<PIPE_V>();
      for (uint32_t c = 0; c < chunks; ++c) Widen(x[c * 64], out[c * 64], ChunkLanes(width, c), rows, pitch_, pitch_);
      PipeBarrier<PIPE_V>();
    }
    for (uint32_t c = 0; c < chunks; ++c)
      Mul(x[c * 64], x[c * 64], w_[p * pitch_ + c * 64], ChunkLanes(width, c), rows, BinaryRepeatParams(1, 1, 1, stride, stride, 0));
    PipeBarrier<PIPE_V>();
    for (uint32_t c = 0; c < chunks; ++c) Narrow(out[c * 64], x[c * 64], ChunkLanes(width, c), rows, pitch_, pitch_);
    out_.EnQue(out);
    out = out_.template DeQue<T>();
    CopyOut(y_[uint64_t(first) * t_.columns + p * RmsNormTiling::kPanel], out, rows, width, t_.columns, pitch_);
    out_.FreeTensor(out);
    PipeBarrier<PIPE_V>();  // the next tile overwrites this panel
  }

  const RmsNormTiling t_;
  const uint32_t pitch_;
  TPipe pipe_;
  TQue<TPosition::VECIN, 1> in_;
  TQue<TPosition::VECOUT, 1> out_, rstd_out_;
  TBuf<TPosition::VECCALC> row_buffer_, weight_buffer_, square_buffer_, acc_buffer_, part_buffer_, scale_buffer_, word_buffer_;
  LocalTensor<float> row_, w_, square_, acc_, part_, scale_, sum_, length_, one_;
  GlobalTensor<T> x_, y_, weight_;
  GlobalTensor<float> rstd_;
};

}  // namespace tpi

template <typename T>
__global__ __aicore__ void rms_norm(GM_ADDR x, GM_ADDR weight, GM_ADDR y, GM_ADDR rstd, RmsNormTiling tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  tpi::RmsNorm<T>(x, weight, y, rstd, tiling).Run();
}
