// The most probable token of every row of logits.
#include <limits>

#include "../layers.h"
#include "simd.h"

namespace winnow::WINNOW_ISA {

namespace {

/// Elements below which waking other threads costs more than they save.
constexpr int64_t PARALLEL_FROM = 65536;

/// The first of the largest elements. NaN counts as impossible; 0 if nothing is possible.
template <class T>
int64_t largest(const T *row, int64_t size) {
  constexpr float NOTHING = -std::numeric_limits<float>::infinity();
  vf best = broadcast(NOTHING);
  vi where{}, index{};
  for (int i = 0; i < WIDTH; ++i) index[i] = i;
  const auto take = [&](vf value) {
    const vi better = value > best;  // False for NaN; of equals, a lane's first one stays
    best = better ? value : best;
    where = better ? index : where;
    index += WIDTH;
  };
  int64_t i = 0;
  for (; i + WIDTH <= size; i += WIDTH) take(load(row + i));
  float top = NOTHING;
  int64_t out = 0;
  for (int lane = 0; lane < WIDTH; ++lane)
    if (best[lane] > top || (best[lane] == top && top > NOTHING && where[lane] < out))
      top = best[lane], out = where[lane];
  for (; i < size; ++i)
    if (to_float(row[i]) > top) top = to_float(row[i]), out = i;
  return out;
}

template <class T>
void rows_of(const LogitRows &rows, int64_t *tokens, int threads) {
  const T *logits = reinterpret_cast<const T *>(rows.logits);
#pragma omp parallel for num_threads(threads) if (rows.count * rows.size >= PARALLEL_FROM)
  for (int64_t r = 0; r < rows.count; ++r) tokens[r] = largest(logits + r * rows.stride, rows.size);
}

}  // namespace

void greedy(const LogitRows &rows, int64_t *tokens, int threads) {
  switch (rows.dtype) {
    case DType::f32: return rows_of<float>(rows, tokens, threads);
    case DType::bf16: return rows_of<bf16>(rows, tokens, threads);
    case DType::f16: return rows_of<f16>(rows, tokens, threads);
  }
}

}  // namespace winnow::WINNOW_ISA
