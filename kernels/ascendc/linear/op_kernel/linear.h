// linear (docs/op-schemas.md): y[m, n] = tree over leaves of (sum along k of x * w, in the cube's order), + bias, rounded.
//
// Groups take tiles of 128 x 256, down a column of weights first, so that L2 serves the weight to all of them. The cube core sums a leaf
// in L0C from zero, always with the same instruction along k. With several leaves (or a bias) every leaf goes to a workspace as float32; the
// two vector cores take the upper and the lower half of the tile's rows, add the leaves as the tree says, and round.
#pragma once

#include "../../common.h"
#include "../op_host/tiling.h"

namespace tpi {

constexpr uint16_t kLeavesReady = 0, kSlotFree = 1;  // cross-core flags

template <typename T, typename Out>
class LinearCube {
 public:
  __aicore__ inline LinearCube(GM_ADDR x, GM_ADDR weight, GM_ADDR y, GM_ADDR workspace, const LinearTiling& tiling) : t_(tiling) {
    x_.SetGlobalBuffer((__gm__ T*)x, uint64_t(t_.rows) * t_.depth);
    weight_.SetGlobalBuffer((__gm__ T*)weight, uint64_t(t_.columns) * t_.depth);
    y_.SetGlobalBuffer((__gm__ Out*)y, uint64_t(t_.rows) * t_.columns);
    workspace_.SetGlobalBuffer((__gm__ float*)workspace + GetBlockIdx() * LinearTiling::kSlots * t_.slot_elements(),
                               LinearTiling::kSlots * t_.slot_elements());
    pipe_.InitBuffer(a1_, 2, t_.tile_rows * LinearTiling::kPanelBytes);
    pipe_.InitBuffer(b1_, 2, LinearTiling::kTileColumns * LinearTiling::kPanelBytes);
    pipe_.InitBuffer(a2_, 2, t_.tile_rows * LinearTiling::kStepBytes);
    pipe_.InitBuffer(b2_, 2, kHalf * LinearTiling::kStepBytes);
    pipe_.InitBuffer(c_, 2, t_.tile_rows * kHalf * 4);
    SetHF32Mode(false);
  }

  __aicore__ inline void Run() {
    uint32_t done = 0;
    for (uint32_t tile = GetBlockIdx(); tile < t_.tiles(); tile += GetBlockNum(), ++done) {
      if (!t_.direct() && done >= LinearTiling::kSlots) CrossCoreWaitFlag<2>(kSlotFree);
      const uint32_t row = tile % t_.tiles_down() * t_.tile_rows, column = tile / t_.tiles_down() * LinearTiling::kTileColumns;
      rows_ = Least(t_.tile_rows, t_.rows - row);
      columns_ = Least(LinearTiling::kTileColumns, t_.columns - column);
      slot_ = done % LinearTiling::kSlots * t_.slot_elements();
      for (uint32_t leaf = 0; leaf < t_.leaves; ++leaf) Leaf(row, column, leaf);
      if (!t_.direct()) CrossCoreSetFlag<2, PIPE_FIX>(kLeavesReady);
    }
    if (!t_.direct())
      for (uint32_t i = 0; i < Least(done, LinearTiling::kSlots); ++i) CrossCoreWaitFlag<2>(kSlotFree);
  }

 private:
  static constexpr uint32_t kBlock = 32 / sizeof(T);                           // elements along k of a fractal
  static constexpr uint32_t kPanel = LinearTiling::kPanelBytes / sizeof(T);    // along k
  static constexpr uint32_t kStep = LinearTiling::kStepBytes / sizeof(T);
  static constexpr uint32_t kHalf = LinearTiling::kTileColumns / 2;
  __aicore__ static inline uint32_t Least(uint32_t a, uint32_t b) { return a < b ? a : b; }
  __aicore__ static inline uint32_t Padded(uint32_t n) { return (n + 15) / 16 * 16; }

