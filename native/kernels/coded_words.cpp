// Not for AVX512-BF16, which leaves few rows to AVX-512 (dispatch.cpp).
#if !defined(__AVX512BF16__)

#include "direct.h"

#include <algorithm>

#include "coded_scales.h"
#include "integers.h"

namespace winnow::WINNOW_ISA {

#if defined(__AVX2__)
namespace {

typedef uint16_t words __attribute__((vector_size(WIDTH * 4)));
constexpr int WORDS = 2 * WIDTH;  // of a vector
constexpr float LARGEST = 32767.0f;
/// Sums of so many products of 8 bits and 16 bits fit 32 bits.
constexpr int MOST_CHANNELS = 512;
static_assert(TILE <= MOST_CHANNELS);
/// Channels of a group of 4 bits; half of them lie in the low bits of a group's bytes.
constexpr int GROUP4 = 32;

// A chunk is what WORDS bytes of codes hold: one vector of words, or two where a byte has two codes.

constexpr int chunk_channels(Format format) { return vectors_of_step(format) * WORDS; }

/// Groups of a chunk with 4 bits; lanes of words that lie side by side belong to one.
constexpr int CHUNK_GROUPS = WORDS * 2 / GROUP4;

#if defined(__AVX512F__)
using Bytes = __m256i;
inline vi widen_signed(Bytes x) { return (vi)_mm512_cvtepi8_epi16(x); }
inline vi widen(Bytes x) { return (vi)_mm512_cvtepu8_epi16(x); }
inline Bytes unpack_low(Bytes a, Bytes b) { return _mm256_unpacklo_epi8(a, b); }
inline Bytes unpack_high(Bytes a, Bytes b) { return _mm256_unpackhi_epi8(a, b); }

/// The lanes of 2 WIDTH numbers that `from` names.
inline vi pick(vi low, vi high, vi from) {
  return (vi)_mm512_permutex2var_ps((__m512)low, (__m512i)from, (__m512)high);
}
inline vf pick(vf x, vi from) { return (vf)_mm512_permutexvar_ps((__m512i)from, (__m512)x); }

/// Sums of channels whose bytes were unpacked by halves of 16 bytes, in the order of the channels.
inline void in_order(vf &low, vf &high) {
  const vf first = (vf)_mm512_shuffle_f32x4((__m512)low, (__m512)high, 0x44);
  high = (vf)_mm512_shuffle_f32x4((__m512)low, (__m512)high, 0xee);
  low = first;
}
#else
using Bytes = __m128i;
inline vi widen_signed(Bytes x) { return (vi)_mm256_cvtepi8_epi16(x); }
inline vi widen(Bytes x) { return (vi)_mm256_cvtepu8_epi16(x); }
inline Bytes unpack_low(Bytes a, Bytes b) { return _mm_unpacklo_epi8(a, b); }
inline Bytes unpack_high(Bytes a, Bytes b) { return _mm_unpackhi_epi8(a, b); }

inline vi pick(vi low, vi high, vi from) {
  const __m256i at = (__m256i)from;
  const __m256i first = _mm256_permutevar8x32_epi32((__m256i)low, at), second = _mm256_permutevar8x32_epi32((__m256i)high, at);
  return (vi)_mm256_blendv_epi8(first, second, _mm256_cmpgt_epi32(at, _mm256_set1_epi32(WIDTH - 1)));
}
inline vf pick(vf x, vi from) { return (vf)_mm256_permutevar8x32_ps((__m256)x, (__m256i)from); }
inline void in_order(vf &, vf &) {}
#endif

inline vi low_codes(vi x) { return x & 0x000f000f; }
inline vi high_codes(vi x) { return (vi)((words)x >> 4); }

/// The codes of a chunk as words.
template <Format F>
inline void widen_codes(const uint8_t *code, vi *out) {
  const Bytes x = load_vector<Bytes>(code);
  if constexpr (F == Format::int8)
    out[0] = widen_signed(x);
  else
    out[0] = low_codes(widen(x)), out[1] = high_codes(widen(x));
}

/// Pairs of words: the codes of a chunk of one KV beside those of another. Sums of their vectors go to in_order, two by two.
template <Format F>
inline void pair_codes(const uint8_t *one, const uint8_t *other, vi *out) {
  const Bytes a = load_vector<Bytes>(one), b = load_vector<Bytes>(other);
  const Bytes low = unpack_low(a, b), high = unpack_high(a, b);
  if constexpr (F == Format::int8) {
    out[0] = widen_signed(low), out[1] = widen_signed(high);
  } else {
    const vi first = widen(low), second = widen(high);
    out[0] = low_codes(first), out[1] = low_codes(second), out[2] = high_codes(first), out[3] = high_codes(second);
  }
}

inline vi lane_numbers_by(int apart) {
  vi out;
  for (int i = 0; i < WIDTH; ++i) out[i] = i / apart;
  return out;
}

/// What numbers up to `largest` are multiplied by to become words; what words become numbers by is `largest` / LARGEST.
inline vf inverse_of(vf largest) { return largest > 1e-30f ? LARGEST / largest : vf{}; }

inline vf magnitude(vf x) { return (vf)((vi)x & 0x7fffffff); }

/// Rows of queries as words, those of a chunk side by side in the order of widen_codes.
template <Format F>
struct WordQueries {
  alignas(64) int16_t words[DIRECT_ROWS * MOST_CHANNELS];
  float scale[DIRECT_ROWS];
  float sums[DIRECT_ROWS][MAX_GROUPS];  // of the words of a group, for minima

