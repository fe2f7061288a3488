// Linear layers of weights in blocks (blocks.h): codes become numbers of 16 bits on the way, products of 32 or 16 inputs sum up,
// and what scales a block scales its sum. So no number of the weight is rounded.
//
// Where the processor multiplies bf16, activations of that type are multiplied as they are: codes are bf16 too, without rounding.
// All others become integers of 16 bits, with a scale for each 32 inputs of a row; sums of their products are exact. Blocks add up
// in their order, in float32: a row's result depends neither on the rows beside it nor on the number of threads.
#include <limits>
#include <memory>

#include "../products.h"
#include "block_panel.h"
#include "tile_product.h"

namespace winnow::WINNOW_ISA {

namespace {

/// Inputs that a minimum, and at least a scale, belongs to.
constexpr int64_t HALF = 16;
/// Rows whose sums stay in L1 until they are scaled.
constexpr int64_t ROWS_AT_ONCE = 32;
/// Bytes of a panel that are read before they are needed.
constexpr int64_t AHEAD = 8192;
/// Most rows of which every thread prepares all, rather than wait for the others.
constexpr int64_t EACH_BY_ITSELF = 2;
/// What codes are multiplied with.
template <class T>
using OperandFor = typename std::conditional<std::is_same_v<typename OperandOf<T>::type, bf16>, bf16, int16_t>::type;
/// Whether products in tile registers take whole blocks alone: halves lie beside zeros then.
#if defined(WINNOW_TILES)
template <class Operand>
constexpr bool PADS = std::is_same_v<Operand, bf16>;
#else
template <class Operand>
constexpr bool PADS = false;
#endif

typedef uint16_t words __attribute__((vector_size(WIDTH * 4)));
typedef int16_t numbers __attribute__((vector_size(WIDTH * 4)));

/// Numbers of a plane's codes, repeated so that bits above a code change nothing.
struct Table {
  alignas(64) int16_t number[32];
};

/// Each word's number, by its lowest `bits`.
template <int BITS>
inline numbers look_up(const Table &table, words code) {
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

inline void store_numbers(int16_t *to, numbers value) { store_vector(to, value); }

#if defined(__AVX512BF16__)
inline void store_numbers(bf16 *to, numbers value) {
  const __m512i all = (__m512i)value;
  const auto floats = [](__m256i part) { return _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(part)); };
  store_vector(to, _mm512_cvtneps_pbh(floats(_mm512_castsi512_si256(all))));
  store_vector(to + WIDTH, _mm512_cvtneps_pbh(floats(_mm512_extracti64x4_epi64(all, 1))));
}
#endif

/// Codes of a record as B of product.h: [16 pairs][PANEL][2]. Tables of a single plane hold operands as they are stored.
template <int LOW, int HIGH, class Operand>
void widen(const char *record, const Table &low_table, const Table &high_table, Operand *out) {
  constexpr int64_t VECTOR = 4 * WIDTH;
  const char *high_plane = record + LOW * MAX_VECTORS * VECTOR;
  for (int v = 0; v < MAX_VECTORS; ++v) {
    words low[LOW], high[HIGH ? HIGH : 1];
#pragma GCC unroll 4
    for (int g = 0; g < LOW; ++g) {
      const char *from = record + (v * LOW + g) * VECTOR;
      low[g] = load_vector<words>(from);
      __builtin_prefetch(from + AHEAD);
    }
#pragma GCC unroll 4
    for (int g = 0; g < HIGH; ++g) {
      const char *from = high_plane + (v * HIGH + g) * VECTOR;
      high[g] = load_vector<words>(from);
      __builtin_prefetch(from + AHEAD);
    }
#pragma GCC unroll 16
    for (int pair = 0; pair < BLOCK / 2; ++pair) {
      constexpr int FIELDS = 16 / LOW;
      Operand *to = out + (pair * PANEL + v * WIDTH) * 2;
      numbers number = look_up<LOW>(low_table, low[pair / FIELDS] >> (pair % FIELDS * LOW));
      if constexpr (HIGH > 0) {
        constexpr int ABOVE = 16 / HIGH;
        number += look_up<HIGH>(high_table, high[pair / ABOVE] >> (pair % ABOVE * HIGH));
        store_numbers(to, number);
      } else {
        store_vector(to, number);
      }
    }
  }
}

/// A kind's tables and the function that widens its records.
template <class Operand>
struct Widening {
  Table low, high;
  void (*widen)(const char *, const Table &, const Table &, Operand *);

  explicit Widening(BlockKind kind) {
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
    const int high_bits = form.high_bits;
    widen = form.low_bits == 2 ? (high_bits ? winnow::WINNOW_ISA::widen<2, 1, Operand> : winnow::WINNOW_ISA::widen<2, 0, Operand>)
            : high_bits == 0   ? winnow::WINNOW_ISA::widen<4, 0, Operand>
            : high_bits == 1   ? winnow::WINNOW_ISA::widen<4, 1, Operand>
            : high_bits == 2   ? winnow::WINNOW_ISA::widen<4, 2, Operand>
                               : winnow::WINNOW_ISA::widen<4, 4, Operand>;
  }
};

/// Rows as they are multiplied, the scales of integers, and the sums that minima are multiplied with.
template <class Operand>
struct PreparedRows {
  const Operand *x;
  int64_t stride, in;
  std::unique_ptr<Operand[]> own;
  std::unique_ptr<float[]> scale, sum;  // [rows, in / 32], [rows, in / 16]

