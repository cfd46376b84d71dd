// Tiles of rows in UB: what the kernels that work row by row share.
//
// A tile is `rows` rows of one panel of columns, float32, each row on a block. An elementwise step is one instruction where rows are whole chunks of
// 64 columns, else one a chunk with a repeat a row. Every step begins with a barrier: it depends on the one before. Lanes: 64 float32 a row, to which chunk
// after chunk is added (the lane tree's sequential part); BlockReduceSum twice is its tree.
#pragma once

#include "common.h"
#include "rows_tiling.h"

namespace tpi {

class Rows {
 public:
  __aicore__ inline explicit Rows(const RowTiling& tiling) : t_(tiling) {}

 protected:
  // `in`, `out`: bytes of the widest element that is loaded and stored; 0: none.
  __aicore__ inline void Init(uint32_t in, uint32_t out) {
    const uint32_t tile = t_.tile_elements(), slots = t_.slots();
    if (in) pipe_.InitBuffer(in_, 2, tile * in);
    if (out) pipe_.InitBuffer(out_, 2, tile * out);
    if (t_.tiles) pipe_.InitBuffer(tile_buffer_, t_.tiles * tile * 4);
    if (t_.lanes) pipe_.InitBuffer(lane_buffer_, t_.lanes * slots * 64 * 4);
    if (t_.lanes) pipe_.InitBuffer(part_buffer_, slots * 8 * 4);
    if (t_.vectors) pipe_.InitBuffer(vector_buffer_, t_.vectors * slots * 4);
    if (t_.spreads) pipe_.InitBuffer(spread_buffer_, t_.spreads * slots * 8 * 4);
    if (t_.vectors) pipe_.InitBuffer(vector_in_, 2, slots * 4);
    if (t_.vectors) pipe_.InitBuffer(vector_out_, 2, slots * 4);
    pipe_.InitBuffer(panel_out_, 1, t_.pitch() * 4);
  }

  __aicore__ inline LocalTensor<float> Tile(uint32_t i) { return tile_buffer_.template Get<float>()[i * t_.tile_elements()]; }
  __aicore__ inline LocalTensor<float> Lanes(uint32_t i) { return lane_buffer_.template Get<float>()[i * t_.slots() * 64]; }
  __aicore__ inline LocalTensor<float> Vector(uint32_t i) { return vector_buffer_.template Get<float>()[i * t_.slots()]; }
  __aicore__ inline LocalTensor<float> Spread(uint32_t i) { return spread_buffer_.template Get<float>()[i * t_.slots() * 8]; }

  // The tile that later steps work on: `rows` rows of `width` columns.
  __aicore__ inline void Shape(uint32_t rows, uint32_t width) {
    rows_ = rows;
    width_ = width;
    pitch_ = (width + 15) / 16 * 16;
    chunks_ = (width + 63) / 64;
    whole_ = width % 64 == 0;
  }
  __aicore__ inline uint32_t Panels() const { return (t_.columns + t_.panel - 1) / t_.panel; }
  __aicore__ inline uint32_t Width(uint32_t panel) const {
    const uint32_t left = t_.columns - panel * t_.panel;
    return left < t_.panel ? left : t_.panel;
  }

  // Calls f(first row, rows) for every tile of rows that is this core's.
  template <typename F>
  __aicore__ inline void EachTile(F f) {
    for (uint32_t first = GetBlockIdx() * t_.tile_rows; first < t_.rows; first += GetBlockNum() * t_.tile_rows) {
      const uint32_t left = t_.rows - first;
      f(first, left < t_.tile_rows ? left : t_.tile_rows);
    }
  }

