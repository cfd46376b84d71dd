#include "../../host/launch.h"
#include "../op_kernel/expert_weight.h"

extern "C" int32_t tpi_ascendc_expert_weight_backward(const tpi::Launch* launch, int32_t dtype, const void* g, const void* a, const void* weights,
                                                      void* dweights, void* da, uint32_t rows, uint32_t columns, uint32_t leaf, uint32_t leaves) {
  return tpi::Guard(launch, [&] {
    tpi::Typed(dtype, [&](auto type) {
      using T = decltype(type);
      const RowTiling t = MakeRowTiling(rows, columns, 4, sizeof(T), 2, 1, 1 + leaves, 1);
      const uint64_t count = uint64_t(rows) * columns;
      TPI_AIV(launch,
              (tpi::In("g", g, count * 4), tpi::In("a", a, count * sizeof(T)), tpi::In("weights", weights, rows * 4ull),
               tpi::Out("dweights", dweights, rows * 4ull), tpi::Out("da", da, count * sizeof(T))),
              expert_weight_backward<T>, tpi::Gm(g), tpi::Gm(a), tpi::Gm(weights), tpi::Gm(dweights), tpi::Gm(da), leaf, leaves, t);
    });
  });
}
