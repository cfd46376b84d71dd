// The forward pass over one description of the keys and values: token-major tensors or the paged cache. A task is a run of
// queries of one line with the query heads of one KV head; its rows are ordered query by query, head by head.
#pragma once
#include "attention_tile.h"
#include "lane_tree.h"

namespace tpi {
namespace TPI_NS {

// A task converts each block of keys and values once for all its rows.
constexpr i64 kMinTaskRows = 48, kMaxTaskRows = 192;

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
  void fetch_values(int, i64) const {}
  void fetch_next_keys(int, i64) const {}
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

// vexp for x <= 0 and no NaN: the same operations without the checks of what cannot occur.
inline vf exp_not_positive(vf x) {
  const vf magic = set1(0x1.8p+23f);
  vf shifted = add(mul(x, set1(0x1.715476p+0f)), magic);
  vf n = sub(shifted, magic);
  vf r = fma(n, set1(-0x1.62e4p-1f), x);
  r = fma(n, set1(-0x1.7f7d1cp-20f), r);
  vf p = set1(0x1.a0d2cep-13f);
  p = fma(p, r, set1(0x1.6e879cp-10f));
  p = fma(p, r, set1(0x1.11121p-7f));
  p = fma(p, r, set1(0x1.555382p-5f));
  p = fma(p, r, set1(0x1.555554p-3f));
  p = fma(p, r, set1(0x1p-1f));
  p = fma(p, mul(r, r), r);
  p = add_exponent(add(p, set1(1.0f)), shifted);
  return select(lt(x, set1(-0x1.5d4p+6f)), zero(), p);
}

// p = exp(s - m) over the vectors [first, last) of a row; gives the 64 lanes of their sum, paired down to one vector.
template <class Exp>
TPI_INLINE inline vf exponentials(float* s, int first, int last, float m, Exp exp) {
  const vf shift = set1(m);
  vf lanes[kLaneVectors];
  if (first == 0 && last == 2 * kLaneVectors) {
    for (int v = 0; v < kLaneVectors; ++v) {
      const vf a = exp(sub(load(s + v * W), shift)), b = exp(sub(load(s + kLanes + v * W), shift));
      store(s + v * W, a);
      store(s + kLanes + v * W, b);
      lanes[v] = add(a, b);
    }
  } else {
    for (int v = 0; v < kLaneVectors; ++v) lanes[v] = zero();
    for (int c = first; c < last; ++c) {
      const vf a = exp(sub(load(s + c * W), shift));
      store(s + c * W, a);
      lanes[c % kLaneVectors] = add(lanes[c % kLaneVectors], a);
    }
  }
  for (int n = kLaneVectors / 2; n > 0; n /= 2)
    for (int v = 0; v < n; ++v) lanes[v] = pair_sums(lanes[2 * v], lanes[2 * v + 1]);
  return lanes[0];
}

// Turns the scores s [R][128] into p and moves m and l on; gives alpha. Only what lies in the spans is a result.
template <int R>
inline void softmax_tile(float* s, const Span* span, Span all, float* m, float* l, float* alpha) {
  const int first = all.lo / W, last = (all.hi + W - 1) / W;
  vf top[R], total[R];
  for (int r = 0; r < R; ++r) {
    float* row = s + r * kBlock;
    for (int j = first * W; j < span[r].lo; ++j) row[j] = -INFINITY;
    for (int j = span[r].empty() ? first * W : span[r].hi; j < last * W; ++j) row[j] = -INFINITY;
    top[r] = set1(-INFINITY);
    total[r] = zero();
  }
  for (int c = first; c < last; ++c)
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const vf x = load(s + r * kBlock + c * W);
      top[r] = max_raw(x, top[r]);
      total[r] = add(total[r], x);
    }
  // A NaN score, which max_raw may have dropped (or infinities of both signs).
  vf sum = total[0];
  for (int r = 1; r < R; ++r) sum = add(sum, total[r]);
  bool careful = any(is_nan(sum));
  if (careful)
    for (int r = 0; r < R; ++r)
      for (int c = first; c < last; ++c) top[r] = vmax(top[r], load(s + r * kBlock + c * W));
  for (int begin = 0; begin < R; begin += W) {
    const int n = R - begin < W ? R - begin : W;
    vf t[W];
    for (int i = 0; i < W; ++i) t[i] = i < n ? top[begin + i] : zero();
    transpose(t);
    for (int i = 1; i < W; ++i) t[0] = vmax(t[0], t[i]);
    const vf before = load_n(m + begin, n), now = vmax(before, t[0]);
    store_n(m + begin, now, n);
    store(alpha + begin, vexp(sub(before, now)));
    careful = careful || any(is_nan(mul(now, zero())));  // not finite
  }
  constexpr int kPadded = (R + W - 1) / W * W;
  vf sums[kPadded];
  for (int r = R; r < kPadded; ++r) sums[r] = zero();
  for (int r = 0; r < R; ++r)
    sums[r] = careful ? exponentials(s + r * kBlock, first, last, m[r], [](vf x) { return vexp(x); })
                      : exponentials(s + r * kBlock, first, last, m[r], [](vf x) { return exp_not_positive(x); });
  if (careful)
    for (int r = 0; r < R; ++r)
      if (span[r].empty()) {  // no visible key changes nothing
        alpha[r] = 1.0f;
        sums[r] = zero();
      }
  for (int begin = 0; begin < R; begin += W) {
    const int n = R - begin < W ? R - begin : W;
    for (int step = W / 2; step > 0; step /= 2)
      for (int i = 0; i < step; ++i) sums[begin + i] = pair_sums(sums[begin + 2 * i], sums[begin + 2 * i + 1]);
    store_n(l + begin, fma(load_n(l + begin, n), load(alpha + begin), sums[begin]), n);
  }
}

// One block for R rows of the running (m, l, o) of a segment. o starts as 0, l as 0 and m as -inf, which makes the first
// visible block of a row initialise: then o * exp(-inf - m') is 0, or everything is NaN.
template <int R, class View>
__attribute__((noinline)) void attend_tile(const View& kv, const Span* span, const float* q, i64 D, float scale,
                                           float* m, float* l, float* o) {
  const Span all = hull(span, R);
  if (all.empty()) return;
  alignas(64) float s[R * kBlock];
  scores<R>(q, D, kv.k, kv.k_ld, scale, all, s, [&](int group, i64 d) { kv.fetch_values(group, d); });
  float alpha[(R + W - 1) / W * W];
  softmax_tile<R>(s, span, all, m, l, alpha);
  weighted<R, kBlock, 1>(s, span, kv.v, kv.v_ld, round_up(D, W), alpha, o, kRowStride,
                         [&](int j, i64 c) { kv.fetch_next_keys(j, c); });
}

template <class T, class Source>
class Forward {
 public:
  Forward(const Source& source, const Heads& heads, const T* q, i64 q_ts, i64 q_hs, const Output<T>& out)
      : source_(source), h_(heads), q_(q), q_ts_(q_ts), q_hs_(q_hs), out_(out) {}

