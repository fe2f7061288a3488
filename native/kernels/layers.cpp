// What a decoder layer computes besides matrix products and attention, and the choice of a token. Arithmetic is float whatever the number format.
// A row is one thread's work from end to end, so results do not depend on how many threads there are.
#include <algorithm>
#include <cmath>
#include <limits>

#include "../layers.h"
#include "activation.h"

namespace winnow::WINNOW_ISA {

namespace {

/// Elements below which waking other threads costs more than they save.
constexpr int64_t PARALLEL_FROM = 16384;

/// Calls body(first, count) for pieces of at most a register's width.
template <class F>
inline void pieces(int64_t n, F body) {
  for (int64_t i = 0; i < n; i += WIDTH) body(i, static_cast<int>(std::min<int64_t>(WIDTH, n - i)));
}

/// Calls body(first, count, normed) for pieces of a row whose squares add up to what the lanes of `squares` do.
template <class T, class F>
inline void scale_row(const T *x, vf squares, int64_t size, const RmsNorm &norm, F body) {
  const float scale = 1.0f / std::sqrt(horizontal_sum(squares) / static_cast<float>(size) + norm.eps);
  const T *weight = reinterpret_cast<const T *>(norm.weight);
  const float plus = norm.one_plus ? 1.0f : 0.0f;
  pieces(size, [&](int64_t i, int n) { body(i, n, get(x + i, n) * scale * (get(weight + i, n) + plus)); });
}

template <class T>
void norm_row(T *x, const T *add, T *out, int64_t size, const RmsNorm &norm) {
  vf sum{};
  pieces(size, [&](int64_t i, int n) {
    vf value = get(x + i, n);
    if (add) {
      put(x + i, value + get(add + i, n), n);
      value = get(x + i, n);  // the residual stream as it is stored, rounded
    }
    sum += value * value;
  });
  scale_row(x, sum, size, norm, [&](int64_t i, int n, vf normed) { put(out + i, normed, n); });
}

template <class T>
void add_normed_row(const T *x, T *total, int64_t size, const RmsNorm &norm) {
  vf sum{};
  pieces(size, [&](int64_t i, int n) {
    const vf value = get(x + i, n);
    sum += value * value;
  });
  scale_row(x, sum, size, norm, [&](int64_t i, int n, vf normed) { put(total + i, get(total + i, n) + normed, n); });
}

template <class T>
void rotate_head(T *x, const T *cos, const T *sin, int64_t half) {
  pieces(half, [&](int64_t i, int n) {
    const vf a = get(x + i, n), b = get(x + half + i, n);
    put(x + i, a * get(cos + i, n) - b * get(sin + i, n), n);
    put(x + half + i, b * get(cos + half + i, n) + a * get(sin + half + i, n), n);
  });
}

/// The first of the largest elements. NaN counts as impossible; 0 if nothing is possible.
template <class T>
int64_t largest(const T *row, int64_t size) {
  constexpr float NOTHING = -std::numeric_limits<float>::infinity();
  vf best = broadcast(NOTHING);
  vi where{}, index{};
  for (int i = 0; i < WIDTH; ++i) index[i] = i;
  const auto take = [&](vf value) {
    const vi better = value > best;  // False for NaN; ties keep a lane's first
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

}  // namespace

void rms_norm(const NormRows &rows, const RmsNorm &norm, int threads) {
  with_type(rows.dtype, [&](auto type) {
    using T = decltype(type);
    T *x = reinterpret_cast<T *>(rows.x), *out = reinterpret_cast<T *>(rows.out);
    const T *add = reinterpret_cast<const T *>(rows.add);
#pragma omp parallel for num_threads(threads) if (rows.tokens * rows.size >= PARALLEL_FROM)
    for (int64_t t = 0; t < rows.tokens; ++t) {
      const int64_t at = t * rows.size;
      norm_row(x + at, add ? add + at : nullptr, out + at, rows.size, norm);
    }
  });
}

void add_normed(const AddedRows &rows, const RmsNorm &norm, int threads) {
  with_type(rows.dtype, [&](auto type) {
    using T = decltype(type);
    const T *x = reinterpret_cast<const T *>(rows.x);
    T *sum = reinterpret_cast<T *>(rows.sum);
#pragma omp parallel for num_threads(threads) if (rows.tokens * rows.size >= PARALLEL_FROM)
    for (int64_t t = 0; t < rows.tokens; ++t) add_normed_row(x + t * rows.size, sum + t * rows.size, rows.size, norm);
  });
}

void rotate(const RotaryRows &rows, const RmsNorm &query_norm, const RmsNorm &key_norm, int threads) {
  with_type(rows.dtype, [&](auto type) {
    using T = decltype(type);
    const int64_t heads = rows.num_query_heads + rows.num_kv_heads, dim = rows.head_dim;
#pragma omp parallel for num_threads(threads) if (rows.tokens * heads * dim >= PARALLEL_FROM)
    for (int64_t t = 0; t < rows.tokens; ++t) {
      const T *cos = reinterpret_cast<const T *>(rows.cos) + t * rows.rotary_dim;
      const T *sin = reinterpret_cast<const T *>(rows.sin) + t * rows.rotary_dim;
      for (int64_t head = 0; head < heads; ++head) {
        T *x = reinterpret_cast<T *>(rows.heads) + t * rows.token_stride + head * dim;
        const RmsNorm &norm = head < rows.num_query_heads ? query_norm : key_norm;
        if (norm.weight) norm_row<T>(x, nullptr, x, dim, norm);
        rotate_head(x, cos, sin, rows.rotary_dim / 2);
      }
    }
  });
}

void gate(const GatedRows &rows, Activation activation, int threads) {
  with_type(rows.dtype, [&](auto type) {
    using T = decltype(type);
#pragma omp parallel for num_threads(threads) if (rows.tokens * rows.size >= PARALLEL_FROM)
    for (int64_t t = 0; t < rows.tokens; ++t) {
      const T *from = reinterpret_cast<const T *>(rows.gate_up) + 2 * t * rows.size;
      T *out = reinterpret_cast<T *>(rows.out) + t * rows.size;
      pieces(rows.size, [&](int64_t i, int n) {
        put(out + i, activate(get(from + i, n), activation) * get(from + rows.size + i, n), n);
      });
    }
  });
}

void greedy(const LogitRows &rows, int64_t *tokens, int threads) {
  with_type(rows.dtype, [&](auto type) {
    const auto *logits = reinterpret_cast<const decltype(type) *>(rows.logits);
#pragma omp parallel for num_threads(threads) if (rows.count * rows.size >= 4 * PARALLEL_FROM)
    for (int64_t r = 0; r < rows.count; ++r) tokens[r] = largest(logits + r * rows.stride, rows.size);
  });
}

}  // namespace winnow::WINNOW_ISA
