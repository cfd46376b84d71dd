// The cube: L1 -> L0, products, L0C -> GM.
//
// The order inside an instruction is not documented. The twin declares one, which is the numerics contract's leaf order `cube`: per group of
// one block along k (16 elements of 16 bits, 8 of float32) the products rounded to float32, a tree over adjacent pairs, then added to the
// accumulator; groups ascending. It is not claimed to be the hardware's.
#pragma once

#include "vector.h"

namespace AscendC {

struct FixpipeConfig {
  bool row_major;
};
inline constexpr FixpipeConfig CFG_ROW_MAJOR{true};

inline void SetHF32Mode(bool on) {
  if (on) twin::Fail(twin::core().Where(), ": SetHF32Mode(true) rounds the operands of float32 products");
}

// Fractals of 512 B (16 rows of one block).
template <typename T>
void LoadData(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LoadData2DParams& p, int line = __builtin_LINE()) {
  twin::Instruction by("LoadData", PIPE_MTE1, line);
  const bool left = dst.position() == TPosition::A2;
  if (!(left && src.position() == TPosition::A1) && !(dst.position() == TPosition::B2 && src.position() == TPosition::B1))
    twin::Fail(by, "copies A1 to A2 or B1 to B2");
  twin::Range(by, "repeatTimes", p.repeatTimes, 1, 255);
  if (p.ifTranspose && sizeof(T) != 2) twin::Fail(by, "transposes 16-bit types only");
  for (uint32_t i = 0; i < p.repeatTimes; ++i) {
    const uint64_t from = src.Check(by, (p.startIndex + uint64_t(i) * p.srcStride) * 512, 512, 32);
    const uint64_t to = dst.Check(by, uint64_t(i) * (1 + p.dstGap) * 512, 512, 512);
    by.Read(src.memory(), from, 512);
    by.Write(dst.memory(), to, 512);
    if (!p.ifTranspose) {
      twin::CopyBytes(dst.memory(), to, src.memory(), from, 512);
      continue;
    }
    for (uint32_t row = 0; row < 16; ++row)
      for (uint32_t column = 0; column < 16; ++column)
        twin::CopyBytes(dst.memory(), to + (row * 16 + column) * 2, src.memory(), from + (column * 16 + row) * 2, 2);
  }
  twin::core().counts.l1_to_l0 += p.repeatTimes * 512.0;
  by.Finish(p.repeatTimes * 512.0 / (left ? twin::kL1ToL0a : twin::kL1ToL0b));
}

// C[m, n] (+)= A[m, k] B[n, k]. A in L0A (M1, K1, 16, K0), B in L0B (K1, N1, 16, K0), C in L0C (N1, M1, 16, 16). An unwritten row of A or B
// (padding of m and n) makes its row or column of C unwritten.
template <typename C, typename A, typename B>
void Mmad(const LocalTensor<C>& dst, const LocalTensor<A>& a, const LocalTensor<B>& b, const MmadParams& p, int line = __builtin_LINE()) {
  static_assert(std::is_same_v<C, float> && std::is_same_v<A, B>, "the twin multiplies two of a type into float");
  twin::Instruction by("Mmad", PIPE_M, line);
  if (dst.position() != TPosition::CO1 || a.position() != TPosition::A2 || b.position() != TPosition::B2)
    twin::Fail(by, "takes A2 and B2 to CO1");
  twin::Range(by, "m", p.m, 1, 4095);
  twin::Range(by, "n", p.n, 1, 4095);
  twin::Range(by, "k", p.k, 1, 4095);
  if (p.m == 1) twin::Fail(by, "with m = 1 becomes a matrix-vector product of another layout; pad m to 16");
  if (p.unitFlag || p.cmatrixSource) twin::Fail(by, "unitFlag and cmatrixSource are not offered by the twin");
  constexpr uint32_t k0 = 32 / sizeof(A);
  const uint32_t m1 = (p.m + 15u) / 16, n1 = (p.n + 15u) / 16, k1 = (p.k + k0 - 1) / k0, columns = n1 * 16;
  const uint64_t at_a = a.Check(by, 0, uint64_t(m1) * k1 * 512, 512), at_b = b.Check(by, 0, uint64_t(k1) * n1 * 512, 512);
  const uint64_t at_c = dst.Check(by, 0, uint64_t(m1) * n1 * 1024, 64);
  // A large product keeps the pipe busy until its first results are out; a small one that continues needs a barrier.
  const bool ordered = m1 * n1 >= 10;
  by.Read(a.memory(), at_a, uint64_t(m1) * k1 * 512);
  by.Read(b.memory(), at_b, uint64_t(k1) * n1 * 512);
  if (!p.cmatrixInitVal) by.Read(dst.memory(), at_c, uint64_t(m1) * n1 * 1024, ordered);
  by.Write(dst.memory(), at_c, uint64_t(m1) * n1 * 1024, ordered);

  auto load = [](const LocalTensor<A>& x, uint64_t at, uint8_t& written) {
    A value;
    std::memcpy(&value, x.memory().data + at, sizeof(A));
    written &= x.memory().written[at];
    return twin::Value(value);
  };
  std::vector<float> right(uint64_t(k1) * k0 * columns), left(uint64_t(k1) * k0);
  std::vector<uint8_t> right_written(columns, 1);
  for (uint32_t k = 0; k < k1 * k0; ++k)
    for (uint32_t n = 0; n < columns; ++n)
      right[uint64_t(k) * columns + n] = load(b, at_b + ((uint64_t(k / k0) * n1 + n / 16) * 16 + n % 16) * 32 + k % k0 * sizeof(A), right_written[n]);
  float* c = reinterpret_cast<float*>(dst.memory().data + at_c);
  uint8_t* c_written = dst.memory().written.data() + at_c;
  std::vector<float> sums(columns), products(uint64_t(k0) * columns);
  for (uint32_t m = 0; m < m1 * 16; ++m) {
    uint8_t left_written = 1;
    for (uint32_t k = 0; k < k1 * k0; ++k)
      left[k] = load(a, at_a + ((uint64_t(m / 16) * k1 + k / k0) * 16 + m % 16) * 32 + k % k0 * sizeof(A), left_written);
    auto place = [&](uint32_t n) { return (uint64_t(n / 16) * m1 * 16 + m) * 16 + n % 16; };
    for (uint32_t n = 0; n < columns; ++n) sums[n] = p.cmatrixInitVal ? 0.0f : c[place(n)];
    for (uint32_t k = 0; k < k1 * k0; k += k0) {
      for (uint32_t i = 0; i < k0; ++i)
        for (uint32_t n = 0; n < columns; ++n) products[i * columns + n] = left[k + i] * right[uint64_t(k + i) * columns + n];
      for (uint32_t width = k0; width > 1; width /= 2)
        for (uint32_t i = 0; i < width / 2; ++i)
          for (uint32_t n = 0; n < columns; ++n)
            products[i * columns + n] = products[2 * i * columns + n] + products[(2 * i + 1) * columns + n];
      for (uint32_t n = 0; n < columns; ++n) sums[n] += products[n];
    }
    for (uint32_t n = 0; n < columns; ++n) {
      c[place(n)] = twin::Canonical(sums[n]);
      uint8_t* written = c_written + place(n) * 4;
      const uint8_t now = left_written & right_written[n] & (p.cmatrixInitVal ? 1 : written[0]);
      std::memset(written, now, 4);
    }
  }
  by.Finish(double(m1) * n1 * k1 * (sizeof(A) == 4 ? 2 : 1));
}

// L0C to GM, row-major, as float32 or rounded half to even.
template <typename T, typename U, const FixpipeConfig& config = CFG_ROW_MAJOR>
void Fixpipe(const GlobalTensor<T>& dst, const LocalTensor<U>& src, const FixpipeParamsV220& p, int line = __builtin_LINE()) {
  static_assert(config.row_major && std::is_same_v<U, float>, "the twin writes float32 sums row-major");
  twin::Instruction by("Fixpipe", PIPE_FIX, line);
  if (src.position() != TPosition::CO1) twin::Fail(by, "reads CO1");
  twin::Range(by, "nSize", p.nSize, 1, 4095);
  twin::Range(by, "mSize", p.mSize, 1, 8192);
  if (p.ndNum != 1 || p.unitFlag || p.reluEn) twin::Fail(by, "ndNum other than 1, unitFlag and relu are not offered by the twin");
  const QuantMode_t needed = std::is_same_v<T, float> ? QuantMode_t::NoQuant : std::is_same_v<T, half> ? QuantMode_t::F322F16 : QuantMode_t::F322BF16;
  if (p.quantPre != needed) twin::Fail(by, "quantPre does not match the type it writes");
  bool in_range = true;
  for (uint32_t m = 0; m < p.mSize; ++m)
    for (uint32_t n = 0; n < p.nSize; n += 16) {
      const uint32_t columns = std::min(16u, p.nSize - n);
      const uint64_t from = src.Check(by, (uint64_t(n / 16) * p.srcStride + m) * 64, columns * 4, 4);
      by.Read(src.memory(), from, columns * 4);
      by.Defined(src.memory(), from, columns * 4);
      auto [memory, to] = dst.Check(by, uint64_t(m) * p.dstStride + n, columns);
      by.Write(*memory, to, columns * sizeof(T));
      for (uint32_t i = 0; i < columns; ++i) {
        float x;
        std::memcpy(&x, src.memory().data + from + i * 4, 4);
        const T value = twin::Rounded<T>(x, in_range);
        std::memcpy(memory->data + to + i * sizeof(T), &value, sizeof(T));
      }
      if (!memory->written.empty()) std::memset(memory->written.data() + to, 1, columns * sizeof(T));
    }
  if (!in_range) twin::Fail(by, "narrows a value that is not finite or overflows: the result depends on CTRL[48]");
  const double total = double(p.mSize) * p.nSize * sizeof(T);
  twin::core().counts.l0c_to_gm += total;
  by.Finish(total / twin::kL0cToGm);
}

}  // namespace AscendC
