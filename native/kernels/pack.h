// Packs queries, keys and values as operands of product.h.
#pragma once

#include <type_traits>

#include "product.h"

namespace winnow::WINNOW_ISA {

constexpr int round_up(int n, int to) { return (n + to - 1) / to * to; }

/// Keys of a tile: this many columns of logits are computed at once. A multiple of every WIDTH.
constexpr int TILE = 64;
/// Keys of a tile where rows are many: they scale, load and store their sums half as often.
constexpr int WIDE_TILE = 2 * TILE;

#if defined(__AVX512F__)
/// Transpose 16 x 16 of 32 bits.
inline void transpose(__m512i r[16]) {
  __m512i t[16];
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 4; ++i) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 8; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
  }
}

inline void transpose(vf r[WIDTH]) { transpose(reinterpret_cast<__m512i *>(r)); }
#elif defined(__AVX2__)
/// Transpose 8 x 8.
inline void transpose(vf r[WIDTH]) {
  vf t[8], u[8];
  for (int i = 0; i < 4; ++i) {
    t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 2; ++i) {
    u[4 * i] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
    u[4 * i + 1] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
    u[4 * i + 2] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
    u[4 * i + 3] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x20);
    r[i + 4] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x31);
  }
}
#else
inline void transpose(vf r[WIDTH]) {
  vf t[WIDTH] = {};
  for (int i = 0; i < WIDTH; ++i)
    for (int j = 0; j < WIDTH; ++j) t[i][j] = r[j][i];
  for (int i = 0; i < WIDTH; ++i) r[i] = t[i];
}
#endif

#if defined(__AVX512BF16__)
/// Elements of two rows by turns, from each half of them: as pairs along K.
struct Interleaved {
  __m512i low, high;

  Interleaved(__m512i a, __m512i b) {
    alignas(64) static constexpr uint16_t LOW[32] = {0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                     8,  40, 9,  41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const __m512i lanes = _mm512_load_si512(LOW);
    low = _mm512_permutex2var_epi16(a, lanes, b);
    high = _mm512_permutex2var_epi16(a, _mm512_add_epi16(lanes, _mm512_set1_epi16(16)), b);
  }
};

/// The first 32 of n elements, zeros where there are fewer.
inline __m512i load_pairs(const bf16 *from, int n) {
  return _mm512_maskz_loadu_epi16(n >= 2 * WIDTH ? ~0u : (1u << n) - 1, from);
}
#endif

/// Keys as B of the product with queries: [padded / PAIR][TILE][PAIR], the first round_up(n, WIDTH) columns of it.
///
/// key: TILE pointers, of which those from n on repeat a valid one. next: what will be packed after it, prefetched line by
/// line, since blocks lie scattered and hardware prefetchers do not cross from one to the next; it is not read yet.
/// padded: dim rounded up to WIDTH; beyond dim zeros.
template <class KV, class Operand>
inline void pack_keys(const KV *const *key, const KV *const *next, int n, int dim, Operand *out) {
  const int padded = round_up(dim, WIDTH);
  if constexpr (std::is_same_v<Operand, float>) {
    for (int first = 0; first < n; first += WIDTH)
      for (int d = 0; d < padded; d += WIDTH) {
        vf rows[WIDTH];
        for (int i = 0; i < WIDTH; ++i) {
          const KV *from = key[first + i] + d;
          __builtin_prefetch(next[first + i] + d, 0, 2);
          rows[i] = d + WIDTH <= dim ? load(from) : load_part(from, dim - d);
        }
        transpose(rows);
        for (int i = 0; i < WIDTH; ++i) store(out + (d + i) * TILE + first, rows[i]);
      }
  } else {
#if defined(__AVX512BF16__)
    // A pair of bf16 moves as 32 bits; 32 dimensions fill a register.
    for (int first = 0; first < n; first += WIDTH)
      for (int d = 0; d < padded; d += 2 * WIDTH) {
        __m512i rows[WIDTH];
        for (int i = 0; i < WIDTH; ++i) {
          rows[i] = load_pairs(key[first + i] + d, dim - d);
          __builtin_prefetch(next[first + i] + d, 0, 2);
        }
        transpose(rows);
        const int pairs = padded - d < 2 * WIDTH ? (padded - d) / 2 : WIDTH;
        for (int i = 0; i < pairs; ++i) _mm512_storeu_si512(out + ((d / 2 + i) * TILE + first) * 2, rows[i]);
      }
#endif
  }
}

/// Values as B of the product with probabilities: [TILE / PAIR][padded][PAIR], the first round_up(n, PAIR) rows of it.
template <class KV, class Operand>
inline void pack_values(const KV *const *value, const KV *const *next, int n, int dim, Operand *out) {
  const int padded = round_up(dim, WIDTH);
  if constexpr (std::is_same_v<Operand, float>) {
    for (int i = 0; i < n; ++i)
      for (int d = 0; d < padded; d += WIDTH) {
        __builtin_prefetch(next[i] + d, 0, 2);
        store(out + i * padded + d, d + WIDTH <= dim ? load(value[i] + d) : load_part(value[i] + d, dim - d));
      }
  } else {
#if defined(__AVX512BF16__)
    for (int i = 0; i < n; i += 2)
      for (int d = 0; d < padded; d += 2 * WIDTH) {
        const Interleaved both(load_pairs(value[i] + d, dim - d), load_pairs(value[i + 1] + d, dim - d));
        __builtin_prefetch(next[i] + d, 0, 2);
        __builtin_prefetch(next[i + 1] + d, 0, 2);
        bf16 *to = out + (i * padded / 2 + d) * 2;
        _mm512_storeu_si512(to, both.low);
        if (padded - d > WIDTH) _mm512_storeu_si512(to + 2 * WIDTH, both.high);
      }
#endif
  }
}

/// A row of A: dim elements of a query, zeros up to padded.
template <class Act, class Operand>
inline void pack_query(const Act *from, int dim, Operand *out) {
  const int padded = round_up(dim, WIDTH);
  for (int d = 0; d < padded; d += WIDTH) {
    const vf x = d + WIDTH <= dim ? load(from + d) : load_part(from + d, dim - d);
    store(out + d, x);
  }
}

}  // namespace winnow::WINNOW_ISA
