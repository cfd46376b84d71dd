// Contract constants that are fixed when the CPU kernels are compiled. The others (leaf, leaves, segment_blocks, window,
// vocabulary leaves) are arguments. mindspeed_tpi.contract holds the same numbers; a unit test compares them.
#pragma once
#include <cstdint>

typedef int64_t i64;
typedef int32_t i32;

enum tpi_dtype { TPI_F32 = 0, TPI_BF16 = 1, TPI_F16 = 2 };

enum tpi_status {
  TPI_OK = 0,
  TPI_BAD_DTYPE = 1,    // a dtype code outside tpi_dtype
  TPI_BAD_SHAPE = 2,    // sizes that the operator's schema excludes
  TPI_BAD_INDEX = 3,    // a token id, slot, page or position outside its table
  TPI_NAN_ROUTER = 4,   // a router logit is NaN
  TPI_NO_MEMORY = 5,
};

namespace tpi {
constexpr i64 kKvBlock = 128;   // contract.kv_block
constexpr i64 kLanes = 64;      // contract.lanes
constexpr int kKernelSemantics = 4;  // contract.kernel_semantics: bump with any change of bits
}  // namespace tpi
