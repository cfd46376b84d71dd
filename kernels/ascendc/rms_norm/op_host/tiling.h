// Tiling of rms_norm: plain C++, shared by the host and the kernel.
#pragma once

#include <cstdint>

struct RmsNormTiling {
  uint32_t rows, columns;
  float eps;
  uint32_t tile_rows;  // rows that a vector core holds at once

  static constexpr uint32_t kPanel = 1024;  // columns of a copy; a row of it fits a repeat stride (255 blocks)
  static constexpr uint32_t kMaxColumns = 16384;

  uint32_t panels() const { return (columns + kPanel - 1) / kPanel; }
  // Columns that a row of a panel takes in UB.
  uint32_t panel_pitch() const { return columns < kPanel ? (columns + 63) / 64 * 64 : kPanel; }
  // Rows rounded up to what a block reduction takes.
  uint32_t row_slots() const { return (tile_rows + 7) / 8 * 8; }
};

// UB of one tile: rows and weight in float32, squares of a panel, twice a panel in and out, 64 lanes and a few words a row.
inline uint64_t RmsNormBytes(const RmsNormTiling& t, uint32_t item) {
  const uint64_t panel = uint64_t(t.tile_rows) * t.panel_pitch(), row = uint64_t(t.panels()) * t.panel_pitch();
  return (t.tile_rows + 1) * row * 4 + panel * (4 + 4 * item) + t.row_slots() * (64 + 8 + 8 + 5) * 4;
}

// `item`: bytes of an element of x. False: more columns than a vector core can hold.
inline bool MakeRmsNormTiling(RmsNormTiling& t, uint32_t rows, uint32_t columns, float eps, uint32_t item) {
  t = {rows, columns, eps, 128};
  if (columns == 0 || columns > RmsNormTiling::kMaxColumns) return false;
  while (t.tile_rows > 1 && RmsNormBytes(t, item) > 184 * 1024) t.tile_rows /= 2;
  return RmsNormBytes(t, item) <= 184 * 1024;
}
