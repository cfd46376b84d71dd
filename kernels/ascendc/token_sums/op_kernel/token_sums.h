// linear_db, rms_norm_dw and head_terms (docs/op-schemas.md): a term a token, added token after token inside a span, a tree over the spans of a row, rows added
// to the gradient in order.
//
// A core takes a span of a row and a panel of columns, from nothing; the spans' sums go to a workspace. A second kernel, of which a core owns columns, folds
// them: it alone writes its part of the gradient, row after row.
#pragma once

#include "../../rows.h"
#include "../op_host/tiling.h"

namespace tpi {

// Where the tokens of a row lie.
struct TokenRow {
  uint64_t first;
  uint32_t count, stride;
};

__aicore__ inline TokenRow RowOf(const TokenTiling& t, const GlobalTensor<int64_t>& offsets, uint32_t row) {
  if (!t.has_offsets) return {row, t.tokens / t.rows, t.rows};
  const int64_t first = offsets.GetValue(row), last = offsets.GetValue(row + 1);
  return {uint64_t(first), uint32_t(last - first), 1};
}

__aicore__ inline uint32_t SpansOf(const TokenTiling& t, uint32_t count) {
  uint32_t spans = t.spans;
  while (count % spans) spans /= 2;
  return spans;
}

// `Norm`: the term is dy * rounded(x * rstd), else dy.
template <typename T, bool norm>
class TokenSums : public Rows {
 public:
  __aicore__ inline explicit TokenSums(const TokenTiling& tiling) : Rows(tiling.tile), tokens_(tiling) { Init(sizeof(T), norm ? sizeof(T) : 0); }

  __aicore__ inline void Run(GM_ADDR dy, GM_ADDR x, GM_ADDR rstd, GM_ADDR offsets, GM_ADDR sums) {
    const uint32_t h = t_.columns;
    const uint64_t count = uint64_t(tokens_.tokens) * h;
    GlobalTensor<T> dy_gm, x_gm;
    GlobalTensor<float> rstd_gm, sums_gm;
    GlobalTensor<int64_t> offsets_gm;
    dy_gm.SetGlobalBuffer((__gm__ T*)dy, count);
    x_gm.SetGlobalBuffer((__gm__ T*)x, count);
    rstd_gm.SetGlobalBuffer((__gm__ float*)rstd, tokens_.tokens);
    sums_gm.SetGlobalBuffer((__gm__ float*)sums, uint64_t(tokens_.rows) * tokens_.spans * h);
    offsets_gm.SetGlobalBuffer((__gm__ int64_t*)offsets, tokens_.rows + 1);
    const LocalTensor<float> acc = Tile(0), term = Tile(1), n = Tile(2);
    const uint32_t items = tokens_.rows * tokens_.spans * Panels();
    for (uint32_t item = GetBlockIdx(); item < items; item += GetBlockNum()) {
      const uint32_t p = item % Panels(), span = item / Panels() % tokens_.spans, row = item / Panels() / tokens_.spans;
      const TokenRow tokens = RowOf(tokens_, offsets_gm, row);
      const uint32_t spans = SpansOf(tokens_, tokens.count), length = span < spans ? tokens.count / spans : 0;
      Shape(1, Width(p));
      Fill(acc, 0.0f);
      for (uint32_t done = 0; done < length; done += t_.tile_rows) {
        const uint64_t token = tokens.first + uint64_t(span * length + done) * tokens.stride, at = token * h + p * t_.panel;
        Shape(length - done < t_.tile_rows ? length - done : t_.tile_rows, Width(p));
        Load<T>(term, dy_gm[at], tokens.stride * h);
        if constexpr (norm) {
          Load<T>(n, x_gm[at], tokens.stride * h);
          LoadRstd(rstd_gm, token, tokens.stride);
          TimesRow(n, n, Spread(0));
          Round<T>(n);
          Times(term, term, n);
        }
        const uint32_t rows = rows_;
        Shape(1, Width(p));
        for (uint32_t r = 0; r < rows; ++r) Plus(acc, acc, term[r * pitch_]);
      }
      SavePanel(sums_gm[(uint64_t(row) * tokens_.spans + span) * h + p * t_.panel], acc);
    }
  }

 private:
  // The tokens' rstd, `stride` apart: one by one into a vector.
  __aicore__ inline void LoadRstd(const GlobalTensor<float>& rstd, uint64_t token, uint32_t stride) {
    if (stride == 1) {
      LoadVector(Vector(0), rstd[token], rows_);
    } else {
      LoadStrided(Vector(0), rstd[token], rows_, stride);
    }
    SpreadRows(Spread(0), Vector(0));
  }

  const TokenTiling tokens_;
};

// grad = grad + (tree over the spans of a row), rows ascending; a row without tokens adds nothing.
class TokenFold : public Rows {
 public:
  __aicore__ inline explicit TokenFold(const TokenTiling& tiling) : Rows(tiling.tile), tokens_(tiling) { Init(4, 4); }

