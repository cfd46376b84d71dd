#include "../../host/launch.h"
#include "../op_kernel/sigmoid_gate.h"

extern "C" {

int32_t tpi_ascendc_sigmoid_gate(const tpi::Launch* launch, int32_t dtype, const void* x, const void* logits, void* y, uint32_t rows,
                                 uint32_t columns) {
  return tpi::Guard(launch, [&] {
    tpi::Typed(dtype, [&](auto type) {
      using T = decltype(type);
      const RowTiling t = MakeRowTiling(rows, columns, sizeof(T), sizeof(T), 2, 1, 3, 1);
      const uint64_t bytes = uint64_t(rows) * columns * sizeof(T);
      TPI_AIV(launch, (tpi::In("x", x, bytes), tpi::In("logits", logits, rows * 4ull), tpi::Out("y", y, bytes)), sigmoid_gate<T>, tpi::Gm(x),
              tpi::Gm(logits), tpi::Gm(y), t);
    });
  });
}

int32_t tpi_ascendc_sigmoid_gate_backward(const tpi::Launch* launch, int32_t dtype, const void* dout, const void* x, const void* logits, void* dx,
                                          void* dlogits, uint32_t rows, uint32_t columns) {
  return tpi::Guard(launch, [&] {
    tpi::Typed(dtype, [&](auto type) {
      using T = decltype(type);
      const RowTiling t = MakeRowTiling(rows, columns, sizeof(T), sizeof(T), 2, 1, 3, 1);
      const uint64_t bytes = uint64_t(rows) * columns * sizeof(T);
      TPI_AIV(launch,
              (tpi::In("dout", dout, bytes), tpi::In("x", x, bytes), tpi::In("logits", logits, rows * 4ull), tpi::Out("dx", dx, bytes),
               tpi::Out("dlogits", dlogits, rows * 4ull)),
              sigmoid_gate_backward<T>, tpi::Gm(dout), tpi::Gm(x), tpi::Gm(logits), tpi::Gm(dx), tpi::Gm(dlogits), t);
    });
  });
}
}