  WordQueries(const float *queries, int rows, int dim) {
    for (int r = 0; r < rows; ++r, queries += dim) {
      vf most{};
      for (int d = 0; d < dim; d += WIDTH) most = vmax(most, magnitude(load(queries + d)));
      const float largest = horizontal_max(most);
      const vf inverse = inverse_of(broadcast(largest));
      scale[r] = largest / LARGEST;
      vi total{};
      for (int d = 0; d < dim; d += WIDTH) {
        const vi codes = nearest(load(queries + d) * inverse);
        store_codes(words + r * dim + place(d), codes);
        if (F == Format::int8) continue;
        total += codes;
        if ((d + WIDTH) % GROUP4 == 0) sums[r][d / GROUP4] = horizontal_sum(to_floats(total)), total = vi{};
      }
    }
  }

  /// Where the words lie of a vector of channels from `channel` on.
  static int place(int channel) {
    if (F == Format::int8) return channel;
    const int chunk = channel / chunk_channels(F), group = channel % chunk_channels(F) / GROUP4, rest = channel % GROUP4;
    return chunk * chunk_channels(F) + rest / (GROUP4 / 2) * WORDS + group * (GROUP4 / 2) + rest % (GROUP4 / 2);
  }
};

template <int R, int DIM>
[[gnu::noinline]] void products_of(const CodedVectors &vectors, const CodedTile &tile, const CodedTile &next, int any_dim,
                                   const TileScales &scales, const WordQueries<Format::int8> &queries, float *out) {
  constexpr int N = R > 3 && WIDTH < 16 ? 2 : 4;
  const Prefetch<Format::int8, DIM> prefetch(vectors, next);
  const int dim = DIM ? DIM : any_dim;
  for (int first = 0; first < tile.n; first += WIDTH) {
    vf fours[R][FOURS];
#pragma GCC unroll 1
    for (int i = 0; i < FOURS; ++i) {
      vf all[R][4];
#pragma GCC unroll 2
      for (int half = 0; half < 4; half += N) {
        const int at = first + 4 * i + half;
        vi sum[R][N] = {};
#pragma GCC unroll 4
        for (int j = 0; j < N; ++j) prefetch(at + j);
#pragma GCC unroll 4
        for (int d = 0; d < dim; d += WORDS) {
          vi row[R];
#pragma GCC unroll 4
          for (int r = 0; r < R; ++r) row[r] = load_vector<vi>(queries.words + r * dim + d);
#pragma GCC unroll 4
          for (int j = 0; j < N; ++j) {
            vi x;
            widen_codes<Format::int8>(bytes_of_codes(tile.code[at + j]) + d, &x);
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) sum[r][j] = add_pairs(sum[r][j], x, row[r]);
          }
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
          for (int j = 0; j < N; ++j) all[r][half + j] = to_floats(sum[r][j]);
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) fours[r][i] = add_up_four(all[r][0], all[r][1], all[r][2], all[r][3]);
    }
    const vf scale = load(scales.scale + first);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) store(out + r * TILE + first, sums_of<false>(fours[r]) * (scale * queries.scale[r]));
  }
}

#if defined(__AVX512F__)
constexpr int MOST_GROUPS4 = 4;  // of keys: the scales of 8 of them are in two vectors

/// Of each quarter of four vectors the sum, side by side.
inline vi add_up_quarters(const vi x[4]) {
  const auto add = [](vi a, vi b) {
    return (vi)_mm512_unpacklo_epi32((__m512i)a, (__m512i)b) + (vi)_mm512_unpackhi_epi32((__m512i)a, (__m512i)b);
  };
  const __m512i low = (__m512i)add(x[0], x[1]), high = (__m512i)add(x[2], x[3]);
  return (vi)_mm512_unpacklo_epi64(low, high) + (vi)_mm512_unpackhi_epi64(low, high);
}

/// Of two vectors' quarters the sums of neighbours.
inline vi add_up_neighbours(vi a, vi b) {
  return (vi)_mm512_shuffle_i32x4((__m512i)a, (__m512i)b, 0x88) + (vi)_mm512_shuffle_i32x4((__m512i)a, (__m512i)b, 0xdd);
}

inline vf add_up_neighbours(vf a, vf b) {
  return (vf)_mm512_shuffle_f32x4((__m512)a, (__m512)b, 0x88) + (vf)_mm512_shuffle_f32x4((__m512)a, (__m512)b, 0xdd);
}

/// word_products of R rows with keys of 4 bits. Products of a chunk become sums by key and group before they are scaled: of
/// eight keys in a vector, whose quarters are the two groups of four keys and then of the others.
template <int R, int DIM>
[[gnu::noinline]] void products_of(const CodedVectors &vectors, const CodedTile &tile, const CodedTile &next, int any_dim,
                                   const TileScales &scales, const WordQueries<Format::int4> &queries, float *out) {
  constexpr int EIGHT = WIDTH / CHUNK_GROUPS, CHUNK = chunk_channels(Format::int4);
  const Prefetch<Format::int4, DIM> prefetch(vectors, next);
  const int dim = DIM ? DIM : any_dim, groups = dim / GROUP4;
  vi of_key;  // where a lane's scale lies
  for (int i = 0; i < WIDTH; ++i) of_key[i] = (i / 8 * 4 + i % 4) * groups + i / 4 % 2;
  for (int first = 0; first < tile.n; first += WIDTH) {
    vf both[R][2] = {};
#pragma GCC unroll 1
    for (int half = 0; half < 2; ++half) {
      const int at = first + half * EIGHT;
#pragma GCC unroll 2
      for (int chunk = 0; chunk < dim / CHUNK; ++chunk) {
        vi fours[R][2];
#pragma GCC unroll 2
        for (int four = 0; four < 2; ++four) {
          vi sum[R][4];
#pragma GCC unroll 4
          for (int j = 0; j < 4; ++j) {
            const int key = at + 4 * four + j;
            if (chunk == 0) prefetch(key);
            vi x[2];
            widen_codes<Format::int4>(bytes_of_codes(tile.code[key]) + chunk * WORDS, x);
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) {
              const int16_t *q = queries.words + r * dim + chunk * CHUNK;
              sum[r][j] = add_pairs(add_pairs(vi{}, x[0], load_vector<vi>(q)), x[1], load_vector<vi>(q + WORDS));
            }
          }
#pragma GCC unroll 4
          for (int r = 0; r < R; ++r) fours[r][four] = add_up_quarters(sum[r]);
        }
        const float *from = scales.scale + at * groups + 2 * chunk, *from_least = scales.least + at * groups + 2 * chunk;
        const vf scale = (vf)pick(load_vector<vi>(from), load_vector<vi>(from + WIDTH), of_key);
        const vf least = (vf)pick(load_vector<vi>(from_least), load_vector<vi>(from_least + WIDTH), of_key);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          const float a = queries.sums[r][2 * chunk], b = queries.sums[r][2 * chunk + 1];
          const vf of_group = {a, a, a, a, b, b, b, b, a, a, a, a, b, b, b, b};
          both[r][half] += to_floats(add_up_neighbours(fours[r][0], fours[r][1])) * scale + of_group * least;
        }
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) store(out + r * TILE + first, add_up_neighbours(both[r][0], both[r][1]) * queries.scale[r]);
  }
}
#endif

