// Products of few rows with weights in blocks (blocks.h): numbers are multiplied in registers as soon as they are known.
#pragma once

#include <limits>
#include <memory>

#include "../layers.h"
#include "block_panel.h"
#include "tile_registers.h"

namespace winnow::WINNOW_ISA {

/// Inputs that a minimum, and at least a scale, belongs to.
constexpr int64_t HALF = 16;
/// Most rows whose numbers are multiplied in registers, and how many of them at once.
constexpr int64_t FEW = 4, MOST_FEW = 2;
/// Tile registers take whole blocks alone: halves lie beside zeros.
template <class Operand>
constexpr bool PADS = std::is_same_v<Operand, bf16>;

/// The sum of a row's products with numbers in the order in which `multiply` adds them up, so that it is the same to the last bit.
template <class Operand>
struct PairSum {
  using Given = Operand;
  typename SumOf<Operand>::vector total{};

  void add(const Operand *a, numbers pairs) { total = multiply_add(total, a, (decltype(total))pairs); }
  template <class Vector>
  void add(const Operand *a, Vector first, Vector second) {
    Operand joined[4 * WIDTH / sizeof(Operand)];
    store_pairs(joined, first, second);
    add(a, load_vector<numbers>(joined));
  }
  vf sum(float scale) const { return __builtin_convertvector(total, vf) * scale; }
};

/// Floats are added up one by one.
template <>
struct PairSum<float> {
  using Given = float;
  vf total{};

  template <class Vector>
  void add(const float *a, Vector first, Vector second) {
    total += a[0] * to_floats(first);
    total += a[1] * to_floats(second);
  }
  vf sum(float) const { return total; }
};

/// Tile registers add up both inputs of pairs apart.
template <>
struct PairSum<bf16> {
  using Given = float;
  vf even{}, odd{};

  void add(const float *a, numbers pairs) { add(a, (vf)((vu)pairs << 16), (vf)((vu)pairs & 0xffff0000u)); }
  template <class Vector>
  void add(const float *a, Vector first, Vector second) {
    even += a[0] * to_floats(first);
    odd += a[1] * to_floats(second);
  }
  vf sum(float) const { return even + odd; }
};

/// Rows as they are multiplied, the scales of integers, and the sums that minima are multiplied with.
template <class Operand>
struct PreparedRows {
  const Operand *x;
  int64_t count, stride, in;
  std::unique_ptr<Operand[]> own;
  std::unique_ptr<float[]> scale, sum;  // [rows, in / 32], [rows, in / 16]
  std::unique_ptr<float[]> floats;      // [rows, in], of few rows that tile registers would sum

  /// as_given: they are multiplied as they are.
  PreparedRows(const LinearRows &rows, int64_t in, bool as_given)
      : count(rows.rows), stride(as_given ? rows.x_stride : in), in(in) {
    if (!as_given) own.reset(new Operand[rows.rows * in]);
    if (std::is_integral_v<Operand>) scale.reset(new float[rows.rows * (in / BLOCK)]);
    if (count <= FEW && PADS<Operand>) floats.reset(new float[rows.rows * in]);
    sum.reset(new float[rows.rows * (in / HALF)]);
    x = as_given ? reinterpret_cast<const Operand *>(rows.x) : own.get();
  }

  template <class T>
  void prepare(const T *given, int64_t row) {
    float *sums = sum.get() + row * (in / HALF);
    for (int64_t i = 0; i < in; i += BLOCK) {
      vf part[BLOCK / WIDTH], largest{};
      for (int j = 0; j < BLOCK / WIDTH; ++j) {
        part[j] = load(given + i + j * WIDTH);
        if constexpr (std::is_same_v<Operand, float>)
          if (own) store(own.get() + row * in + i + j * WIDTH, part[j]);
        if (PADS<Operand> && floats) store(floats.get() + row * in + i + j * WIDTH, part[j]);
        largest = (vf)larger((vi)largest, (vi)part[j] & 0x7fffffff);  // what is no number above all
      }
      float factor = 1.0f;
      if constexpr (std::is_integral_v<Operand>) {
        int32_t most = 0;
        for (int lane = 0; lane < WIDTH; ++lane) most = std::max(most, ((vi)largest)[lane]);
        float size;
        std::memcpy(&size, &most, sizeof size);
        constexpr float SMALLEST = 1e-30f, LARGEST = std::numeric_limits<Operand>::max();  // their ratio stays finite
        const bool finite = most < 0x7f800000;
        const float inverse = finite && size >= SMALLEST ? LARGEST / size : 0.0f;
        factor = !finite ? std::numeric_limits<float>::quiet_NaN() : size < SMALLEST ? 0.0f : size / LARGEST;
        for (int j = 0; j < BLOCK / WIDTH; ++j) {
          const vi codes = inverse ? nearest(rounded_product(part[j], inverse)) : vi{};
          store_codes(own.get() + row * in + i + j * WIDTH, codes);
          part[j] = __builtin_convertvector(codes, vf);
        }
        scale[row * (in / BLOCK) + i / BLOCK] = factor;
      }
      for (int h = 0; h < 2; ++h) {
        vf total{};
        for (int j = 0; j < HALF / WIDTH; ++j) total += part[h * (HALF / WIDTH) + j];
        sums[i / HALF + h] = horizontal_sum(total) * factor;
      }
    }
  }

