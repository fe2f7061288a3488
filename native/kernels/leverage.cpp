// Ridge leverage of each key among the keys of its row (winnow.eviction.Leverage), and smoothing over KVs near in position.
//
// A row's keys are scattered in the pool and read three times: for their mean, for their second moment S, and for
// x^T S^-1 x. With S = R^T R that is |x R^-1|^2, and R^-1 is triangular: both products with the keys cost little more than
// half of a full one. Keys are centred tile by tile, so that nothing as large as a row is stored.
//
// One thread computes a row: results depend neither on the number of threads nor on the other rows.
#include <cmath>
#include <numeric>
#include <vector>

#include "keys.h"
#include "neighbours.h"

namespace winnow::WINNOW_ISA {

namespace {

/// Rows of a product that are summed at once; enough to hide the latency of a fused multiply-add.
constexpr int PART = 8;
constexpr int PADDING = WIDTH > PART ? WIDTH : PART;
/// KVs below which waking other threads costs more than smoothing them.
constexpr int64_t SMOOTH_PARALLEL_FROM = 4096;
/// Relative to the mean eigenvalue. Equal keys have no spread: their score is 0.
constexpr float LEAST_SPREAD = 1e-12f;

/// A thread's memory for one row. Matrices are [padded, padded], of which the upper triangle counts.
struct Work {
  int padded;
  Buffer memory;
  float *mean;     // [padded]
  float *tile;     // [KEY_TILE, padded]: keys less their mean
  float *moment;   // S, then R
  float *inverse;  // R^-1