/// Weights of a row times the scales of their values, as words: for each pair of KVs and each group the words of both.
struct WordWeights {
  // Whole vectors are read from any pair on.
  alignas(64) int32_t pairs[TILE / 2 * MAX_GROUPS + WIDTH];
  float scale[MAX_GROUPS];  // of words
  float least[MAX_GROUPS];  // weights times minima, added up

  /// What becomes of weights [n], which are zero up to the next multiple of WIDTH. groups: of a value; divides WIDTH.
  void set(const float *weights, int n, int groups, const TileScales &scales, bool has_least) {
    alignas(64) float scaled[TILE * MAX_GROUPS];
    const vi kv = lane_numbers_by(groups);
    const int size = round_up(n, WIDTH) * groups, kvs = WIDTH / groups;
    vf most{}, total{};
    for (int i = 0, j = 0; i < size; i += WIDTH, j += kvs) {
      const vf weight = pick(get(weights + j, std::min(WIDTH, TILE - j)), kv), x = weight * load(scales.scale + i);
      if (has_least) total += weight * load(scales.least + i);
      most = vmax(most, magnitude(x));
      store(scaled + i, x);
    }
    for (int apart = WIDTH / 2; apart >= groups; apart /= 2) {
      const vi other = lane_numbers_by(1) ^ apart;
      most = vmax(most, pick(most, other));
      if (has_least) total += pick(total, other);
    }
    const vf inverse = inverse_of(most);
    std::memcpy(scale, &most, groups * sizeof(float));
    std::memcpy(least, &total, groups * sizeof(float));
    for (int g = 0; g < groups; ++g) scale[g] /= LARGEST;
    // Of two vectors: the KVs with even numbers, and with odd ones.
    const vi even = kv * groups + (vi)(lane_numbers_by(1)), odd = even + groups;
    for (int i = 0; i < size; i += 2 * WIDTH) {
      const vi one = nearest(load(scaled + i) * inverse);
      const vi other = i + WIDTH < size ? nearest(load(scaled + i + WIDTH) * inverse) : vi{};
      store_vector(pairs + i / 2, (pick(one, other, even) & 0xffff) | pick(one, other, odd) << 16);
    }
  }
};

