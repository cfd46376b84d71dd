// The vector unit: float32 arithmetic, casts, ordered reductions. Cycles by the documented throughput, 64 elements of four bytes
// a cycle (Exp, Ln, Sqrt, Div: 32), without start-up.
//
// Exp and Ln are the float32 nearest to the float64 result: a stand-in, their hardware accuracy is not documented. Rsqrt, Reciprocal, the fused
// multiply-adds and ReduceSum are left out on purpose: their rounding or order is undocumented or differs by form and generation.
#pragma once

#include "copy.h"

namespace twin {

// One operand: bytes of a tensor with block and repeat strides of 32 B.
struct Operand {
  Memory* memory;
  uint64_t base;
  uint32_t size;  // of an element
  uint32_t block, repeat;
};

// Which elements an instruction touches: `count` contiguous ones, or the masked lanes of every repeat.
struct Extent {
  bool counted;
  uint32_t count, repeats, lanes;
  std::array<uint64_t, 2> mask;

  bool Active(uint32_t lane) const { return counted || (mask[lane / 64] >> lane % 64 & 1); }
  double Cycles(uint32_t bytes) const {  // one repeat is 256 B of the wider type
    return counted ? (uint64_t(count) * bytes + 255) / 256 : repeats;
  }
};

inline Extent Counted(uint32_t count) { return {true, count, 1, count, {}}; }

inline Extent Masked(const Instruction& by, std::array<uint64_t, 2> mask, uint32_t repeats, uint32_t bytes) {
  const uint32_t lanes = 256 / bytes;
  if (lanes <= 64 && mask[1]) Fail(by, "mask has lanes beyond ", lanes);
  return {false, 0, repeats, lanes, mask};
}

inline Extent FirstLanes(const Instruction& by, uint64_t lanes, uint32_t repeats, uint32_t bytes) {
  Range(by, "mask (first lanes)", int64_t(lanes), 1, 256 / bytes);
  const uint64_t low = lanes >= 64 ? ~0ull : (1ull << lanes) - 1, high = lanes > 64 ? (lanes == 128 ? ~0ull : (1ull << (lanes - 64)) - 1) : 0;
  return Masked(by, {low, high}, repeats, bytes);
}

inline uint64_t At(const Operand& x, const Extent& extent, uint32_t repeat, uint32_t lane) {
  const uint64_t byte = uint64_t(lane) * x.size;
  if (extent.counted) return x.base + byte;
  return x.base + uint64_t(repeat) * x.repeat * kBlock + byte / kBlock * x.block * kBlock + byte % kBlock;
}

// Runs f(first byte, bytes) over the contiguous runs of an operand, one per block of each repeat.
template <typename F>
void Runs(const Operand& x, const Extent& extent, F f) {
  if (extent.counted) {
    f(x.base, uint64_t(extent.count) * x.size);
    return;
  }
  const uint32_t per_block = kBlock / x.size;
  for (uint32_t repeat = 0; repeat < extent.repeats; ++repeat)
    for (uint32_t lane = 0; lane < extent.lanes;) {
      if (!extent.Active(lane)) {
        ++lane;
        continue;
      }
      uint32_t end = lane + 1;
      while (end % per_block && end < extent.lanes && extent.Active(end)) ++end;
      f(At(x, extent, repeat, lane), uint64_t(end - lane) * x.size);
      lane = end;
    }
}

inline void ReadAll(Instruction& by, const Operand& x, const Extent& extent) {
  Runs(x, extent, [&](uint64_t at, uint64_t bytes) {
    by.Read(*x.memory, at, bytes);
    by.Defined(*x.memory, at, bytes);
  });
}

inline void WriteAll(Instruction& by, const Operand& x, const Extent& extent) {
  if (!extent.counted && extent.repeats > 1 && x.repeat == 0)
    Fail(by, "writes the same block in every repeat: the repeats of one instruction are not ordered");
  if (!extent.counted && x.block == 0) Fail(by, "has a destination block stride of 0");
  Runs(x, extent, [&](uint64_t at, uint64_t bytes) {
    by.Write(*x.memory, at, bytes);
    std::memset(x.memory->written.data() + at, 1, bytes);
  });
}

// Source and destination are the same elements or share no block.
inline void Disjoint(const Instruction& by, const Operand& dst, const Operand& src, const Extent& extent) {
  if (dst.memory != src.memory) return;
  if (dst.base == src.base && dst.size == src.size && (extent.counted || ((dst.block == src.block || extent.lanes * dst.size <= kBlock) &&
                                                                         (dst.repeat == src.repeat || extent.repeats == 1))))
    return;
  std::vector<uint8_t> blocks(dst.memory->size / kBlock + 1);
  Runs(dst, extent, [&](uint64_t at, uint64_t bytes) {
    for (uint64_t block = at / kBlock; block * kBlock < at + bytes; ++block) blocks[block] = 1;
  });
  Runs(src, extent, [&](uint64_t at, uint64_t bytes) {
    for (uint64_t block = at / kBlock; block * kBlock < at + bytes; ++block)
      if (blocks[block]) Fail(by, "overlaps: source and destination share ", dst.memory->name, " at byte ", block * kBlock, " but are not the same range");
  });
}

template <typename T>
Operand OperandOf(Instruction& by, const AscendC::LocalTensor<T>& x, const Extent& extent, uint32_t block, uint32_t repeat) {
  if (core().cube) Fail(by, "is a vector instruction on a cube core");
  Operand operand{nullptr, x.Check(by, 0, 0, kBlock), sizeof(T), block, repeat};
  operand.memory = &x.memory();
  uint64_t end = operand.base;
  Runs(operand, extent, [&](uint64_t at, uint64_t bytes) { end = std::max(end, at + bytes); });
  x.Check(by, 0, end - operand.base, kBlock);
  return operand;
}

template <typename T>
T Load(const Operand& x, uint64_t at) {
  T value;
  std::memcpy(&value, x.memory->data + at, sizeof(T));
  return value;
}
template <typename T>
void Store(const Operand& x, uint64_t at, T value) {
  std::memcpy(x.memory->data + at, &value, sizeof(T));
}

template <typename F>
void Elements(const Extent& extent, F f) {
  for (uint32_t repeat = 0; repeat < extent.repeats; ++repeat)
    for (uint32_t lane = 0; lane < extent.lanes; ++lane)
      if (extent.Active(lane)) f(repeat, lane);
}

template <typename F>
void Binary(Instruction& by, const AscendC::LocalTensor<float>& dst, const AscendC::LocalTensor<float>& a, const AscendC::LocalTensor<float>& b,
            const Extent& extent, const AscendC::BinaryRepeatParams& p, double cost, F f) {
  const Operand to = OperandOf(by, dst, extent, p.dstBlkStride, p.dstRepStride);
  const Operand left = OperandOf(by, a, extent, p.src0BlkStride, p.src0RepStride);
  const Operand right = OperandOf(by, b, extent, p.src1BlkStride, p.src1RepStride);
  ReadAll(by, left, extent);
  ReadAll(by, right, extent);
  Disjoint(by, to, left, extent);
  Disjoint(by, to, right, extent);
  WriteAll(by, to, extent);
  Elements(extent, [&](uint32_t r, uint32_t i) {
    Store(to, At(to, extent, r, i), Canonical(f(Load<float>(left, At(left, extent, r, i)), Load<float>(right, At(right, extent, r, i)))));
  });
  by.Finish(extent.Cycles(4) * cost);
}

template <typename T, typename U, typename F>
void Unary(Instruction& by, const AscendC::LocalTensor<T>& dst, const AscendC::LocalTensor<U>& src, const Extent& extent,
           const AscendC::UnaryRepeatParams& p, double cost, F f) {
  const Operand to = OperandOf(by, dst, extent, p.dstBlkStride, p.dstRepStride);
  const Operand from = OperandOf(by, src, extent, p.srcBlkStride, p.srcRepStride);
  ReadAll(by, from, extent);
  Disjoint(by, to, from, extent);
  WriteAll(by, to, extent);
  Elements(extent, [&](uint32_t r, uint32_t i) { Store<T>(to, At(to, extent, r, i), f(Load<U>(from, At(from, extent, r, i)))); });
  by.Finish(extent.Cycles(std::max(sizeof(T), sizeof(U))) * cost);
}

inline float Maximum(float a, float b) {  // NaN wins; +0 is larger than -0
  if (a != a || b != b) return Canonical(NAN);
  return a > b || (a == b && !std::signbit(a)) ? a : b;
}
inline float Minimum(float a, float b) { return -Maximum(-a, -b); }

// Adjacent pairs, again and again.
template <typename F>
float Tree(float* x, uint32_t n, F f) {
  for (; n > 1; n /= 2)
    for (uint32_t i = 0; i < n / 2; ++i) x[i] = Canonical(f(x[2 * i], x[2 * i + 1]));
  return x[0];
}

// Every `width` lanes of a repeat become one value. `dst_repeat` counts values. A group that is only partly masked has no documented
// result; one that is masked off is not written.
template <typename F>
void Reduce(Instruction& by, const AscendC::LocalTensor<float>& dst, const AscendC::LocalTensor<float>& src, uint32_t repeats, uint64_t mask,
            uint32_t width, uint32_t dst_repeat, uint32_t block, uint32_t repeat, F f) {
  Range(by, "repeatTime", repeats, 0, 255);
  const Extent extent = FirstLanes(by, mask, repeats, 4);
  if (mask % width) Fail(by, "mask = ", mask, " lanes ends inside a group of ", width, ": what the missing lanes count for is not documented");
  const Operand from = OperandOf(by, src, extent, block, repeat);
  ReadAll(by, from, extent);
  const uint32_t groups = uint32_t(mask) / width;
  for (uint32_t r = 0; r < repeats; ++r)
    for (uint32_t g = 0; g < groups; ++g) {
      float x[64];
      for (uint32_t i = 0; i < width; ++i) x[i] = Load<float>(from, At(from, extent, r, g * width + i));
      const uint64_t to = dst.Check(by, (uint64_t(r) * dst_repeat + g) * 4, 4, 4);
      for (uint32_t i = 0; i < width; ++i)
        if (&dst.memory() == from.memory && At(from, extent, r, g * width + i) / kBlock == to / kBlock && (r || dst.offset() != src.offset()))
          Fail(by, "overlaps: source and destination share a block");
      by.Write(dst.memory(), to, 4);
      const float value = Tree(x, width, f);
      std::memcpy(dst.memory().data + to, &value, 4);
      std::memset(dst.memory().written.data() + to, 1, 4);
    }
}

inline float Plus(float a, float b) { return a + b; }

}  // namespace twin