  /// A row as PairSum takes it.
  const typename PairSum<Operand>::Given *given(int64_t row) const {
    if constexpr (PADS<Operand>)
      return floats.get() + row * in;
    else
      return x + row * stride;
  }
};

/// Products with a panel, for one thread.
template <class Operand>
struct PanelProduct;

/// A kind's tables and the functions that read its records.
template <class Operand>
struct Widening {
  BlockKind kind;
  Table low, high;
  void (*widen)(const char *, const Table &, const Table &, Operand *, int64_t);
  void (*few[MOST_FEW])(const Widening &, const char *, const PreparedRows<Operand> &, int64_t, float *);

  explicit Widening(BlockKind kind) : kind(kind) {
    const BlockForm &form = form_of(kind);
    const auto stored = [&](int number) {
      if (form.high_bits || !std::is_same_v<Operand, bf16>) return static_cast<int16_t>(number);
      const float exact = static_cast<float>(number);
      uint32_t bits;
      std::memcpy(&bits, &exact, sizeof bits);
      return static_cast<int16_t>(bits >> 16);
    };
    for (int i = 0; i < 32; ++i) {
      low.number[i] = stored(low_number(kind, i & ((1 << form.low_bits) - 1)));
      high.number[i] = high_number(kind, i & ((1 << form.high_bits) - 1));
    }
    if constexpr (std::is_same_v<Operand, float>)
      take<8, FLOATS, false>();
    else
      take_codes(form);
  }

 private:
  void take_codes(const BlockForm &form) {
    if constexpr (std::is_same_v<Operand, bf16>)
      if (form.floats) return take<8, FLOATS, false>();
    const int high_bits = form.high_bits;
    form.low_bits == 8   ? take<8, 0, false>()
    : form.low_bits == 2 ? (high_bits ? take<2, 1, false>() : take<2, 0, true>())
    : high_bits == 0     ? (form.minimum ? take<4, 0, true>() : take<4, 0, false>())
    : high_bits == 1     ? (form.minimum ? take<4, 1, true>() : take<4, 1, false>())
                         : take<4, 2, false>();
  }

  template <int LOW, int HIGH, bool MINIMUM>
  void take() {
    widen = winnow::WINNOW_ISA::widen<LOW, HIGH, Operand>;
    few[0] = multiply_few<LOW, HIGH, MINIMUM, 1>, few[1] = multiply_few<LOW, HIGH, MINIMUM, 2>;
  }

  /// Sums of a panel for R rows, to [R][PANEL]: numbers are multiplied in registers as soon as they are known.
  template <int LOW, int HIGH, bool MINIMUM, int R>
  static void multiply_few(const Widening &tables, const char *panel, const PreparedRows<Operand> &rows, int64_t first, float *to) {
    constexpr int SCALES = LOW == 2 || HIGH == 2 ? 2 : 1;  // as form.scales()
    const BlockForm &form = form_of(tables.kind);
    vf total[R][MAX_VECTORS] = {};
    for (int64_t b = 0; b < rows.in / BLOCK; ++b) {
      alignas(64) float scale[SCALES][PANEL], minimum[SCALES][PANEL];
      const BlockScales scales(form, panel, b);
      for (int h = 0; h < SCALES; ++h) scales.read(tables.kind, h, scale[h], minimum[h]);
#pragma GCC unroll 4
      for (int v = 0; v < MAX_VECTORS; ++v) {
        PairSum<Operand> sums[R][SCALES];
        decode<LOW, HIGH, Operand>(panel + PANEL * form.record_at(b), v, tables.low, tables.high,
                                   [&](int pair, auto... number) __attribute__((always_inline)) {
#pragma GCC unroll 2
                                     for (int r = 0; r < R; ++r)
                                       sums[r][pair * SCALES / (BLOCK / 2)].add(rows.given(first + r) + b * BLOCK + 2 * pair,
                                                                                number...);
                                   });
#pragma GCC unroll 2
        for (int r = 0; r < R; ++r) {
          const int64_t at = (first + r) * (rows.in / BLOCK) + b;
          const float *row_sum = rows.sum.get() + 2 * at;
#pragma GCC unroll 2
          for (int h = 0; h < SCALES; ++h) {
            total[r][v] += sums[r][h].sum(rows.scale ? rows.scale[at] : 1.0f) * load(scale[h] + v * WIDTH);
            if constexpr (MINIMUM)
              total[r][v] += load(minimum[h] + v * WIDTH) * (SCALES == 2 ? row_sum[h] : row_sum[0] + row_sum[1]);
          }
        }
      }
    }
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < MAX_VECTORS; ++v) store(to + r * PANEL + v * WIDTH, total[r][v]);
  }
};

}  // namespace winnow::WINNOW_ISA