  __aicore__ inline void Run(GM_ADDR sums, GM_ADDR offsets, GM_ADDR grad) {
    const uint32_t h = t_.columns;
    GlobalTensor<float> sums_gm, grad_gm;
    GlobalTensor<int64_t> offsets_gm;
    sums_gm.SetGlobalBuffer((__gm__ float*)sums, uint64_t(tokens_.rows) * tokens_.spans * h);
    grad_gm.SetGlobalBuffer((__gm__ float*)grad, h);
    offsets_gm.SetGlobalBuffer((__gm__ int64_t*)offsets, tokens_.rows + 1);
    const uint32_t last = t_.tiles - 1;
    for (uint32_t p = GetBlockIdx(); p < Panels(); p += GetBlockNum()) {
      Shape(1, Width(p));
      Load<float>(Tile(last), grad_gm[p * t_.panel], h);
      for (uint32_t row = 0; row < tokens_.rows; ++row) {
        if (RowOf(tokens_, offsets_gm, row).count == 0) continue;
        uint32_t depth = 0;
        for (uint32_t i = 0; i < tokens_.spans; ++i) {
          Load<float>(Tile(depth), sums_gm[(uint64_t(row) * tokens_.spans + i) * h + p * t_.panel], h);
          for (uint32_t rest = i; rest & 1; rest >>= 1, --depth) Plus(Tile(depth - 1), Tile(depth - 1), Tile(depth));
          ++depth;
        }
        Plus(Tile(last), Tile(last), Tile(0));
      }
      Save<float>(grad_gm[p * t_.panel], Tile(last), h);
    }
  }

 private:
  const TokenTiling tokens_;
};

// head_terms: a token's heads cut in leaves of as many as their number has odd factors; a leaf is a chain of terms from nothing, then a tree.
template <typename T>
class HeadTerms : public Rows {
 public:
  __aicore__ inline explicit HeadTerms(const RowTiling& tiling) : Rows(tiling) { Init(sizeof(T), sizeof(T)); }

  __aicore__ inline void Run(GM_ADDR dy, GM_ADDR x, GM_ADDR rstd, GM_ADDR terms, uint32_t tokens) {
    const uint32_t d = t_.columns, heads = t_.rows, leaves = heads & (~heads + 1), leaf = heads / leaves;
    GlobalTensor<T> dy_gm, x_gm;
    GlobalTensor<float> rstd_gm, terms_gm;
    dy_gm.SetGlobalBuffer((__gm__ T*)dy, uint64_t(tokens) * heads * d);
    x_gm.SetGlobalBuffer((__gm__ T*)x, uint64_t(tokens) * heads * d);
    rstd_gm.SetGlobalBuffer((__gm__ float*)rstd, uint64_t(tokens) * heads);
    terms_gm.SetGlobalBuffer((__gm__ float*)terms, uint64_t(tokens) * d);
    const LocalTensor<float> g = Tile(0), n = Tile(1);
    const uint32_t root = 2;  // tiles from here on: finished subtrees
    for (uint32_t item = GetBlockIdx(); item < tokens * Panels(); item += GetBlockNum()) {
      const uint32_t p = item % Panels(), token = item / Panels();
      uint32_t depth = 0;
      for (uint32_t l = 0; l < leaves; ++l) {
        Shape(1, Width(p));
        Fill(Tile(root + depth), 0.0f);
        for (uint32_t done = 0; done < leaf; done += t_.tile_rows) {
          const uint64_t head = uint64_t(token) * heads + l * leaf + done, at = head * d + p * t_.panel;
          Shape(leaf - done < t_.tile_rows ? leaf - done : t_.tile_rows, Width(p));
          Load<T>(g, dy_gm[at], d);
          Load<T>(n, x_gm[at], d);
          LoadVector(Vector(0), rstd_gm[head], rows_);
          SpreadRows(Spread(0), Vector(0));
          TimesRow(n, n, Spread(0));
          Round<T>(n);
          Times(g, g, n);
          const uint32_t rows = rows_;
          Shape(1, Width(p));
          for (uint32_t r = 0; r < rows; ++r) Plus(Tile(root + depth), Tile(root + depth), g[r * pitch_]);
        }
        for (uint32_t rest = l; rest & 1; rest >>= 1, --depth) Plus(Tile(root + depth - 1), Tile(root + depth - 1), Tile(root + depth));
        ++depth;
      }
      SavePanel(terms_gm[uint64_t(token) * d + p * t_.panel], Tile(root));
    }
  }
};

}  // namespace tpi

template <typename T, bool norm>
__global__ __aicore__ void token_sums(GM_ADDR dy, GM_ADDR x, GM_ADDR rstd, GM_ADDR offsets, GM_ADDR sums, TokenTiling tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  tpi::TokenSums<T, norm>(tiling).Run(dy, x, rstd, offsets, sums);
}

__global__ __aicore__ inline void token_fold(GM_ADDR sums, GM_ADDR offsets, GM_ADDR grad, TokenTiling tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  tpi::TokenFold(tiling).Run(sums, offsets, grad);
}

template <typename T>
__global__ __aicore__ void head_terms(GM_ADDR dy, GM_ADDR x, GM_ADDR rstd, GM_ADDR terms, uint32_t tokens, RowTiling tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  tpi::HeadTerms<T>(tiling).Run(dy, x, rstd, terms, tokens);
}
