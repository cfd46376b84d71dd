// The kernels on the twin, as a C library: one function an operator. Returns 0, or 1 with the fault in `message`.
#include "launch.h"

#include "../linear/op_kernel/linear.h"
#include "../rms_norm/op_kernel/rms_norm.h"
#include "../swiglu/op_kernel/swiglu.h"

namespace {

using twin::Buffer;
using twin::Counts;
using twin::Run;

enum DType : int32_t { kFloat32, kBFloat16, kFloat16 };

// What twin::Counts holds, flat: bytes, instructions, busy cycles of the pipes S V M MTE1 MTE2 MTE3 FIX, critical path.
void Flatten(const Counts& counts, double* out) {
  const double head[] = {counts.gm_to_ub, counts.ub_to_gm, counts.gm_to_l1, counts.l1_to_l0, counts.l0c_to_gm, counts.instructions};
  out = std::copy(std::begin(head), std::end(head), out);
  out = std::copy(counts.busy.begin(), counts.busy.end(), out);
  *out = counts.critical;
}

template <typename F>
int32_t Guard(char* message, int32_t length, double* counts, F f) {
  try {
    Flatten(f(), counts);
    return 0;
  } catch (const twin::Fault& fault) {
    std::snprintf(message, size_t(length), "%s", fault.what());
    return 1;
  }
}

// f(a value of the storage type)
template <typename F>
Counts Typed(int32_t dtype, F f) {
  if (dtype == kBFloat16) return f(bfloat16_t{});
  if (dtype == kFloat16) return f(half{});
  return f(float{});
}

uint8_t* Address(const void* data) { return const_cast<uint8_t*>(static_cast<const uint8_t*>(data)); }

template <typename T, typename Out>
Counts Linear(const LinearTiling& t, const void* x, const void* weight, const void* bias, void* y, Run run) {
  std::vector<uint8_t> workspace(LinearWorkspace(t, uint32_t(run.blocks)));
  const uint64_t item = sizeof(T);
  std::vector<Buffer> buffers = {{Buffer::kInput, "x", x, t.rows * uint64_t(t.depth) * item},
                                 {Buffer::kInput, "weight", weight, t.columns * uint64_t(t.depth) * item},
                                 {Buffer::kOutput, "y", y, t.rows * uint64_t(t.columns) * sizeof(Out)},
                                 {Buffer::kWorkspace, "workspace", workspace.data(), workspace.size()}};
  if (bias) buffers.push_back({Buffer::kInput, "bias", bias, t.columns * item});
  return twin::Launch(twin::KernelType::kMixAic12, run, buffers,
                      [&] { linear<T, Out>(Address(x), Address(weight), Address(bias), Address(y), workspace.data(), t); });
}

}  // namespace

extern "C" {

int32_t tpi_twin_rms_norm(int32_t dtype, const void* x, const void* weight, void* y, void* rstd, uint32_t rows, uint32_t columns, float eps,
                          Run run, char* message, int32_t length, double* counts) {
  return Guard(message, length, counts, [&] {
    return Typed(dtype, [&](auto type) {
      using T = decltype(type);
      RmsNormTiling t;
      if (!MakeRmsNormTiling(t, rows, columns, eps, sizeof(T))) twin::Fail("rms_norm of ", columns, " columns; at most ", RmsNormTiling::kMaxColumns);
      const uint64_t bytes = uint64_t(rows) * columns * sizeof(T);
      return twin::Launch(twin::KernelType::kAivOnly, run,
                          {{Buffer::kInput, "x", x, bytes},
                           {Buffer::kInput, "weight", weight, columns * sizeof(T)},
                           {Buffer::kOutput, "y", y, bytes},
                           {Buffer::kOutput, "rstd", rstd, rows * 4ull}},
                          [&] { rms_norm<T>(Address(x), Address(weight), Address(y), Address(rstd), t); });
    });
  });
}

int32_t tpi_twin_swiglu(int32_t dtype, const void* x, void* y, uint32_t rows, uint32_t columns, Run run, char* message, int32_t length,
                        double* counts) {
  return Guard(message, length, counts, [&] {
    return Typed(dtype, [&](auto type) {
      using T = decltype(type);
      const SwigluTiling t = MakeSwigluTiling(rows, columns, sizeof(T));
      const uint64_t bytes = uint64_t(rows) * columns * sizeof(T);
      return twin::Launch(twin::KernelType::kAivOnly, run,
                          {{Buffer::kInput, "x", x, 2 * bytes}, {Buffer::kOutput, "y", y, bytes}},
                          [&] { swiglu<T>(Address(x), Address(y), t); });
    });
  });
}

int32_t tpi_twin_linear(int32_t dtype, int32_t out_float32, const void* x, const void* weight, const void* bias, void* y, uint32_t rows,
                        uint32_t columns, uint32_t depth, uint32_t leaf, uint32_t leaves, Run run, char* message, int32_t length,
                        double* counts) {
  return Guard(message, length, counts, [&] {
    return Typed(dtype, [&](auto type) {
      using T = decltype(type);
      LinearTiling t;
      if (!MakeLinearTiling(t, rows, columns, depth, leaf, leaves, bias != nullptr))
        twin::Fail("linear: ", leaves, " leaves of ", leaf, " for a depth of ", depth, "; leaves are a power of two up to ", LinearTiling::kMaxLeaves,
                   ", none empty");
      return out_float32 ? Linear<T, float>(t, x, weight, bias, y, run) : Linear<T, T>(t, x, weight, bias, y, run);
    });
  });
}

}  // extern "C"
