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
/// Rows and records whose sums stay in L1 until they are scaled, and most rows of a task, whose results stay in L2.
constexpr int64_t ROWS_AT_ONCE = 32, RECORDS_AT_ONCE = 4, TASK_ROWS = 384;
/// Records that are rounded before they are multiplied with many rows.
constexpr int64_t ROUNDED_RECORDS = 12;
/// Bytes of a panel that are read before they are needed.
constexpr int64_t AHEAD = 8192;
/// Most rows of which every thread prepares all, rather than wait for the others.
constexpr int64_t EACH_BY_ITSELF = 2;
/// Most rows whose numbers are multiplied in registers, and how many of them at once.
constexpr int64_t FEW = 4, MOST_FEW = 2;
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

#if defined(__AVX512BF16__)
inline void store_pairs(bf16 *to, numbers pairs) { store_vector(to, pairs); }

/// Numbers of 8 bits are exact: the upper halves of floats.
inline void store_pairs(bf16 *to, vi first, vi second) {
  const vf low = __builtin_convertvector(first, vf), high = __builtin_convertvector(second, vf);
  store_vector(to, (vu)high | (vu)low >> 16);
}
#endif

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
      use(pair, load_bytes(from), load_bytes(from + WIDTH));
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
      numbers number = look_up<LOW>(low_table, low[pair / FIELDS], pair % FIELDS);
      if constexpr (HIGH > 0) number += look_up<HIGH>(high_table, high[pair / ABOVE], pair % ABOVE);
      if constexpr (HIGH > 0 && !std::is_same_v<Operand, int16_t>)
        use(pair, (vi)number << 16 >> 16, (vi)number >> 16);
      else
        use(pair, number);
    }
  }
}

/// Codes of a record as B of product.h: [16 pairs][PANEL][2], the second half of the pairs `apart` farther on.
template <int LOW, int HIGH, class Operand>
void widen(const char *record, const Table &low_table, const Table &high_table, Operand *out, int64_t apart) {
  for (int v = 0; v < MAX_VECTORS; ++v)
    decode<LOW, HIGH, Operand>(record, v, low_table, high_table, [=](int pair, auto... number) __attribute__((always_inline)) {
      store_pairs(out + (pair * PANEL + v * WIDTH) * 2 + (pair < BLOCK / 4 ? 0 : apart), number...);
    });
}

/// The sum of a row's products with numbers in the order in which `multiply` adds them up, so that it is the same to the last bit.
template <class Operand>
struct PairSum {
  using Given = Operand;
  typename SumOf<Operand>::vector total{};

  void add(const Operand *a, numbers pairs) { total = multiply_add(total, a, (decltype(total))pairs); }
  void add(const Operand *a, vi first, vi second) {
    Operand joined[4 * WIDTH / sizeof(Operand)];
    store_pairs(joined, first, second);
    add(a, load_vector<numbers>(joined));
  }
  vf sum(float scale) const {
    if constexpr (std::is_same_v<Operand, int16_t>)
      return __builtin_convertvector(total, vf) * scale;
    else
      return total;
  }
};

#if defined(WINNOW_TILES)
/// Tile registers add up both inputs of pairs apart.
template <>
struct PairSum<bf16> {
  using Given = float;
  vf even{}, odd{};

  void add(const float *a, numbers pairs) {
    even += a[0] * (vf)((vu)pairs << 16);
    odd += a[1] * (vf)((vu)pairs & 0xffff0000u);
  }
  void add(const float *a, vi first, vi second) {
    even += a[0] * __builtin_convertvector(first, vf);
    odd += a[1] * __builtin_convertvector(second, vf);
  }
  vf sum(float) const { return even + odd; }
};
#endif

