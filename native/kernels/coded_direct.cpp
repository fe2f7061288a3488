// Not for AVX512-BF16, which leaves few rows to AVX-512 (dispatch.cpp).
#if !defined(__AVX512BF16__)

#include "direct.h"

#include <algorithm>

#include "attend.h"
#include "coded_scales.h"

namespace winnow::WINNOW_ISA {

namespace {

/// Where the steps of a vector lie.
template <Format F>
struct Steps {
  static constexpr int VECTORS = vectors_of_step(F);
  const int dim, group;  // channels

  int count() const { return dim / (VECTORS * WIDTH); }
  int groups() const { return dim / group; }
  int per_group() const { return group / (VECTORS * WIDTH); }
  /// Channels from a step's first vector to its second.
  int apart() const { return group / VECTORS; }
  /// The first channel of a step.
  int channel(int step) const { return step / per_group() * group + step % per_group() * WIDTH; }
};

/// coded_products of R rows.
template <Format F, bool SCALED, int R>
[[gnu::noinline]] void products_of(const CodedVectors &vectors, const CodedTile &tile, const CodedTile &next, int dim,
                                   const TileScales &scales, const float *queries, float *out) {
  constexpr int V = vectors_of_step(F), N = R > 3 && WIDTH < 16 ? 2 : 4;
  const Steps<F> steps{dim, static_cast<int>(vectors.group)};
  const Prefetch<F, 0> prefetch(vectors, next);
  const int groups = steps.groups();
  for (int first = 0; first < tile.n; first += WIDTH) {
    vf fours[R][FOURS];
#pragma GCC unroll 1
    for (int i = 0; i < FOURS; ++i) {
      vf all[R][4];
#pragma GCC unroll 2
      for (int half = 0; half < 4; half += N) {
        const int at = first + 4 * i + half;
        const uint8_t *code[N];
        const float *scale[N], *least[N];
        vf sum[R][N] = {};
#pragma GCC unroll 4
        for (int j = 0; j < N; ++j) {
          code[j] = bytes_of_codes(tile.code[at + j]);
          scale[j] = scales.scale + (at + j) * groups, least[j] = scales.least + (at + j) * groups;
          prefetch(at + j);
        }
        int byte = 0;
#pragma GCC unroll 4
        for (int group = 0; group < groups; ++group) {
          const float *q = queries + group * steps.group;
          for (int step = 0; step < steps.per_group(); ++step, q += WIDTH, byte += step_bytes(F)) {
            vf row[R][V];
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
              for (int v = 0; v < V; ++v) row[r][v] = load(q + r * dim + v * steps.apart());
#pragma GCC unroll 4
            for (int j = 0; j < N; ++j) {
              vf x[V];
              decode_step<F, SCALED>(code[j] + byte, scale[j][group], least[j][group], x);
#pragma GCC unroll 2
              for (int v = 0; v < V; ++v)
#pragma GCC unroll 4
                for (int r = 0; r < R; ++r) sum[r][j] += row[r][v] * x[v];
            }
          }
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
          for (int j = 0; j < N; ++j) all[r][half + j] = sum[r][j];
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) fours[r][i] = add_up_four(all[r][0], all[r][1], all[r][2], all[r][3]);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const vf sums = sums_of<false>(fours[r]);
      store(out + r * TILE + first, SCALED || is_plain(F) ? sums : sums * load(scales.scale + first));
    }
  }
}

/// coded_sums of R rows, of S steps from `step` on. weights: with the scales where not SCALED.
template <Format F, bool SCALED, int R, int S>
inline void sums_of_steps(const Steps<F> &steps, int step, const CodedTile &tile, const Prefetch<F, 0> &prefetch,
                          const TileScales &scales, const float *weights, float *sums) {
  constexpr int V = vectors_of_step(F);
  const int dim = steps.dim, groups = steps.groups();
  vf sum[R][S][V];
  float *to[S];
  const float *scale[S], *least[S];
#pragma GCC unroll 8
  for (int s = 0; s < S; ++s) {
    to[s] = sums + steps.channel(step + s);
    const int group = (step + s) / steps.per_group();
    scale[s] = scales.scale + group, least[s] = scales.least + group;
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) sum[r][s][v] = load(to[s] + r * dim + v * steps.apart());
  }
  for (int j = 0; j < tile.n; ++j) {
    const uint8_t *code = bytes_of_codes(tile.code[j]) + step * step_bytes(F);
    if (step == 0) prefetch(j);
    vf w[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) w[r] = broadcast(weights[r * TILE + j]);
#pragma GCC unroll 8
    for (int s = 0; s < S; ++s) {
      vf x[V];
      decode_step<F, SCALED>(code + s * step_bytes(F), scale[s][j * groups], least[s][j * groups], x);
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v)
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) sum[r][s][v] += w[r] * x[v];
    }
  }
#pragma GCC unroll 8
  for (int s = 0; s < S; ++s)
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) store(to[s] + r * dim + v * steps.apart(), sum[r][s][v]);
}

