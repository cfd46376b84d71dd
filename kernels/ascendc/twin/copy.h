// Copies between GM and the memories of a core.
#pragma once

#include "tensor.h"

namespace twin {

// Copies bytes with what is known of them; `from` may be an input, which is all written.
inline void CopyBytes(Memory& to, uint64_t to_byte, const Memory& from, uint64_t from_byte, uint64_t bytes) {
  std::memcpy(to.data + to_byte, from.data + from_byte, bytes);
  if (to.written.empty()) return;
  if (from.written.empty())
    std::memset(to.written.data() + to_byte, 1, bytes);
  else
    std::memcpy(to.written.data() + to_byte, from.written.data() + from_byte, bytes);
}

inline void Range(const Instruction& by, const char* field, int64_t value, int64_t low, int64_t high) {
  if (value < low || value > high) Fail(by, field, " = ", value, " is outside ", low, " to ", high);
}

inline double& GmReadCounter() { return core().cube ? core().counts.gm_to_l1 : core().counts.gm_to_ub; }

}  // namespace twin

namespace AscendC {

template <typename T>
void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const DataCopyParams& p, int line = __builtin_LINE()) {
  twin::Instruction by("DataCopy", PIPE_MTE2, line);
  twin::Range(by, "blockCount", p.blockCount, 1, 4095);
  for (uint32_t row = 0; row < p.blockCount; ++row) {
    const uint64_t bytes = p.blockLen * 32ull;
    auto [memory, from] = src.Check(by, row * uint64_t(p.blockLen + p.srcStride) * 32 / sizeof(T), bytes / sizeof(T));
    const uint64_t to = dst.Check(by, row * uint64_t(p.blockLen + p.dstStride) * 32, bytes, 32);
    by.Read(*memory, from, bytes);
    by.Defined(*memory, from, bytes);
    by.Write(dst.memory(), to, bytes);
    twin::CopyBytes(dst.memory(), to, *memory, from, bytes);
  }
  const double total = p.blockCount * p.blockLen * 32.0;
  twin::GmReadCounter() += total;
  by.Finish(total / twin::kGmRead);
}

template <typename T>
void DataCopy(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyParams& p, int line = __builtin_LINE()) {
  twin::Instruction by("DataCopy", PIPE_MTE3, line);
  twin::Range(by, "blockCount", p.blockCount, 1, 4095);
  for (uint32_t row = 0; row < p.blockCount; ++row) {
    const uint64_t bytes = p.blockLen * 32ull;
    const uint64_t from = src.Check(by, row * uint64_t(p.blockLen + p.srcStride) * 32, bytes, 32);
    auto [memory, to] = dst.Check(by, row * uint64_t(p.blockLen + p.dstStride) * 32 / sizeof(T), bytes / sizeof(T));
    by.Read(src.memory(), from, bytes);
    by.Defined(src.memory(), from, bytes);
    by.Write(*memory, to, bytes);
    twin::CopyBytes(*memory, to, src.memory(), from, bytes);
  }
  const double total = p.blockCount * p.blockLen * 32.0;
  twin::core().counts.ub_to_gm += total;
  by.Finish(total / twin::kUbToGm);
}

namespace twin_detail {
template <typename T>
DataCopyParams Whole(uint32_t count) {
  const uint64_t bytes = uint64_t(count) * sizeof(T);
  if (bytes % 32) twin::Fail(twin::core().Where(), ": DataCopy of ", count, " elements is ", bytes, " bytes, which the hardware cuts to a multiple of 32; use DataCopyPad");
  if (bytes / 32 > 65535) twin::Fail(twin::core().Where(), ": DataCopy of ", bytes, " bytes; at most 65,535 blocks of 32");
  return {1, uint16_t(bytes / 32), 0, 0};
}
}  // namespace twin_detail

template <typename T>
void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, uint32_t count, int line = __builtin_LINE()) {
  DataCopy(dst, src, twin_detail::Whole<T>(count), line);
}
template <typename T>
void DataCopy(const GlobalTensor<T>& dst, const LocalTensor<T>& src, uint32_t count, int line = __builtin_LINE()) {
  DataCopy(dst, src, twin_detail::Whole<T>(count), line);
}

