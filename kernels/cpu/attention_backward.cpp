// Gradient of attention: docs/op-schemas.md, "Attention". The lines of `seqs` that share their keys are a group, whose dK and
// dV are a tree over its lines. The groups are worked through line by line. A task is one query head of one line: it walks
// the KV blocks in ascending order and, for each, the query blocks that see it, so that one pass gives dQ (a running sum
// over KV blocks) and this head's dK and dV (tiles that stay in the thread's scratch). A second loop then sums the query
// heads of a KV head and takes the sum into the group's tree, a binary counter.
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
  // Set by run: sizes of the longest line and group.
  i64 max_queries = 0, kv_segments = 1;

  // Lines [first, first + lines) of `seqs`; `before`: keys of all earlier groups.
  struct Group {
    i64 first, lines, keys, before;
  };

  int run() {
    Group* groups = static_cast<Group*>(std::malloc(size_t(n_seqs + 1) * sizeof(Group)));
    if (!groups) return TPI_NO_MEMORY;
    const int status = run(groups, find_groups(groups));
    std::free(groups);
    return status;
  }

  i64 find_groups(Group* groups) const {
    i64 n = 0;
    for (i64 i = 0; i < n_seqs; ++i) {
      const Line t = line(i);
      if (n > 0 && t.keys > 0 && groups[n - 1].keys > 0 && t.first_key == line(i - 1).first_key) {
        Group& g = groups[n - 1];
        ++g.lines;
        g.keys = most(g.keys, t.keys);
      } else {
        const i64 before = n > 0 ? groups[n - 1].before + groups[n - 1].keys : 0;
        groups[n++] = {i, 1, t.keys, before};
      }
    }
    return n;
  }

  int run(const Group* groups, i64 n_groups) {
    i64 work = 0, longest = 1, levels = 0;
    for (i64 i = 0; i < n_seqs; ++i) {
      const Line t = line(i);
      work += (t.queries + 1) * (t.keys + 1) * Hq * D;
      max_queries = most(max_queries, t.queries);
      kv_segments = most(kv_segments, segment_count(t.keys));
    }
    for (i64 i = 0; i < n_groups; ++i) {
      if (!is_power_of_two(groups[i].lines)) return TPI_BAD_SHAPE;
      longest = most(longest, groups[i].lines);
    }
    while ((i64(1) << levels) < longest) ++levels;
    const i64 keys = n_groups > 0 ? groups[n_groups - 1].before + groups[n_groups - 1].keys : 0;
    const bool tiny = work < kTinyWork;
    const i64 group = Hq / Hk, threads = omp_get_max_threads();
    // As few KV heads at a time as keep the threads busy: each query head holds its dK and dV in f32 until they are summed,
    // and each KV head the stored levels of its tree.
    const i64 heads = least(Hk, most(1, 4 * threads / (group * most(1, n_groups))));
    const i64 rows = heads * group * keys, tree_rows = heads * levels * keys;
    float* sums = static_cast<float*>(std::malloc(size_t(2 * (rows + tree_rows) * D + 1) * sizeof(float)));
    i64* rows_of = static_cast<i64*>(std::malloc(size_t(2 * heads * n_groups * levels + 1) * sizeof(i64)));
    int status = sums && rows_of ? TPI_OK : TPI_NO_MEMORY;
    float* nodes = sums + 2 * rows * D;
    for (i64 head = 0; head < Hk && status == TPI_OK; head += heads) {
      const i64 count = least(heads, Hk - head);
      for (i64 step = 0; step < longest && status == TPI_OK; ++step) {
        // dK of the keys of a group for one of the query heads, [keys][D]; dV: rows * D further on.
        const auto dk_of = [&](const Group& g, i64 query_head) { return sums + (query_head * keys + g.before) * D; };
        status = for_tasks(n_groups * count * group, task_floats(), tiny, [&](i64 task, float* scratch) {
          const Group& g = groups[task % n_groups];
          const i64 query_head = task / n_groups;
          if (step >= g.lines) return;
          float* to = dk_of(g, query_head);
          head_pass(line(g.first + step), head * group + query_head, scratch, to, to + rows * D);
        });
        if (status != TPI_OK) break;
        status = for_tasks(n_groups * count * 2, 0, tiny, [&](i64 task, float*) {
          const i64 index = task % n_groups, kv_head = task / n_groups / 2, is_dv = task / n_groups % 2;
          const Group& g = groups[index];
          if (step >= g.lines) return;
          float* sum = dk_of(g, kv_head * group) + is_dv * rows * D;
          i64 seen = seen_keys(line(g.first + step));  // later rows are +0
          sum_heads(seen, sum, keys * D);
          const auto node = [&](i64 level) {
            return nodes + (((kv_head * levels + level) * 2 + is_dv) * keys + g.before) * D;
          };
          i64* node_rows = rows_of + ((kv_head * 2 + is_dv) * n_groups + index) * levels;
          i64 level = 0;
          for (; step >> level & 1; ++level) seen = merge(sum, seen, node(level), node_rows[level]);
          if (step + 1 == g.lines) {
            void* to = is_dv ? dv : dk;
            const float factor = is_dv || partial ? 1.0f : scale;
            if (partial)
              finish(line(g.first), g.keys, head + kv_head, sum, seen, factor, static_cast<float*>(to));
            else
              finish(line(g.first), g.keys, head + kv_head, sum, seen, factor, static_cast<T*>(to));
          } else {
            std::memcpy(node(level), sum, size_t(seen * D) * sizeof(float));
            node_rows[level] = seen;
          }
        });
      }
    }
    std::free(rows_of);
    std::free(sums);
    return status;
  }

  static constexpr i64 kTinyWork = 1 << 16;
  static constexpr i64 kTile = kBlock * kRowStride;

  Line line(i64 i) const {
    const i32* s = seqs + 5 * i;
    return {s[0], most(s[1], 0), s[2], s[3], most(s[4], 0)};
  }
  static i64 seen_keys(const Line& t) { return t.queries > 0 ? least(t.keys, t.end()) : 0; }
  i64 segment_keys() const { return kBlock * segment_blocks; }
  i64 segment_count(i64 positions) const { return (most(0, positions) + segment_keys() - 1) / segment_keys(); }
  i64 dq_ld() const { return round_up(D, W); }

  // Scratch of a task, in this order.
  struct Scratch {
    float *k_columns, *v_columns, *k_rows, *q_rows, *dout_rows, *p, *ds, *sum, *m, *l, *delta, *dq, *dq_segment;
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
    s.sum = take(2 * kTile);
    s.m = take(max_queries);
    s.l = take(max_queries);
    s.delta = take(max_queries);
    s.dq = take(max_queries * dq_ld());
    s.dq_segment = take(kv_segments > 1 ? max_queries * dq_ld() : 0);
    return s;
  }
  i64 task_floats() const { return carve(nullptr).floats; }

  // dQ of one query head of one line, and its unscaled dK and dV, [seen_keys][D].
  void head_pass(const Line& t, i64 head, float* scratch, float* dk_out, float* dv_out) const {
    const Scratch s = carve(scratch);
    const i64 kv_head = head / (Hq / Hk), dq_size = t.queries * dq_ld(), n_keys = seen_keys(t);
    for (i64 i = 0; i < t.queries; ++i) {
      const i64 token = t.first_query + i * stride;
      const T *o = out.at(token, head), *d = dout.at(token, head);
      s.m[i] = m[head * ml_hs + token];
      s.l[i] = l[head * ml_hs + token];
      s.delta[i] = lane_tree(D, [&](i64 j, int n) { return mul(load_part(d + j, n), load_part(o + j, n)); });
    }
    std::memset(s.dq, 0, size_t(dq_size) * sizeof(float));
    for (i64 base = 0; base < n_keys; base += kBlock) {
      const i64 segment = base / segment_keys();
      if (segment > 0 && base % segment_keys() == 0) std::memset(s.dq_segment, 0, size_t(dq_size) * sizeof(float));
      float* dq_rows = segment == 0 ? s.dq : s.dq_segment;
      const Span keys = clip(0, n_keys, base);
      const float* sum = kv_block(t, head, kv_head, base, keys, s, dq_rows);
      for (i64 j = 0; j < keys.hi; ++j) {
        float *to_k = dk_out + (base + j) * D, *to_v = dv_out + (base + j) * D;
        if (sum) {
          std::memcpy(to_k, sum + j * kRowStride, size_t(D) * sizeof(float));
          std::memcpy(to_v, sum + kTile + j * kRowStride, size_t(D) * sizeof(float));
        } else {
          std::memset(to_k, 0, size_t(D) * sizeof(float));
          std::memset(to_v, 0, size_t(D) * sizeof(float));
        }
      }
      if (segment > 0 && ((base + kBlock) % segment_keys() == 0 || base + kBlock >= n_keys))
        add_to(s.dq, s.dq_segment, dq_size);
    }
    for (i64 i = 0; i < t.queries; ++i) {
      T* to = dq.at(t.first_query + i * stride, head);
      const float* from = s.dq + i * dq_ld();
      for_columns(0, D, [&](i64 c, int n) { store_part(to + c, add(mul(load(from + c), set1(scale)), zero()), n); });
    }
  }

  // (dK, dV) of one KV block: one sum a query block, added ascending; null if no query sees it. Adds to dq_rows.
  const float* kv_block(const Line& t, i64 head, i64 kv_head, i64 base, Span keys, const Scratch& s,
                        float* dq_rows) const {
    const i64 first = most(t.position, base) / kBlock;
    const i64 last_key = base + keys.hi - 1;
    const i64 end = (least(t.end(), end_query(last_key, window)) + kBlock - 1) / kBlock;
    if (first >= end) return nullptr;
    const auto key = [&](const Rows<const T>& x, i64 j) { return x.at(t.first_key + (base + j) * stride, kv_head); };
    load_transposed(keys, D, [&](int j) { return key(k, j); }, s.k_columns);
    load_transposed(keys, D, [&](int j) { return key(v, j); }, s.v_columns);
    for (int j = 0; j < keys.hi; ++j) load_row(key(k, j), D, s.k_rows + j * kRowStride);
    std::memset(s.sum, 0, size_t(2 * kTile) * sizeof(float));
    for (i64 block = first; block < end; ++block) block_pair(t, head, base, keys, block * kBlock, s, dq_rows, s.sum);
    return s.sum;
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

  // The tree over the query heads of a KV head, into the first head's rows.
  void sum_heads(i64 n_rows, float* sum, i64 head_stride) const {
    const i64 group = Hq / Hk, leaves = group & -group, leaf = group / leaves;
    for (i64 j = 0; j < n_rows; ++j, sum += D) {
      const auto add_row = [&](i64 a, i64 b) { add_row_to(sum + a * head_stride, sum + b * head_stride); };
      for (i64 x = 0; x < leaves; ++x)
        for (i64 y = 1; y < leaf; ++y) add_row(x * leaf, x * leaf + y);
      for (i64 step = 1; step < leaves; step *= 2)
        for (i64 x = 0; x < leaves; x += 2 * step) add_row(x * leaf, (x + step) * leaf);
    }
  }

  void add_row_to(float* x, const float* y) const {
    for_columns(0, D, [&](i64 c, int n) { store_n(x + c, add(load_n(x + c, n), load_n(y + c, n)), n); });
  }

  // Adds `from_rows` rows to `rows` rows; an absent row is +0, and adding that changes no bits but a zero's sign, which the
  // final + 0 fixes.
  i64 merge(float* sum, i64 rows, const float* from, i64 from_rows) const {
    const i64 both = least(rows, from_rows);
    for (i64 j = 0; j < both; ++j) add_row_to(sum + j * D, from + j * D);
    if (from_rows > both) std::memcpy(sum + both * D, from + both * D, size_t((from_rows - both) * D) * sizeof(float));
    return most(rows, from_rows);
  }

  // One output of a group whose keys are those of `t`: `seen` rows of a sum, then +0.
  template <class Out>
  void finish(const Line& t, i64 keys, i64 kv_head, const float* sum, i64 seen, float factor, Out* to) const {
    for (i64 j = 0; j < keys; ++j, sum += D) {
      Out* row = to + (t.first_key + j * stride) * dk_ts + kv_head * dk_hs;
      for_columns(0, D, [&](i64 c, int n) {
        vf x = j < seen ? load_n(sum + c, n) : zero();
        store_part(row + c, add(mul(x, set1(factor)), zero()), n);
      });
    }
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
