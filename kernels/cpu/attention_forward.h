// The forward pass over one description of the keys and values: token-major tensors or the paged cache. A task is a run of
// queries of one line with the query heads of one KV head; its rows are ordered query by query, head by head.
#pragma once
#include "attention_tile.h"
#include "lane_tree.h"

namespace tpi {
namespace TPI_NS {

constexpr i64 kTaskRows = 96;

struct Heads {
  i64 Hq, Hk, D;
  float scale;
  i64 window, segment_blocks;
  i64 group() const { return Hq / Hk; }
  bool valid() const {
    return Hk > 0 && Hq > 0 && Hq % Hk == 0 && D > 0 && D % 8 == 0 && D <= kMaxHeadDim && window >= 0 &&
           segment_blocks > 0;
  }
};

// A run of queries at consecutive positions, and the number of keys from position 0.
struct Line {
  i64 first_query, queries, position, keys;
};

// K d-major and V row-major of one block: k[i], v[i] point at position 16 i.
template <class T>
struct KvView {
  const T* k[kGroups];
  const T* v[kGroups];
  i64 k_ld, v_ld;
};
inline KvView<float> scratch_view(const float* k, const float* v, i64 D) {
  KvView<float> view;
  for (int g = 0; g < kGroups; ++g) {
    view.k[g] = k + g * kGroup * D;
    view.v[g] = v + g * kGroup * kRowStride;
  }
  view.k_ld = kGroup;
  view.v_ld = kRowStride;
  return view;
}

template <class T>
struct Output {
  T* out;
  i64 ts, hs;
  float *m, *l;  // null: not wanted
  i64 ml_hs;
};

inline float scalar_exp(float x) { return first_lane(vexp(set1(x))); }
inline float scalar_max(float a, float b) { return a != a || a > b ? a : b; }  // NaN if either is

// Turns the scores s of one row into p, and gives m and the sum of p. Scores outside the span are overwritten: a p there is
// +0, or NaN with every other p.
inline void exponentials(float* s, Span span, float* m, float* sum) {
  const vf low = set1(-INFINITY);
  const int first = span.lo / W, last = (span.hi + W - 1) / W;
  float* edge = s + first * W;
  store(edge, select(first_n(span.lo - first * W), low, load(edge)));
  edge = s + (last - 1) * W;
  store(edge, select(first_n(span.hi - (last - 1) * W), load(edge), low));
  vf top = low, total = zero();
  for (int c = first; c < last; ++c) {
    const vf x = load(s + c * W);
    top = max_raw(x, top);
    total = add(total, x);
  }
  if (any(is_nan(total)))  // a score is NaN (or +inf meets -inf): max_raw may have dropped it
    for (int c = first; c < last; ++c) top = vmax(load(s + c * W), top);
  float t[W];
  store(t, top);
  for (int i = 0; i < W; ++i) *m = scalar_max(*m, t[i]);
  LaneSum lanes;
  const vf shift = set1(*m);
  for (int c = first; c < last; ++c) {
    const vf p = vexp(sub(load(s + c * W), shift));
    store(s + c * W, p);
    lanes.lanes[c % kLaneVectors] = add(lanes.lanes[c % kLaneVectors], p);
  }
  *sum = lanes.root();
}

// One block for R rows of the running (m, l, o) of a segment. o starts as 0, l as 0 and m as -inf, which makes the first
// visible block of a row initialise: then o * exp(-inf - m') is 0, or everything is NaN.
template <int R, class T>
__attribute__((noinline)) void attend_tile(const KvView<T>& kv, const Span* span, const float* q, i64 D, float scale,
                                           float* m, float* l, float* o) {
  const Span all = hull(span, R);
  if (all.empty()) return;
  alignas(64) float s[R * kBlock];
  scores<R>(q, D, kv.k, kv.k_ld, scale, all, s);
  constexpr int kPadded = (R + W - 1) / W * W;
  float alpha[kPadded] = {}, sum[kPadded] = {};
  for (int r = 0; r < R; ++r) {
    if (span[r].empty()) continue;  // exp(0) = 1 and sum 0: the row keeps its values
    const float before = m[r];
    exponentials(s + r * kBlock, span[r], m + r, sum + r);
    alpha[r] = before - m[r];
  }
  for (int r = 0; r < R; r += W) {
    const int n = R - r < W ? R - r : W;
    const vf a = vexp(load(alpha + r));
    store(alpha + r, a);
    store_n(l + r, fma(load_n(l + r, n), a, load(sum + r)), n);
  }
  weighted<R, kBlock, 1>(s, span, kv.v, kv.v_ld, round_up(D, W), alpha, o, kRowStride);
}

template <class T, class Source>
class Forward {
 public:
  Forward(const Source& source, const Heads& heads, const T* q, i64 q_ts, i64 q_hs, const Output<T>& out)
      : source_(source), h_(heads), q_(q), q_ts_(q_ts), q_hs_(q_hs), out_(out) {}