/// word_sums of R rows, of S chunks from `chunk` on.
template <Format F, int R, int S, int DIM>
inline void sums_of_chunks(int chunk, int groups, const CodedTile &tile, const Prefetch<F, DIM> &prefetch,
                           const WordWeights *weights, int any_dim, float *sums) {
  constexpr int V = 2 * vectors_of_step(F);
  constexpr bool BY_GROUP = F == Format::int4;
  const int dim = DIM ? DIM : any_dim, group_step = BY_GROUP ? CHUNK_GROUPS : 0;
  const vi of_group = BY_GROUP ? lane_numbers_by(WIDTH / CHUNK_GROUPS) : vi{};
  vi sum[R][S][V] = {};
  for (int j = 0; j < tile.n; j += 2) {
    if (chunk == 0) prefetch(j), prefetch(j + 1);
    const uint8_t *one = bytes_of_codes(tile.code[j]) + chunk * WORDS;
    const uint8_t *other = bytes_of_codes(tile.code[j + 1]) + chunk * WORDS;
#pragma GCC unroll 4
    for (int s = 0; s < S; ++s) {
      vi x[V], w[R];
      pair_codes<F>(one + s * WORDS, other + s * WORDS, x);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const int32_t *pair = weights[r].pairs + j / 2 * groups + (chunk + s) * group_step;
        w[r] = BY_GROUP && CHUNK_GROUPS > 1 ? (vi)pick(load_vector<vf>(pair), of_group) : broadcast(*pair);
      }
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v)
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) sum[r][s][v] = add_pairs(sum[r][s][v], x[v], w[r]);
    }
  }
#pragma GCC unroll 4
  for (int s = 0; s < S; ++s)
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int v = 0; v < V; v += 2) {
        vf both[2] = {to_floats(sum[r][s][v]), to_floats(sum[r][s][v + 1])};
        in_order(both[0], both[1]);
        for (int half = 0; half < 2; ++half) {
          const int in_chunk = half * WIDTH, group = BY_GROUP ? (chunk + s) * CHUNK_GROUPS + in_chunk / (GROUP4 / 2) : 0;
          float *to = sums + r * dim;
          to += BY_GROUP ? group * GROUP4 + v / 2 * (GROUP4 / 2) + in_chunk % (GROUP4 / 2) : (chunk + s) * WORDS + in_chunk;
          vf more = both[half] * weights[r].scale[group];
          if (BY_GROUP) more += weights[r].least[group];
          store(to, load(to) + more);
        }
      }
}

