// Gradient of attention: docs/op-schemas.md, "Attention". A task is one query head of one line. It walks the KV blocks in
// ascending order and, for each, the query blocks that see it, so that one pass gives dQ (a running sum over KV blocks) and
// this head's dK and dV (tiles that stay in the thread's scratch); a second loop then sums the query heads of a KV head.
#include "attention_tile.h"
#include "lane_tree.h"

namespace tpi {
namespace TPI_NS {
namespace {

template <class T>
struct Rows {
  T* p;
  i64 ts, hs;
  T* at(i64 token, i64 head) const { return p + token * ts + head * hs; }
};

struct Line {
  i64 first_query, queries, position, first_key, keys;
  i64 end() const { return position + queries; }
};

const float kOnes[16] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};

// p and dS of R queries with the keys of one block, and their share of dQ: dq += chain over j of dS * k.
struct QueryTile {
  const float *q, *dout;                     // [rows][kRowStride]
  const float *const *k_columns, *const *v_columns, *const *k_rows;  // groups of one block: d-major, d-major, row-major
  i64 D;
  float scale;
  const float *m, *l, *delta;  // of the rows
  float *p, *ds;               // [rows][128]
  float* dq;
  i64 dq_ld;
};
template <int R>
__attribute__((noinline)) void query_tile(const QueryTile& t, const Span* span) {
  const Span all = hull(span, R);
  if (all.empty()) return;
  scores<R>(t.q, t.D, t.k_columns, kGroup, t.scale, all, t.p);
  scores<R>(t.dout, t.D, t.v_columns, kGroup, 1.0f, all, t.ds);
  for (int r = 0; r < R; ++r) {
    float *p = t.p + r * kBlock, *ds = t.ds + r * kBlock;
    const vf m = set1(t.m[r]), l = set1(t.l[r]), delta = set1(t.delta[r]);
    for (int c = span[r].lo / W * W; c < span[r].hi; c += W) {
      const vf x = div(vexp(sub(load(p + c), m)), l);
      store(p + c, x);
      store(ds + c, mul(x, sub(load(ds + c), delta)));
    }
  }
  weighted<R, kBlock, 1>(t.ds, span, t.k_rows, kRowStride, round_up(t.D, W), kOnes, t.dq, t.dq_ld);
}

// dv += chain over i of p * dO and dk += chain over i of dS * q, for R keys; p and ds point at the first key's column.
template <int R>
__attribute__((noinline)) void key_tile(const float* p, const float* ds, const Span* span, const float* const* dout,
                                        const float* const* q, i64 D, float* dk, float* dv) {
  if (hull(span, R).empty()) return;
  weighted<R, 1, kBlock>(p, span, dout, kRowStride, round_up(D, W), kOnes, dv, kRowStride);
  weighted<R, 1, kBlock>(ds, span, q, kRowStride, round_up(D, W), kOnes, dk, kRowStride);
}

inline void add_to(float* to, const float* from, i64 n) {
  for (i64 i = 0; i < n; i += W) store(to + i, add(load(to + i), load(from + i)));
}

template <class T>
struct Backward {
  Rows<const T> dout, q, k, v, out;
  const float *m, *l;
  i64 ml_hs;
  Rows<T> dq;
  void *dk, *dv;
  i64 dk_ts, dk_hs;
  bool partial;
  const i32* seqs;
  i64 n_seqs, stride, Hq, Hk, D;
  float scale;
  i64 window, segment_blocks;
  // Set by run: the longest line, and the depth of the tree over query segments.
  i64 max_queries = 0, kv_segments = 1, levels = 0;