template <Format F, bool SCALED, int R>
[[gnu::noinline]] void sums_of_values(const CodedVectors &vectors, const CodedTile &tile, const CodedTile &next, int dim,
                                      const TileScales &scales, const float *weights, float *sums) {
  constexpr int V = vectors_of_step(F), MOST = WIDTH == 16 ? (R <= 3 ? 8 : 4) : (R <= 2 ? 4 : 2);  // vectors of sums
  constexpr int S = MOST / V;
  const Steps<F> steps{dim, static_cast<int>(vectors.group)};
  const Prefetch<F, 0> prefetch(vectors, next);
  alignas(64) float scaled[R * TILE];
  if (!SCALED && !is_plain(F)) {
    for (int r = 0; r < R; ++r)
      for (int j = 0; j < tile.n; j += WIDTH)
        store(scaled + r * TILE + j, load(weights + r * TILE + j) * load(scales.scale + j));
    weights = scaled;
  }
  int step = 0;
  for (; step + S <= steps.count(); step += S)
    sums_of_steps<F, SCALED, R, S>(steps, step, tile, prefetch, scales, weights, sums);
  if constexpr (S > 4)
    for (; step + 4 <= steps.count(); step += 4)
      sums_of_steps<F, SCALED, R, 4>(steps, step, tile, prefetch, scales, weights, sums);
  if constexpr (S > 2)
    for (; step + 2 <= steps.count(); step += 2)
      sums_of_steps<F, SCALED, R, 2>(steps, step, tile, prefetch, scales, weights, sums);
  for (; step < steps.count(); ++step)
    sums_of_steps<F, SCALED, R, 1>(steps, step, tile, prefetch, scales, weights, sums);
}

/// Calls f with the format, and whether channels have scales of their own, as constants.
template <class F>
inline void with_scaling(const CodedVectors &vectors, int dim, F f) {
  with_format(vectors.format, [&](auto format) {
    if constexpr (vectors_of_step(format) == 1 && !is_plain(format))
      vectors.group < dim ? f(format, std::true_type{}) : f(format, std::false_type{});
    else
      f(format, std::integral_constant<bool, !is_plain(format)>{});
  });
}

/// Groups of a vector.
inline int groups_of(const CodedVectors &vectors, int dim) { return dim / static_cast<int>(vectors.group); }

}  // namespace

bool decodes_in_registers(const CodedVectors &vectors, int rows, int dim) {
  return rows <= DIRECT_ROWS && groups_of(vectors, dim) <= MAX_GROUPS && groups_are_steps(vectors, dim);
}

void coded_products(const CodedVectors &vectors, int64_t block_size, const CodedTile &tile, const CodedTile &next, int rows,
                    int dim, DType act, const float *queries, float *out) {
  if (act != DType::f32 && keys_as_words(vectors, rows, dim)) {
    word_products(vectors, block_size, tile, next, rows, dim, queries, out);
  } else {
    TileScales scales;
    convert_scales(vectors, block_size, tile, groups_of(vectors, dim), scales);
    with_scaling(vectors, dim, [&](auto format, auto scaled) {
      with_rows(rows, [&](auto count) { products_of<format, scaled, count>(vectors, tile, next, dim, scales, queries, out); });
    });
  }
  for_outliers(vectors, block_size, tile, [&](int j, int channel, float rest) {
    for (int r = 0; r < rows; ++r) out[r * TILE + j] += queries[r * dim + channel] * rest;
  });
  for (int j = tile.n; j < next.n; ++j) __builtin_prefetch(next.code[j], 0, 2);
}

void coded_sums(const CodedVectors &vectors, int64_t block_size, const CodedTile &tile, const CodedTile &next, int rows,
                int dim, DType act, const float *weights, float *sums) {
  if (act != DType::f32 && values_as_words(vectors, rows, dim)) {
    word_sums(vectors, block_size, tile, next, rows, dim, weights, sums);
  } else {
    TileScales scales;
    convert_scales(vectors, block_size, tile, groups_of(vectors, dim), scales);
    with_scaling(vectors, dim, [&](auto format, auto scaled) {
      with_rows(rows, [&](auto count) { sums_of_values<format, scaled, count>(vectors, tile, next, dim, scales, weights, sums); });
    });
  }
  for_outliers(vectors, block_size, tile, [&](int j, int channel, float rest) {
    for (int r = 0; r < rows; ++r) sums[r * dim + channel] += weights[r * TILE + j] * rest;
  });
  for (int j = tile.n; j < next.n; ++j) __builtin_prefetch(next.code[j], 0, 2);
}

}  // namespace winnow::WINNOW_ISA

#endif
