// What the generated header of the operators is made of: operands as torch hands them over (DLPack, through apache-tvm-ffi), their
// checks, and results from torch's own allocator. A function returns its tensors, or an int: 0 done; a tpi_status; kRefused for a
// call that the table excludes (Python says why); -(1 + i) to ask for a contiguous copy of argument i.
#pragma once
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include <algorithm>
#include <array>
#include <initializer_list>
#include <limits>

#include "tpi/contract.h"

#define TPI_OP(name, params, args) extern "C" int tpi_##name params;
#include "tpi/ops.def"
#undef TPI_OP

namespace tpi::binding {

using tvm::ffi::AnyView;
constexpr int kInt32 = 3, kInt64 = 4;  // beside tpi_dtype
constexpr int kRefused = 99;
constexpr i64 kIntLimit = i64(1) << 31;  // INT_LIMIT of the table
constexpr int kMaxRank = 16;

// Thrown by a binding that cannot read an operand where it lies.
struct NeedsCopy {
  int argument;
};

inline DLDataType dl_dtype(int code) {
  switch (code) {
    case TPI_F32: return {kDLFloat, 32, 1};
    case TPI_BF16: return {kDLBfloat, 16, 1};
    case TPI_F16: return {kDLFloat, 16, 1};
    case kInt32: return {kDLInt, 32, 1};
    default: return {kDLInt, 64, 1};
  }
}

// The dimensions that `*` stands for.
struct Star {
  const i64* sizes = nullptr;
  i64 count = -1;
};

// A dimension: bound by its first operand, compared with by the others.
inline bool bind(i64& dimension, i64 size, i64 factor, i64 offset) {
  const i64 rest = size - offset;
  if (dimension >= 0) return rest == factor * dimension;
  if (rest < 0 || rest % factor != 0) return false;
  dimension = rest / factor;
  return true;
}

struct Rows {  // [count, n], dense in n
  char* data;
  i64 stride, count;
};
struct Heads {  // [T, H, D], dense in D
  char* data;
  i64 token_stride, head_stride;
};

struct Operand {
  int argument;
  const DLTensor* t = nullptr;

  bool given() const { return t != nullptr; }
  bool take(const AnyView& any, bool optional) {
    const int32_t type = any.type_index();
    if (type == tvm::ffi::TypeIndex::kTVMFFINone) return optional;
    if (type == tvm::ffi::TypeIndex::kTVMFFITensor) t = any.cast<DLTensor*>();
    return t != nullptr && t->device.device_type == kDLCPU && t->ndim <= kMaxRank;
  }
  bool is(int code) const {
    const DLDataType wanted = dl_dtype(code);
    return t->dtype.code == wanted.code && t->dtype.bits == wanted.bits && t->dtype.lanes == 1;
  }
  // A storage dtype, the same for every operand of one letter.
  bool shares(int& code) const {
    if (code >= 0) return is(code);
    for (int storage : {TPI_F32, TPI_BF16, TPI_F16})
      if (is(storage)) code = storage;
    return code >= 0;
  }
  bool rank(int wanted) const { return t->ndim == wanted; }
  bool rank(int fixed, Star& star, int first) const {
    const i64 count = t->ndim - fixed;
    if (count < 0) return false;
    if (star.count < 0) {
      star = {t->shape + first, count};
      return true;
    }
    return star.count == count && std::equal(star.sizes, star.sizes + count, t->shape + first);
  }
  i64 size(int i) const { return t->shape[i < 0 ? t->ndim + i : i]; }
  i64 stride(int i) const { return t->strides[i < 0 ? t->ndim + i : i]; }
  i64 count() const {
    i64 n = 1;
    for (int i = 0; i < t->ndim; ++i) n *= t->shape[i];
    return n;
  }
  i64 item() const { return t->dtype.bits / 8; }

  // The last n dimensions lie densely, or (turned) both of two do in the other order.
  bool dense(int n, bool turned = false) const {
    i64 reach = 1;
    bool fits = true;
    for (int i = 1; i <= n; ++i) {
      fits = fits && (size(-i) == 1 || stride(-i) == reach);
      reach *= size(-i);
    }
    return fits || count() == 0 || (turned && this->turned());
  }
  // Dense in the first of two dimensions.
  bool turned() const {
    return (size(0) == 1 || stride(0) == 1) && (size(1) == 1 || stride(1) == size(0));
  }
  // Stored in its first dimension: strides (1, n).
  bool stored_transposed() const { return stride(0) == 1 && stride(1) != 1; }
  // No two elements share memory.
  bool disjoint() const {
    if (count() == 0) return true;
    int order[kMaxRank];
    for (int i = 0; i < t->ndim; ++i) order[i] = i;
    std::sort(order, order + t->ndim, [&](int a, int b) { return stride(a) < stride(b); });
    i64 reach = 1;
    for (int k = 0; k < t->ndim; ++k) {
      const int i = order[k];
      if (size(i) <= 1) continue;
      if (stride(i) < reach) return false;
      reach = stride(i) * size(i);
    }
    return true;
  }

