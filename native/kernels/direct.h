// Products of few rows with keys and values as they lie in the pool.
//
// A decoding sequence has as many rows as query heads in a group. So few use a key or value too seldom to pay for bringing it
// into the operand forms of product.h (pack.h): its elements, or pairs of them, are multiplied where they lie.
#pragma once

#include "pack.h"
#include "tile_registers.h"

namespace winnow::WINNOW_ISA {

/// Rows that are multiplied at once: their sums stay in registers.
constexpr int DIRECT_ROWS = 4;
/// Parts of a tile whose keys are read by turns, one of each, where they lie in several places. Divides WIDTH.
constexpr int STREAMS = 4;
/// Vectors of a tile that different rows ask for in shares, so that memory is busy all the time.
constexpr int SHARED = TILE / STREAMS;
/// Beyond so many rows packing pays, or where they fill a tile register.
#if defined(WINNOW_TILES)
constexpr int MOST_DIRECT_ROWS = TMM_ROWS - 1;
#else
constexpr int MOST_DIRECT_ROWS = 4 * DIRECT_ROWS;
#endif

/// Four vectors become one: every four lanes hold what these lanes of each add up to.
inline vf add_up_four(vf a, vf b, vf c, vf d) {
#if defined(__AVX512F__)
  const auto pair = [](vf x, vf y) {
    return _mm512_add_ps(_mm512_unpacklo_ps((__m512)x, (__m512)y), _mm512_unpackhi_ps((__m512)x, (__m512)y));
  };
  const __m512 ab = pair(a, b), cd = pair(c, d);
  return (vf)_mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
#elif defined(__AVX2__)
  const auto pair = [](vf x, vf y) {
    return _mm256_add_ps(_mm256_unpacklo_ps((__m256)x, (__m256)y), _mm256_unpackhi_ps((__m256)x, (__m256)y));
  };
  const __m256 ab = pair(a, b), cd = pair(c, d);
  return (vf)_mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
#else
  vf rows[WIDTH] = {a, b, c, d};
  transpose(rows);
  return rows[0] + rows[1] + rows[2] + rows[3];
#endif
}

/// The sums of WIDTH vectors, one in each lane, from what add_up_four makes of each four of them.
inline vf sums_of(const vf fours[WIDTH / 4]) {
#if defined(__AVX512F__)
  const auto pair = [](__m512 x, __m512 y) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x88), _mm512_shuffle_f32x4(x, y, 0xdd));
  };
  return (vf)pair(pair((__m512)fours[0], (__m512)fours[1]), pair((__m512)fours[2], (__m512)fours[3]));
#elif defined(__AVX2__)
  const __m256 x = (__m256)fours[0], y = (__m256)fours[1];
  return (vf)_mm256_add_ps(_mm256_permute2f128_ps(x, y, 0x20), _mm256_permute2f128_ps(x, y, 0x31));
#else
  return fours[0];
#endif
}

/// Lanes that are the first of each stream, then the second of each, and so on: stream by stream.
inline vf by_streams(vf x) {
#if defined(__AVX512F__)
  return (vf)_mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), (__m512)x);
#elif defined(__AVX2__)
  return (vf)_mm256_permutevar8x32_ps((__m256)x, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
#else
  return x;
#endif
}

/// Numbers in a line of memory.
template <class T>
constexpr int LINE = 64 / sizeof(T);

/// What a query and a key make: a logit.
struct Product {
  static vf add(vf sum, vf a, vf b) { return sum + a * b; }
};

/// What an output and a value make.
struct SquaredDistance {
  static vf add(vf sum, vf a, vf b) { return sum + (a - b) * (a - b); }
};

/// R rows with N keys or values, every `every`th of `each`: a vector of sums for each, to the first N of out, [R][4].
template <class What, int R, int N, class KV>
inline void meet_some(const KV *const *each, const KV *const *next, int every, int dim, const float *rows, int padded,
                      vf *out) {
  const KV *from[N];
#pragma GCC unroll 8
  for (int j = 0; j < N; ++j) {
    from[j] = each[j * every];
    for (int d = 0; d < dim; d += LINE<KV>) __builtin_prefetch(next[j * every] + d, 0, 2);
  }
  vf sum[R][N] = {};
  const auto add = [&](int d, auto read) __attribute__((always_inline)) {
    vf row[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) row[r] = load(rows + r * padded + d);
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) {
      const vf x = read(from[j] + d);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) sum[r][j] = What::add(sum[r][j], row[r], x);
    }
  };
  const int whole = dim / WIDTH * WIDTH;
  for (int d = 0; d < whole; d += WIDTH) add(d, [](const KV *x) { return load(x); });
  if (whole < dim) add(whole, [&](const KV *x) { return load_part(x, dim - whole); });
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) out[r * 4 + j] = sum[r][j];
}

