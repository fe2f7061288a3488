// Linear layers of weights in blocks (blocks.h): codes become numbers of 16 bits on the way, products of 32 or 16 inputs sum up,
// and what scales a block scales its sum. So no number of the weight is rounded.
//
// Where the processor multiplies bf16, activations of that type are multiplied as they are: codes are bf16 too, without rounding.
// All others become integers of 16 bits, with a scale for each 32 inputs of a row; sums of their products are exact. Codes that are
// floats are multiplied with floats there. Blocks add up in their order, in float32: a row's result depends neither on the rows
// beside it nor on the number of threads.
#include "../blocks.h"
#include "block_few.h"
#include "tile_product.h"

namespace winnow::WINNOW_ISA {

namespace {

/// Rows and records whose sums stay in L1 until they are scaled, and most rows of a task, whose results stay in L2.
constexpr int64_t ROWS_AT_ONCE = 32, RECORDS_AT_ONCE = 4, TASK_ROWS = 384;
/// Records that are rounded before they are multiplied with many rows.
constexpr int64_t ROUNDED_RECORDS = 12;
/// Most rows of which every thread prepares all, rather than wait for the others.
constexpr int64_t EACH_BY_ITSELF = 2;

/// Calls f with what codes are multiplied with, and their rows' type.
template <class F>
void with_operand(const PackedWeight &weight, F f) {
  with_type(weight.dtype, [&](auto type) {
    using Operand = typename OperandOf<decltype(type)>::type;
    if constexpr (std::is_same_v<Operand, bf16>)
      f(type, bf16{});
    else if (form_of(static_cast<BlockKind>(weight.panels->kind)).floats)
      f(type, float{});
    else
      f(type, int16_t{});
  });
}

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
template <int PANELS, class T, class Operand, class Finish>
void multiply(T, Operand, const PackedWeight &weight, const LinearRows &rows, int64_t apart, int threads, Finish finish) {
  using Sum = typename SumOf<Operand>::type;
  constexpr int64_t PIECE = BLOCK * PANEL;
  if (rows.rows == 0) return;
  const int64_t in = weight.in_features, out = weight.out_features, panels = num_panels(out) / PANELS;
  const int64_t tasks = (rows.rows + TASK_ROWS - 1) / TASK_ROWS, most = (rows.rows + tasks - 1) / tasks;
  const bool rounds = PADS<Operand> && rows.rows > ROWS_AT_ONCE;
  const int64_t blocks = in / BLOCK, together = rounds ? ROUNDED_RECORDS : RECORDS_AT_ONCE;
  const T *given = reinterpret_cast<const T *>(rows.x);
  const bool shared = rows.rows > EACH_BY_ITSELF, few = rows.rows <= FEW;
  const auto prepared_rows = [&] { return new PreparedRows<Operand>(rows, in, few, std::is_same_v<T, Operand>); };
  std::unique_ptr<PreparedRows<Operand>> of_all(shared ? prepared_rows() : nullptr);
#pragma omp parallel num_threads(threads) if (rows.rows * in * out >= PARALLEL_FROM)
  {
    std::unique_ptr<PreparedRows<Operand>> own(shared ? nullptr : prepared_rows());
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
  with_operand(weight, [&](auto type, auto operand) {
    multiply<1>(type, operand, weight, rows, 0, threads, row_writer<decltype(type)>(weight, rows));
  });
}

bool block_gates(int64_t size) { return size % PANEL == 0; }

void block_gated_linear(const PackedWeight &weight, const LinearRows &rows, Activation activation, int threads) {
  with_operand(weight, [&](auto type, auto operand) {
    const int64_t apart = weight.out_features / 2 / PANEL;
    multiply<2>(type, operand, weight, rows, apart, threads, gated_row_writer<decltype(type)>(weight, rows, activation));
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
