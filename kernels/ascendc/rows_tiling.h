// Tiling of kernels that work on tiles of rows (rows.h): plain C++, shared by the host and the kernels.
#pragma once

#include <cstdint>

struct RowTiling {
  uint32_t rows, columns;
  uint32_t tiles, lanes, vectors, spreads;  // work buffers: tiles, 64 lanes a row, one value a row, eight equal values a row
  uint32_t panel, tile_rows;

  static constexpr uint32_t kPanel = 1024;  // columns of a tile: a row's pitch fits a repeat stride (255 blocks)
  static constexpr uint32_t kCores = 48;

  uint32_t pitch() const { return (panel + 63) / 64 * 64; }
  uint32_t tile_elements() const { return tile_rows * pitch(); }
  uint32_t slots() const { return (tile_rows + 7) / 8 * 8; }
  uint64_t bytes(uint32_t in, uint32_t out) const {
    return uint64_t(tile_elements()) * (2 * in + 2 * out + 4 * tiles) +
           uint64_t(slots()) * 4 * (64 * lanes + 8 * (lanes > 0) + vectors + 8 * spreads + 4 * (vectors > 0)) + 4 * pitch() + 512;
  }
};

// As many rows as UB holds, but few enough that every core has some. `in`, `out`: bytes of the widest element loaded and stored.
inline RowTiling MakeRowTiling(uint32_t rows, uint32_t columns, uint32_t in, uint32_t out, uint32_t tiles, uint32_t lanes, uint32_t vectors,
                               uint32_t spreads) {
  RowTiling t{rows, columns, tiles, lanes, vectors, spreads, columns < RowTiling::kPanel ? columns : RowTiling::kPanel, 128};
  while (t.tile_rows > 1 && (t.bytes(in, out) > 184 * 1024 || (t.tile_rows > 8 && rows < t.tile_rows * RowTiling::kCores / 2))) t.tile_rows /= 2;
  return t;
}
