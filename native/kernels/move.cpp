// Kernels that move KVs and compute nothing.
#include <algorithm>
#include <cstring>

#include "../types.h"

namespace winnow::WINNOW_ISA {

namespace {

void clear_scores(const Pool &pool, int64_t slot) {
  for (int64_t n = 0; n < pool.num_scores; ++n) pool.score[n * pool.num_slots + slot] = 0.0f;
}

}  // namespace

void write(const Cache &cache, const Batch &batch, const NewKVs &kvs, int threads) {
  const Heads k = kvs.k, v = kvs.v;
  const int64_t width = bytes_of(cache.dtype), bytes = cache.head_dim * width;
  const int64_t pieces = batch.num_seqs() * cache.num_heads;
#pragma omp parallel num_threads(threads) if (kvs.last - kvs.first > 32)
  {
#pragma omp for schedule(dynamic, 4)
    for (int64_t piece = 0; piece < pieces; ++piece) {
      const int64_t seq = piece / cache.num_heads, head = piece % cache.num_heads;
      const int64_t end = batch.starts[seq] + batch.counts[seq];
      const int64_t from = std::max(batch.starts[seq], kvs.first), count = std::min(end, kvs.last) - from;
      if (count <= 0) continue;
      const Row row(cache, batch.slots[seq], kvs.layer, head);
      row.runs(row.length - (end - from), count, [&](int64_t i, int64_t n, int64_t slot) {
        int64_t vector = cache.at(slot) * width;
        for (int64_t token = from + i; token < from + i + n; ++token, ++slot, vector += bytes) {
          std::memcpy(cache.k + vector, k.data + (token * k.token_stride + head * k.head_stride) * width, bytes);
          std::memcpy(cache.v + vector, v.data + (token * v.token_stride + head * v.head_stride) * width, bytes);
          cache.position[slot] = static_cast<int32_t>(batch.position[token]);
          clear_scores(cache, slot);
        }
      });
    }
  }
}

void compact(const Pool &pool, const int64_t *source, const int64_t *target, int64_t n, int threads) {
  const int64_t width = bytes_of(pool.dtype), bytes = pool.head_dim * width;
#pragma omp parallel for num_threads(threads) if (n > 256)
  for (int64_t i = 0; i < n; ++i) {
    const int64_t from = source[i], to = target[i];
    const int64_t old_vector = pool.at(from) * width, new_vector = pool.at(to) * width;
    std::memcpy(pool.k + new_vector, pool.k + old_vector, bytes);
    std::memcpy(pool.v + new_vector, pool.v + old_vector, bytes);
    pool.position[to] = pool.position[from];
    for (int64_t s = 0; s < pool.num_scores; ++s)
      pool.score[s * pool.num_slots + to] = pool.score[s * pool.num_slots + from];
  }
}

}  // namespace winnow::WINNOW_ISA