namespace AscendC {

#define TWIN_BINARY(NAME, COST, EXPRESSION)                                                                                     \
  template <typename T>                                                                                                         \
  void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, const int32_t& count,            \
            int line = __builtin_LINE()) {                                                                                      \
    twin::Instruction by(#NAME, PIPE_V, line);                                                                                  \
    twin::Binary(by, dst, src0, src1, twin::Counted(count), {}, COST, [](float a, float b) { return EXPRESSION; });             \
  }                                                                                                                             \
  template <typename T, bool isSetMask = true>                                                                                  \
  void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, uint64_t mask,                   \
            const uint8_t repeatTime, const BinaryRepeatParams& p, int line = __builtin_LINE()) {                               \
    twin::Instruction by(#NAME, PIPE_V, line);                                                                                  \
    twin::Binary(by, dst, src0, src1, twin::FirstLanes(by, mask, repeatTime, 4), p, COST,                                       \
                 [](float a, float b) { return EXPRESSION; });                                                                  \
  }
TWIN_BINARY(Add, 1, a + b)
TWIN_BINARY(Sub, 1, a - b)
TWIN_BINARY(Mul, 1, a* b)
TWIN_BINARY(Div, 2, a / b)
TWIN_BINARY(Max, 1, twin::Maximum(a, b))
TWIN_BINARY(Min, 1, twin::Minimum(a, b))
#undef TWIN_BINARY

#define TWIN_SCALAR(NAME, EXPRESSION)                                                                                           \
  template <typename T, bool isSetMask = true>                                                                                  \
  void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& s, const int32_t& count,                             \
            int line = __builtin_LINE()) {                                                                                      \
    twin::Instruction by(#NAME, PIPE_V, line);                                                                                  \
    twin::Unary(by, dst, src, twin::Counted(count), {}, 1, [s](float a) { return twin::Canonical(EXPRESSION); });               \
  }                                                                                                                             \
  template <typename T, bool isSetMask = true>                                                                                  \
  void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& s, uint64_t mask, const uint8_t repeatTime,          \
            const UnaryRepeatParams& p, int line = __builtin_LINE()) {                                                          \
    twin::Instruction by(#NAME, PIPE_V, line);                                                                                  \
    twin::Unary(by, dst, src, twin::FirstLanes(by, mask, repeatTime, 4), p, 1,                                                  \
                [s](float a) { return twin::Canonical(EXPRESSION); });                                                          \
  }
TWIN_SCALAR(Adds, a + s)
TWIN_SCALAR(Muls, a* s)
TWIN_SCALAR(Maxs, twin::Maximum(a, s))
TWIN_SCALAR(Mins, twin::Minimum(a, s))
#undef TWIN_SCALAR

#define TWIN_UNARY(NAME, COST, EXPRESSION)                                                                                      \
  template <typename T>                                                                                                         \
  void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src, const int32_t& count, int line = __builtin_LINE()) {          \
    twin::Instruction by(#NAME, PIPE_V, line);                                                                                  \
    twin::Unary(by, dst, src, twin::Counted(count), {}, COST, [](float a) { return twin::Canonical(EXPRESSION); });             \
  }                                                                                                                             \
  template <typename T, bool isSetMask = true>                                                                                  \
  void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src, uint64_t mask, const uint8_t repeatTime,                      \
            const UnaryRepeatParams& p, int line = __builtin_LINE()) {                                                          \
    twin::Instruction by(#NAME, PIPE_V, line);                                                                                  \
    twin::Unary(by, dst, src, twin::FirstLanes(by, mask, repeatTime, 4), p, COST,                                               \
                [](float a) { return twin::Canonical(EXPRESSION); });                                                           \
  }
TWIN_UNARY(Exp, 2, float(std::exp(double(a))))
TWIN_UNARY(Ln, 2, float(std::log(double(a))))
TWIN_UNARY(Sqrt, 2, std::sqrt(a))
TWIN_UNARY(Abs, 1, std::fabs(a))
#undef TWIN_UNARY

namespace twin_detail {
template <typename T, typename U>
void CastWith(twin::Instruction& by, const LocalTensor<T>& dst, const LocalTensor<U>& src, RoundMode mode, const twin::Extent& extent,
              const UnaryRepeatParams& p) {
  static_assert(std::is_same_v<T, float> != std::is_same_v<U, float>, "the twin casts between float and a 16-bit type");
  if ((mode == RoundMode::CAST_NONE) != std::is_same_v<T, float>)
    twin::Fail(by, "widening is CAST_NONE and narrowing CAST_RINT");
  bool in_range = true;
  twin::Unary(by, dst, src, extent, p, 1, [&](U x) { return twin::Rounded<T>(twin::Value(x), in_range); });
  if (!in_range) twin::Fail(by, "narrows a value that is not finite or overflows: the result depends on CTRL[48]");
}
}  // namespace twin_detail

template <typename T, typename U>
void Cast(const LocalTensor<T>& dst, const LocalTensor<U>& src, const RoundMode& mode, const uint32_t count, int line = __builtin_LINE()) {
  twin::Instruction by("Cast", PIPE_V, line);
  twin_detail::CastWith(by, dst, src, mode, twin::Counted(count), {});
}
template <typename T, typename U, bool isSetMask = true>
void Cast(const LocalTensor<T>& dst, const LocalTensor<U>& src, const RoundMode& mode, const uint64_t mask, const uint8_t repeatTime,
          const UnaryRepeatParams& p, int line = __builtin_LINE()) {
  twin::Instruction by("Cast", PIPE_V, line);
  twin_detail::CastWith(by, dst, src, mode, twin::FirstLanes(by, mask, repeatTime, 4), p);
}

template <typename T>
void Duplicate(const LocalTensor<T>& dst, const T& value, const int32_t& count, int line = __builtin_LINE()) {
  twin::Instruction by("Duplicate", PIPE_V, line);
  const twin::Extent extent = twin::Counted(count);
  const twin::Operand to = twin::OperandOf(by, dst, extent, 1, 8);
  twin::WriteAll(by, to, extent);
  twin::Elements(extent, [&](uint32_t r, uint32_t i) { twin::Store(to, twin::At(to, extent, r, i), value); });
  by.Finish(extent.Cycles(sizeof(T)));
}

// Eight scalars fill eight blocks.
template <typename T>
void Brcb(const LocalTensor<T>& dst, const LocalTensor<T>& src, const uint8_t repeatTime, const BrcbRepeatParams& p,
          int line = __builtin_LINE()) {
  static_assert(sizeof(T) == 4, "the twin offers Brcb of 32-bit types");
  twin::Instruction by("Brcb", PIPE_V, line);
  const twin::Extent to_lanes = twin::FirstLanes(by, 64, repeatTime, 4), from_lanes = twin::FirstLanes(by, 8, repeatTime, 4);
  const twin::Operand to = twin::OperandOf(by, dst, to_lanes, p.dstBlkStride, p.dstRepStride);
  const twin::Operand from = twin::OperandOf(by, src, from_lanes, 1, 1);
  twin::ReadAll(by, from, from_lanes);
  twin::WriteAll(by, to, to_lanes);
  twin::Elements(to_lanes, [&](uint32_t r, uint32_t i) { twin::Store(to, twin::At(to, to_lanes, r, i), twin::Load<T>(from, twin::At(from, from_lanes, r, i / 8))); });
  by.Finish(repeatTime);
}

// Reductions: trees over adjacent pairs. Note the order of the arguments: (repeatTime, mask) here, (mask, repeatTime) in Whole*.
#define TWIN_REDUCE_BLOCK(NAME, FUNCTION)                                                                                       \
  template <typename T, bool isSetMask = true>                                                                                  \
  void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src, const int32_t repeatTime, const int32_t mask,                 \
            const int32_t dstRepStride, const int32_t srcBlkStride, const int32_t srcRepStride, int line = __builtin_LINE()) {  \
    twin::Instruction by(#NAME, PIPE_V, line);                                                                                  \
    twin::Reduce(by, dst, src, repeatTime, mask, 8, dstRepStride * 8, srcBlkStride, srcRepStride, FUNCTION);                    \
    by.Finish(repeatTime);                                                                                                      \
  }
TWIN_REDUCE_BLOCK(BlockReduceSum, twin::Plus)
TWIN_REDUCE_BLOCK(BlockReduceMax, twin::Maximum)
TWIN_REDUCE_BLOCK(BlockReduceMin, twin::Minimum)
#undef TWIN_REDUCE_BLOCK

template <typename T, bool isSetMask = true>
void PairReduceSum(const LocalTensor<T>& dst, const LocalTensor<T>& src, const int32_t repeatTime, const int32_t mask,
                   const int32_t dstRepStride, const int32_t srcBlkStride, const int32_t srcRepStride, int line = __builtin_LINE()) {
  twin::Instruction by("PairReduceSum", PIPE_V, line);
  twin::Reduce(by, dst, src, repeatTime, mask, 2, dstRepStride * 32, srcBlkStride, srcRepStride, twin::Plus);
  by.Finish(repeatTime);
}

template <typename T, bool isSetMask = true>
void WholeReduceSum(const LocalTensor<T>& dst, const LocalTensor<T>& src, const int32_t mask, const int32_t repeatTime,
                    const int32_t dstRepStride, const int32_t srcBlkStride, const int32_t srcRepStride, int line = __builtin_LINE()) {
  twin::Instruction by("WholeReduceSum", PIPE_V, line);
  twin::Reduce(by, dst, src, repeatTime, mask, 64, dstRepStride, srcBlkStride, srcRepStride, twin::Plus);
  by.Finish(repeatTime * 7);
}

}  // namespace AscendC
