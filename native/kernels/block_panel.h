// Scales of a record of a panel in blocks (blocks.h), and its codes as numbers: in registers, and as B of product.h.
#pragma once

#include "../blocks.h"
#include "coded_step.h"
#include "panel.h"

namespace winnow::WINNOW_ISA {

/// Scales of 32 inputs: for each feature of a panel, one behind the other.
class BlockScales {
 public:
  /// panel: where it begins.
  BlockScales(const BlockForm &form, const char *panel, int64_t b)
      : form_(form),
        head_(const_cast<char *>(panel) + PANEL * form.super_at(b)),
        tail_(const_cast<char *>(panel) + PANEL * (form.record_at(b) + (form.low_bits + form.high_bits) * BLOCK / 8)) {}

  f16 *half(int h) const { return reinterpret_cast<f16 *>(tail_) + h * PANEL; }
  f16 *half_minimum(int h) const { return half(form_.scales() + h); }
  float *whole() const { return reinterpret_cast<float *>(tail_); }
  f16 *super() const { return reinterpret_cast<f16 *>(head_); }
  f16 *super_minimum() const { return super() + PANEL; }
  int8_t *steps(int h) const { return reinterpret_cast<int8_t *>(tail_) + h * PANEL; }
  int8_t *minimum_steps(int h) const { return steps(form_.scales() + h); }

  /// Scales and minima of all features of a panel as numbers, of the h-th half.
  void read(BlockKind kind, int h, float *scale, float *minimum) const {
    for (int j = 0; j < PANEL; j += WIDTH) {
      if (kind == BlockKind::mxfp4) {
        store(scale + j, load(reinterpret_cast<const bf16 *>(half(h)) + j));
      } else if (form_.floats) {
        store(scale + j, load(whole() + j));
      } else if (form_.super) {
        store(scale + j, load(super() + j) * to_floats(widen_signed(steps(h) + j)));
        if (form_.minimum) store(minimum + j, -(load(super_minimum() + j) * to_floats(widen_signed(minimum_steps(h) + j))));
      } else {
        store(scale + j, load(half(h) + j));
        if (form_.minimum) store(minimum + j, load(half_minimum(h) + j));
      }
    }
  }

  /// Of one feature, as block_codes.cpp has them.
  void read_feature(BlockKind kind, int j, float &scale, float &least, int *step, int *least_step) const {
    step[0] = step[1] = least_step[0] = least_step[1] = 1;
    if (!form_.super) {
      scale = form_.floats ? whole()[j] : kind == BlockKind::mxfp4 ? to_float(bf16{half(0)[j].bits}) : to_float(half(0)[j]);
      least = form_.minimum ? -to_float(half_minimum(0)[j]) : 0.0f;
      return;
    }
    scale = to_float(super()[j]), least = form_.minimum ? to_float(super_minimum()[j]) : 0.0f;
    for (int h = 0; h < form_.scales(); ++h) {
      step[h] = steps(h)[j];
      if (form_.minimum) least_step[h] = minimum_steps(h)[j];
    }
  }

 private:
  const BlockForm &form_;
  char *head_, *tail_;
};

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
