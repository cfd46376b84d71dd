// Tiling of linear: plain C++, shared by the host and the kernel.
#pragma once

#include <cstdint>

struct LinearTiling {
  uint32_t rows, columns, depth;  // x [rows, depth], weight [columns, depth]
  uint32_t leaf, leaves;          // cut of `depth`: leaf * leaves >= depth, the last ones may be short
  uint32_t has_bias;
  uint32_t tile_rows;

  // A tile fills L0C (128 KB of float32), in two halves of its columns; L1 holds two of each operand's panels of kPanelBytes along k, L0 two of kStepBytes.
  static constexpr uint32_t kTileRows = 128, kTileColumns = 256, kPanelBytes = 512, kStepBytes = 128;
  static constexpr uint32_t kMaxLeaves = 64;
  static constexpr uint32_t kSlots = 2;  // tiles of a group that wait in the workspace

  // One leaf and no bias leave L0C already rounded; everything else passes a vector core.
  bool direct() const { return leaves == 1 && !has_bias; }
  uint64_t slot_elements() const { return uint64_t(leaves) * tile_rows * kTileColumns; }
  uint32_t tiles_down() const { return (rows + tile_rows - 1) / tile_rows; }
  uint32_t tiles() const { return tiles_down() * ((columns + kTileColumns - 1) / kTileColumns); }
};

// False: a cut that does not cover `depth`, or more leaves than a vector core adds at once.
inline bool MakeLinearTiling(LinearTiling& t, uint32_t rows, uint32_t columns, uint32_t depth, uint32_t leaf, uint32_t leaves, bool has_bias) {
  const uint32_t padded = (rows + 15) / 16 * 16;
  t = {rows, columns, depth, leaf, leaves, has_bias, padded < LinearTiling::kTileRows ? padded : LinearTiling::kTileRows};
  return rows && columns && depth && leaf && leaves && leaves <= LinearTiling::kMaxLeaves && (leaves & (leaves - 1)) == 0 &&
         uint64_t(leaf) * (leaves - 1) < depth && uint64_t(leaf) * leaves >= depth;
}

// Bytes of GM workspace.
inline uint64_t LinearWorkspace(const LinearTiling& t, uint32_t groups) {
  return t.direct() ? 0 : uint64_t(groups) * LinearTiling::kSlots * t.slot_elements() * 4;
}
