// How much each key points where its row's keys point together (winnow.eviction.KeyDifference).
//
// Keys are read twice where they lie: for their norms and the sum of their directions, and for the cosine with that sum.
#include <cmath>
#include <vector>

#include "keys.h"

namespace winnow::WINNOW_ISA {

namespace {

constexpr float LEAST_NORM = 1e-12f;

/// x^T x of an array whose size is a multiple of WIDTH.
float squared_norm(const std::vector<float> &x) {
  vf sum{};
  for (size_t d = 0; d < x.size(); d += WIDTH) sum += load(&x[d]) * load(&x[d]);
  return horizontal_sum(sum);
}

/// A thread's memory for one row: the sum of the keys' directions, and that of one tile. Sums of many floats lose little
/// when they are made tile by tile.
struct Anchor {
  std::vector<float> all, tile;

  explicit Anchor(int64_t dim) : all((dim + WIDTH - 1) / WIDTH * WIDTH), tile(all.size()) {}
};

template <class KV>
void difference_of_row(const Keys<KV> &keys, Anchor &anchor, float *score) {
  std::fill(anchor.all.begin(), anchor.all.end(), 0.0f);
  for (int64_t first = 0; first < keys.length; first += KEY_TILE) {
    std::fill(anchor.tile.begin(), anchor.tile.end(), 0.0f);
    for (int64_t i = first; i < first + keys.tile(first); ++i) {
      vf squares{};
      for (int d = 0; d < keys.dim; d += WIDTH) squares += keys.part(i, d) * keys.part(i, d);
      const float scale = 1.0f / std::max(std::sqrt(horizontal_sum(squares)), LEAST_NORM);
      score[i] = scale;  // until the cosine takes its place
      for (int d = 0; d < keys.dim; d += WIDTH)
        store(&anchor.tile[d], load(&anchor.tile[d]) + scale * keys.part(i, d));
    }
    for (int d = 0; d < keys.dim; d += WIDTH)
      store(&anchor.all[d], load(&anchor.all[d]) + load(&anchor.tile[d]));
  }
  const float share = -1.0f / std::max(std::sqrt(squared_norm(anchor.all)), LEAST_NORM);
  for (int64_t i = 0; i < keys.length; ++i) {
    vf along{};
    for (int d = 0; d < keys.dim; d += WIDTH) along += keys.part(i, d) * load(&anchor.all[d]);
    score[i] *= horizontal_sum(along) * share;
  }
}

}  // namespace

void key_difference(const KeyRows &rows, float *score, int threads) {
  for_rows(
      rows, score, threads, 4 * rows.head_dim, [&] { return Anchor(rows.head_dim); },
      [](const auto &keys, Anchor &anchor, float *out) { difference_of_row(keys, anchor, out); });
}

}  // namespace winnow::WINNOW_ISA
