// The exported C ABI: every operator forwards to the implementation of the instruction set chosen at load time.
#include <cstring>

#include "tpi/contract.h"

#define TPI_OP(name, params, args)                    \
  extern "C" int tpi_##name##__portable params;       \
  extern "C" int tpi_##name##__wide params;           \
  extern "C" int tpi_##name##__widest params;
#include "tpi/ops.def"
#undef TPI_OP
extern "C" int tpi_dot__widest();  // dot.cpp
extern "C" bool tpi_use_dot;
bool tpi_use_dot = false;  // whether the widest implementation multiplies bf16 with `dot`

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
    {"avx512_bf16",
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
constexpr int kDot = 3;  // of x86-64: the same implementation, bf16 products by vdpbf16ps

#if defined(__x86_64__)
int dot_state() {
  static const int state = tpi_dot__widest();
  return state;
}
#endif

bool runs_here(int i) {
#if defined(__x86_64__)
  if (i == 1) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#if defined(TPI_EMULATE_AVX512)
  if (i >= 2) return runs_here(1);
#endif
  if (i == 2)
    return runs_here(1) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (i == kDot) return runs_here(2) && __builtin_cpu_supports("avx512bf16") && dot_state() > 0;
#endif
  return i < kTableCount;
}

// The rate of vdpbf16ps against two fma is half on some CPUs and twice on others, so it is timed once (0.1 ms).
bool pays(int i) {
#if defined(__x86_64__)
  return i != kDot || dot_state() == 2;
#else
  return i >= 0;
#endif
}

int use(int i) {
  tpi_use_dot = i == kDot;
  return i;
}

int fastest() {
  int i = kTableCount - 1;
  while (i > 0 && !(runs_here(i) && pays(i))) --i;
  return i;
}

int chosen = use(fastest());

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

// The i-th instruction set of this build that runs on this CPU, narrowest first; null past the last. (The one in use at
// first is the fastest, which need not be the last.)
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
      chosen = use(k);
      return 0;
    }
  return 1;
}