  int run() {
    i64 keys = 0, work = 0, segments = 1;
    for (i64 i = 0; i < n_seqs; ++i) {
      const Line t = line(i);
      keys += t.keys;
      work += (t.queries + 1) * (t.keys + 1) * Hq * D;
      max_queries = most(max_queries, t.queries);
      segments = most(segments, segment_count(t.end()));
      kv_segments = most(kv_segments, segment_count(t.keys));
    }
    while ((i64(1) << levels) < segments) ++levels;
    const bool tiny = work < kTinyWork;
    const i64 group = Hq / Hk, threads = omp_get_max_threads();
    // As few KV heads at a time as keep the threads busy: each query head holds its dK and dV in f32 until they are summed.
    const i64 heads = least(Hk, most(1, 4 * threads / (group * most(1, n_seqs))));
    const i64 rows = heads * group * keys;
    float* sums = static_cast<float*>(std::malloc(size_t(2 * rows * D + 1) * sizeof(float)));
    if (!sums) return TPI_NO_MEMORY;
    int status = TPI_OK;
    for (i64 head = 0; head < Hk && status == TPI_OK; head += heads) {
      const i64 count = least(heads, Hk - head);
      // dK and dV of the keys of a line, for one of the query heads: [keys][D] each.
      const auto dk_of = [&](i64 index, i64 query_head) {
        return sums + (query_head * keys + keys_before(index)) * D;
      };
      const auto dv_of = [&](i64 index, i64 query_head) { return dk_of(index, query_head) + rows * D; };
      status = for_tasks(n_seqs * count * group, task_floats(), tiny, [&](i64 task, float* scratch) {
        const i64 index = task % n_seqs, query_head = task / n_seqs;
        head_pass(line(index), head * group + query_head, scratch, dk_of(index, query_head), dv_of(index, query_head));
      });
      if (status != TPI_OK) break;
      status = for_tasks(n_seqs * count, 0, tiny, [&](i64 task, float*) {
        const i64 index = task % n_seqs, kv_head = task / n_seqs;
        float *dk_sum = dk_of(index, kv_head * group), *dv_sum = dv_of(index, kv_head * group);
        const Line t = line(index);
        if (partial) {
          sum_heads(t, head + kv_head, dk_sum, keys * D, 1.0f, static_cast<float*>(dk));
          sum_heads(t, head + kv_head, dv_sum, keys * D, 1.0f, static_cast<float*>(dv));
        } else {
          sum_heads(t, head + kv_head, dk_sum, keys * D, scale, static_cast<T*>(dk));
          sum_heads(t, head + kv_head, dv_sum, keys * D, 1.0f, static_cast<T*>(dv));
        }
      });
    }
    std::free(sums);
    return status;
  }

  static constexpr i64 kTinyWork = 1 << 16;
  static constexpr int kMaxLevels = 64;
  static constexpr i64 kTile = kBlock * kRowStride;

  Line line(i64 i) const {
    const i32* s = seqs + 5 * i;
    return {s[0], most(s[1], 0), s[2], s[3], most(s[4], 0)};
  }
  i64 keys_before(i64 index) const {
    i64 n = 0;
    for (i64 i = 0; i < index; ++i) n += line(i).keys;
    return n;
  }
  i64 segment_keys() const { return kBlock * segment_blocks; }
  i64 segment_count(i64 positions) const { return (most(0, positions) + segment_keys() - 1) / segment_keys(); }
  i64 dq_ld() const { return round_up(D, W); }

  // Scratch of a task, in this order.
  struct Scratch {
    float *k_columns, *v_columns, *k_rows, *q_rows, *dout_rows, *p, *ds, *nodes, *m, *l, *delta, *dq, *dq_segment;
    i64 floats;
  };
  Scratch carve(float* memory) const {
    Scratch s;
    s.floats = 0;
    const auto take = [&](i64 n) {
      float* p = memory ? memory + s.floats : nullptr;
      s.floats += round_up(n, 16);
      return p;
    };
    s.k_columns = take(kBlock * D);
    s.v_columns = take(kBlock * D);
    s.k_rows = take(kTile);
    s.q_rows = take(kTile);
    s.dout_rows = take(kTile);
    s.p = take(kBlock * kBlock);
    s.ds = take(kBlock * kBlock);
    s.nodes = take((levels + 2) * 2 * kTile);
    s.m = take(max_queries);
    s.l = take(max_queries);
    s.delta = take(max_queries);
    s.dq = take(max_queries * dq_ld());
    s.dq_segment = take(kv_segments > 1 ? max_queries * dq_ld() : 0);
    return s;
  }
  i64 task_floats() const { return carve(nullptr).floats; }

