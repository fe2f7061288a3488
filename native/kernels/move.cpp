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

void write(const Cache &cache, const Batch &batch, int64_t layer, Heads k, Heads v, int threads) {
  const int64_t width = bytes_of(cache.dtype), bytes = cache.head_dim * width;
  const int64_t pieces = batch.num_seqs() * cache.num_heads;
#pragma omp parallel num_threads(threads) if (batch.num_tokens() > 32)
  {
    std::vector<int64_t> slots;
#pragma omp for schedule(dynamic, 4)
    for (int64_t piece = 0; piece < pieces; ++piece) {
      const int64_t seq = piece / cache.num_heads, head = piece % cache.num_heads;
      const int64_t count = batch.counts[seq], start = batch.starts[seq];
      const Row row(cache, batch.slots[seq], layer, head);
      slots.resize(count);
      row.slots(row.length - count, count, slots.data());
      for (int64_t i = 0; i < count; ++i) {
        const int64_t token = start + i, slot = slots[i];
        std::memcpy(cache.k + slot * bytes, k.data + (token * k.token_stride + head * k.head_stride) * width, bytes);
        std::memcpy(cache.v + slot * bytes, v.data + (token * v.token_stride + head * v.head_stride) * width, bytes);
        cache.position[slot] = static_cast<int32_t>(batch.position[token]);
        clear_scores(cache, slot);
      }
    }
  }
}

void compact(const Pool &pool, const int64_t *source, const int64_t *target, int64_t n, int threads) {
  const int64_t bytes = pool.head_dim * bytes_of(pool.dtype);
#pragma omp parallel for num_threads(threads) if (n > 256)
  for (int64_t i = 0; i < n; ++i) {
    const int64_t from = source[i], to = target[i];
    std::memcpy(pool.k + to * bytes, pool.k + from * bytes, bytes);
    std::memcpy(pool.v + to * bytes, pool.v + from * bytes, bytes);
    pool.position[to] = pool.position[from];
    for (int64_t s = 0; s < pool.num_scores; ++s)
      pool.score[s * pool.num_slots + to] = pool.score[s * pool.num_slots + from];
  }
}

}  // namespace winnow::WINNOW_ISA