// Rows of any length. In UB each starts on a block; its tail up to the block is paddingValue (isPad), the row's first element
// (no paddings), or undefined.
template <typename T>
void DataCopyPad(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const DataCopyExtParams& p, const DataCopyPadExtParams<T>& pad,
                 int line = __builtin_LINE()) {
  twin::Instruction by("DataCopyPad", PIPE_MTE2, line);
  twin::Range(by, "blockCount", p.blockCount, 1, 4095);
  twin::Range(by, "blockLen", p.blockLen, 1, 2097151);
  twin::Range(by, "leftPadding in bytes", pad.leftPadding * sizeof(T), 0, 32);
  twin::Range(by, "rightPadding in bytes", pad.rightPadding * sizeof(T), 0, 32);
  if (p.blockLen % sizeof(T) || p.srcStride % sizeof(T)) twin::Fail(by, "blockLen and srcStride are bytes of whole elements");
  const uint64_t left = pad.leftPadding * sizeof(T), used = left + p.blockLen + pad.rightPadding * sizeof(T);
  const uint64_t rounded = (used + 31) / 32 * 32, pitch = rounded + p.dstStride * 32ull;
  for (uint32_t row = 0; row < p.blockCount; ++row) {
    auto [memory, from] = src.Check(by, row * uint64_t(p.blockLen + p.srcStride) / sizeof(T), p.blockLen / sizeof(T));
    const uint64_t to = dst.Check(by, row * pitch, rounded, 32);
    by.Read(*memory, from, p.blockLen);
    by.Defined(*memory, from, p.blockLen);
    by.Write(dst.memory(), to, rounded);
    dst.memory().Poison(to, rounded);
    twin::CopyBytes(dst.memory(), to + left, *memory, from, p.blockLen);
    if (!pad.isPad && (pad.leftPadding || pad.rightPadding)) continue;
    T value = pad.paddingValue;
    if (!pad.isPad) std::memcpy(&value, memory->data + from, sizeof(T));
    for (uint64_t at = 0; at < rounded; at += sizeof(T)) {
      if (at >= left && at < left + p.blockLen) continue;
      std::memcpy(dst.memory().data + to + at, &value, sizeof(T));
      std::memset(dst.memory().written.data() + to + at, 1, sizeof(T));
    }
  }
  const double total = double(p.blockCount) * p.blockLen;
  twin::GmReadCounter() += total;
  by.Finish(total / twin::kGmRead);
}

template <typename T>
void DataCopyPad(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyExtParams& p, int line = __builtin_LINE()) {
  twin::Instruction by("DataCopyPad", PIPE_MTE3, line);
  twin::Range(by, "blockCount", p.blockCount, 1, 4095);
  twin::Range(by, "blockLen", p.blockLen, 1, 2097151);
  if (p.blockLen % sizeof(T) || p.dstStride % sizeof(T)) twin::Fail(by, "blockLen and dstStride are bytes of whole elements");
  const uint64_t pitch = (uint64_t(p.blockLen) + 31) / 32 * 32 + p.srcStride * 32ull;
  for (uint32_t row = 0; row < p.blockCount; ++row) {
    const uint64_t from = src.Check(by, row * pitch, p.blockLen, 32);
    auto [memory, to] = dst.Check(by, row * uint64_t(p.blockLen + p.dstStride) / sizeof(T), p.blockLen / sizeof(T));
    by.Read(src.memory(), from, p.blockLen);
    by.Defined(src.memory(), from, p.blockLen);
    by.Write(*memory, to, p.blockLen);
    twin::CopyBytes(*memory, to, src.memory(), from, p.blockLen);
  }
  const double total = double(p.blockCount) * p.blockLen;
  twin::core().counts.ub_to_gm += total;
  by.Finish(total / twin::kUbToGm);
}

// Row-major GM to the cube's NZ in L1: columns in groups of one block (C0 elements), rows inside a group. The last group's
// missing columns become zeros; missing rows stay as they were.
template <typename T>
void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const Nd2NzParams& p, int line = __builtin_LINE()) {
  twin::Instruction by("DataCopy Nd2Nz", PIPE_MTE2, line);
  if (!twin::core().cube) twin::Fail(by, "is for L1");
  twin::Range(by, "ndNum", p.ndNum, 0, 4095);
  twin::Range(by, "nValue", p.nValue, 0, 16384);
  constexpr uint32_t c0 = 32 / sizeof(T);
  for (uint32_t nd = 0; nd < p.ndNum; ++nd)
    for (uint32_t row = 0; row < p.nValue; ++row)
      for (uint32_t column = 0; column < p.dValue; column += c0) {
        const uint64_t bytes = std::min(c0, p.dValue - column) * sizeof(T);
        auto [memory, from] = src.Check(by, uint64_t(nd) * p.srcNdMatrixStride + uint64_t(row) * p.srcDValue + column, bytes / sizeof(T));
        const uint64_t block = uint64_t(column / c0) * p.dstNzC0Stride + uint64_t(row) * p.dstNzNStride;
        const uint64_t to = dst.Check(by, uint64_t(nd) * p.dstNzMatrixStride * sizeof(T) + block * 32, 32, 32);
        by.Read(*memory, from, bytes);
        by.Defined(*memory, from, bytes);
        by.Write(dst.memory(), to, 32);
        twin::CopyBytes(dst.memory(), to, *memory, from, bytes);
        std::memset(dst.memory().data + to + bytes, 0, 32 - bytes);
        std::memset(dst.memory().written.data() + to + bytes, 1, 32 - bytes);
      }
  const double total = double(p.ndNum) * p.nValue * p.dValue * sizeof(T);
  twin::core().counts.gm_to_l1 += total;
  by.Finish(total / twin::kGmRead);
}

}  // namespace AscendC
