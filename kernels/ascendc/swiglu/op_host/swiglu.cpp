#include "../../host/launch.h"
#include "../op_kernel/swiglu.h"
#include "../op_kernel/swiglu_backward.h"

extern "C" {

int32_t tpi_ascendc_swiglu(const tpi::Launch* launch, int32_t dtype, const void* x, void* y, uint32_t rows, uint32_t columns) {
  return tpi::Guard(launch, [&] {
    tpi::Typed(dtype, [&](auto type) {
      using T = decltype(type);
      const SwigluTiling t = MakeSwigluTiling(rows, columns, sizeof(T));
      const uint64_t bytes = uint64_t(rows) * columns * sizeof(T);
      TPI_AIV(launch, (tpi::In("x", x, 2 * bytes), tpi::Out("y", y, bytes)), swiglu<T>, tpi::Gm(x), tpi::Gm(y), t);
    });
  });
}

int32_t tpi_ascendc_swiglu_backward(const tpi::Launch* launch, int32_t dtype, const void* dy, const void* x, void* dx, uint32_t rows,
                                    uint32_t columns) {
  return tpi::Guard(launch, [&] {
    tpi::Typed(dtype, [&](auto type) {
      using T = decltype(type);
      const RowTiling t = MakeRowTiling(rows, columns, sizeof(T), sizeof(T), 5, 0, 0, 0);
      const uint64_t bytes = uint64_t(rows) * columns * sizeof(T);
      TPI_AIV(launch, (tpi::In("dy", dy, bytes), tpi::In("x", x, 2 * bytes), tpi::Out("dx", dx, 2 * bytes)), swiglu_backward<T>, tpi::Gm(dy),
              tpi::Gm(x), tpi::Gm(dx), t);
    });
  });
}
}