  char* data() const { return t == nullptr ? nullptr : static_cast<char*>(t->data) + t->byte_offset; }
  // The whole operand, dense.
  template <class T = void>
  T* vector() const {
    if (t != nullptr && !dense(t->ndim)) throw NeedsCopy{argument};
    return reinterpret_cast<T*>(data());
  }
  // [*, n] as rows.
  Rows rows() const {
    const int last = t->ndim - 1;
    const bool empty = this->count() == 0;
    if (!empty && size(last) > 1 && stride(last) != 1) throw NeedsCopy{argument};
    i64 count = 1, step = 0;
    for (int i = last - 1; i >= 0; --i) {
      if (count == 1)
        step = stride(i);
      else if (!empty && size(i) != 1 && stride(i) != step * count)
        throw NeedsCopy{argument};
      count *= size(i);
    }
    return {data(), count == 1 ? size(last) : step, count};
  }
  Heads heads() const {
    if (count() > 0 && size(2) > 1 && stride(2) != 1) throw NeedsCopy{argument};
    return {data(), stride(0), stride(1)};
  }
};

// An operand that is written shares no memory with another one.
inline bool apart(const Operand& a, const Operand& b) {
  if (!a.given() || !b.given() || a.count() == 0 || b.count() == 0) return true;
  const auto end = [](const Operand& x) {
    i64 last = 0;
    for (int i = 0; i < x.t->ndim; ++i) last += (x.size(i) - 1) * x.stride(i);
    return x.data() + (last + 1) * x.item();
  };
  return end(a) <= b.data() || end(b) <= a.data();
}

inline bool take_int(i64& value, const AnyView& any) {
  if (any.type_index() != tvm::ffi::TypeIndex::kTVMFFIInt) return false;
  value = any.cast<i64>();
  return -kIntLimit <= value && value < kIntLimit;
}
inline bool take_float(float& value, const AnyView& any) {
  i64 whole = 0;
  if (any.type_index() == tvm::ffi::TypeIndex::kTVMFFIFloat)
    value = float(any.cast<double>());
  else if (take_int(whole, any))
    value = float(whole);
  else
    return false;
  return true;
}
inline bool take_bool(bool& value, const AnyView& any) {
  if (any.type_index() != tvm::ffi::TypeIndex::kTVMFFIBool) return false;
  value = any.cast<bool>();
  return true;
}
// A code of tpi_dtype; -1 for None, which stands for the operands' dtype.
inline bool take_dtype(int& code, const AnyView& any, bool optional = false) {
  if (any.type_index() == tvm::ffi::TypeIndex::kTVMFFINone) {
    code = -1;
    return optional;
  }
  i64 value = -1;
  if (!take_int(value, any) || value < TPI_F32 || value > TPI_F16) return false;
  code = int(value);
  return true;
}
inline bool take_choice(i64& index, const AnyView& any, std::initializer_list<const char*> choices) {
  const auto text = any.try_cast<tvm::ffi::String>();
  if (!text.has_value()) return false;
  index = 0;
  for (const char* choice : choices) {
    if (*text == choice) return true;
    ++index;
  }
  return false;
}

inline tvm::ffi::Any& pending(int i) {
  thread_local tvm::ffi::Any results[4];
  return results[i];
}

struct Result {
  tvm::ffi::Tensor tensor{nullptr};
  int code = -1;  // dtype

  void make(int dtype, std::initializer_list<i64> sizes, const Star& star = {}, int at = -1) {
    code = dtype;
    i64 shape[kMaxRank + 4];
    int rank = 0;
    const auto splice = [&] {
      for (i64 k = 0; k < star.count; ++k) shape[rank++] = star.sizes[k];
    };
    for (i64 size : sizes) {
      if (rank == at) splice();
      shape[rank++] = size;
    }
    if (at == int(sizes.size())) splice();
    tensor = tvm::ffi::Tensor::FromEnvAlloc(TVMFFIEnvTensorAlloc, tvm::ffi::ShapeView(shape, rank), dl_dtype(dtype),
                                            DLDevice{kDLCPU, 0});
  }
  template <class T = void>
  T* data() const {
    return static_cast<T*>(tensor.data_ptr());
  }
  i64 count() const { return tensor.numel(); }
  i64 item() const { return dl_dtype(code).bits / 8; }
  // The first result is returned; Python fetches the others.
  void give(int i, tvm::ffi::Any* result) { (i == 0 ? *result : pending(i)) = std::move(tensor); }
};

}  // namespace tpi::binding

#define TPI_EXPORTED extern "C" __attribute__((visibility("default"))) int

#define TPI_BINDING(name, make, give)                                                                         \
  TPI_EXPORTED __tvm_ffi_##name(void*, const TVMFFIAny* packed, int32_t count, TVMFFIAny* returned) {         \
    TVM_FFI_SAFE_CALL_BEGIN();                                                                                \
    name##_call c;                                                                                            \
    auto* result = reinterpret_cast<tvm::ffi::Any*>(returned);                                                \
    if (!take(c, reinterpret_cast<const AnyView*>(packed), count)) {                                          \
      *result = i64(kRefused);                                                                                \
      return 0;                                                                                               \
    }                                                                                                         \
    try {                                                                                                     \
      make;                                                                                                   \
      const int status = run(c);                                                                              \
      if (status != TPI_OK) {                                                                                 \
        *result = i64(status);                                                                                \
        return 0;                                                                                             \
      }                                                                                                       \
      *result = i64(TPI_OK);                                                                                  \
      give;                                                                                                   \
    } catch (const NeedsCopy& copy) {                                                                         \
      *result = i64(-1 - copy.argument);                                                                      \
    }                                                                                                         \
    TVM_FFI_SAFE_CALL_END();                                                                                  \
  }
