// Products of rows in bf16 with weights in blocks (blocks.h) as integers of 8 bits: rows are rounded to codes from -127 to 127 with
// a scale for each 32 inputs, as llama.cpp does (Q8_0, Q8_1, Q8_K); codes of weights stay as they are, above 0, and what they
// begin with counts as a minimum. Signed ones (Q8_0) become so by 128 more with VNNI, else by giving their signs to those of rows.
// Four inputs of a feature lie in a lane: sums of their products are exact.
#pragma once

#include "block_few.h"

#if defined(__AVX2__) && !defined(__AVX512F__)
#define WINNOW_BYTE_PRODUCTS

namespace winnow::WINNOW_ISA {

/// Records whose codes stay in L1, bytes that are read before they are needed, and rows whose sums stay in registers.
constexpr int64_t BYTE_RECORDS = 8, BYTES_AHEAD = 4096;
constexpr int BYTE_ROWS = 3, QUADS = BLOCK / 4;

/// Whether codes of all panels follow one another.
inline bool has_byte_products(const PackedWeight &weight) {
  return std::all_of(weight.panels, weight.panels + num_panels(weight.out_features), [](const BlockPanel &panel) {
    return form_of(static_cast<BlockKind>(panel.kind)).low_step == 1;
  });
}

/// What signed codes begin with, where they count from 0.
#if defined(WINNOW_VNNI)
constexpr int SIGNED_FROM = -128;
#else
constexpr int SIGNED_FROM = 0;
#endif

/// Sums of quads, codes of BITS bits. Without VNNI, of as many as fit 16 bits before they are widened.
template <int BITS>
struct QuadSum {
  vi total;
  numbers pairs;

  void add(int q, [[maybe_unused]] bool last, vi codes, vi quad) {
#if defined(WINNOW_VNNI)
    total = add_quads(q ? total : vi{}, codes, quad);
#else
    constexpr int FIT = BITS == 8 ? 1 : 1 << (7 - BITS);  // two products of at most 128 * 127
    if constexpr (BITS == 8) quad = (vi)_mm256_sign_epi8((__m256i)quad, (__m256i)codes), codes = (vi)_mm256_abs_epi8((__m256i)codes);
    const numbers products = (numbers)_mm256_maddubs_epi16((__m256i)codes, (__m256i)quad);
    pairs = q % FIT ? pairs + products : products;
    asm("" : "+x"(pairs));  // else GCC computes all products first, and spills them
    if (q % FIT + 1 == FIT || last) total = add_pairs(q < FIT ? vi{} : total, (vi)pairs, broadcast(0x10001));
#endif
  }
  vf floats() const { return __builtin_convertvector(total, vf); }
};

/// Codes of a record's quads, for the v-th vector of features.
template <int LOW, int HIGH>
inline __attribute__((always_inline)) void decode_quads(const char *record, int v, vi *out) {
  if constexpr (LOW == 8) {  // two inputs of all features, and the two that lie four farther on
    const __m256i halves = _mm256_setr_epi32(0, 4, 2, 6, 1, 5, 3, 7);
    const __m256i transposed = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
#pragma GCC unroll 8
    for (int q = 0; q < QUADS; ++q) {
      const char *from = record + (v * BLOCK + q / 2 * 8 + q % 2 * 2) * WIDTH;
      if (q % 2 == 0) __builtin_prefetch(from + BYTES_AHEAD, 0, 3);
      const __m256i four = _mm256_loadu2_m128i((const __m128i *)(from + 4 * WIDTH), (const __m128i *)from);
      out[q] = (vi)_mm256_shuffle_epi8(_mm256_permutevar8x32_epi32(four, halves), transposed);
      if (SIGNED_FROM) out[q] ^= broadcast(static_cast<int32_t>(0x80808080));
    }
    return;
  }
  constexpr int64_t VECTOR = 4 * WIDTH;
  constexpr int FIELDS = 8 / LOW, ABOVE = HIGH ? 8 / HIGH : 1;
  const char *low = record + v * LOW * VECTOR, *high = record + (LOW * MAX_VECTORS + v * HIGH) * VECTOR;
#pragma GCC unroll 8
  for (int q = 0; q < QUADS; ++q) {
    if (q % FIELDS == 0) __builtin_prefetch(low + q / FIELDS * VECTOR + BYTES_AHEAD, 0, 3);
    words code = load_vector<words>(low + q / FIELDS * VECTOR) >> (q % FIELDS * LOW) & static_cast<uint16_t>(((1 << LOW) - 1) * 0x101);
    if constexpr (HIGH > 0) {
      const words above = load_vector<words>(high + q / ABOVE * VECTOR);
      const int shift = q % ABOVE * HIGH - LOW;
      if (q % ABOVE == 0) __builtin_prefetch(high + q / ABOVE * VECTOR + BYTES_AHEAD, 0, 3);
      code |= (shift > 0 ? above >> shift : above << -shift) & static_cast<uint16_t>((((1 << HIGH) - 1) << LOW) * 0x101);
    }
    out[q] = (vi)code;
  }
}

/// Some records of a panel.
template <int LOW, int HIGH>
struct ByteRecords {
  static constexpr int SCALES = LOW == 2 || HIGH == 2 ? 2 : 1;  // as form.scales()
  alignas(64) vi codes[BYTE_RECORDS][MAX_VECTORS][QUADS];
  alignas(64) float scale[BYTE_RECORDS][SCALES][PANEL], minimum[BYTE_RECORDS][SCALES][PANEL];

