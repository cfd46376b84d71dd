#include "../../host/launch.h"
#include "../op_kernel/elementary.h"

namespace {

template <bool log>
int32_t Elementary(const tpi::Launch* launch, const void* x, void* y, uint32_t count) {
  return tpi::Guard(launch, [&] {
    const RowTiling t = MakeRowTiling(1, count, 4, 4, 1, 0, 0, 0);
    TPI_AIV(launch, (tpi::In("x", x, count * 4ull), tpi::Out("y", y, count * 4ull)), elementary<log>, tpi::Gm(x), tpi::Gm(y), t);
  });
}

}  // namespace

extern "C" {

int32_t tpi_ascendc_exp(const tpi::Launch* launch, const void* x, void* y, uint32_t count) { return Elementary<false>(launch, x, y, count); }
int32_t tpi_ascendc_log(const tpi::Launch* launch, const void* x, void* y, uint32_t count) { return Elementary<true>(launch, x, y, count); }
}