  // A tile from GM, whose rows are `gm_pitch` elements apart.
  template <typename T>
  __aicore__ inline void Load(const LocalTensor<float>& to, const GlobalTensor<T>& from, uint32_t gm_pitch) {
    LocalTensor<T> in = in_.template AllocTensor<T>();
    CopyIn(in, from, rows_, width_, gm_pitch, pitch_);
    in_.EnQue(in);
    in = in_.template DeQue<T>();
    PipeBarrier<PIPE_V>();
    WidenTile(to, in);
    in_.FreeTensor(in);
  }
  // A tile to GM, rounded.
  template <typename T>
  __aicore__ inline void Save(const GlobalTensor<T>& to, const LocalTensor<float>& from, uint32_t gm_pitch) {
    LocalTensor<T> out = out_.template AllocTensor<T>();
    PipeBarrier<PIPE_V>();
    NarrowTile(out, from);
    out_.EnQue(out);
    out = out_.template DeQue<T>();
    CopyOut(to, out, rows_, width_, gm_pitch, pitch_);
    out_.FreeTensor(out);
  }
  // One row of float32 to GM.
  __aicore__ inline void SavePanel(const GlobalTensor<float>& to, const LocalTensor<float>& from) {
    LocalTensor<float> out = panel_out_.template AllocTensor<float>();
    PipeBarrier<PIPE_V>();
    NarrowTile(out, from);
    panel_out_.EnQue(out);
    out = panel_out_.template DeQue<float>();
    CopyOut(to, out, 1, width_, width_, pitch_);
    panel_out_.FreeTensor(out);
  }
  // Rounded to T and widened again.
  template <typename T>
  __aicore__ inline void Round(const LocalTensor<float>& tile) {
    if constexpr (!IsSameType<T, float>::value) {
      LocalTensor<T> out = out_.template AllocTensor<T>();
      PipeBarrier<PIPE_V>();
      NarrowTile(out, tile);
      PipeBarrier<PIPE_V>();
      WidenTile(tile, out);
      out_.FreeTensor(out);
    }
  }
  // One float32 a row, from and to GM.
  __aicore__ inline void LoadVector(const LocalTensor<float>& to, const GlobalTensor<float>& from, uint32_t rows) {
    LocalTensor<float> in = vector_in_.template AllocTensor<float>();
    CopyIn(in, from, 1, rows, rows, t_.slots());
    vector_in_.EnQue(in);
    in = vector_in_.template DeQue<float>();
    PipeBarrier<PIPE_V>();
    Duplicate(to, 1.0f, t_.slots());  // rows that do not exist
    PipeBarrier<PIPE_V>();
    Muls(to, in, 1.0f, int32_t(rows));
    vector_in_.FreeTensor(in);
  }
  // The same from values that lie `stride` apart: each is a row of one value, then its block's first lane is kept.
  __aicore__ inline void LoadStrided(const LocalTensor<float>& to, const GlobalTensor<float>& from, uint32_t rows, uint32_t stride) {
    LocalTensor<float> in = in_.template AllocTensor<float>();
    CopyIn(in, from, rows, 1, stride, 8);
    in_.EnQue(in);
    in = in_.template DeQue<float>();
    PipeBarrier<PIPE_V>();
    Duplicate(to, 1.0f, t_.slots());
    PipeBarrier<PIPE_V>();
    BlockReduceMax(to, in, int32_t(rows / 8), 64, 1, 1, 8);  // eight equal values a block: the row's first element pads it
    if (rows % 8) BlockReduceMax(to[rows / 8 * 8], in[rows / 8 * 64], 1, int32_t(rows % 8 * 8), 1, 1, 8);
    in_.FreeTensor(in);
  }
  __aicore__ inline void SaveVector(const GlobalTensor<float>& to, const LocalTensor<float>& from, uint32_t rows) {
    LocalTensor<float> out = vector_out_.template AllocTensor<float>();
    PipeBarrier<PIPE_V>();
    Muls(out, from, 1.0f, int32_t(t_.slots()));
    vector_out_.EnQue(out);
    out = vector_out_.template DeQue<float>();
    CopyOut(to, out, 1, rows, rows, t_.slots());
    vector_out_.FreeTensor(out);
  }

#define TPI_TILE(NAME, STEP)                                                                                                  \
  __aicore__ inline void NAME(const LocalTensor<float>& d, const LocalTensor<float>& a, const LocalTensor<float>& b) {        \
    const uint8_t s = pitch_ / 8;                                                                                             \
    PipeBarrier<PIPE_V>();                                                                                                    \
    if (whole_) {                                                                                                             \
      STEP(d, a, b, int32_t(rows_ * pitch_));                                                                                 \
    } else {                                                                                                                  \
      for (uint32_t c = 0; c < chunks_; ++c)                                                                                  \
        STEP(d[c * 64], a[c * 64], b[c * 64], uint64_t(ChunkLanes(width_, c)), rows_, BinaryRepeatParams(1, 1, 1, s, s, s));  \
    }                                                                                                                         \
  }                                                                                                                           \
  /* b: eight equal values a row. */                                                                                          \
  __aicore__ inline void NAME##Row(const LocalTensor<float>& d, const LocalTensor<float>& a, const LocalTensor<float>& b) {   \
    const uint8_t s = pitch_ / 8;                                                                                             \
    PipeBarrier<PIPE_V>();                                                                                                    \
    for (uint32_t c = 0; c < chunks_; ++c)                                                                                    \
      STEP(d[c * 64], a[c * 64], b, uint64_t(ChunkLanes(width_, c)), rows_, BinaryRepeatParams(1, 1, 0, s, s, 1));            \
  }                                                                                                                           \
  /* b: one row for all. */                                                                                                   \
  __aicore__ inline void NAME##Across(const LocalTensor<float>& d, const LocalTensor<float>& a, const LocalTensor<float>& b) { \
    const uint8_t s = pitch_ / 8;                                                                                             \
    PipeBarrier<PIPE_V>();                                                                                                    \
    for (uint32_t c = 0; c < chunks_; ++c)                                                                                    \
      STEP(d[c * 64], a[c * 64], b[c * 64], uint64_t(ChunkLanes(width_, c)), rows_, BinaryRepeatParams(1, 1, 1, s, s, 0));    \
  }
  TPI_TILE(Plus, Add)
  TPI_TILE(Minus, Sub)
  TPI_TILE(Times, Mul)
  TPI_TILE(Over, Div)
  TPI_TILE(Larger, Max)
