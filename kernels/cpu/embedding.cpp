// Embedding lookup of a vocabulary shard and its gradient.
#include "elementwise.h"

using namespace tpi;
using namespace tpi::TPI_NS;

TPI_EXPORT(embedding)
(int dtype, const void* w, i64 ldw, const i64* ids, void* out, i64 T, i64 H, i64 vocab_start, i64 vocab_rows,
 i64 vocab_size) {
  for (i64 t = 0; t < T; ++t)
    if (ids[t] < 0 || ids[t] >= vocab_size) return TPI_BAD_INDEX;
  return for_dtype(dtype, [&](auto tag) {
    const i64 row_bytes = H * i64(sizeof(tag)), stride = ldw * i64(sizeof(tag));
    parallel_for(T, T * H, [&](i64 first, i64 last) {
      for (i64 t = first; t < last; ++t) {
        const i64 row = ids[t] - vocab_start;
        char* to = (char*)out + t * row_bytes;
        if (row >= 0 && row < vocab_rows)
          std::memcpy(to, (const char*)w + row * stride, size_t(row_bytes));
        else
          std::memset(to, 0, size_t(row_bytes));
      }
    });
    return int(TPI_OK);
  });
}

TPI_EXPORT(embedding_dw)
(int dtype, const void* dy, i64 lddy, const i64* ids, float* grad, i64 ldg, i64 H, i64 vocab_start, i64 vocab_rows,
 i64 rows, const i64* row_first, const i64* row_len, i64 row_stride) {
  return for_dtype(dtype, [&](auto tag) {
    using T = decltype(tag);
    i64 tokens = 0;
    for (i64 r = 0; r < rows; ++r) tokens += row_len[r];
    // Threads own columns, whole cache lines of them, so that the tokens of one id are added in order.
    constexpr i64 kLine = 16;
    const i64 lines = (H + kLine - 1) / kLine;
    parallel_for(lines, tokens * H, [&](i64 first, i64 last) {
      const i64 begin = first * kLine, end = last * kLine < H ? last * kLine : H;
      for (i64 r = 0; r < rows; ++r)
        for (i64 k = 0; k < row_len[r]; ++k) {
          const i64 token = row_first[r] + k * row_stride, row = ids[token] - vocab_start;
          if (row < 0 || row >= vocab_rows) continue;
          const T* from = (const T*)dy + token * lddy;
          float* to = grad + row * ldg;
          for_columns(begin, end, [&](i64 j, int n) TPI_INLINE {
            store_part(to + j, add(load_part((const float*)to + j, n), load_part(from + j, n)), n);
          });
        }
    });
    return int(TPI_OK);
  });
}
