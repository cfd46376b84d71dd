#include "../../host/launch.h"
#include "../op_kernel/tree_sum.h"

extern "C" int32_t tpi_ascendc_tree_sum(const tpi::Launch* launch, int32_t bias_dtype, int32_t out_dtype, const void* parts, const void* bias,
                                        void* y, uint32_t count, uint32_t rows, uint32_t columns) {
  return tpi::Guard(launch, [&] {
    tpi::Typed(bias_dtype, [&](auto bias_type) {
      tpi::Typed(out_dtype, [&](auto out_type) {
        using Bias = decltype(bias_type);
        using Out = decltype(out_type);
        uint32_t tiles = 2;
        for (uint32_t n = count; n > 1; n /= 2) ++tiles;
        const RowTiling t = MakeRowTiling(rows, columns, 4, sizeof(Out), tiles, 0, 0, 0);
        const uint64_t size = uint64_t(rows) * columns;
        TPI_AIV(launch,
                (tpi::In("parts", parts, count * size * 4), tpi::In("bias", bias, bias ? columns * sizeof(Bias) : 0),
                 tpi::Out("y", y, size * sizeof(Out))),
                (tree_sum<Bias, Out>), tpi::Gm(parts), tpi::Gm(bias), tpi::Gm(y), count, t);
      });
    });
  });
}