#if defined(__AVX512BF16__)
/// The same of rows and keys that are multiplied in pairs.
template <class What, int R, int N>
inline void meet_some(const bf16 *const *each, const bf16 *const *next, int every, int dim, const bf16 *rows, int padded,
                      vf *out) {
  static_assert(std::is_same_v<What, Product>);
  // Asked for as they lie in memory, line by line, which is faster than in the order in which they are multiplied.
#pragma GCC unroll 4
  for (int j = 0; j < N; ++j)
    for (int d = 0; d < dim; d += 2 * WIDTH) __builtin_prefetch(next[j * every] + d, 0, 2);
  __m512 sum[R][N] = {};
  for (int d = 0; d < dim; d += 2 * WIDTH) {
    __m512bh row[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) row[r] = (__m512bh)load_pairs(rows + r * padded + d, dim - d);
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j) {
      const __m512bh x = (__m512bh)load_pairs(each[j * every] + d, dim - d);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) sum[r][j] = _mm512_dpbf16_ps(sum[r][j], row[r], x);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j) out[r * 4 + j] = (vf)sum[r][j];
}
#endif

/// As direct_products, of R rows: one of each of `streams` parts by turns, 1 or STREAMS.
template <class What, int R, int streams, class KV, class Operand>
[[gnu::noinline]] void meet(const KV *const *each, const KV *const *next, int n, int dim, const Operand *rows, int padded,
                            float *out) {
  constexpr int N = R > 3 && WIDTH < 16 ? 2 : 4;  // their sums stay in registers
  constexpr int FOURS = WIDTH / 4, STEP = streams > 1 ? 1 : 4;
  const int length = streams > 1 ? TILE / streams : n, every = streams > 1 ? length : 1;
  for (int first = 0; first < length; first += WIDTH / streams) {
    vf fours[R][FOURS];
#pragma GCC unroll 4
    for (int i = 0; i < FOURS; ++i) {
      vf sums[R][4];
#pragma GCC unroll 2
      for (int j = 0; j < 4; j += N) {
        const int at = first + i * STEP + j * every;
        meet_some<What, R, N>(each + at, next + at, every, dim, rows, padded, sums[0] + j);
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) fours[r][i] = add_up_four(sums[r][0], sums[r][1], sums[r][2], sums[r][3]);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const vf sum = sums_of(fours[r]);
      float *to = out + r * TILE + first;
      if (streams == 1) {
        store(to, sum);
        continue;
      }
      const vf apart = by_streams(sum);
#pragma GCC unroll 4
      for (int s = 0; s < streams; ++s)
        std::memcpy(to + s * length, reinterpret_cast<const float *>(&apart) + s * FOURS, FOURS * sizeof(float));
    }
  }
}

/// As direct_sums, of R rows.
template <int R, class KV>
inline void multiply_values(const KV *const *value, const KV *const *next, int n, int dim, const float *weights, int padded,
                            float *sums) {
  constexpr int V = R == 1 ? 8 : R <= 3 ? 4 : 2;
  const auto columns = [&](int d, auto vectors) {
    constexpr int C = decltype(vectors)::value;
    vf sum[R][C];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) sum[r][c] = load(sums + r * padded + d + c * WIDTH);
    for (int j = 0; j < n; ++j) {
      vf w[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) w[r] = broadcast(weights[r * TILE + j]);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) {
        if ((d + c * WIDTH) % LINE<KV> == 0) __builtin_prefetch(next[j] + d + c * WIDTH, 0, 2);
        const vf v = get(value[j] + d + c * WIDTH, C > 1 || dim - d > WIDTH ? WIDTH : dim - d);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) sum[r][c] += w[r] * v;
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) store(sums + r * padded + d + c * WIDTH, sum[r][c]);
  };
  int d = 0;
  for (; d + V * WIDTH <= dim; d += V * WIDTH) columns(d, std::integral_constant<int, V>{});
  for (; d < dim; d += WIDTH) columns(d, std::integral_constant<int, 1>{});
}

