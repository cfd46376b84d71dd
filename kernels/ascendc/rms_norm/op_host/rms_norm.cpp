#include "../../host/launch.h"
#include "../op_kernel/rms_norm.h"
#include "../op_kernel/rms_norm_backward.h"

extern "C" {

int32_t tpi_ascendc_rms_norm(const tpi::Launch* launch, int32_t dtype, const void* x, const void* weight, void* y, void* rstd, uint32_t rows,
                             uint32_t columns, float eps) {
  return tpi::Guard(launch, [&] {
    tpi::Typed(dtype, [&](auto type) {
      using T = decltype(type);
      RmsNormTiling t;
      MakeRmsNormTiling(t, rows, columns, eps, sizeof(T));
      const uint64_t bytes = uint64_t(rows) * columns * sizeof(T);
      TPI_AIV(launch,
              (tpi::In("x", x, bytes), tpi::In("weight", weight, columns * sizeof(T)), tpi::Out("y", y, bytes), tpi::Out("rstd", rstd, rows * 4ull)),
              rms_norm<T>, tpi::Gm(x), tpi::Gm(weight), tpi::Gm(y), tpi::Gm(rstd), t);
    });
  });
}

int32_t tpi_ascendc_rms_norm_backward(const tpi::Launch* launch, int32_t dtype, const void* dy, const void* x, const void* weight, const void* rstd,
                                      const void* dskip, void* dx, uint32_t rows, uint32_t columns) {
  return tpi::Guard(launch, [&] {
    tpi::Typed(dtype, [&](auto type) {
      using T = decltype(type);
      const RowTiling t = MakeRowTiling(rows, columns, sizeof(T), sizeof(T), 3, 1, 3, 2);
      const uint64_t bytes = uint64_t(rows) * columns * sizeof(T);
      TPI_AIV(launch,
              (tpi::In("dy", dy, bytes), tpi::In("x", x, bytes), tpi::In("weight", weight, columns * sizeof(T)), tpi::In("rstd", rstd, rows * 4ull),
               tpi::In("dskip", dskip, dskip ? bytes : 0), tpi::Out("dx", dx, bytes)),
              rms_norm_backward<T>, tpi::Gm(dy), tpi::Gm(x), tpi::Gm(weight), tpi::Gm(rstd), tpi::Gm(dskip), tpi::Gm(dx), t);
    });
  });
}
}
