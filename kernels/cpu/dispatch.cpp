// The exported C ABI: every operator forwards to the implementation of the instruction set chosen at load time.
#include <cstring>

#include "tpi/contract.h"

#define TPI_OP(name, params, args)                    \
  extern "C" int tpi_##name##__portable params;       \
  extern "C" int tpi_##name##__wide params;           \
  extern "C" int tpi_##name##__widest params;
#include "tpi/ops.def"
#undef TPI_OP

namespace {

struct Table {
  const char* name;
#define TPI_OP(name, params, args) int(*name) params;
#include "tpi/ops.def"
#undef TPI_OP
};

const Table kTables[] = {
    {"portable",
#define TPI_OP(name, params, args) tpi_##name##__portable,
#include "tpi/ops.def"
#undef TPI_OP
    },
#if defined(__x86_64__)
    {"avx2",
#define TPI_OP(name, params, args) tpi_##name##__wide,
#include "tpi/ops.def"
#undef TPI_OP
    },
    {"avx512",
#define TPI_OP(name, params, args) tpi_##name##__widest,
#include "tpi/ops.def"
#undef TPI_OP
    },
#elif defined(__aarch64__)
    {"neon",
#define TPI_OP(name, params, args) tpi_##name##__wide,
#include "tpi/ops.def"
#undef TPI_OP
    },
#endif
};
constexpr int kTableCount = int(sizeof(kTables) / sizeof(kTables[0]));

bool runs_here(int i) {
#if defined(__x86_64__)
  if (i == 1) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#if defined(TPI_EMULATE_AVX512)
  if (i == 2) return runs_here(1);
#endif
  if (i == 2)
    return runs_here(1) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#endif
  return i < kTableCount;
}

int widest() {
  int i = kTableCount - 1;
  while (i > 0 && !runs_here(i)) --i;
  return i;
}

int chosen = widest();

}  // namespace

// The rest of the library is compiled with hidden visibility.
#define TPI_PUBLIC extern "C" __attribute__((visibility("default")))

#define TPI_OP(name, params, args) \
  TPI_PUBLIC int tpi_##name params { return kTables[chosen].name args; }
#include "tpi/ops.def"
#undef TPI_OP

TPI_PUBLIC int tpi_kernel_semantics() { return tpi::kKernelSemantics; }
TPI_PUBLIC int tpi_kv_block() { return int(tpi::kKvBlock); }
TPI_PUBLIC int tpi_lanes() { return int(tpi::kLanes); }

// The i-th instruction set of this build that runs on this CPU, narrowest first; null past the last.
TPI_PUBLIC const char* tpi_isa_available(int i) {
  for (int k = 0; k < kTableCount; ++k)
    if (runs_here(k) && i-- == 0) return kTables[k].name;
  return nullptr;
}
TPI_PUBLIC const char* tpi_isa() { return kTables[chosen].name; }
// 0 if the named instruction set is now in use, 1 if this build or CPU does not have it. Bits do not depend on it.
TPI_PUBLIC int tpi_set_isa(const char* name) {
  for (int k = 0; k < kTableCount; ++k)
    if (runs_here(k) && std::strcmp(kTables[k].name, name) == 0) {
      chosen = k;
      return 0;
    }
  return 1;
}