  PreparedRows(const LinearRows &rows, int64_t in) : stride(rows.x_stride), in(in) {
    constexpr bool INTEGERS = std::is_same_v<Operand, int16_t>;
    if (INTEGERS) own.reset(new Operand[rows.rows * in]), scale.reset(new float[rows.rows * (in / BLOCK)]), stride = in;
    sum.reset(new float[rows.rows * (in / HALF)]);
    x = INTEGERS ? own.get() : reinterpret_cast<const Operand *>(rows.x);
  }

  template <class T>
  void prepare(const T *given, int64_t row) {
    float *sums = sum.get() + row * (in / HALF);
    for (int64_t i = 0; i < in; i += BLOCK) {
      vf part[BLOCK / WIDTH], largest{};
      for (int j = 0; j < BLOCK / WIDTH; ++j) {
        part[j] = load(given + i + j * WIDTH);
        largest = (vf)larger((vi)largest, (vi)part[j] & 0x7fffffff);  // what is no number above all
      }
      float factor = 1.0f;
      if constexpr (std::is_same_v<Operand, int16_t>) {
        int32_t most = 0;
        for (int lane = 0; lane < WIDTH; ++lane) most = std::max(most, ((vi)largest)[lane]);
        float size;
        std::memcpy(&size, &most, sizeof size);
        constexpr float SMALLEST = 1e-30f, LARGEST = 32767.0f;  // their ratio stays finite
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
};

/// Scales a block's sums of some rows and adds them to those of the blocks before it.
template <bool MINIMUM, class Sum>
inline void add_block(const Sum *of_block, int64_t rows, const float *row_scale, const float *row_sum, int64_t blocks,
                      bool whole, const float *scale, const float *minimum, bool first, float *to) {
  using Vector = typename std::conditional<std::is_same_v<Sum, float>, vf, vi>::type;
#pragma GCC unroll 4
  for (int v = 0; v < MAX_VECTORS; ++v) {
    const vf by = load(scale + v * WIDTH), least = MINIMUM ? load(minimum + v * WIDTH) : vf{};
    for (int64_t r = 0; r < rows; ++r) {
      float *at = to + r * PANEL + v * WIDTH;
      const Vector sum = load_vector<Vector>(of_block + r * PANEL + v * WIDTH);
      vf total = first ? vf{} : load(at);
      if constexpr (std::is_same_v<Sum, float>)
        total += sum * by;
      else
        total += __builtin_convertvector(sum, vf) * row_scale[r * blocks] * by;
      if constexpr (MINIMUM) total += least * (row_sum[2 * r * blocks] + (whole ? row_sum[2 * r * blocks + 1] : 0.0f));
      store(at, total);
    }
  }
}

/// As `multiply` of linear.cpp.
template <class T, int PANELS, class Finish>
void multiply(const PackedWeight &weight, const LinearRows &rows, int64_t apart, int threads, Finish finish) {
  using Operand = OperandFor<T>;
  using Sum = typename std::conditional<std::is_same_v<Operand, bf16>, float, int32_t>::type;
  constexpr int64_t SUMS = ROW_BLOCK * PANEL, PIECE = BLOCK * PANEL;
  if (rows.rows == 0) return;
  const int64_t in = weight.in_features, out = weight.out_features, panels = num_panels(out) / PANELS;
  const int64_t blocks = (rows.rows + ROW_BLOCK - 1) / ROW_BLOCK, most = (rows.rows + blocks - 1) / blocks;
  const T *given = reinterpret_cast<const T *>(rows.x);
  const bool shared = rows.rows > EACH_BY_ITSELF;
  std::unique_ptr<PreparedRows<Operand>> of_all(shared ? new PreparedRows<Operand>(rows, in) : nullptr);
#pragma omp parallel num_threads(threads) if (rows.rows * in * out >= PARALLEL_FROM)
  {
    std::unique_ptr<PreparedRows<Operand>> own(shared ? nullptr : new PreparedRows<Operand>(rows, in));
    PreparedRows<Operand> &prepared = shared ? *of_all : *own;
    if (shared) {
#pragma omp for schedule(static)
      for (int64_t r = 0; r < rows.rows; ++r) prepared.prepare(given + r * rows.x_stride, r);
    } else {
      for (int64_t r = 0; r < rows.rows; ++r) prepared.prepare(given + r * rows.x_stride, r);
    }
    TileRegisters<Operand> registers(0);
    alignas(64) Operand piece[(PADS<Operand> ? 2 : 1) * PIECE];
    alignas(64) Sum of_block[ROWS_AT_ONCE * PANEL];
    alignas(64) float sums[PANELS * SUMS], scale[2][PANEL], minimum[2][PANEL];
    std::unique_ptr<Widening<Operand>> widening;
    int64_t kind = -1;
#pragma omp for schedule(static)
    for (int64_t task = 0; task < panels * blocks; ++task) {
      const int64_t panel = task / blocks, begin = task % blocks * most, count = std::min(most, rows.rows - begin);
      for (int64_t n = 0; n < PANELS; ++n) {
        const BlockPanel &where = weight.panels[panel + n * apart];
        const BlockKind block_kind = static_cast<BlockKind>(where.kind);
        const BlockForm &form = form_of(block_kind);
        if (where.kind != kind) widening.reset(new Widening<Operand>(block_kind)), kind = where.kind;
        const char *from = weight.packed + where.at;
        float *to = sums + n * SUMS;
        for (int64_t b = 0; b < in / BLOCK; ++b) {
          const char *record = from + PANEL * form.record_at(b);
          widening->widen(record, widening->low, widening->high, piece);
          const BlockScales scales(form, from, b);
          for (int h = 0; h < form.scales(); ++h) scales.read(block_kind, h, scale[h], minimum[h]);
          if (PADS<Operand> && form.halves) {
            std::copy(piece + PIECE / 2, piece + PIECE, piece + PIECE + PIECE / 2);
            std::fill(piece + PIECE / 2, piece + PIECE + PIECE / 2, Operand{});
          }
          for (int64_t r = 0; r < count; r += ROWS_AT_ONCE) {
            const int64_t some = std::min(ROWS_AT_ONCE, count - r), row = begin + r;
            for (int h = 0; h < form.scales(); ++h) {
              const int64_t at = PADS<Operand> ? 0 : h * HALF, deep = form.halves && !PADS<Operand> ? HALF : BLOCK;
              const Operand *operand = piece + h * (PADS<Operand> ? PIECE : PIECE / 2);
              product_streaming<MAX_VECTORS>(registers, static_cast<int>(some),
                                             prepared.x + row * prepared.stride + b * BLOCK + at,
                                             static_cast<int>(prepared.stride), operand, of_block, PANEL,
                                             static_cast<int>(deep), false, nullptr, nullptr, [](int, int) {});
              const float *row_sum = prepared.sum.get() + row * (in / HALF) + 2 * b + h;
              const float *row_scale = prepared.scale ? prepared.scale.get() + row * (in / BLOCK) + b : nullptr;
              const bool first = b == 0 && h == 0;
              (form.minimum ? add_block<true, Sum> : add_block<false, Sum>)(
                  of_block, some, row_scale, row_sum, in / BLOCK, !form.halves, scale[h], minimum[h], first, to + r * PANEL);
            }
          }
        }
      }
      finish(sums, panel, begin, count);
    }
  }
}

void block_linear(const PackedWeight &weight, const LinearRows &rows, int threads) {
  with_type(weight.dtype, [&](auto type) {
    using T = decltype(type);
    const int64_t width = weight.out_features;
    const T *bias = reinterpret_cast<const T *>(rows.bias), *add = reinterpret_cast<const T *>(rows.add);
    T *out = reinterpret_cast<T *>(rows.out);
    multiply<T, 1>(weight, rows, 0, threads, [=](const float *sums, int64_t panel, int64_t first, int64_t count) {
      const int64_t feature = panel * PANEL, features = std::min<int64_t>(PANEL, width - feature);
      for (int64_t r = 0; r < count; ++r) {
        const int64_t at = (first + r) * width + feature;
        finish_row(sums + r * PANEL, bias ? bias + feature : nullptr, add ? add + at : nullptr, out + at, features);
      }
    });
  });
}

bool block_gates(int64_t size) { return size % PANEL == 0; }

void block_gated_linear(const PackedWeight &weight, const LinearRows &rows, Activation activation, int threads) {
  with_type(weight.dtype, [&](auto type) {
    using T = decltype(type);
    const int64_t size = weight.out_features / 2;
    const T *bias = reinterpret_cast<const T *>(rows.bias);
    T *out = reinterpret_cast<T *>(rows.out);
    multiply<T, 2>(weight, rows, size / PANEL, threads, [=](const float *sums, int64_t panel, int64_t first, int64_t count) {
      const int64_t feature = panel * PANEL;
      const T *gate_bias = bias ? bias + feature : nullptr, *up_bias = bias ? bias + size + feature : nullptr;
      for (int64_t r = 0; r < count; ++r)
        finish_gated_row(sums + r * PANEL, sums + (ROW_BLOCK + r) * PANEL, gate_bias, up_bias, activation,
                         out + (first + r) * size + feature);
    });
  });
}

}  // namespace

int64_t block_bytes(BlockKind, int64_t, int64_t);
void pack_blocks(const RawBlocks &, char *, int);
void dequantize_blocks(const RawBlocks &, DType, char *, int);
void unpack_block_rows(const PackedWeight &, const int64_t *, int64_t, char *, int);

extern const BlockProducts block_products;
constexpr BlockProducts block_products{
    {nullptr, nullptr, unpack_block_rows, block_linear, block_gates, block_gated_linear},
    block_bytes, pack_blocks, dequantize_blocks,
};

}  // namespace winnow::WINNOW_ISA
