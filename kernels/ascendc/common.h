// What several kernels share.
#pragma once

#include "kernel_operator.h"

namespace tpi {

using namespace AscendC;

// Columns of chunk `i` of a row: the vector unit takes 64 float32 at a time.
__aicore__ inline uint32_t ChunkLanes(uint32_t columns, uint32_t i) { return columns - i * 64 < 64 ? columns - i * 64 : 64; }

// 64 columns of `rows` rows from T to float32, exactly. Strides between rows in elements.
template <typename T>
__aicore__ inline void Widen(const LocalTensor<float>& dst, const LocalTensor<T>& src, uint64_t lanes, uint8_t rows, uint32_t dst_pitch,
                             uint32_t src_pitch) {
  const UnaryRepeatParams p(1, 1, dst_pitch / 8, src_pitch * sizeof(T) / 32);
  if constexpr (IsSameType<T, float>::value) {
    Muls(dst, src, 1.0f, lanes, rows, p);  // times 1 keeps the sign of zero, plus 0 would not
  } else {
    Cast(dst, src, RoundMode::CAST_NONE, lanes, rows, p);
  }
}

// The same from float32 to T, rounded half to even.
template <typename T>
__aicore__ inline void Narrow(const LocalTensor<T>& dst, const LocalTensor<float>& src, uint64_t lanes, uint8_t rows, uint32_t dst_pitch,
                              uint32_t src_pitch) {
  const UnaryRepeatParams p(1, 1, dst_pitch * sizeof(T) / 32, src_pitch / 8);
  if constexpr (IsSameType<T, float>::value) {
    Muls(dst, src, 1.0f, lanes, rows, p);
  } else {
    Cast(dst, src, RoundMode::CAST_RINT, lanes, rows, p);
  }
}

// `rows` rows of `columns` elements, `gm_pitch` apart in GM and `ub_pitch` apart in UB (a multiple of 32 bytes).
template <typename T>
__aicore__ inline void CopyIn(const LocalTensor<T>& dst, const GlobalTensor<T>& src, uint32_t rows, uint32_t columns, uint32_t gm_pitch,
                              uint32_t ub_pitch) {
  const uint32_t gap = (ub_pitch * sizeof(T) - (columns * sizeof(T) + 31) / 32 * 32) / 32;
  DataCopyPad(dst, src, DataCopyExtParams(rows, columns * sizeof(T), (gm_pitch - columns) * sizeof(T), gap, 0),
              DataCopyPadExtParams<T>(false, 0, 0, T{}));
}
template <typename T>
__aicore__ inline void CopyOut(const GlobalTensor<T>& dst, const LocalTensor<T>& src, uint32_t rows, uint32_t columns, uint32_t gm_pitch,
                               uint32_t ub_pitch) {
  const uint32_t gap = (ub_pitch * sizeof(T) - (columns * sizeof(T) + 31) / 32 * 32) / 32;
  DataCopyPad(dst, src, DataCopyExtParams(rows, columns * sizeof(T), gap, (gm_pitch - columns) * sizeof(T), 0));
}

}  // namespace tpi