template <Format F, int R, int DIM>
[[gnu::noinline]] void sums_of_values(const CodedVectors &vectors, const CodedTile &tile, const CodedTile &next, int any_dim,
                                      const WordWeights *weights, float *sums) {
  constexpr int MOST = WIDTH == 16 ? 16 : 8, S = std::max(1, MOST / (R * 2 * vectors_of_step(F)));  // vectors of sums
  const int dim = DIM ? DIM : any_dim, chunks = dim / chunk_channels(F);
  const int groups = F == Format::int4 ? dim / GROUP4 : 1;
  const Prefetch<F, DIM> prefetch(vectors, next);
  int chunk = 0;
  if constexpr (S >= 4)
    for (; chunk + 4 <= chunks; chunk += 4) sums_of_chunks<F, R, 4>(chunk, groups, tile, prefetch, weights, dim, sums);
  if constexpr (S >= 2)
    for (; chunk + 2 <= chunks; chunk += 2) sums_of_chunks<F, R, 2>(chunk, groups, tile, prefetch, weights, dim, sums);
  for (; chunk < chunks; ++chunk) sums_of_chunks<F, R, 1>(chunk, groups, tile, prefetch, weights, dim, sums);
}

/// Calls f with the rows and the channels of a head or 0, as constants.
template <class F>
inline void with_shape(int rows, int dim, F f) {
  with_rows(rows, [&](auto count) {
    if (dim == 64) return f(count, std::integral_constant<int, 64>{});
    if (dim == 128) return f(count, std::integral_constant<int, 128>{});
    f(count, std::integral_constant<int, 0>{});
  });
}

bool are_words(const CodedVectors &vectors, int rows, int dim, int most_groups4) {
  if (rows > DIRECT_ROWS || dim > MOST_CHANNELS || dim % chunk_channels(vectors.format)) return false;
  const int groups = dim / static_cast<int>(vectors.group);
  if (vectors.format == Format::int8) return groups == 1;
  return vectors.format == Format::int4 && vectors.group == GROUP4 && vectors.min.data && groups <= most_groups4 &&
         WIDTH % groups == 0;
}

}  // namespace

bool keys_as_words(const CodedVectors &vectors, int rows, int dim) {
#if defined(__AVX512F__)
  return are_words(vectors, rows, dim, MOST_GROUPS4);
#else
  return vectors.format == Format::int8 && are_words(vectors, rows, dim, 0);
#endif
}

bool values_as_words(const CodedVectors &vectors, int rows, int dim) { return are_words(vectors, rows, dim, MAX_GROUPS); }

void word_products(const CodedVectors &vectors, int64_t block_size, const CodedTile &tile, const CodedTile &next, int rows,
                   int dim, const float *queries, float *out) {
  TileScales scales;
  convert_scales(vectors, block_size, tile, dim / static_cast<int>(vectors.group), scales);
  const auto multiply = [&](const auto &words) {
    with_shape(rows, dim, [&](auto count, auto known) {
      products_of<count, known>(vectors, tile, next, dim, scales, words, out);
    });
  };
#if defined(__AVX512F__)
  if (vectors.format == Format::int4) return multiply(WordQueries<Format::int4>(queries, rows, dim));
#endif
  multiply(WordQueries<Format::int8>(queries, rows, dim));
}

void word_sums(const CodedVectors &vectors, int64_t block_size, const CodedTile &tile, const CodedTile &next, int rows,
               int dim, const float *weights, float *sums) {
  const int groups = dim / static_cast<int>(vectors.group);
  TileScales scales;
  convert_scales(vectors, block_size, tile, groups, scales);
  WordWeights words[DIRECT_ROWS];
  for (int r = 0; r < rows; ++r) words[r].set(weights + r * TILE, tile.n, groups, scales, vectors.min.data != nullptr);
  with_shape(rows, dim, [&](auto count, auto known) {
    if (vectors.format == Format::int8)
      sums_of_values<Format::int8, count, known>(vectors, tile, next, dim, words, sums);
    else
      sums_of_values<Format::int4, count, known>(vectors, tile, next, dim, words, sums);
  });
}

#else

bool keys_as_words(const CodedVectors &, int, int) { return false; }
bool values_as_words(const CodedVectors &, int, int) { return false; }
void word_products(const CodedVectors &, int64_t, const CodedTile &, const CodedTile &, int, int, const float *, float *) {}
void word_sums(const CodedVectors &, int64_t, const CodedTile &, const CodedTile &, int, int, const float *, float *) {}

#endif

}  // namespace winnow::WINNOW_ISA

#endif