  // dQ of one query head of one line, and its unscaled dK and dV, [keys][D].
  void head_pass(const Line& t, i64 head, float* scratch, float* dk_out, float* dv_out) const {
    const Scratch s = carve(scratch);
    const i64 kv_head = head / (Hq / Hk), dq_size = t.queries * dq_ld();
    for (i64 i = 0; i < t.queries; ++i) {
      const i64 token = t.first_query + i * stride;
      const T *o = out.at(token, head), *d = dout.at(token, head);
      s.m[i] = m[head * ml_hs + token];
      s.l[i] = l[head * ml_hs + token];
      s.delta[i] = lane_tree(D, [&](i64 j, int n) { return mul(load_part(d + j, n), load_part(o + j, n)); });
    }
    std::memset(s.dq, 0, size_t(dq_size) * sizeof(float));
    for (i64 base = 0; base < t.keys; base += kBlock) {
      const i64 segment = base / segment_keys();
      if (segment > 0 && base % segment_keys() == 0) std::memset(s.dq_segment, 0, size_t(dq_size) * sizeof(float));
      float* dq_rows = segment == 0 ? s.dq : s.dq_segment;
      const Span keys = clip(0, t.keys, base);
      const float* node = kv_block(t, head, kv_head, base, keys, s, dq_rows);
      for (i64 j = 0; j < keys.hi; ++j) {
        float *to_k = dk_out + (base + j) * D, *to_v = dv_out + (base + j) * D;
        if (node) {
          std::memcpy(to_k, node + j * kRowStride, size_t(D) * sizeof(float));
          std::memcpy(to_v, node + kTile + j * kRowStride, size_t(D) * sizeof(float));
        } else {
          std::memset(to_k, 0, size_t(D) * sizeof(float));
          std::memset(to_v, 0, size_t(D) * sizeof(float));
        }
      }
      if (segment > 0 && ((base + kBlock) % segment_keys() == 0 || base + kBlock >= t.keys))
        add_to(s.dq, s.dq_segment, dq_size);
    }
    for (i64 i = 0; i < t.queries; ++i) {
      T* to = dq.at(t.first_query + i * stride, head);
      const float* from = s.dq + i * dq_ld();
      for_columns(0, D, [&](i64 c, int n) { store_part(to + c, add(mul(load(from + c), set1(scale)), zero()), n); });
    }
  }

  // The root over query segments of (dK, dV) of one KV block, or null if no query sees it. Adds to dq_rows.
  const float* kv_block(const Line& t, i64 head, i64 kv_head, i64 base, Span keys, const Scratch& s,
                        float* dq_rows) const {
    const i64 first = most(t.position, base) / kBlock;
    const i64 last_key = base + keys.hi - 1;
    const i64 end = (least(t.end(), end_query(last_key, window)) + kBlock - 1) / kBlock;
    if (first >= end || t.queries == 0) return nullptr;
    const auto key = [&](const Rows<const T>& x, i64 j) { return x.at(t.first_key + (base + j) * stride, kv_head); };
    load_transposed(keys, D, [&](int j) { return key(k, j); }, s.k_columns);
    load_transposed(keys, D, [&](int j) { return key(v, j); }, s.v_columns);
    for (int j = 0; j < keys.hi; ++j) load_row(key(k, j), D, s.k_rows + j * kRowStride);
    // A binary counter: node[i] is the root of a finished subtree of 2^i segments. An absent segment is +0, and adding
    // that to a sum changes no bits but a zero's sign, which the final + 0 fixes.
    float* node[kMaxLevels];
    bool present[kMaxLevels] = {};
    for (i64 i = 0; i < levels + 2; ++i) node[i] = s.nodes + i * 2 * kTile;
    float*& leaf = node[levels + 1];
    for (i64 segment = first / segment_blocks; segment < i64(1) << levels; ++segment) {
      const i64 from = most(first, segment * segment_blocks), to = least(end, (segment + 1) * segment_blocks);
      bool have = from < to;
      if (have) {
        std::memset(leaf, 0, size_t(2 * kTile) * sizeof(float));
        for (i64 block = from; block < to; ++block) block_pair(t, head, base, keys, block * kBlock, s, dq_rows, leaf);
      }
      int level = 0;
      for (; segment >> level & 1; ++level) {
        if (!present[level]) continue;
        if (have) {
          add_to(leaf, node[level], 2 * kTile);
        } else {
          swap(leaf, node[level]);
        }
        have = true;
        present[level] = false;
      }
      if (have) swap(leaf, node[level]);
      present[level] = have;
    }
    return node[levels];
  }

