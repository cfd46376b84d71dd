#include "../../host/launch.h"
#include "../op_kernel/residual_add.h"

extern "C" int32_t tpi_ascendc_residual_add(const tpi::Launch* launch, int32_t dtype, const void* x, const void* y, void* out, uint32_t rows,
                                            uint32_t columns) {
  return tpi::Guard(launch, [&] {
    tpi::Typed(dtype, [&](auto type) {
      using T = decltype(type);
      const RowTiling t = MakeRowTiling(rows, columns, sizeof(T), sizeof(T), 2, 0, 0, 0);
      const uint64_t bytes = uint64_t(rows) * columns * sizeof(T);
      TPI_AIV(launch, (tpi::In("x", x, bytes), tpi::In("y", y, bytes), tpi::Out("out", out, bytes)), residual_add<T>, tpi::Gm(x), tpi::Gm(y),
              tpi::Gm(out), t);
    });
  });
}