  // Row-major rows of GM to NZ in L1; the rows that pad to 16 stay unwritten, what they yield is never stored.
  __aicore__ inline void LoadPanel(const LocalTensor<T>& to, const GlobalTensor<T>& from, uint32_t rows, uint32_t k) {
    DataCopy(to, from, Nd2NzParams(1, rows, k, 0, t_.depth, Padded(rows), 1, 0));
  }

  // The halves of a tile's columns take turns, a panel each: one leaves L0C while the other is summed.
  __aicore__ inline void Leaf(uint32_t row, uint32_t column, uint32_t leaf) {
    const uint32_t begin = leaf * t_.leaf, end = Least(begin + t_.leaf, t_.depth);
    LocalTensor<float> c[2];
    for (uint32_t k = begin; k < end; k += kPanel) {
      const uint32_t panel = Least(kPanel, end - k);
      LocalTensor<T> a = a1_.template AllocTensor<T>();
      LoadPanel(a, x_[uint64_t(row) * t_.depth + k], rows_, panel);
      a1_.EnQue(a);
      LocalTensor<T> b = b1_.template AllocTensor<T>();
      LoadPanel(b, weight_[uint64_t(column) * t_.depth + k], columns_, panel);
      b1_.EnQue(b);
      a = a1_.template DeQue<T>();
      b = b1_.template DeQue<T>();
      for (uint32_t part = 0; part * kHalf < columns_; ++part) {
        if (k == begin) c[part] = c_.template AllocTensor<float>();
        for (uint32_t step = 0; step < panel; step += kStep)
          Multiply(c[part], a, b, part, step, Least(kStep, panel - step), k == begin && step == 0);
        if (k + panel < end) continue;
        c_.EnQue(c[part]);
        Store(row, column + part * kHalf, leaf, part);
      }
      a1_.FreeTensor(a);
      b1_.FreeTensor(b);
    }
  }

  __aicore__ inline void Store(uint32_t row, uint32_t column, uint32_t leaf, uint32_t part) {
    LocalTensor<float> c = c_.template DeQue<float>();
    const uint32_t columns = Least(kHalf, columns_ - part * kHalf);
    if (t_.direct()) {
      FixpipeParamsV220 out(columns, rows_, Padded(rows_), t_.columns, false);
      if constexpr (!IsSameType<Out, float>::value)
        out.quantPre = IsSameType<Out, half>::value ? QuantMode_t::F322F16 : QuantMode_t::F322BF16;
      Fixpipe<Out, float, CFG_ROW_MAJOR>(y_[uint64_t(row) * t_.columns + column], c, out);
    } else {
      const uint64_t to = slot_ + uint64_t(leaf) * t_.tile_rows * LinearTiling::kTileColumns + part * kHalf;
      Fixpipe<float, float, CFG_ROW_MAJOR>(
          workspace_[to], c, FixpipeParamsV220(columns, rows_, Padded(rows_), LinearTiling::kTileColumns, false));
    }
    c_.FreeTensor(c);
  }

  __aicore__ inline void Multiply(const LocalTensor<float>& c, const LocalTensor<T>& a, const LocalTensor<T>& b, uint32_t part,
                                  uint32_t step, uint32_t k, bool first) {
    const uint16_t down = Padded(rows_) / 16, across = Padded(columns_) / 16, fractals = (k + kBlock - 1) / kBlock;
    const uint16_t start = step / kBlock, from = part * kHalf / 16, columns = Least(kHalf / 16, across - from);
    LocalTensor<T> left = a2_.template AllocTensor<T>();
    for (uint16_t m = 0; m < down; ++m)
      LoadData(left[m * fractals * 16 * kBlock], a, LoadData2DParams(start * down + m, fractals, down, 0, 0, false, 0));
    a2_.EnQue(left);
    LocalTensor<T> right = b2_.template AllocTensor<T>();
    for (uint16_t i = 0; i < fractals; ++i)
      LoadData(right[i * columns * 16 * kBlock], b, LoadData2DParams((start + i) * across + from, columns, 1, 0, 0, false, 0));
    b2_.EnQue(right);
    left = a2_.template DeQue<T>();
    right = b2_.template DeQue<T>();
    Mmad(c, left, right, MmadParams(Padded(rows_), columns * 16, k, 0, false, first));
    PipeBarrier<PIPE_M>();  // the next product adds to the same tile
    a2_.FreeTensor(left);
    b2_.FreeTensor(right);
  }