#undef TPI_TILE

#define TPI_SCALAR(NAME, STEP)                                                                                                 \
  __aicore__ inline void NAME(const LocalTensor<float>& d, const LocalTensor<float>& a, float x) {                             \
    PipeBarrier<PIPE_V>();                                                                                                     \
    if (whole_) {                                                                                                              \
      STEP(d, a, x, int32_t(rows_ * pitch_));                                                                                  \
    } else {                                                                                                                   \
      for (uint32_t c = 0; c < chunks_; ++c)                                                                                   \
        STEP(d[c * 64], a[c * 64], x, uint64_t(ChunkLanes(width_, c)), rows_, UnaryRepeatParams(1, 1, pitch_ / 8, pitch_ / 8)); \
    }                                                                                                                          \
  }
  TPI_SCALAR(PlusScalar, Adds)
  TPI_SCALAR(TimesScalar, Muls)
#undef TPI_SCALAR

#define TPI_UNARY(NAME, STEP)                                                                                               \
  __aicore__ inline void NAME(const LocalTensor<float>& d, const LocalTensor<float>& a) {                                   \
    PipeBarrier<PIPE_V>();                                                                                                  \
    if (whole_) {                                                                                                           \
      STEP(d, a, int32_t(rows_ * pitch_));                                                                                  \
    } else {                                                                                                                \
      for (uint32_t c = 0; c < chunks_; ++c)                                                                                \
        STEP(d[c * 64], a[c * 64], uint64_t(ChunkLanes(width_, c)), rows_, UnaryRepeatParams(1, 1, pitch_ / 8, pitch_ / 8)); \
    }                                                                                                                       \
  }
  TPI_UNARY(Exponential, Exp)
  TPI_UNARY(Logarithm, Ln)
