// Attention over the paged cache and the write into it: docs/op-schemas.md, "Attention".
#include <type_traits>

#include "attention_forward.h"

namespace tpi {
namespace TPI_NS {
namespace {

// The cache read in place. Its tiles are columns, which hardware does not prefetch well: the pass over K fetches V, line by
// line, and the pass over V the next block's K.
template <class T>
struct PagedView : KvView<T> {
  const T* next_k[kGroups];
  void fetch_values(int group, i64 d) const { __builtin_prefetch(this->v[group] + d * kGroup); }
  void fetch_next_keys(int j, i64 c) const {
    __builtin_prefetch(next_k[j / kGroup] + (c / kGroup * kGroup + j % kGroup) * this->k_ld);
  }
};

template <class T>
struct Paged {
  const T* cache;
  i64 block_stride, head_stride, page;
  const i32* block_table;
  i64 bt_stride;
  const i32 *query_start_loc, *seq_lens;
  i64 D;
  static constexpr i64 stride = 1;
  // Up to this many rows the cache is read in place, with more a widened copy of the block pays.
  static constexpr i64 kDirectRows = 2 * kTileRows;

  Line line(i64 i) const {
    const i64 queries = query_start_loc[i + 1] - query_start_loc[i];
    return {query_start_loc[i], queries, seq_lens[i] - queries, seq_lens[i]};
  }

  // Whether every page that request `index` can read is in its table and in the cache.
  bool pages_valid(i64 index, i64 window, i64 bt_width, i64 blocks) const {
    const Line l = line(index);
    if (l.queries <= 0) return true;
    if (l.position < 0 || l.keys > bt_width * page) return false;
    for (i64 i = first_key(l.position, window) / page; i * page < l.keys; ++i)
      if (block_table[index * bt_stride + i] < 0 || block_table[index * bt_stride + i] >= blocks) return false;
    return true;
  }

  const T* tile(i64 index, i64 head, i64 position) const {
    return cache + block_table[index * bt_stride + position / page] * block_stride + head * head_stride;
  }

  template <class F>
  void view(const Line& line, i64 index, i64 head, i64 block, Span span, i64 rows, float* scratch, F f) const {
    PagedView<T> in_place;
    in_place.k_ld = page;
    in_place.v_ld = D;
    const int first = span.lo / kGroup, end = (span.hi + kGroup - 1) / kGroup;
    for (int g = first; g < end; ++g) {
      const i64 position = block * kBlock + g * kGroup, slot = position % page, next = position + kBlock;
      const T* at = tile(index, head, position);
      in_place.k[g] = at + slot;
      in_place.v[g] = at + D * page + slot * D;
      in_place.next_k[g] = next < line.keys ? tile(index, head, next) + next % page : in_place.k[g];
    }
    if (rows <= kDirectRows && D % W == 0) return f(in_place);
    float* values = scratch + kBlock * D;
    for (int g = first; g < end; ++g)
      for (i64 d = 0; d < D; ++d)
        for (int j = 0; j < kGroup; j += W)
          store(scratch + (g * D + d) * kGroup + j, load_as(in_place.k[g] + d * page + j));
    for (int j = span.lo; j < span.hi; ++j)
      load_row(in_place.v[j / kGroup] + j % kGroup * D, D, values + j * kRowStride);
    f(scratch_view(scratch, values, D));
  }
};

bool page_valid(i64 page) { return page > 0 && page % kGroup == 0 && (kBlock % page == 0 || page % kBlock == 0); }

// A copy, so the type only has to have the right size. Tokens are taken in runs that fill consecutive slots of one page.
template <class U>
void write_head(const U* k, i64 k_ts, const U* v, i64 v_ts, U* cache, i64 block_stride, i64 page, const i64* slots,
                i64 T, i64 D) {
  for (i64 t = 0; t < T;) {
    const i64 slot = slots[t];
    if (slot < 0) {
      ++t;
      continue;
    }
    i64 n = 1;
    while (t + n < T && slots[t + n] == slot + n && (slot + n) % page != 0 && n < kGroup) ++n;
    U* keys = cache + slot / page * block_stride + slot % page;
    for (i64 d = 0; d < D; ++d)
      for (i64 i = 0; i < n; ++i) keys[d * page + i] = k[(t + i) * k_ts + d];
    U* values = cache + slot / page * block_stride + D * page + slot % page * D;
    for (i64 i = 0; i < n; ++i) std::memcpy(values + i * D, v + (t + i) * v_ts, size_t(D) * sizeof(U));
    t += n;
  }
}

template <class U>
void write(const void* k, i64 k_ts, i64 k_hs, const void* v, i64 v_ts, i64 v_hs, void* cache, i64 block_stride,
           i64 head_stride, i64 page, const i64* slots, i64 T, i64 Hk, i64 D) {
  parallel_for(Hk, T * Hk * D, [&](i64 first, i64 last) {
    for (i64 head = first; head < last; ++head)
      write_head(static_cast<const U*>(k) + head * k_hs, k_ts, static_cast<const U*>(v) + head * v_hs, v_ts,
                 static_cast<U*>(cache) + head * head_stride, block_stride, page, slots, T, D);
  });
}

}  // namespace
}  // namespace TPI_NS
}  // namespace tpi

TPI_EXPORT(paged_attention)
(int dtype, const void* q, i64 q_ts, i64 q_hs, const void* cache, i64 block_stride, i64 head_stride, i64 page,
 const i32* block_table, i64 bt_stride, i64 bt_width, i64 blocks, const i32* query_start_loc, const i32* seq_lens,
 i64 n_seqs, void* out, i64 o_ts, i64 o_hs, i64 Hq, i64 Hk, i64 D, float scale, i64 window, i64 segment_blocks) {
  using namespace tpi;
  using namespace tpi::TPI_NS;
  const Heads heads = {Hq, Hk, D, scale, window, segment_blocks};
  if (!heads.valid() || !page_valid(page)) return TPI_BAD_SHAPE;
  return for_dtype(dtype, [&](auto type) -> int {
    using T = decltype(type);
    const Paged<T> source = {static_cast<const T*>(cache), block_stride, head_stride, page, block_table, bt_stride,
                             query_start_loc, seq_lens, D};
    for (i64 i = 0; i < n_seqs; ++i)
      if (!source.pages_valid(i, window, bt_width, blocks)) return TPI_BAD_INDEX;
    const Output<T> output = {static_cast<T*>(out), o_ts, o_hs, nullptr, nullptr, 0};
    return Forward<T, Paged<T>>(source, heads, static_cast<const T*>(q), q_ts, q_hs, output).run(n_seqs);
  });
}

TPI_EXPORT(paged_cache_write)
(int dtype, const void* k, i64 k_ts, i64 k_hs, const void* v, i64 v_ts, i64 v_hs, void* cache, i64 block_stride,
 i64 head_stride, i64 page, const i64* slots, i64 T, i64 Hk, i64 D) {
  using namespace tpi;
  using namespace tpi::TPI_NS;
  if (!page_valid(page) || D <= 0 || D % 8 != 0 || D > kMaxHeadDim) return TPI_BAD_SHAPE;
  return for_dtype(dtype, [&](auto type) -> int {
    using U = std::conditional_t<sizeof(type) == 4, uint32_t, uint16_t>;
    write<U>(k, k_ts, k_hs, v, v_ts, v_hs, cache, block_stride, head_stride, page, slots, T, Hk, D);
    return TPI_OK;
  });
}
