// Products of few rows with keys and values in place in the pool.
//
// A decoding sequence has as many rows as query heads in a group. So few reuse a key or value too little to pay for packing it
// (pack.h): its elements, or pairs of them, are multiplied in place, and codes decoded in registers, a vector at a time.
#pragma once

#include "pack.h"
#include "tile_registers.h"

namespace winnow::WINNOW_ISA {

/// Rows that are multiplied at once: their sums stay in registers.
constexpr int DIRECT_ROWS = 4;
/// With more rows packing pays, or they fill a tile register.
#if defined(WINNOW_TILES)
constexpr int MOST_DIRECT_ROWS = TMM_ROWS - 1;
#else
constexpr int MOST_DIRECT_ROWS = 4 * DIRECT_ROWS;
#endif

/// Calls f with a number of rows, up to DIRECT_ROWS, as a constant.
template <class F>
inline void with_rows(int rows, F f) {
  switch (rows) {
    case 1: return f(std::integral_constant<int, 1>{});
    case 2: return f(std::integral_constant<int, 2>{});
    case 3: return f(std::integral_constant<int, 3>{});
    default: return f(std::integral_constant<int, DIRECT_ROWS>{});
  }
}

/// Numbers in a line of memory.
template <class T>
constexpr int LINE = 64 / sizeof(T);

/// Products of each of the rows [rows, padded] and the first round_up(n, WIDTH) of TILE keys: [rows, TILE]. `each` and `next`
/// are as pack_keys takes them; keys of a scattered tile, which is a whole one, are read from several blocks in turn.
template <class KV, class Operand>
void direct_products(int rows, const KV *const *each, const KV *const *next, int n, bool scattered, int dim,
                     const Operand *with, int padded, float *out);

/// Adds weights [rows, TILE] times the first n values to sums [rows, padded], always in the order of the values: a sum's last
/// bits depend on it. Sums are for put_in_order.
template <class KV, class Operand>
void direct_sums(int rows, const KV *const *value, const KV *const *next, int n, int dim, const Operand *weights, int padded,
                 float *sums);

/// Reorder a row of sums after the last direct_sums.
template <class Operand>
inline void put_in_order([[maybe_unused]] float *sums, [[maybe_unused]] int padded) {
#if defined(__AVX512BF16__)
  if constexpr (pair_size<Operand>() == 2) {
    const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    for (int d = 0; d + 2 * WIDTH <= padded; d += 2 * WIDTH) {
      const __m512 one = _mm512_loadu_ps(sums + d), other = _mm512_loadu_ps(sums + d + WIDTH);
      _mm512_storeu_ps(sums + d, _mm512_permutex2var_ps(one, low, other));
      _mm512_storeu_ps(sums + d + WIDTH, _mm512_permutex2var_ps(one, high, other));
    }
  }
#endif
}

/// Groups of a vector, at most, that are decoded in registers.
constexpr int MAX_GROUPS = 8;

/// Whether `rows` are multiplied with vectors that are decoded in registers; else the vectors of a tile are decoded first,
/// which pays where more rows read them, and takes groups of any size.
bool decodes_in_registers(const CodedVectors &vectors, int rows, int dim);

/// As direct_products, of a tile of coded keys: [rows, TILE]. next: prefetched meanwhile. act: the format of
/// activations; those of 16 bits may be multiplied as integers.
void coded_products(const CodedVectors &vectors, int64_t block_size, const CodedTile &tile, const CodedTile &next, int rows,
                    int dim, DType act, const float *queries, float *out);

/// As direct_sums, of a tile of coded values.
void coded_sums(const CodedVectors &vectors, int64_t block_size, const CodedTile &tile, const CodedTile &next, int rows,
                int dim, DType act, const float *weights, float *sums);

// As products of 16-bit integers (coded_words.cpp): codes become 16 bits wide, twice as many in an instruction as floats, and the
// processor itself adds up products of two neighbours (VNNI joins them to the sum, too). Queries, and weights times the scales
// of their values, become 16-bit integers with a scale for each row: off by 2^-16 of the row's largest, far less than
// activations of 16 bits are rounded by.

/// Whether `rows` are multiplied with keys so, or with values.
bool keys_as_words(const CodedVectors &vectors, int rows, int dim);
bool values_as_words(const CodedVectors &vectors, int rows, int dim);

/// As coded_products and coded_sums, but for outliers.
void word_products(const CodedVectors &vectors, int64_t block_size, const CodedTile &tile, const CodedTile &next, int rows,
                   int dim, const float *queries, float *out);
void word_sums(const CodedVectors &vectors, int64_t block_size, const CodedTile &tile, const CodedTile &next, int rows,
               int dim, const float *weights, float *sums);

// Sums over the lanes of vectors, for as many vectors at once as one has lanes. A step joins two vectors: of each, one part is
// added to the other. Where the parts of a stay in their lanes and those of b in the others, one shuffle brings what is added.

/// Fours of vectors whose sums fill a vector.
constexpr int FOURS = WIDTH / 4;

#if defined(__AVX512F__)
/// a's halves added up, in the first half, and b's in the second.
inline vf join_halves(vf a, vf b) {
  const vf other = (vf)_mm512_shuffle_f32x4((__m512)a, (__m512)b, 0x4e);
  return (vf)_mm512_mask_blend_ps(0xff00, (__m512)a, (__m512)b) + other;
}

/// Of every four lanes, a's pairs added up in the first two and b's in the others.
inline vf join_pairs(vf a, vf b) {
  const vf other = (vf)_mm512_shuffle_ps((__m512)a, (__m512)b, 0x4e);
  return (vf)_mm512_mask_blend_ps(0xcccc, (__m512)a, (__m512)b) + other;
}
#elif defined(__AVX2__)
inline vf join_halves(vf a, vf b) {
  const vf other = (vf)_mm256_permute2f128_ps((__m256)a, (__m256)b, 0x21);
  return (vf)_mm256_blend_ps((__m256)a, (__m256)b, 0xf0) + other;
}

inline vf join_pairs(vf a, vf b) {
  const vf other = (vf)_mm256_shuffle_ps((__m256)a, (__m256)b, 0x4e);
  return (vf)_mm256_blend_ps((__m256)a, (__m256)b, 0xcc) + other;
}
#endif

/// Four vectors become one, for sums_of.
inline vf add_up_four(vf a, vf b, vf c, vf d) {
#if defined(__AVX2__)
  return join_pairs(join_halves(a, b), join_halves(c, d));
#else
  vf rows[WIDTH] = {a, b, c, d};
  transpose(rows);
  return rows[0] + rows[1] + rows[2] + rows[3];
#endif
}

/// The sums of WIDTH vectors, one in each lane, from what add_up_four makes of each four of them: those of the first four, of
/// the second and so on; by_turns: the first of each four, then the second of each.
template <bool by_turns>
inline vf sums_of(const vf fours[WIDTH / 4]) {
#if defined(__AVX512F__)
  const auto add = [](__m512 x, __m512 y) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x88), _mm512_shuffle_f32x4(x, y, 0xdd));
  };
  const __m512 x = add((__m512)fours[0], (__m512)fours[1]), y = add((__m512)fours[2], (__m512)fours[3]);
  const __m512 sums = _mm512_add_ps(_mm512_shuffle_ps(x, y, 0x88), _mm512_shuffle_ps(x, y, 0xdd));
  const __m512i from = by_turns ? _mm512_setr_epi32(0, 8, 2, 10, 4, 12, 6, 14, 1, 9, 3, 11, 5, 13, 7, 15)
                                : _mm512_setr_epi32(0, 4, 1, 5, 8, 12, 9, 13, 2, 6, 3, 7, 10, 14, 11, 15);
  return (vf)_mm512_permutexvar_ps(from, sums);
#elif defined(__AVX2__)
  const __m256 x = (__m256)fours[0], y = (__m256)fours[1];
  const __m256 sums = _mm256_add_ps(_mm256_shuffle_ps(x, y, 0x88), _mm256_shuffle_ps(x, y, 0xdd));
  const __m256i from = by_turns ? _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7) : _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  return (vf)_mm256_permutevar8x32_ps(sums, from);
#else
  return fours[0];
#endif
}

}  // namespace winnow::WINNOW_ISA