  int run(i64 lines) {
    const i64 g = h_.group(), threads = omp_get_max_threads();
    i64 queries = 0, count = 0, work = 0, segments = 1;
    for (i64 i = 0; i < lines; ++i) queries += most(source_.line(i).queries, 0);
    const i64 share = queries * h_.Hq / (4 * threads);  // several tasks a thread
    const i64 run = most(1, least(most(share, kMinTaskRows), kMaxTaskRows) / g);
    rows_ = run * g;
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
    if (!tiny && segments > 1 && threads > 1 && units < 4 * threads)
      status = run_by_segment(tasks, units, segments);
    else
      status = for_tasks(units, 2 * part_floats() + kv_floats(), tiny, [&](i64 unit, float* scratch) {
        const Task& task = tasks[unit / h_.Hk];
        const i64 head = unit % h_.Hk;
        const Part total = part(scratch), next = part(scratch + part_floats());
        const i64 first = first_segment(task);
        attend_segment(task, head, first, total, scratch + 2 * part_floats());
        for (i64 segment = first + 1; segment < end_segment(task); ++segment) {
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

  i64 part_floats() const { return round_up(rows_ * (kRowStride + 2), kGroup); }
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
    Span span[kTileRows];
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
        narrow(total.m[r] + 0.0f, out_.m + query_head * out_.ml_hs + token);
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

  const Source& source_;
  const Heads h_;
  const T* q_;
  const i64 q_ts_, q_hs_;
  const Output<T> out_;
  i64 rows_ = 0;
};

}  // namespace TPI_NS
}  // namespace tpi
