// One source for two hosts: with bisheng a launch is <<<>>> on a stream, with any other compiler the kernel runs on the CPU twin.
//
// An operator's C function takes a Launch first, returns 0, or 1 with the reason in `message`. Sizes and dtypes have been checked by the caller
// (ops/checks.py); all addresses are device memory except where a parameter's name begins with host_.
#pragma once

#include <cstdint>
#include <cstdio>

#ifdef TPI_NPU
#include "kernel_operator.h"
#else
#include "../twin/launch.h"
#endif

namespace tpi {

enum DType : int32_t { kFloat32, kBFloat16, kFloat16 };

#ifdef TPI_NPU

struct Launch {
  void* stream;    // aclrtStream
  int32_t groups;  // cube cores; each has two vector cores
  char* message;
  int32_t length;
};

// Buffers are named for the twin only.
#define TPI_AIV(launch, buffers, kernel, ...) kernel<<<uint32_t(2 * (launch)->groups), nullptr, (launch)->stream>>>(__VA_ARGS__)

template <typename F>
int32_t Guard(const Launch*, F f) {
  f();
  return 0;
}

#else

// Groups (of a kernel for vector cores: cores), the seed of their order, a source line whose barrier is ignored (0: none), where to say
// what went wrong, and twin::Counts flat (null: not wanted), added up over the launches of the operator.
struct Launch {
  twin::Run run;
  char* message;
  int32_t length;
  double* counts;
};

#define TPI_LIST(...) {__VA_ARGS__}
#define TPI_AIV(launch, buffers, kernel, ...) \
  ::tpi::Count(launch, ::twin::Launch(::twin::KernelType::kAivOnly, (launch)->run, TPI_LIST buffers, [&] { kernel(__VA_ARGS__); }))

// Bytes, instructions, busy cycles of the pipes S V M MTE1 MTE2 MTE3 FIX, critical path.
inline void Count(const Launch* launch, const twin::Counts& counts) {
  if (!launch->counts) return;
  const double head[] = {counts.gm_to_ub, counts.ub_to_gm, counts.gm_to_l1, counts.l1_to_l0, counts.l0c_to_gm, counts.instructions};
  double* out = launch->counts;
  for (double x : head) *out++ += x;
  for (double x : counts.busy) *out++ += x;
  *out += counts.critical;
}

template <typename F>
int32_t Guard(const Launch* launch, F f) {
  try {
    f();
    return 0;
  } catch (const twin::Fault& fault) {
    std::snprintf(launch->message, size_t(launch->length), "%s", fault.what());
    return 1;
  }
}

inline twin::Buffer In(const char* name, const void* data, uint64_t bytes) { return {twin::Buffer::kInput, name, data, bytes}; }
inline twin::Buffer Out(const char* name, const void* data, uint64_t bytes) { return {twin::Buffer::kOutput, name, data, bytes}; }
inline twin::Buffer InOut(const char* name, const void* data, uint64_t bytes) { return {twin::Buffer::kInOut, name, data, bytes}; }

#endif

// f(a value of the storage type)
template <typename F>
void Typed(int32_t dtype, F f) {
  if (dtype == kBFloat16)
    f(bfloat16_t{});
  else if (dtype == kFloat16)
    f(half{});
  else
    f(float{});
}

inline GM_ADDR Gm(const void* data) { return (GM_ADDR) const_cast<void*>(data); }

}  // namespace tpi
