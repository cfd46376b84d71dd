// Names, enumerations and parameter structs of AscendC that our kernels use (CANN 8.5 and later, Atlas A2/A3), for a plain C++
// compiler. Field names, constructors and units are the API's; what a field means is said where it is used.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#define __global__
#define __aicore__
#define __gm__
#define GM_ADDR uint8_t*

// Storage types: the vector unit has no arithmetic for them, so neither do they here. Only Cast and the cube read them.
struct half {
  uint16_t bits;
};
struct bfloat16_t {
  uint16_t bits;
};

enum pipe_t { PIPE_S = 0, PIPE_V, PIPE_M, PIPE_MTE1, PIPE_MTE2, PIPE_MTE3, PIPE_ALL, PIPE_FIX = 10 };
enum class QuantMode_t { NoQuant, F322F16, F322BF16 };

namespace AscendC {

enum class TPosition : uint8_t { GM, A1, A2, B1, B2, C1, C2, CO1, CO2, VECIN, VECOUT, VECCALC };
using QuePosition = TPosition;

enum class HardEvent : uint8_t {
  MTE2_V, V_MTE2, V_MTE3, MTE3_V, MTE3_MTE2, MTE2_MTE3, MTE2_MTE1, MTE1_MTE2, MTE1_M, M_MTE1, M_FIX, FIX_M,
  S_V, V_S, S_MTE2, MTE2_S, S_MTE3, MTE3_S, COUNT
};

template <typename A, typename B>
using IsSameType = std::is_same<A, B>;

enum class RoundMode { CAST_NONE, CAST_RINT };

struct UnaryRepeatParams {
  UnaryRepeatParams() = default;
  UnaryRepeatParams(uint16_t dst_block, uint16_t src_block, uint8_t dst_repeat, uint8_t src_repeat)
      : dstBlkStride(dst_block), srcBlkStride(src_block), dstRepStride(dst_repeat), srcRepStride(src_repeat) {}
  uint16_t dstBlkStride = 1, srcBlkStride = 1;  // 32 B
  uint8_t dstRepStride = 8, srcRepStride = 8;
};

struct BinaryRepeatParams {
  BinaryRepeatParams() = default;
  BinaryRepeatParams(uint8_t dst_block, uint8_t src0_block, uint8_t src1_block, uint8_t dst_repeat, uint8_t src0_repeat,
                     uint8_t src1_repeat)
      : dstBlkStride(dst_block), src0BlkStride(src0_block), src1BlkStride(src1_block), dstRepStride(dst_repeat),
        src0RepStride(src0_repeat), src1RepStride(src1_repeat) {}
  uint8_t dstBlkStride = 1, src0BlkStride = 1, src1BlkStride = 1;  // 32 B; 0 reads the same block again
  uint8_t dstRepStride = 8, src0RepStride = 8, src1RepStride = 8;
};

struct BrcbRepeatParams {
  BrcbRepeatParams() = default;
  BrcbRepeatParams(uint16_t dst_block, uint16_t dst_repeat) : dstBlkStride(dst_block), dstRepStride(dst_repeat) {}
  uint16_t dstBlkStride = 1, dstRepStride = 8;
};

struct DataCopyParams {
  DataCopyParams() = default;
  DataCopyParams(uint16_t count, uint16_t length, uint16_t src, uint16_t dst)
      : blockCount(count), blockLen(length), srcStride(src), dstStride(dst) {}
  uint16_t blockCount = 1, blockLen = 0, srcStride = 0, dstStride = 0;  // lengths and gaps of 32 B
};

struct DataCopyExtParams {
  DataCopyExtParams() = default;
  DataCopyExtParams(uint16_t count, uint32_t length, uint32_t src, uint32_t dst, uint32_t reserved)
      : blockCount(count), blockLen(length), srcStride(src), dstStride(dst), rsv(reserved) {}
  uint16_t blockCount = 1;
  uint32_t blockLen = 0, srcStride = 0, dstStride = 0, rsv = 0;  // bytes in GM; gaps in UB of 32 B
};

template <typename T>
struct DataCopyPadExtParams {
  DataCopyPadExtParams() = default;
  DataCopyPadExtParams(bool pad, uint8_t left, uint8_t right, T value)
      : isPad(pad), leftPadding(left), rightPadding(right), paddingValue(value) {}
  bool isPad = false;
  uint8_t leftPadding = 0, rightPadding = 0;  // elements
  T paddingValue = {};
};

struct Nd2NzParams {
  Nd2NzParams() = default;
  Nd2NzParams(uint16_t nd, uint16_t n, uint16_t d, uint16_t src_matrix, uint16_t src_d, uint16_t c0, uint16_t n_stride,
              uint16_t dst_matrix)
      : ndNum(nd), nValue(n), dValue(d), srcNdMatrixStride(src_matrix), srcDValue(src_d), dstNzC0Stride(c0),
        dstNzNStride(n_stride), dstNzMatrixStride(dst_matrix) {}
  uint16_t ndNum = 0, nValue = 0, dValue = 0, srcNdMatrixStride = 0, srcDValue = 0;  // rows, columns, elements
  uint16_t dstNzC0Stride = 0, dstNzNStride = 0, dstNzMatrixStride = 0;               // 32 B, 32 B, elements
};

struct LoadData2DParams {
  LoadData2DParams() = default;
  LoadData2DParams(uint16_t start, uint8_t repeat, uint16_t src, uint8_t id, uint16_t dst, bool transpose, uint8_t mode)
      : startIndex(start), dstGap(dst), srcStride(src), ifTranspose(transpose), repeatTimes(repeat), sid(id), addrMode(mode) {}
  uint16_t startIndex = 0, dstGap = 0, srcStride = 0;  // fractals of 512 B
  bool ifTranspose = false;
  uint8_t repeatTimes = 0, sid = 0, addrMode = 0;
};

struct MmadParams {
  MmadParams() = default;
  MmadParams(uint16_t rows, uint16_t columns, uint16_t depth, uint8_t unit, bool source, bool init)
      : m(rows), n(columns), k(depth), unitFlag(unit), cmatrixSource(source), cmatrixInitVal(init) {}
  uint16_t m = 0, n = 0, k = 0;
  uint8_t unitFlag = 0;
  bool cmatrixSource = false, cmatrixInitVal = true;
};

struct FixpipeParamsV220 {
  FixpipeParamsV220() = default;
  FixpipeParamsV220(uint16_t columns, uint16_t rows, uint16_t src, uint32_t dst, bool relu)
      : nSize(columns), mSize(rows), srcStride(src), dstStride(dst), reluEn(relu) {}
  uint16_t nSize = 0, mSize = 0, srcStride = 0;  // srcStride: rows of the L0C tile
  uint32_t dstStride = 0;                        // row-major: elements
  bool reluEn = false;
  QuantMode_t quantPre = QuantMode_t::NoQuant;
  int64_t deqScalar = 0;
  uint16_t ndNum = 1, srcNdStride = 0, dstNdStride = 0;
  uint8_t unitFlag = 0;
};

}  // namespace AscendC

