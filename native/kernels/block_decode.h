// Codes of a record of weights in blocks (blocks.h) as numbers: in registers, and as B of product.h.
#pragma once

#include "block_panel.h"
#include "product.h"

namespace winnow::WINNOW_ISA {

/// In place of bits above a code: codes of 8 bits are floats (E4M3).
constexpr int FLOATS = -1;
/// Bytes of a panel that are read before they are needed.
constexpr int64_t AHEAD = 8192;

typedef uint16_t words __attribute__((vector_size(WIDTH * 4)));
typedef int16_t numbers __attribute__((vector_size(WIDTH * 4)));

/// Numbers of a plane's codes, repeated so that bits above a code change nothing.
struct Table {
  alignas(64) int16_t number[32];
};

/// Numbers of the codes in a field of words, of BITS bits.
template <int BITS>
inline numbers look_up(const Table &table, words word, int field) {
  const words code = word >> (field * BITS);
#if defined(__AVX512F__)
  return (numbers)_mm512_permutexvar_epi16((__m512i)code, _mm512_load_si512(table.number));
#elif defined(__AVX2__)
  // Numbers are of 8 bits, looked up as the upper half of a word.
  const __m256i bytes = _mm256_broadcastsi128_si256(_mm_packs_epi16(_mm_load_si128((const __m128i *)table.number),
                                                                    _mm_load_si128((const __m128i *)(table.number + 8))));
  const words index = (code & static_cast<uint16_t>((1 << BITS) - 1)) << 8;
  return (numbers)_mm256_shuffle_epi8(bytes, (__m256i)index) >> 8;
#else
  numbers out;
  for (int i = 0; i < 2 * WIDTH; ++i) out[i] = table.number[code[i] & 31];
  return out;
#endif
}

inline void store_pairs(int16_t *to, numbers pairs) { store_vector(to, pairs); }
inline void store_pairs(int16_t *to, vi first, vi second) { store_vector(to, (first & 0xffff) | second << 16); }

inline void store_pairs(float *to, vf first, vf second) { store(to, first), store(to + PANEL, second); }

inline vf to_floats(vf numbers) { return numbers; }

#if defined(__AVX512BF16__)
inline void store_pairs(bf16 *to, numbers pairs) { store_vector(to, pairs); }

/// Numbers of 8 bits are exact: the upper halves of floats.
template <class Vector>
inline void store_pairs(bf16 *to, Vector first, Vector second) {
  store_vector(to, (vu)to_floats(second) | (vu)to_floats(first) >> 16);
}
#endif

/// Numbers of codes in E4M3. Those below the smallest exponent are found by a subtraction: a product would begin with a
/// number that is no normal float.
inline vf from_e4m3s(vi code) {
  constexpr float SMALLEST = 0x1p-6f;
  const vf number = (vf)(((code & 0x7f) << 20) + (120 << 23));
  const vf size = (code & 0x78) == 0 ? number + number - SMALLEST : number;
  return (vf)((vi)size | (code << 24 & static_cast<int32_t>(0x80000000)));
}

/// Calls use(pair, ...) with the numbers of a record's pairs of inputs, for the v-th vector of features: joined as tables have
/// them, or as two vectors. Tables of a single plane hold operands as they are stored; codes of 8 bits are the numbers.
template <int LOW, int HIGH, class Operand, class Use>
inline __attribute__((always_inline)) void decode(const char *record, int v, const Table &low_table, const Table &high_table,
                                                  Use use) {
  if constexpr (LOW == 8) {
#pragma GCC unroll 16
    for (int pair = 0; pair < BLOCK / 2; ++pair) {
      const char *from = record + (v * BLOCK + pair * 2) * WIDTH;
      if (pair % 2 == 0) __builtin_prefetch(from + AHEAD, 0, 2);
      if constexpr (HIGH == FLOATS)
        use(pair, from_e4m3s(widen_signed(from)), from_e4m3s(widen_signed(from + WIDTH)));
      else
        use(pair, widen_signed(from), widen_signed(from + WIDTH));
    }
  } else {
    constexpr int64_t VECTOR = 4 * WIDTH;
    words low[LOW], high[HIGH ? HIGH : 1];
    const auto read = [](const char *from, int count, words *to) __attribute__((always_inline)) {
#pragma GCC unroll 4
      for (int g = 0; g < count; ++g) {
        to[g] = load_vector<words>(from + g * VECTOR);
        __builtin_prefetch(from + g * VECTOR + AHEAD, 0, 2);
      }
    };
    read(record + v * LOW * VECTOR, LOW, low);
    read(record + (LOW * MAX_VECTORS + v * HIGH) * VECTOR, HIGH, high);
#pragma GCC unroll 16
    for (int pair = 0; pair < BLOCK / 2; ++pair) {
      constexpr int FIELDS = 16 / LOW, ABOVE = HIGH ? 16 / HIGH : 1;
      numbers number = look_up<LOW>(low_table, low[pair / FIELDS], field_of(pair % FIELDS, FIELDS));
      if constexpr (HIGH > 0) number += look_up<HIGH>(high_table, high[pair / ABOVE], field_of(pair % ABOVE, ABOVE));
      if constexpr (HIGH > 0 && !std::is_same_v<Operand, int16_t>)
        use(pair, (vi)number << 16 >> 16, (vi)number >> 16);
      else
        use(pair, number);
    }
  }
}

/// Codes of a record as B of product.h: [16 pairs][PANEL][2], or floats [32][PANEL], the second half `apart` farther on.
template <int LOW, int HIGH, class Operand>
void widen(const char *record, const Table &low_table, const Table &high_table, Operand *out, int64_t apart) {
  for (int v = 0; v < MAX_VECTORS; ++v)
    decode<LOW, HIGH, Operand>(record, v, low_table, high_table, [=](int pair, auto... number) __attribute__((always_inline)) {
      constexpr int PAIR = pair_size<Operand>();
      store_pairs(out + pair * 2 * PANEL + v * WIDTH * PAIR + (pair < BLOCK / 4 ? 0 : apart), number...);
    });
}

}  // namespace winnow::WINNOW_ISA
