// Tiling of swiglu: plain C++, shared by the host and the kernel.
#pragma once

#include <cstdint>

struct SwigluTiling {
  uint32_t rows, columns;  // x is [rows, 2 * columns]
  uint32_t tile_rows, tile_columns;

  static constexpr uint32_t kTile = 4096;  // elements of a tile: 16 KB of float32
};

// `item`: bytes of an element of x.
inline SwigluTiling MakeSwigluTiling(uint32_t rows, uint32_t columns, uint32_t item) {
  SwigluTiling t{rows, columns, 1, columns < SwigluTiling::kTile ? columns : SwigluTiling::kTile};
  const uint32_t block = 32 / item, pitch = (t.tile_columns + block - 1) / block * block;
  if (pitch < SwigluTiling::kTile) t.tile_rows = SwigluTiling::kTile / pitch;
  return t;
}