namespace twin {

inline float Canonical(float x) { return x != x ? std::numeric_limits<float>::quiet_NaN() : x; }

inline float FromBits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

inline uint32_t Bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

inline float Value(float x) { return x; }
inline float Value(bfloat16_t x) { return FromBits(uint32_t(x.bits) << 16); }
inline float Value(half x) {
  const uint32_t sign = uint32_t(x.bits & 0x8000) << 16, exponent = x.bits >> 10 & 31, fraction = x.bits & 0x3ff;
  if (exponent == 31) return FromBits(sign | 0x7f800000 | fraction << 13);
  const float magnitude = exponent ? std::ldexp(float(fraction | 0x400), int(exponent) - 25) : std::ldexp(float(fraction), -24);
  return sign ? -magnitude : magnitude;
}

// Round half to even. `in_range` becomes false where the result would depend on the saturation mode (CTRL[48]): an input that is
// not finite, or an overflow.
template <typename T>
T Rounded(float x, bool& in_range);
template <>
inline float Rounded<float>(float x, bool&) {
  return Canonical(x);
}
template <>
inline bfloat16_t Rounded<bfloat16_t>(float x, bool& in_range) {
  const uint32_t bits = Bits(x), rounded = bits + 0x7fff + (bits >> 16 & 1);
  in_range = in_range && (bits & 0x7f800000) != 0x7f800000 && (rounded & 0x7f800000) != 0x7f800000;
  return {uint16_t(rounded >> 16)};
}
template <>
inline half Rounded<half>(float x, bool& in_range) {
  const float magnitude = std::fabs(x);
  in_range = in_range && magnitude < 65520.0f;
  if (!in_range) return {0};
  int exponent;
  std::frexp(magnitude, &exponent);
  const int unit = (exponent < -13 ? -13 : exponent) - 11;  // weight of the last bit
  const uint32_t steps = uint32_t(std::nearbyint(std::ldexp(magnitude, -unit)));
  // Adding the steps to the exponent field carries into the next binade by itself.
  const uint32_t bits = magnitude == 0 ? 0 : steps + (uint32_t(unit + 24) << 10);
  return {uint16_t((Bits(x) >> 16 & 0x8000) | bits)};
}

}  // namespace twin