  int run(i64 lines) {
    const i64 g = h_.group(), run = most(1, kTaskRows / g);
    rows_ = run * g;
    i64 count = 0, work = 0, segments = 1;
    for (i64 i = 0; i < lines; ++i) {
      const Line line = source_.line(i);
      count += (most(line.queries, 0) + run - 1) / run;
      const i64 keys = most(0, least(line.keys, line.position + line.queries));
      work += most(line.queries, 0) * h_.Hq * h_.D * least(keys + 1, h_.window > 0 ? h_.window + line.queries : INT64_MAX);
      segments = most(segments, (keys + segment_keys() - 1) / segment_keys());
    }
    if (count == 0) return TPI_OK;
    Task* tasks = static_cast<Task*>(std::malloc(size_t(count) * sizeof(Task)));
    if (!tasks) return TPI_NO_MEMORY;
    i64 filled = 0;
    for (i64 i = lines - 1; i >= 0; --i) {  // the last queries of a line see the most keys: start with them
      const Line line = source_.line(i);
      for (i64 first = (most(line.queries, 0) + run - 1) / run * run - run; first >= 0; first -= run)
        tasks[filled++] = {line, i, first, least(run, line.queries - first)};
    }
    const bool tiny = work < kTinyWork;
    const i64 units = count * h_.Hk;
    int status;
    if (!tiny && segments > 1 && omp_get_max_threads() > 1 && units < 4 * omp_get_max_threads())
      status = run_by_segment(tasks, units, segments);
    else
      status = for_tasks(units, 2 * part_floats() + kv_floats(), tiny, [&](i64 unit, float* scratch) {
        const Task& task = tasks[unit / h_.Hk];
        const i64 head = unit % h_.Hk;
        const Part total = part(scratch), next = part(scratch + part_floats());
        clear(task, total);
        for (i64 segment = first_segment(task); segment < end_segment(task); ++segment) {
          attend_segment(task, head, segment, next, scratch + 2 * part_floats());
          merge(task, segment, total, next);
        }
        finish(task, head, total);
      });
    std::free(tasks);
    return status;
  }

 private:
  static constexpr i64 kTinyWork = 1 << 17;

  struct Task {
    Line line;
    i64 index, first, count;
    i64 position(i64 query) const { return line.position + first + query; }
  };
  // (m, l, o) of a task's rows.
  struct Part {
    float *o, *m, *l;
  };

  i64 part_floats() const { return rows_ * (kRowStride + 2) + kGroup - rows_ * 2 % kGroup; }
  Part part(float* at) const { return {at, at + rows_ * kRowStride, at + rows_ * (kRowStride + 1)}; }
  // queries, a transposed K block, a V block
  i64 kv_floats() const { return rows_ * kRowStride + kBlock * h_.D + kBlock * kRowStride; }
  i64 segment_keys() const { return kBlock * h_.segment_blocks; }
  // Keys that the task's rows see together: [first_visible, end_visible).
  i64 first_visible(const Task& t) const { return first_key(t.position(0), h_.window); }
  i64 end_visible(const Task& t) const { return least(t.line.keys, t.position(t.count)); }
  i64 first_segment(const Task& t) const { return first_visible(t) / segment_keys(); }
  i64 end_segment(const Task& t) const { return (most(0, end_visible(t)) + segment_keys() - 1) / segment_keys(); }
  Span visible(const Task& t, i64 query, i64 base) const {
    const i64 p = t.position(query);
    return clip(first_key(p, h_.window), least(t.line.keys, p + 1), base);
  }

  void clear(const Task& t, const Part& part) const {
    const i64 rows = t.count * h_.group();
    for (i64 r = 0; r < rows; ++r) {
      std::memset(part.o + r * kRowStride, 0, size_t(round_up(h_.D, W)) * sizeof(float));
      part.m[r] = -INFINITY;
      part.l[r] = 0;
    }
  }