#if defined(WINNOW_TILES)
/// Numbers of a record times their scales, plus their minima, rounded to bf16.
void scale_record(const BlockForm &form, const float (*scale)[PANEL], const float (*minimum)[PANEL], bf16 *piece) {
  for (int v = 0; v < MAX_VECTORS; ++v)
    for (int pair = 0; pair < BLOCK / 2; ++pair) {
      const int h = form.halves && pair >= BLOCK / 4;
      const vf by = load(scale[h] + v * WIDTH), least = form.minimum ? load(minimum[h] + v * WIDTH) : vf{};
      bf16 *at = piece + (pair * PANEL + v * WIDTH) * 2;
      const vu both = load_vector<vu>(at);
      const auto upper = [&](vf number) { return _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)(number * by + least))); };
      store_vector(at, (vu)upper((vf)(both << 16)) | (vu)upper((vf)(both & 0xffff0000u)) << 16);
    }
}
#endif

/// Rows as they are multiplied, the scales of integers, and the sums that minima are multiplied with.
template <class Operand>
struct PreparedRows {
  const Operand *x;
  int64_t stride, in;
  std::unique_ptr<Operand[]> own;
  std::unique_ptr<float[]> scale, sum;  // [rows, in / 32], [rows, in / 16]
  std::unique_ptr<float[]> floats;      // [rows, in], of few rows that tile registers would sum

  PreparedRows(const LinearRows &rows, int64_t in, bool few) : stride(rows.x_stride), in(in) {
    constexpr bool INTEGERS = std::is_same_v<Operand, int16_t>;
    if (INTEGERS) own.reset(new Operand[rows.rows * in]), scale.reset(new float[rows.rows * (in / BLOCK)]), stride = in;
    if (few && PADS<Operand>) floats.reset(new float[rows.rows * in]);
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
        if (PADS<Operand> && floats) store(floats.get() + row * in + i + j * WIDTH, part[j]);
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

  /// A row as PairSum takes it.
  const typename PairSum<Operand>::Given *given(int64_t row) const {
    if constexpr (PADS<Operand>)
      return floats.get() + row * in;
    else
      return x + row * stride;
  }
};

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
    const int high_bits = form.high_bits;
    form.low_bits == 8   ? take<8, 0, false>()
    : form.low_bits == 2 ? (high_bits ? take<2, 1, false>() : take<2, 0, true>())
    : high_bits == 0     ? (form.minimum ? take<4, 0, true>() : take<4, 0, false>())
    : high_bits == 1     ? (form.minimum ? take<4, 1, true>() : take<4, 1, false>())
                         : take<4, 2, false>();
  }

 private:
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

/// Sums of some records, or halves of them, for some rows, and what scales them.
template <class Sum>
struct RecordSums {
  static constexpr int MOST = 2 * RECORDS_AT_ONCE;
  alignas(64) Sum sum[MOST][ROWS_AT_ONCE * PANEL];
  alignas(64) float scale[MOST][PANEL], minimum[MOST][PANEL];
  float row_scale[ROWS_AT_ONCE][MOST], row_sum[ROWS_AT_ONCE][MOST];

  /// Scales N of them from the first on and adds them to what came before, to [rows][PANEL].
  template <int N, bool MINIMUM>
  void add(int first, int64_t rows, bool begins, float *to) const {
    using Vector = typename std::conditional<std::is_same_v<Sum, float>, vf, vi>::type;
    for (int v = 0; v < MAX_VECTORS; ++v) {
      vf by[N], least[N];
#pragma GCC unroll 8
      for (int i = 0; i < N; ++i) {
        by[i] = load(scale[first + i] + v * WIDTH);
        if (MINIMUM) least[i] = load(minimum[first + i] + v * WIDTH);
      }
      for (int64_t r = 0; r < rows; ++r) {
        float *at = to + r * PANEL + v * WIDTH;
        vf total = begins ? vf{} : load(at);
#pragma GCC unroll 8
        for (int i = 0; i < N; ++i) {
          const Vector found = load_vector<Vector>(sum[first + i] + r * PANEL + v * WIDTH);
          if constexpr (std::is_same_v<Sum, float>)
            total += found * by[i];
          else
            total += __builtin_convertvector(found, vf) * row_scale[r][first + i] * by[i];
          if constexpr (MINIMUM) total += least[i] * row_sum[r][first + i];
        }
        store(at, total);
      }
    }
  }