#if defined(__AVX512BF16__)
/// The same of weights and values that are multiplied in pairs: those of two KVs.
template <int R>
inline void multiply_values(const bf16 *const *value, const bf16 *const *next, int n, int dim, const bf16 *weights, int padded,
                            float *sums) {
  const auto columns = [&](int d, auto vectors) {
    constexpr int C = decltype(vectors)::value;
    const auto at = [=](int r, int c) { return sums + r * padded + d + c * WIDTH; };
    const auto there = [=](int c) { return C > 2 || c == 0 || d + WIDTH < padded; };  // the last pair of vectors may be one
    __m512 sum[R][C];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) sum[r][c] = there(c) ? _mm512_loadu_ps(at(r, c)) : _mm512_setzero_ps();
    for (int j = 0; j < n; j += 2) {
      __m512bh pair[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        int32_t bits;
        std::memcpy(&bits, weights + r * TILE + j, sizeof bits);
        pair[r] = (__m512bh)_mm512_set1_epi32(bits);
      }
#pragma GCC unroll 2
      for (int c = 0; c < C; c += 2) {
        const int from = d + c * WIDTH, left = dim - from;
        __builtin_prefetch(next[j] + from, 0, 2);
        __builtin_prefetch(next[j + 1] + from, 0, 2);
        const Interleaved both(load_pairs(value[j] + from, left), load_pairs(value[j + 1] + from, left));
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          sum[r][c] = _mm512_dpbf16_ps(sum[r][c], pair[r], (__m512bh)both.low);
          sum[r][c + 1] = _mm512_dpbf16_ps(sum[r][c + 1], pair[r], (__m512bh)both.high);
        }
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c)
        if (there(c)) _mm512_storeu_ps(at(r, c), sum[r][c]);
  };
  int d = 0;
  for (; d + 4 * WIDTH <= dim; d += 4 * WIDTH) columns(d, std::integral_constant<int, 4>{});
  for (; d < dim; d += 2 * WIDTH) columns(d, std::integral_constant<int, 2>{});
}
#endif

/// Calls f with as many of the rows as are multiplied at once, as a constant, the first of them, and which of the next tile's
/// vectors to ask for meanwhile. Every turn asks for a share of what lies side by side: `each` stands for the rest.
template <class KV, class F>
inline void for_direct_rows(int rows, const KV *const *each, const KV *const *next, int n, F f) {
  const int turns = (rows + DIRECT_ROWS - 1) / DIRECT_ROWS, width = round_up(n, WIDTH);
  const KV *asked[TILE];
  for (int turn = 0, first = 0; turn < turns; ++turn) {
    for (int j = 0; j < width && turns > 1; ++j) asked[j] = j % SHARED * turns / SHARED == turn ? next[j] : each[j];
    const KV *const *ask = turns > 1 ? asked : next;
    const int count = (rows - first + turns - turn - 1) / (turns - turn);
    switch (count) {
      case 1: f(std::integral_constant<int, 1>{}, first, ask); break;
      case 2: f(std::integral_constant<int, 2>{}, first, ask); break;
      case 3: f(std::integral_constant<int, 3>{}, first, ask); break;
      default: f(std::integral_constant<int, DIRECT_ROWS>{}, first, ask);
    }
    first += count;
  }
}

/// What each of the rows [rows, padded] makes with the first round_up(n, WIDTH) of TILE keys or values: [rows, TILE].
/// `each` and `next` are as pack_keys takes them; those of a scattered tile, which is a whole one, are read by turns.
template <class What, class KV, class Operand>
inline void direct_products(int rows, const KV *const *each, const KV *const *next, int n, bool scattered, int dim,
                            const Operand *with, int padded, float *out) {
  for_direct_rows(rows, each, next, n, [&](auto count, int first, const KV *const *ask) {
    const auto meet_rows = [&](auto streams) {
      meet<What, count, streams>(each, ask, n, dim, with + first * padded, padded, out + first * TILE);
    };
    if (scattered)
      meet_rows(std::integral_constant<int, STREAMS>{});
    else
      meet_rows(std::integral_constant<int, 1>{});
  });
}

/// Adds weights [rows, TILE] times the first n values to sums [rows, padded]: in their order, wherever they lie, for a sum's
/// last bits depend on it.
template <class KV, class Operand>
inline void direct_sums(int rows, const KV *const *value, const KV *const *next, int n, int dim, const Operand *weights,
                        int padded, float *sums) {
  for_direct_rows(rows, value, next, n, [&](auto count, int first, const KV *const *ask) {
    multiply_values<count>(value, ask, n, dim, weights + first * TILE, padded, sums + first * padded);
  });
}

}  // namespace winnow::WINNOW_ISA
