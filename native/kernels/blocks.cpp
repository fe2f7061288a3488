// Linear layers of weights in blocks (blocks.h): codes become numbers of 16 bits on the way, products of 32 or 16 inputs sum up,
// and what scales a block scales its sum. So no number of the weight is rounded.
//
// Tile registers multiply activations in bf16 as they are; with AVX2 they become integers of 8 bits (block_bytes.h). All others
// become integers of 16 bits with a scale for each 32 inputs of a row: sums of their products are exact. Codes that are floats are
// multiplied with floats. Blocks add up in order, in float32: a row's result depends neither on rows beside it nor on threads.
#include "../blocks.h"
#include "block_bytes.h"
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
#if defined(WINNOW_BYTE_PRODUCTS)
    else if (std::is_same_v<decltype(type), bf16> && has_byte_products(weight))
      f(type, int8_t{});
#endif
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

}  // namespace

template <class Operand>
struct PanelProduct {
  explicit PanelProduct(const PreparedRows<Operand> &rows)
      : prepared_(rows), few_(rows.count <= FEW), rounds_(PADS<Operand> && rows.count > ROWS_AT_ONCE) {}

  /// Of `count` rows, to [count][PANEL].
  void multiply(BlockKind kind, const char *panel, int64_t begin, int64_t count, float *to) {
    const BlockForm &form = form_of(kind);
    const bool pads = PADS<Operand> && form.halves && !rounds_ && !few_;
    if (!widening_ || widening_->kind != kind) {
      widening_.reset(new Widening<Operand>(kind));
      if (pads) std::fill(pieces_, pieces_ + ROUNDED_RECORDS * PIECE, Operand{});
    }
    if (few_) {
      for (int64_t r = 0; r < count; r += MOST_FEW)
        widening_->few[std::min(MOST_FEW, count - r) - 1](*widening_, panel, prepared_, begin + r, to + r * PANEL);
      return;
    }
    const int64_t stride = pads ? 2 * PIECE : PIECE, blocks = prepared_.in / BLOCK;
    const int64_t together = rounds_ ? ROUNDED_RECORDS : RECORDS_AT_ONCE;
    for (int64_t first = 0; first < blocks; first += together) {
      const int64_t records = std::min(together, blocks - first);
      for (int64_t b = 0; b < records; ++b) {
        const char *record = panel + PANEL * form.record_at(first + b);
        widening_->widen(record, widening_->low, widening_->high, pieces_ + b * stride, pads ? PIECE : 0);
        const BlockScales scales(form, panel, first + b);
        const int which = rounds_ ? 0 : static_cast<int>(b) * form.scales();
        for (int h = 0; h < form.scales(); ++h) scales.read(kind, h, part_.scale[which + h], part_.minimum[which + h]);
#if defined(WINNOW_TILES)
        if constexpr (PADS<Operand>)
          if (rounds_) scale_record(form, part_.scale, part_.minimum, pieces_ + b * PIECE);
#endif
      }
      if constexpr (PADS<Operand>) {
        if (rounds_) {
          const bf16 *x = prepared_.x + begin * prepared_.stride + first * BLOCK;
          product_panel<MAX_VECTORS>(registers_, count, x, prepared_.stride, pieces_, to, records * BLOCK, first > 0);
          continue;
        }
      }
      for (int64_t r = 0; r < count; r += ROWS_AT_ONCE)
        multiply_records(form, first, records, begin + r, std::min(ROWS_AT_ONCE, count - r), pads, to + r * PANEL);
    }
  }

 private:
  static constexpr int64_t PIECE = BLOCK * PANEL;

  void multiply_records(const BlockForm &form, int64_t first, int64_t records, int64_t row, int64_t rows, bool pads, float *to) {
    const int halves = form.scales(), sums = static_cast<int>(records) * halves;
    const int64_t deep = form.halves && !pads ? HALF : BLOCK;
    for (int i = 0; i < sums; ++i) {
      const Operand *x = prepared_.x + row * prepared_.stride + (first + i / halves) * BLOCK + (pads ? 0 : i % halves * HALF);
      const Operand *piece = pieces_ + (pads ? i * PIECE : i * PIECE / halves);
      product_panel<MAX_VECTORS>(registers_, rows, x, prepared_.stride, piece, part_.sum[i], deep, false);
    }
    for (int64_t r = 0; r < rows; ++r)
      for (int i = 0; i < sums; ++i) {
        const int64_t at = (row + r) * (prepared_.in / BLOCK) + first + i / halves;
        const float *of_row = prepared_.sum.get() + 2 * at;
        if (prepared_.scale) part_.row_scale[r][i] = prepared_.scale[at];
        if (form.minimum) part_.row_sum[r][i] = halves == 2 ? of_row[i % 2] : of_row[0] + of_row[1];
      }
    form.minimum ? part_.template add_all<true>(sums, rows, first == 0, to) : part_.template add_all<false>(sums, rows, first == 0, to);
  }

  const PreparedRows<Operand> &prepared_;
  const bool few_, rounds_;
  TileRegisters<Operand> registers_{0};
  alignas(64) Operand pieces_[ROUNDED_RECORDS * PIECE];
  RecordSums<typename SumOf<Operand>::type> part_;
  std::unique_ptr<Widening<Operand>> widening_;
};

namespace {

/// As `multiply` of linear.cpp.
template <int PANELS, class T, class Operand, class Finish>
void multiply(T, Operand, const PackedWeight &weight, const LinearRows &rows, int64_t apart, int threads, Finish finish) {
  if (rows.rows == 0) return;
  const int64_t in = weight.in_features, out = weight.out_features, panels = num_panels(out) / PANELS;
  const int64_t tasks = (rows.rows + TASK_ROWS - 1) / TASK_ROWS, most = (rows.rows + tasks - 1) / tasks;
  const T *given = reinterpret_cast<const T *>(rows.x);
  const bool shared = rows.rows > EACH_BY_ITSELF;
  const auto prepared_rows = [&] { return new PreparedRows<Operand>(rows, in, std::is_same_v<T, Operand>); };
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
    PanelProduct<Operand> product{prepared};
    const std::unique_ptr<float[]> sums(new float[PANELS * most * PANEL]);
#pragma omp for schedule(static)
    for (int64_t task = 0; task < panels * tasks; ++task) {
      const int64_t panel = task / tasks, begin = task % tasks * most, count = std::min(most, rows.rows - begin);
      for (int64_t n = 0; n < PANELS; ++n) {
        const BlockPanel &where = weight.panels[panel + n * apart];
        product.multiply(static_cast<BlockKind>(where.kind), weight.packed + where.at, begin, count, sums.get() + n * most * PANEL);
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
}  // namespace winnow::WINNOW_ISA

// block_codes.cpp, which is compiled once for as wide vectors.
#ifndef WINNOW_CODES
#define WINNOW_CODES WINNOW_ISA
#endif
namespace winnow::WINNOW_CODES {
int64_t block_bytes(BlockKind, int64_t, int64_t);
void pack_blocks(const RawBlocks &, char *, int);
void dequantize_blocks(const RawBlocks &, DType, char *, int);
void unpack_block_rows(const PackedWeight &, const int64_t *, int64_t, char *, int);
}  // namespace winnow::WINNOW_CODES

namespace winnow::WINNOW_ISA {
using namespace WINNOW_CODES;
extern const BlockProducts block_products;
constexpr BlockProducts block_products{
    {nullptr, nullptr, unpack_block_rows, block_linear, block_gates, block_gated_linear},
    block_bytes, pack_blocks, dequantize_blocks,
};

}  // namespace winnow::WINNOW_ISA