  // 128 query positions with 128 key positions.
  void block_pair(const Line& t, i64 head, i64 base, Span keys, i64 query_base, const Scratch& s, float* dq_rows,
                  float* node) const {
    Span sees[kBlock], seen[kBlock];
    const Span queries = clip(t.position, t.end(), query_base);
    for (i64 i = queries.lo; i < queries.hi; ++i) {
      const i64 position = query_base + i, token = t.first_query + (position - t.position) * stride;
      sees[i] = clip(first_key(position, window), least(t.keys, position + 1), base);
      load_row(q.at(token, head), D, s.q_rows + i * kRowStride);
      load_row(dout.at(token, head), D, s.dout_rows + i * kRowStride);
    }
    for (i64 j = 0; j < keys.hi; ++j) {
      const i64 position = base + j;
      seen[j] = clip(most(t.position, position), least(t.end(), end_query(position, window)), query_base);
    }
    const float *k_columns[kGroups], *v_columns[kGroups], *k_rows[kGroups], *q_rows[kGroups], *dout_rows[kGroups];
    for (int g = 0; g < kGroups; ++g) {
      k_columns[g] = s.k_columns + g * kGroup * D;
      v_columns[g] = s.v_columns + g * kGroup * D;
      k_rows[g] = s.k_rows + g * kGroup * kRowStride;
      q_rows[g] = s.q_rows + g * kGroup * kRowStride;
      dout_rows[g] = s.dout_rows + g * kGroup * kRowStride;
    }
    for_tiles(queries.hi - queries.lo, [&](i64 offset, auto rows) {
      const i64 i = queries.lo + offset, query = query_base + i - t.position;
      const QueryTile tile = {s.q_rows + i * kRowStride, s.dout_rows + i * kRowStride, k_columns, v_columns, k_rows, D,
                              scale, s.m + query, s.l + query, s.delta + query, s.p + i * kBlock, s.ds + i * kBlock,
                              dq_rows + query * dq_ld(), dq_ld()};
      query_tile<rows.value>(tile, sees + i);
    });
    for_tiles(keys.hi, [&](i64 j, auto rows) {
      key_tile<rows.value>(s.p + j, s.ds + j, seen + j, dout_rows, q_rows, D, node + j * kRowStride,
                           node + kTile + j * kRowStride);
    });
  }

  // The tree over the query heads of a KV head, in place, and one output. `sum`: the first head's rows.
  template <class Out>
  void sum_heads(const Line& t, i64 kv_head, float* sum, i64 head_stride, float factor, Out* to) const {
    const i64 group = Hq / Hk, leaves = group & -group, leaf = group / leaves;
    for (i64 j = 0; j < t.keys; ++j, sum += D) {
      const auto add_row = [&](i64 a, i64 b) {
        float *x = sum + a * head_stride, *y = sum + b * head_stride;
        for_columns(0, D, [&](i64 c, int n) { store_n(x + c, add(load_n(x + c, n), load_n(y + c, n)), n); });
      };
      for (i64 x = 0; x < leaves; ++x)
        for (i64 y = 1; y < leaf; ++y) add_row(x * leaf, x * leaf + y);
      for (i64 step = 1; step < leaves; step *= 2)
        for (i64 x = 0; x < leaves; x += 2 * step) add_row(x * leaf, (x + step) * leaf);
      Out* row = to + (t.first_key + j * stride) * dk_ts + kv_head * dk_hs;
      for_columns(0, D, [&](i64 c, int n) {
        store_part(row + c, add(mul(load_n(sum + c, n), set1(factor)), zero()), n);
      });
    }
  }

  static void swap(float*& a, float*& b) {
    float* t = a;
    a = b;
    b = t;
  }

};

}  // namespace
}  // namespace TPI_NS
}  // namespace tpi

TPI_EXPORT(attention_backward)
(int dtype, const void* dout, i64 do_ts, i64 do_hs, const void* q, i64 q_ts, i64 q_hs, const void* k, i64 k_ts, i64 k_hs,
 const void* v, i64 v_ts, i64 v_hs, const void* out, i64 o_ts, i64 o_hs, const float* m, const float* l, i64 ml_hs,
 void* dq, i64 dq_ts, i64 dq_hs, void* dk, void* dv, i64 dk_ts, i64 dk_hs, int partial, const i32* seqs, i64 n_seqs,
 i64 stride, i64 Hq, i64 Hk, i64 D, float scale, i64 window, i64 segment_blocks) {
  using namespace tpi;
  using namespace tpi::TPI_NS;
  if (Hk < 1 || Hq < 1 || Hq % Hk != 0 || D < 8 || D % 8 != 0 || D > kMaxHeadDim || window < 0 || segment_blocks < 1 ||
      stride < 1)
    return TPI_BAD_SHAPE;
  return for_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    Backward<T> backward = {{static_cast<const T*>(dout), do_ts, do_hs},
                            {static_cast<const T*>(q), q_ts, q_hs},
                            {static_cast<const T*>(k), k_ts, k_hs},
                            {static_cast<const T*>(v), v_ts, v_hs},
                            {static_cast<const T*>(out), o_ts, o_hs},
                            m,
                            l,
                            ml_hs,
                            {static_cast<T*>(dq), dq_ts, dq_hs},
                            dk,
                            dv,
                            dk_ts,
                            dk_hs,
                            partial != 0,
                            seqs,
                            n_seqs,
                            stride,
                            Hq,
                            Hk,
                            D,
                            scale,
                            window,
                            segment_blocks};
    return backward.run();
  });
}
