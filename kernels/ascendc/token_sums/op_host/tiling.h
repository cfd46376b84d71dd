// Tiling of the sums over tokens: plain C++, shared by the host and the kernels.
#pragma once

#include "../../rows_tiling.h"

// Rows of tokens, each cut in spans (docs/op-schemas.md). Without offsets the tokens lie [S, batch].
struct TokenTiling {
  RowTiling tile;
  uint32_t tokens, rows, spans, has_offsets;
};