  void attend_segment(const Task& t, i64 head, i64 segment, const Part& part, float* scratch) const {
    const i64 g = h_.group(), rows = t.count * g;
    float* q = scratch;
    float* kv = scratch + rows_ * kRowStride;
    for (i64 r = 0; r < rows; ++r)
      load_row(q_ + (t.line.first_query + (t.first + r / g) * source_.stride) * q_ts_ + (head * g + r % g) * q_hs_, h_.D,
               q + r * kRowStride);
    clear(t, part);
    Span span[kSpans];
    const i64 begin = most(first_visible(t) / kBlock, segment * h_.segment_blocks);
    const i64 end = least((end_visible(t) + kBlock - 1) / kBlock, (segment + 1) * h_.segment_blocks);
    for (i64 block = begin; block < end; ++block) {
      const Span all = clip(first_visible(t), end_visible(t), block * kBlock);
      source_.view(t.line, t.index, head, block, all, rows, kv, [&](const auto& view) {
        for_tiles(rows, [&](i64 first, auto tile) {
          for (int r = 0; r < tile.value; ++r) span[r] = visible(t, (first + r) / g, block * kBlock);
          attend_tile<tile.value>(view, span, q + first * kRowStride, h_.D, h_.scale, part.m + first, part.l + first,
                                  part.o + first * kRowStride);
        });
      });
    }
  }

  // Appends a segment. `total` starts as o = 0, l = 0, m = -inf, which makes the first one initialise as in attend_tile.
  void merge(const Task& t, i64 segment, const Part& total, const Part& next) const {
    const i64 g = h_.group(), rows = t.count * g, base = segment * segment_keys();
    for (i64 r = 0; r < rows; ++r) {
      const i64 p = t.position(r / g);
      if (most(first_key(p, h_.window), base) >= least(least(t.line.keys, p + 1), base + segment_keys())) continue;
      const float m = scalar_max(total.m[r], next.m[r]);
      const vf a = set1(scalar_exp(total.m[r] - m)), b = set1(scalar_exp(next.m[r] - m));
      total.m[r] = m;
      total.l[r] = first_lane(fma(set1(total.l[r]), a, mul(set1(next.l[r]), b)));
      float *o = total.o + r * kRowStride, *o2 = next.o + r * kRowStride;
      for (i64 c = 0; c < h_.D; c += W) store(o + c, fma(load(o + c), a, mul(load(o2 + c), b)));
    }
  }

  void finish(const Task& t, i64 head, const Part& total) const {
    const i64 g = h_.group(), rows = t.count * g;
    for (i64 r = 0; r < rows; ++r) {
      const i64 p = t.position(r / g), token = t.line.first_query + (t.first + r / g) * source_.stride;
      const i64 query_head = head * g + r % g;
      const bool seen = first_key(p, h_.window) < least(t.line.keys, p + 1);
      const float* o = total.o + r * kRowStride;
      T* out = out_.out + token * out_.ts + query_head * out_.hs;
      const vf l = set1(seen ? total.l[r] : 1.0f);
      for_columns(0, h_.D, [&](i64 c, int n) { store_part(out + c, add(div(load(o + c), l), zero()), n); });
      if (out_.m) {
        narrow(total.m[r], out_.m + query_head * out_.ml_hs + token);
        narrow(total.l[r], out_.l + query_head * out_.ml_hs + token);
      }
    }
  }

  // Few tasks over long sequences: segments are independent until they merge.
  int run_by_segment(const Task* tasks, i64 units, i64 segments) const {
    float* parts = static_cast<float*>(std::malloc(size_t(units * segments * part_floats()) * sizeof(float)));
    if (!parts) return TPI_NO_MEMORY;
    const auto at = [&](i64 unit, i64 segment) { return part(parts + (unit * segments + segment) * part_floats()); };
    int status = for_tasks(units * segments, kv_floats(), false, [&](i64 i, float* scratch) {
      const i64 unit = i / segments, segment = i % segments;
      const Task& task = tasks[unit / h_.Hk];
      if (segment >= first_segment(task) && segment < end_segment(task))
        attend_segment(task, unit % h_.Hk, segment, at(unit, segment), scratch);
    });
    if (status == TPI_OK)
      status = for_tasks(units, part_floats(), false, [&](i64 unit, float* scratch) {
        const Task& task = tasks[unit / h_.Hk];
        const Part total = part(scratch);
        clear(task, total);
        for (i64 segment = first_segment(task); segment < end_segment(task); ++segment)
          merge(task, segment, total, at(unit, segment));
        finish(task, unit % h_.Hk, total);
      });
    std::free(parts);
    return status;
  }

  static constexpr int kSpans = kTileRows;
  const Source& source_;
  const Heads h_;
  const T* q_;
  const i64 q_ts_, q_hs_;
  const Output<T> out_;
  i64 rows_ = 0;
};

}  // namespace TPI_NS
}  // namespace tpi