  const LinearTiling t_;
  uint32_t rows_ = 0, columns_ = 0;  // of the current tile
  uint64_t slot_ = 0;                // where it goes in the workspace
  TPipe pipe_;
  TQue<TPosition::A1, 1> a1_;
  TQue<TPosition::B1, 1> b1_;
  TQue<TPosition::A2, 1> a2_;
  TQue<TPosition::B2, 1> b2_;
  TQue<TPosition::CO1, 1> c_;
  GlobalTensor<T> x_, weight_;
  GlobalTensor<Out> y_;
  GlobalTensor<float> workspace_;
};

template <typename T, typename Out>
class LinearVector {
 public:
  __aicore__ inline LinearVector(GM_ADDR bias, GM_ADDR y, GM_ADDR workspace, const LinearTiling& tiling) : t_(tiling) {
    bias_.SetGlobalBuffer((__gm__ T*)bias, t_.has_bias ? t_.columns : 0);
    y_.SetGlobalBuffer((__gm__ Out*)y, uint64_t(t_.rows) * t_.columns);
    const uint64_t group = GetBlockIdx() / GetSubBlockNum();
    workspace_.SetGlobalBuffer((__gm__ float*)workspace + group * LinearTiling::kSlots * t_.slot_elements(),
                               LinearTiling::kSlots * t_.slot_elements());
    strip_ = 64 / t_.leaves;
    if (strip_ > 16) strip_ = 16;
    pipe_.InitBuffer(leaves_, 2, t_.leaves * strip_ * LinearTiling::kTileColumns * 4);
    pipe_.InitBuffer(out_, 2, strip_ * LinearTiling::kTileColumns * sizeof(Out));
    pipe_.InitBuffer(bias_in_, 1, LinearTiling::kTileColumns * sizeof(T));
    pipe_.InitBuffer(bias_buffer_, LinearTiling::kTileColumns * 4);
  }

  __aicore__ inline void Run() {
    const uint32_t group = GetBlockIdx() / GetSubBlockNum(), half_rows = t_.tile_rows / 2;
    uint32_t done = 0;
    for (uint32_t tile = group; tile < t_.tiles(); tile += GetBlockNum(), ++done) {
      const uint32_t row = tile % t_.tiles_down() * t_.tile_rows, column = tile / t_.tiles_down() * LinearTiling::kTileColumns;
      columns_ = t_.columns - column < LinearTiling::kTileColumns ? t_.columns - column : LinearTiling::kTileColumns;
      if (t_.has_bias) LoadBias(column);
      CrossCoreWaitFlag<2>(kLeavesReady);
      const uint32_t rows = t_.rows - row < t_.tile_rows ? t_.rows - row : t_.tile_rows, from = GetSubBlockIdx() * half_rows;
      for (uint32_t r = from; r < rows && r < from + half_rows; r += strip_) {
        const uint32_t until = rows < from + half_rows ? rows : from + half_rows;
        Strip(done % LinearTiling::kSlots * t_.slot_elements(), row, r, column, until - r < strip_ ? until - r : strip_);
      }
      CrossCoreSetFlag<2, PIPE_MTE2>(kSlotFree);
    }
  }

 private:
  static constexpr uint32_t kPitch = LinearTiling::kTileColumns;

