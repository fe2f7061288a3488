// Products of few rows with keys and values in place in the pool.
//
// A decoding sequence has as many rows as query heads in a group. So few reuse a key or value too little to pay for packing it
// (pack.h): its elements, or pairs of them, are multiplied in place.
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

}  // namespace winnow::WINNOW_ISA