#undef TPI_UNARY

  // 1 / (1 + exp(-a)) in d, with a tile of ones. `sum`: 1 + exp(-a).
  __aicore__ inline void Sigmoid(const LocalTensor<float>& d, const LocalTensor<float>& sum, const LocalTensor<float>& a) {
    TimesScalar(sum, a, -1.0f);
    Exponential(sum, sum);
    PlusScalar(sum, sum, 1.0f);
    Fill(d, 1.0f);
    Over(d, d, sum);
  }
  __aicore__ inline void Fill(const LocalTensor<float>& d, float x) {
    PipeBarrier<PIPE_V>();
    Duplicate(d, x, int32_t(rows_ * pitch_));
  }

  __aicore__ inline void ClearLanes(const LocalTensor<float>& lanes) {
    PipeBarrier<PIPE_V>();
    Duplicate(lanes, 0.0f, int32_t(t_.slots() * 64));
  }
  __aicore__ inline void AddToLanes(const LocalTensor<float>& lanes, const LocalTensor<float>& tile) {
    for (uint32_t c = 0; c < chunks_; ++c) {
      PipeBarrier<PIPE_V>();
      Add(lanes, lanes, tile[c * 64], uint64_t(ChunkLanes(width_, c)), rows_, BinaryRepeatParams(1, 1, 1, 8, 8, pitch_ / 8));
    }
  }
  // One value a row: the tree over its lanes.
  __aicore__ inline void SumLanes(const LocalTensor<float>& vector, const LocalTensor<float>& lanes) {
    const LocalTensor<float> part = part_buffer_.template Get<float>();
    PipeBarrier<PIPE_V>();
    BlockReduceSum(part, lanes, t_.slots(), 64, 1, 1, 8);
    PipeBarrier<PIPE_V>();
    BlockReduceSum(vector, part, t_.slots() / 8, 64, 1, 1, 8);
  }
  // Eight equal values a row.
  __aicore__ inline void SpreadRows(const LocalTensor<float>& spread, const LocalTensor<float>& vector) {
    PipeBarrier<PIPE_V>();
    Brcb(spread, vector, t_.slots() / 8, BrcbRepeatParams(1, 8));
  }

  const RowTiling t_;
  uint32_t rows_ = 0, width_ = 0, pitch_ = 0, chunks_ = 0;
  bool whole_ = false;
  TPipe pipe_;

 private:
  template <typename T>
  __aicore__ inline void WidenTile(const LocalTensor<float>& to, const LocalTensor<T>& from) {
    if (whole_) {
      if constexpr (IsSameType<T, float>::value) {
        Muls(to, from, 1.0f, int32_t(rows_ * pitch_));
      } else {
        Cast(to, from, RoundMode::CAST_NONE, rows_ * pitch_);
      }
    } else {
      for (uint32_t c = 0; c < chunks_; ++c) Widen(to[c * 64], from[c * 64], ChunkLanes(width_, c), rows_, pitch_, pitch_);
    }
  }
  template <typename T>
  __aicore__ inline void NarrowTile(const LocalTensor<T>& to, const LocalTensor<float>& from) {
    if (whole_) {
      if constexpr (IsSameType<T, float>::value) {
        Muls(to, from, 1.0f, int32_t(rows_ * pitch_));
      } else {
        Cast(to, from, RoundMode::CAST_RINT, rows_ * pitch_);
      }
    } else {
      for (uint32_t c = 0; c < chunks_; ++c) Narrow(to[c * 64], from[c * 64], ChunkLanes(width_, c), rows_, pitch_, pitch_);
    }
  }

  TQue<TPosition::VECIN, 1> in_, vector_in_;
  TQue<TPosition::VECOUT, 1> out_, vector_out_, panel_out_;
  TBuf<TPosition::VECCALC> tile_buffer_, lane_buffer_, part_buffer_, vector_buffer_, spread_buffer_;
};

}  // namespace tpi
