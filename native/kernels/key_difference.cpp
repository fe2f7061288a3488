// How much each key points where its row's keys point together (winnow.eviction.KeyDifference, KeyDeviation).
//
// Directions are summed and compared before rotation. Keys are read twice where they lie: for their norms and the sum of
// their directions, turned back, and for the cosine with that sum, which is turned to each key's position: a rotation
// leaves the product of two vectors as it is.
#include <algorithm>
#include <cmath>
#include <vector>

#include "hadamard.h"
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

/// Where the dimensions of a key stand in a thread's memory: first halves of the rotated pairs, second halves, the rest,
/// each padded by zeros to whole vectors.
class Order {
 public:
  Order(const KeyRotation &turn, int64_t dim)
      : pairs_(turn.pairs), padded_(round_up(turn.pairs)), size_(2 * padded_ + round_up(dim - 2 * turn.pairs)) {
    const int64_t end = turn.first + 2 * turn.pairs;
    for (int64_t d = 0; d < dim; ++d) {
      const int64_t i = d - turn.first;
      if (d < turn.first || d >= end)
        place_.push_back(2 * padded_ + (d < turn.first ? d : d - 2 * pairs_));
      else if (turn.interleaved)
        place_.push_back(i % 2 * padded_ + i / 2);
      else
        place_.push_back(i < pairs_ ? i : padded_ + i - pairs_);
    }
    in_order_ = true;
    for (int64_t d = 0; d < dim; ++d) in_order_ = in_order_ && place_[d] == d;
  }

  int64_t padded() const { return padded_; }
  int64_t size() const { return size_; }
  bool in_order() const { return in_order_; }
  int64_t operator[](int64_t d) const { return place_[d]; }
  int64_t dim() const { return static_cast<int64_t>(place_.size()); }

 private:
  static int64_t round_up(int64_t n) { return (n + WIDTH - 1) / WIDTH * WIDTH; }

  int64_t pairs_, padded_, size_;
  bool in_order_ = true;
  std::vector<int64_t> place_;
};

/// A thread's memory for one row. Sums of many floats lose little when they are made tile by tile.
struct Work {
  Order order;
  std::vector<float> all, tile, key, plain;

  Work(const KeyRotation &turn, int64_t dim)
      : order(turn, dim), all(order.size()), tile(order.size()), key(order.size()), plain(dim + WIDTH) {}

  /// The key i of a row, in order.
  template <class KV>
  const float *read(const Keys<KV> &keys, int64_t i) {
    float *to = order.in_order() ? key.data() : plain.data();
    for (int d = 0; d < keys.dim; d += WIDTH) store(to + d, keys.part(i, d));
    if constexpr (std::is_same_v<KV, Coded>) hadamard(to, keys.dim, static_cast<int>(keys.vectors.rotation));
    if (order.in_order()) return to;
    for (int64_t d = 0; d < order.dim(); ++d) key[order[d]] = plain[d];
    return key.data();
  }
};

template <class KV>
void difference_of_row(const Keys<KV> &keys, const KeyDirections &directions, int64_t row, Work &work, float *score) {
  const KeyRotation &turn = directions.turn;
  const int64_t half = work.order.padded(), size = work.order.size();
  const int32_t *position = directions.position + row * directions.stride;
  float *sum = directions.sum + row * keys.dim;
  const int32_t counted = directions.counted[row];
  std::vector<float> &all = work.all, &tile = work.tile;
  for (int64_t d = 0; d < keys.dim; ++d) all[work.order[d]] = sum[d];
  for (int64_t first = 0; first < keys.length; first += KEY_TILE) {
    std::fill(tile.begin(), tile.end(), 0.0f);
    for (int64_t i = first; i < first + keys.tile(first); ++i) {
      const float *x = work.read(keys, i);
      vf squares{};
      for (int64_t d = 0; d < size; d += WIDTH) squares += load(x + d) * load(x + d);
      const float scale = 1.0f / std::max(std::sqrt(horizontal_sum(squares)), LEAST_NORM);
      score[i] = scale;  // until the cosine takes its place
      if (position[i] < counted) continue;
      const float *cos = turn.cos + position[i] * turn.stride, *sin = turn.sin + position[i] * turn.stride;
      for (int64_t d = 0; d < half; d += WIDTH) {
        const vf a = load(x + d), b = load(x + half + d), c = load(cos + d), s = load(sin + d);
        store(&tile[d], load(&tile[d]) + scale * (a * c + b * s));
        store(&tile[half + d], load(&tile[half + d]) + scale * (b * c - a * s));
      }
      for (int64_t d = 2 * half; d < size; d += WIDTH) store(&tile[d], load(&tile[d]) + scale * load(x + d));
    }
    for (int64_t d = 0; d < size; d += WIDTH) store(&all[d], load(&all[d]) + load(&tile[d]));
  }
  for (int64_t d = 0; d < keys.dim; ++d) sum[d] = all[work.order[d]];
  const float share = -1.0f / std::max(std::sqrt(squared_norm(all)), LEAST_NORM);
  for (int64_t i = 0; i < keys.length; ++i) {
    const float *x = work.read(keys, i);
    const float *cos = turn.cos + position[i] * turn.stride, *sin = turn.sin + position[i] * turn.stride;
    vf along{};
    for (int64_t d = 0; d < half; d += WIDTH) {
      const vf a = load(x + d), b = load(x + half + d), m = load(&all[d]), n = load(&all[half + d]);
      along += load(cos + d) * (a * m + b * n) + load(sin + d) * (b * m - a * n);
    }
    for (int64_t d = 2 * half; d < size; d += WIDTH) along += load(x + d) * load(&all[d]);
    score[i] *= horizontal_sum(along) * share;
  }
}

}  // namespace

void key_difference(const KeyRows &rows, const KeyDirections &directions, float *score, int threads) {
  for_rows(
      rows, score, threads, 4 * rows.head_dim, [&] { return Work(directions.turn, rows.head_dim); },
      [&](const auto &keys, Work &work, float *out) {
        difference_of_row(keys, directions, (out - score) / rows.stride, work, out);
      });
}

}  // namespace winnow::WINNOW_ISA