  /// Adds products of R rows to [R][PANEL].
  template <int R>
  void multiply(const PreparedRows<int8_t> &rows, int64_t row, int64_t first, int64_t count, float *to) const {
    vf total[R][MAX_VECTORS];
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < MAX_VECTORS; ++v) total[r][v] = first ? load(to + r * PANEL + v * WIDTH) : vf{};
    for (int64_t b = 0; b < count; ++b)
#pragma GCC unroll 2
      for (int h = 0; h < SCALES; ++h) {
        constexpr int EACH = QUADS / SCALES;
        QuadSum<LOW + HIGH> sums[R][MAX_VECTORS];
#pragma GCC unroll 8
        for (int q = 0; q < EACH; ++q)
#pragma GCC unroll 4
          for (int r = 0; r < R; ++r) {
            const vi quad = broadcast_pair(rows.x + (row + r) * rows.stride + (first + b) * BLOCK + (h * EACH + q) * 4);
#pragma GCC unroll 4
            for (int v = 0; v < MAX_VECTORS; ++v) sums[r][v].add(q, q + 1 == EACH, codes[b][v][h * EACH + q], quad);
          }
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          const int64_t at = (row + r) * (rows.in / BLOCK) + first + b;
          const float by = rows.scale[at], *row_sum = rows.sum.get() + 2 * at;
#pragma GCC unroll 4
          for (int v = 0; v < MAX_VECTORS; ++v) {
            total[r][v] += sums[r][v].floats() * by * load(scale[b][h] + v * WIDTH);
            total[r][v] += load(minimum[b][h] + v * WIDTH) * (SCALES == 2 ? row_sum[h] : row_sum[0] + row_sum[1]);
          }
        }
      }
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < MAX_VECTORS; ++v) store(to + r * PANEL + v * WIDTH, total[r][v]);
  }

  /// Products of `count` rows with a panel, to [count][PANEL].
  static void multiply_panel(BlockKind kind, const char *panel, const PreparedRows<int8_t> &rows, int64_t begin, int64_t count,
                             float *to) {
    const BlockForm &form = form_of(kind);
    const float least = LOW == 8 ? SIGNED_FROM : form.low_first;
    ByteRecords records;
    for (int64_t first = 0; first < rows.in / BLOCK; first += BYTE_RECORDS) {
      const int64_t some = std::min(BYTE_RECORDS, rows.in / BLOCK - first);
      for (int64_t b = 0; b < some; ++b) {
        for (int v = 0; v < MAX_VECTORS; ++v)
          decode_quads<LOW, HIGH>(panel + PANEL * form.record_at(first + b), v, records.codes[b][v]);
        const BlockScales scales(form, panel, first + b);
        for (int h = 0; h < SCALES; ++h) {
          scales.read(kind, h, records.scale[b][h], records.minimum[b][h]);
          for (int j = 0; j < PANEL && !form.minimum; j += WIDTH)
            store(records.minimum[b][h] + j, load(records.scale[b][h] + j) * least);
        }
      }
      for (int64_t r = 0, parts = (count + BYTE_ROWS - 1) / BYTE_ROWS, n; parts > 0; --parts, r += n) {
        n = (count - r + parts - 1) / parts;
        n == 3   ? records.template multiply<3>(rows, begin + r, first, some, to + r * PANEL)
        : n == 2 ? records.template multiply<2>(rows, begin + r, first, some, to + r * PANEL)
                 : records.template multiply<1>(rows, begin + r, first, some, to + r * PANEL);
      }
    }
  }
};

template <>
struct PanelProduct<int8_t> {
  const PreparedRows<int8_t> &rows;

  void multiply(BlockKind kind, const char *panel, int64_t begin, int64_t count, float *to) {
    const BlockForm &form = form_of(kind);
    const auto of_panel = form.low_bits == 8    ? ByteRecords<8, 0>::multiply_panel
                          : form.low_bits == 2  ? form.high_bits ? ByteRecords<2, 1>::multiply_panel : ByteRecords<2, 0>::multiply_panel
                          : form.high_bits == 0 ? ByteRecords<4, 0>::multiply_panel
                          : form.high_bits == 1 ? ByteRecords<4, 1>::multiply_panel
                                                : ByteRecords<4, 2>::multiply_panel;
    of_panel(kind, panel, rows, begin, count, to);
  }
};

}  // namespace winnow::WINNOW_ISA

#endif
