#include "../../host/launch.h"
#include "../op_kernel/token_sums.h"

namespace {

uint32_t Levels(uint32_t count) {
  uint32_t levels = 1;
  for (; count > 1; count /= 2) ++levels;
  return levels;
}

}  // namespace

extern "C" {

// sums: float32 [rows, spans, columns]. x, rstd: null for linear_db. offsets: int64 [rows + 1] or null.
int32_t tpi_ascendc_token_sums(const tpi::Launch* launch, int32_t dtype, const void* dy, const void* x, const void* rstd, const void* offsets,
                               void* sums, void* grad, uint32_t tokens, uint32_t columns, uint32_t rows, uint32_t spans) {
  return tpi::Guard(launch, [&] {
    tpi::Typed(dtype, [&](auto type) {
      using T = decltype(type);
      const uint64_t bytes = uint64_t(tokens) * columns * sizeof(T), workspace = uint64_t(rows) * spans * columns * 4;
      const uint64_t offset_bytes = offsets ? (rows + 1) * 8ull : 0;
      TokenTiling t{MakeRowTiling(1 << 20, columns, sizeof(T), sizeof(T), 3, 0, 1, 1), tokens, rows, spans, offsets != nullptr};
      if (x) {
        TPI_AIV(launch,
                (tpi::In("dy", dy, bytes), tpi::In("x", x, bytes), tpi::In("rstd", rstd, tokens * 4ull), tpi::In("offsets", offsets, offset_bytes),
                 tpi::Out("sums", sums, workspace)),
                (token_sums<T, true>), tpi::Gm(dy), tpi::Gm(x), tpi::Gm(rstd), tpi::Gm(offsets), tpi::Gm(sums), t);
      } else {
        TPI_AIV(launch, (tpi::In("dy", dy, bytes), tpi::In("offsets", offsets, offset_bytes), tpi::Out("sums", sums, workspace)),
                (token_sums<T, false>), tpi::Gm(dy), tpi::Gm(x), tpi::Gm(rstd), tpi::Gm(offsets), tpi::Gm(sums), t);
      }
      TokenTiling fold = t;
      fold.tile = MakeRowTiling(1, columns < 256 ? columns : 256, 4, 4, Levels(spans) + 2, 0, 0, 0);
      fold.tile.columns = columns;
      TPI_AIV(launch, (tpi::In("sums", sums, workspace), tpi::In("offsets", offsets, offset_bytes), tpi::InOut("grad", grad, columns * 4ull)),
              token_fold, tpi::Gm(sums), tpi::Gm(offsets), tpi::Gm(grad), fold);
    });
  });
}

int32_t tpi_ascendc_head_terms(const tpi::Launch* launch, int32_t dtype, const void* dy, const void* x, const void* rstd, void* terms,
                               uint32_t tokens, uint32_t heads, uint32_t columns) {
  return tpi::Guard(launch, [&] {
    tpi::Typed(dtype, [&](auto type) {
      using T = decltype(type);
      const uint64_t bytes = uint64_t(tokens) * heads * columns * sizeof(T);
      const RowTiling t = MakeRowTiling(heads, columns, sizeof(T), sizeof(T), 2 + Levels(heads), 0, 1, 1);
      TPI_AIV(launch,
              (tpi::In("dy", dy, bytes), tpi::In("x", x, bytes), tpi::In("rstd", rstd, uint64_t(tokens) * heads * 4),
               tpi::Out("terms", terms, uint64_t(tokens) * columns * 4)),
              head_terms<T>, tpi::Gm(dy), tpi::Gm(x), tpi::Gm(rstd), tpi::Gm(terms), tokens, t);
    });
  });
}
}
