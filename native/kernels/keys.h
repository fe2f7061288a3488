// Rows of keys that lie anywhere in the pool.
#pragma once

#include <algorithm>
#include <vector>

#include "coded.h"

namespace winnow::WINNOW_ISA {

/// Keys that are looked at together: converted to floats, they stay in the first-level cache.
constexpr int KEY_TILE = 64;

/// One row of keys.
template <class KV>
struct Keys {
  const KV *k;
  Blocks blocks;
  const int64_t *slot;
  int64_t length;
  int dim;

  const KV *operator[](int64_t i) const { return k + blocks.at(slot[i]); }

  /// WIDTH elements of key i from `d` on; those past its end are zero.
  vf part(int64_t i, int d) const { return get((*this)[i] + d, std::min(WIDTH, dim - d)); }

  /// Keys of the tile that begins at `first`.
  int tile(int64_t first) const { return static_cast<int>(std::min<int64_t>(KEY_TILE, length - first)); }
};

/// One row of coded keys, decoded tile by tile as they are asked for.
template <>
struct Keys<Coded> {
  const CodedVectors &vectors;
  Blocks blocks;
  const int64_t *slot;
  int64_t length;
  int dim;
  mutable int64_t decoded = -1;  // the tile
  mutable std::vector<float> floats{};

  vf part(int64_t i, int d) const {
    const int padded = (dim + WIDTH - 1) / WIDTH * WIDTH;
    if (const int64_t tile = i / KEY_TILE; tile != decoded) {
      floats.resize(KEY_TILE * padded);
      decode_slots(vectors, blocks, slot + tile * KEY_TILE, this->tile(tile * KEY_TILE), padded, floats.data());
      decoded = tile;
    }
    return load(floats.data() + i % KEY_TILE * padded + d);
  }

  int tile(int64_t first) const { return static_cast<int>(std::min<int64_t>(KEY_TILE, length - first)); }
};

/// Calls f with each row that is not empty and where its results belong. Results past a row's length become 0.
/// `make_work` makes a thread's memory, which f gets too. Runs in one thread where `work` is too little for more.
template <class MakeWork, class F>
void for_rows(const KeyRows &rows, float *out, int threads, int64_t work_per_key, MakeWork make_work, F f) {
  constexpr int64_t PARALLEL_FROM = 1 << 18;
#pragma omp parallel num_threads(threads) if (rows.rows * rows.stride * work_per_key >= PARALLEL_FROM)
  {
    auto work = make_work();
#pragma omp for schedule(dynamic, 1)
    for (int64_t r = 0; r < rows.rows; ++r) {
      const int64_t n = rows.length[r];
      float *to = out + r * rows.stride;
      std::fill(to + n, to + rows.stride, 0.0f);
      if (n == 0) continue;
      const auto dim = static_cast<int>(rows.head_dim);
      if (rows.coded) {
        f(Keys<Coded>{rows.keys, rows, rows.slot + r * rows.stride, n, dim}, work, to);
        continue;
      }
      with_type(rows.dtype, [&](auto type) {
        using KV = decltype(type);
        f(Keys<KV>{reinterpret_cast<const KV *>(rows.k), rows, rows.slot + r * rows.stride, n, dim}, work, to);
      });
    }
  }
}

}  // namespace winnow::WINNOW_ISA