  /// The same of any number of them.
  template <bool MINIMUM>
  void add_all(int count, int64_t rows, bool begins, float *to) const {
    int first = 0;
    for (; first + 4 <= count; first += 4) add<4, MINIMUM>(first, rows, begins && first == 0, to);
    for (; first < count; ++first) add<1, MINIMUM>(first, rows, begins && first == 0, to);
  }
};

/// As `multiply` of linear.cpp.
template <class T, int PANELS, class Finish>
void multiply(const PackedWeight &weight, const LinearRows &rows, int64_t apart, int threads, Finish finish) {
  using Operand = OperandFor<T>;
  using Sum = typename std::conditional<std::is_same_v<Operand, bf16>, float, int32_t>::type;
  constexpr int64_t PIECE = BLOCK * PANEL;
  if (rows.rows == 0) return;
  const int64_t in = weight.in_features, out = weight.out_features, panels = num_panels(out) / PANELS;
  const int64_t tasks = (rows.rows + TASK_ROWS - 1) / TASK_ROWS, most = (rows.rows + tasks - 1) / tasks;
  const bool rounds = PADS<Operand> && rows.rows > ROWS_AT_ONCE;
  const int64_t blocks = in / BLOCK, together = rounds ? ROUNDED_RECORDS : RECORDS_AT_ONCE;
  const T *given = reinterpret_cast<const T *>(rows.x);
  const bool shared = rows.rows > EACH_BY_ITSELF, few = rows.rows <= FEW;
  std::unique_ptr<PreparedRows<Operand>> of_all(shared ? new PreparedRows<Operand>(rows, in, few) : nullptr);
#pragma omp parallel num_threads(threads) if (rows.rows * in * out >= PARALLEL_FROM)
  {
    std::unique_ptr<PreparedRows<Operand>> own(shared ? nullptr : new PreparedRows<Operand>(rows, in, few));
    PreparedRows<Operand> &prepared = shared ? *of_all : *own;
    if (shared) {
#pragma omp for schedule(static)
      for (int64_t r = 0; r < rows.rows; ++r) prepared.prepare(given + r * rows.x_stride, r);
    } else {
      for (int64_t r = 0; r < rows.rows; ++r) prepared.prepare(given + r * rows.x_stride, r);
    }
    TileRegisters<Operand> registers(0);
    alignas(64) Operand pieces[ROUNDED_RECORDS * PIECE];
    RecordSums<Sum> part;
    const std::unique_ptr<float[]> sums(new float[PANELS * most * PANEL]);
    std::unique_ptr<Widening<Operand>> widening;
    int64_t kind = -1;
#pragma omp for schedule(static)
    for (int64_t task = 0; task < panels * tasks; ++task) {
      const int64_t panel = task / tasks, begin = task % tasks * most, count = std::min(most, rows.rows - begin);
      for (int64_t n = 0; n < PANELS; ++n) {
        const BlockPanel &where = weight.panels[panel + n * apart];
        const BlockKind block_kind = static_cast<BlockKind>(where.kind);
        const BlockForm &form = form_of(block_kind);
        const bool pads = PADS<Operand> && form.halves && !rounds && !few;
        const int64_t stride = pads ? 2 * PIECE : PIECE;
        if (where.kind != kind) {
          widening.reset(new Widening<Operand>(block_kind)), kind = where.kind;
          if (pads) std::fill(pieces, pieces + ROUNDED_RECORDS * PIECE, Operand{});
        }
        const char *from = weight.packed + where.at;
        if (few) {
          for (int64_t r = 0; r < count; r += MOST_FEW)
            widening->few[std::min(MOST_FEW, count - r) - 1](*widening, from, prepared, r, sums.get() + (n * most + r) * PANEL);
          continue;
        }
        for (int64_t first = 0; first < blocks; first += together) {
          const int64_t records = std::min(together, blocks - first);
          for (int64_t b = 0; b < records; ++b) {
            const char *record = from + PANEL * form.record_at(first + b);
            widening->widen(record, widening->low, widening->high, pieces + b * stride, pads ? PIECE : 0);
            const BlockScales scales(form, from, first + b);
            const int which = rounds ? 0 : static_cast<int>(b) * form.scales();
            for (int h = 0; h < form.scales(); ++h)
              scales.read(block_kind, h, part.scale[which + h], part.minimum[which + h]);
#if defined(WINNOW_TILES)
            if constexpr (PADS<Operand>)
              if (rounds) scale_record(form, part.scale, part.minimum, pieces + b * PIECE);
#endif
          }
          if constexpr (PADS<Operand>) {
            if (rounds) {
              product_streaming<MAX_VECTORS>(registers, static_cast<int>(count),
                                             prepared.x + begin * prepared.stride + first * BLOCK,
                                             static_cast<int>(prepared.stride), pieces, sums.get() + n * most * PANEL, PANEL,
                                             static_cast<int>(records * BLOCK), first > 0, nullptr, nullptr, [](int, int) {});
              continue;
            }
          }
          for (int64_t r = 0; r < count; r += ROWS_AT_ONCE) {
            const int64_t some = std::min(ROWS_AT_ONCE, count - r), row = begin + r;
            for (int64_t b = 0; b < records; ++b)
              for (int h = 0; h < form.scales(); ++h) {
                const int64_t skipped = pads ? 0 : h * HALF, deep = form.halves && !pads ? HALF : BLOCK;
                product_streaming<MAX_VECTORS>(registers, static_cast<int>(some),
                                               prepared.x + row * prepared.stride + (first + b) * BLOCK + skipped,
                                               static_cast<int>(prepared.stride), pieces + b * stride + h * (pads ? PIECE : PIECE / 2),
                                               part.sum[b * form.scales() + h], PANEL, static_cast<int>(deep), false, nullptr,
                                               nullptr, [](int, int) {});
              }
            const int halves = form.scales(), count_of_sums = static_cast<int>(records) * halves;
            for (int64_t r = 0; r < some; ++r)
              for (int i = 0; i < count_of_sums; ++i) {
                const int64_t at = (row + r) * blocks + first + i / halves;
                const float *of_row = prepared.sum.get() + 2 * at;
                if (prepared.scale) part.row_scale[r][i] = prepared.scale[at];
                if (form.minimum) part.row_sum[r][i] = halves == 2 ? of_row[i % 2] : of_row[0] + of_row[1];
              }
            float *to = sums.get() + (n * most + r) * PANEL;
            form.minimum ? part.template add_all<true>(count_of_sums, some, first == 0, to)
                         : part.template add_all<false>(count_of_sums, some, first == 0, to);
          }
        }
      }
      finish(sums.get(), sums.get() + most * PANEL, panel, begin, count);
    }
  }
}

void block_linear(const PackedWeight &weight, const LinearRows &rows, int threads) {
  with_type(weight.dtype, [&](auto type) {
    using T = decltype(type);
    multiply<T, 1>(weight, rows, 0, threads, row_writer<T>(weight, rows));
  });
}

bool block_gates(int64_t size) { return size % PANEL == 0; }

void block_gated_linear(const PackedWeight &weight, const LinearRows &rows, Activation activation, int threads) {
  with_type(weight.dtype, [&](auto type) {
    using T = decltype(type);
    const int64_t apart = weight.out_features / 2 / PANEL;
    multiply<T, 2>(weight, rows, apart, threads, gated_row_writer<T>(weight, rows, activation));
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