  explicit Work(int dim) : padded((dim + PADDING - 1) / PADDING * PADDING) {
    mean = memory.get<float>(padded * (1 + KEY_TILE + 2 * padded));
    tile = mean + padded;
    moment = tile + KEY_TILE * padded;
    inverse = moment + padded * padded;
  }
};

/// The mean, summed tile by tile: sums of many floats lose little then.
template <class KV>
void find_mean(const Keys<KV> &keys, const Work &work) {
  std::fill(work.mean, work.mean + work.padded, 0.0f);
  const float share = 1.0f / static_cast<float>(keys.length);
  for (int64_t first = 0; first < keys.length; first += KEY_TILE)
    for (int d = 0; d < keys.dim; d += WIDTH) {
      vf sum{};
      for (int i = 0; i < keys.tile(first); ++i) sum += keys.part(first + i, d);
      store(work.mean + d, load(work.mean + d) + sum);
    }
  for (int d = 0; d < work.padded; ++d) work.mean[d] *= share;
}

/// Centre the keys of a tile. Past the row's end the tile keeps what it held, and what comes of that is not used.
template <class KV>
void centre(const Keys<KV> &keys, int64_t first, const Work &work) {
  for (int i = 0; i < keys.tile(first); ++i)
    for (int d = 0; d < keys.dim; d += WIDTH)
      store(work.tile + i * work.padded + d, keys.part(first + i, d) - load(work.mean + d));
}

/// Add the outer products of n keys of the tile.
void add_outer(const Work &work, int n) {
  const int padded = work.padded;
  for (int row = 0; row < padded; row += PART)
    for (int column = row / WIDTH * WIDTH; column < padded; column += WIDTH) {
      float *to = work.moment + row * padded + column;
      vf sum[PART];
      for (int r = 0; r < PART; ++r) sum[r] = load(to + r * padded);
      for (int i = 0; i < n; ++i) {
        const float *key = work.tile + i * padded;
        const vf x = load(key + column);
#pragma GCC unroll 8
        for (int r = 0; r < PART; ++r) sum[r] += key[row + r] * x;
      }
      for (int r = 0; r < PART; ++r) store(to + r * padded, sum[r]);
    }
}

/// From sums of outer products to S + ridge m I, m the mean eigenvalue of S.
void add_ridge(const Work &work, int dim, int64_t count, float ridge) {
  const float share = 1.0f / static_cast<float>(count);
  for (int i = 0; i < work.padded * work.padded; ++i) work.moment[i] *= share;
  float trace = 0.0f;
  for (int d = 0; d < dim; ++d) trace += work.moment[d * (work.padded + 1)];
  const float spread = std::max(trace / static_cast<float>(dim), LEAST_SPREAD);
  for (int d = 0; d < dim; ++d) work.moment[d * (work.padded + 1)] += ridge * spread;
}

/// to [from column `first` on] -= factor * row.
inline void subtract(float *to, float factor, const float *row, int first, int padded) {
  for (int d = first / WIDTH * WIDTH; d < padded; d += WIDTH) store(to + d, load(to + d) - factor * load(row + d));
}

inline void scale(float *row, float factor, int first, int padded) {
  for (int d = first / WIDTH * WIDTH; d < padded; d += WIDTH) store(row + d, load(row + d) * factor);
}

/// R^-1 out of S = R^T R, by Cholesky's decomposition and back substitution. Its lower triangle is zero.
void invert_factor(const Work &work, int dim) {
  const int padded = work.padded;
  float *moment = work.moment, *inverse = work.inverse;
  for (int i = 0; i < dim; ++i) {
    float *row = moment + i * padded;
    scale(row, 1.0f / std::sqrt(row[i]), i, padded);
    for (int j = i + 1; j < dim; ++j) subtract(moment + j * padded, row[j], row, j, padded);
  }
  std::fill(inverse, inverse + padded * padded, 0.0f);
  for (int i = 0; i < dim; ++i) inverse[i * (padded + 1)] = 1.0f;
  for (int i = dim - 1; i >= 0; --i) {
    float *row = inverse + i * padded;
    scale(row, 1.0f / moment[i * (padded + 1)], i, padded);
    for (int j = 0; j < i; ++j) subtract(inverse + j * padded, moment[j * padded + i], row, i, padded);
  }
}

/// |x R^-1|^2 for n keys of the tile.
void squared_lengths(const Work &work, int n, float *out) {
  const int padded = work.padded;
  for (int i = 0; i < n; i += PART) {
    const float *keys = work.tile + i * padded;
    vf total[PART]{};
    for (int column = 0; column < padded; column += WIDTH) {
      vf sum[PART]{};
      for (int d = 0; d < column + WIDTH; ++d) {  // below, this part of R^-1 is zero
        const vf x = load(work.inverse + d * padded + column);
#pragma GCC unroll 8
        for (int r = 0; r < PART; ++r) sum[r] += keys[r * padded + d] * x;
      }
      for (int r = 0; r < PART; ++r) total[r] += sum[r] * sum[r];
    }
    for (int r = 0; r < std::min(PART, n - i); ++r) out[i + r] = horizontal_sum(total[r]);
  }
}

template <class KV>
void leverage_of_row(const Keys<KV> &keys, float ridge, const Work &work, float *score) {
  find_mean(keys, work);
  std::fill(work.tile, work.moment, 0.0f);
  std::fill(work.moment, work.inverse, 0.0f);
  for (int64_t first = 0; first < keys.length; first += KEY_TILE) {
    centre(keys, first, work);
    add_outer(work, keys.tile(first));
  }
  add_ridge(work, keys.dim, keys.length, ridge);
  invert_factor(work, keys.dim);
  for (int64_t first = 0; first < keys.length; first += KEY_TILE) {
    centre(keys, first, work);
    squared_lengths(work, keys.tile(first), score + first);
  }
}

/// The order of a row's n positions, ascending; `keys` and `scratch` are memory for n. Sorted digit by digit.
void order_of(const int32_t *position, int64_t n, int64_t *order, int64_t *scratch) {
  constexpr int BITS = 8, DIGITS = 1 << BITS;
  std::iota(order, order + n, 0);
  if (std::is_sorted(position, position + n)) return;  // never compacted
  const int32_t most = *std::max_element(position, position + n);
  for (int shift = 0; shift < 32 && most >> shift; shift += BITS) {
    int64_t start[DIGITS + 1] = {};
    for (int64_t i = 0; i < n; ++i) ++start[(position[i] >> shift & (DIGITS - 1)) + 1];
    std::partial_sum(start, start + DIGITS, start);
    for (int64_t i = 0; i < n; ++i) scratch[start[position[order[i]] >> shift & (DIGITS - 1)]++] = order[i];
    std::copy(scratch, scratch + n, order);
  }
}

}  // namespace

void leverage(const KeyRows &rows, float ridge, float *score, int threads) {
  for_rows(
      rows, score, threads, rows.head_dim * rows.head_dim, [&] { return Work(static_cast<int>(rows.head_dim)); },
      [&](const auto &keys, const Work &work, float *out) { leverage_of_row(keys, ridge, work, out); });
}

void smooth_rows(const SmoothedRows &rows, float *out, int threads) {
#pragma omp parallel num_threads(threads) if (rows.rows * rows.stride >= SMOOTH_PARALLEL_FROM)
  {
    std::vector<int64_t> order(rows.stride), scratch(rows.stride);
    std::vector<float> ordered(rows.stride);
#pragma omp for schedule(dynamic, 1)
    for (int64_t r = 0; r < rows.rows; ++r) {
      const int64_t n = rows.length[r], first = r * rows.stride;
      order_of(rows.position + first, n, order.data(), scratch.data());
      smooth(rows.x + first, order.data(), n, n, rows.smoothing_size, rows.smoothing_max, ordered.data(), out + first);
      std::fill(out + first + n, out + first + rows.stride, 0.0f);
    }
  }
}

}  // namespace winnow::WINNOW_ISA