  __aicore__ inline void LoadBias(uint32_t column) {
    LocalTensor<T> in = bias_in_.template AllocTensor<T>();
    CopyIn(in, bias_[column], 1, columns_, columns_, kPitch);
    bias_in_.EnQue(in);
    in = bias_in_.template DeQue<T>();
    const LocalTensor<float> bias = bias_buffer_.template Get<float>();
    for (uint32_t c = 0; c * 64 < columns_; ++c) Widen(bias[c * 64], in[c * 64], ChunkLanes(columns_, c), 1, kPitch, kPitch);
    bias_in_.FreeTensor(in);
    PipeBarrier<PIPE_V>();
  }

  // `rows` rows of every leaf, from row `r` of the tile.
  __aicore__ inline void Strip(uint64_t slot, uint32_t row, uint32_t r, uint32_t column, uint32_t rows) {
    const uint32_t strip = strip_ * kPitch;
    LocalTensor<float> sums = leaves_.template AllocTensor<float>();
    for (uint32_t leaf = 0; leaf < t_.leaves; ++leaf)
      CopyIn(sums[leaf * strip], workspace_[slot + (uint64_t(leaf) * t_.tile_rows + r) * kPitch], rows, columns_, kPitch, kPitch);
    leaves_.EnQue(sums);
    sums = leaves_.template DeQue<float>();
    const uint32_t chunks = (columns_ + 63) / 64;
    for (uint32_t apart = 1; apart < t_.leaves; apart *= 2) {
      for (uint32_t leaf = 0; leaf < t_.leaves; leaf += 2 * apart)
        for (uint32_t c = 0; c < chunks; ++c)
          Add(sums[leaf * strip + c * 64], sums[leaf * strip + c * 64], sums[(leaf + apart) * strip + c * 64], ChunkLanes(columns_, c), rows,
              BinaryRepeatParams(1, 1, 1, kPitch / 8, kPitch / 8, kPitch / 8));
      PipeBarrier<PIPE_V>();
    }
    if (t_.has_bias) {
      const LocalTensor<float> bias = bias_buffer_.template Get<float>();
      for (uint32_t c = 0; c < chunks; ++c)
        Add(sums[c * 64], sums[c * 64], bias[c * 64], ChunkLanes(columns_, c), rows, BinaryRepeatParams(1, 1, 1, kPitch / 8, kPitch / 8, 0));
      PipeBarrier<PIPE_V>();
    }
    LocalTensor<Out> out = out_.template AllocTensor<Out>();
    for (uint32_t c = 0; c < chunks; ++c) Narrow(out[c * 64], sums[c * 64], ChunkLanes(columns_, c), rows, kPitch, kPitch);
    leaves_.FreeTensor(sums);
    out_.EnQue(out);
    out = out_.template DeQue<Out>();
    CopyOut(y_[uint64_t(row + r) * t_.columns + column], out, rows, columns_, t_.columns, kPitch);
    out_.FreeTensor(out);
  }

  const LinearTiling t_;
  uint32_t strip_ = 1, columns_ = 0;
  TPipe pipe_;
  TQue<TPosition::VECIN, 1> leaves_, bias_in_;
  TQue<TPosition::VECOUT, 1> out_;
  TBuf<TPosition::VECCALC> bias_buffer_;
  GlobalTensor<T> bias_;
  GlobalTensor<Out> y_;
  GlobalTensor<float> workspace_;
};

}  // namespace tpi

// T: x, weight and bias; Out: T or float.
template <typename T, typename Out>
__global__ __aicore__ void linear(GM_ADDR x, GM_ADDR weight, GM_ADDR bias, GM_ADDR y, GM_ADDR workspace, LinearTiling tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);
  if ASCEND_IS_AIC {
    tpi::LinearCube<T, Out>(x, weight, y, workspace, tiling).Run();
  }
  if ASCEND_IS_AIV {
    if (!tiling.direct()) tpi::LinearVector<T, Out>(bias, y, workspace, tiling).Run();
  }
}
