// KVs that are read from a window beside the coded ones (winnow.cache.wide).
#pragma once

#include <algorithm>

#include "../types.h"
#include "hadamard.h"
#include "product.h"

namespace winnow::WINNOW_ISA {

/// KVs of a tile that are kept wide too, and are read there.
struct WideKVs {
  int n = 0;
  DType dtype;
  int which[WIDE_TILE];  // of the tile's KVs
  const char *key[WIDE_TILE], *value[WIDE_TILE];

  void find(const Cache &cache, const Row &row, const int64_t *slot, int count) {
    n = 0;
    const WideWindow *window = cache.window(row.layer);
    if (!window) return;
    dtype = window->dtype;
    const int32_t *held = window->positions(row.seq_slot, row.layer);
    for (int j = 0; j < count; ++j) {
      const int32_t position = cache.position[slot[j]];
      const int64_t place = window->place(position);
      if (place < 0 || held[place] != position) continue;
      which[n] = j;
      key[n] = window->at(window->k, row.seq_slot, row.layer, row.head, place);
      value[n++] = window->at(window->v, row.seq_slot, row.layer, row.head, place);
    }
  }
};

/// Replace decoded vectors, [n, padded], by those that are kept wide, turned as what is decoded is. vectors: of `wide`.
inline void widen(const WideKVs &wide, const char *const *vectors, int dim, int padded, int64_t rotation, float *out) {
  for (int i = 0; i < wide.n; ++i) {
    float *to = out + wide.which[i] * padded;
    with_type(wide.dtype, [&](auto type) {
      const auto *from = reinterpret_cast<const decltype(type) *>(vectors[i]);
      for (int d = 0; d < dim; d += WIDTH) store(to + d, get(from + d, std::min(WIDTH, dim - d)));
    });
    hadamard(to, dim, static_cast<int>(rotation));
  }
}

}  // namespace winnow::WINNOW_ISA
