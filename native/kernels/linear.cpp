// Linear layers: rows times a weight that is packed once and then read from end to end.
//
// A packed weight is cut into panels of PANEL output features, one after the other; within a panel features are adjacent for
// each input, or each pair of inputs: the B operand of product.h. The last panel is padded with zeros.
//
// A decode step has few rows and is bound by memory: the weight is one stream. A prefill has many and is bound by arithmetic.
// With AVX-512 a piece of a panel is then kept in L2 and multiplied with all rows, while the next panel's piece is prefetched.
// Narrower panels would re-read the rows too often: without AVX-512 a block of rows is kept in L2 and multiplied with all
// panels. In tile registers (AMX) a piece is short, so that rows which are multiplied together stay in L1. Every output is
// summed by one thread in one order: a row's result depends neither on the batch nor on the number of threads.
#include <algorithm>
#include <memory>
#include <type_traits>

#include "../layers.h"
#include "panel.h"
#include "tile_product.h"

namespace winnow::WINNOW_ISA {

namespace {

/// Whether L2 keeps a block of rows, not a piece of a panel: always where rows have to be converted to floats.
template <class T>
constexpr bool rows_stay() {
#if defined(__AVX512F__)
  return !std::is_same_v<typename OperandOf<T>::type, T>;
#else
  return true;
#endif
}
/// Row-block size that fits L2, and the minimum below which re-reading panels dominates.
constexpr int64_t STAYING = 352 * 1024 / sizeof(float), LEAST_STAYING = 4 * MAX_ROWS;
/// Bytes of a piece of a panel in L1, multiplied with rows in L2.
constexpr int64_t PASSING_PIECE = 24 * 1024;
/// Inputs of a piece of a panel in L2.
constexpr int64_t INPUT_BLOCK = 2048;
/// The same where a task has all rows. With few rows a piece fits L1, and the next one is prefetched into L2. More rows leave
/// time to prefetch, and longer pieces store the sums less often.
constexpr int64_t STREAMED_BLOCK = 192, STREAMED_BLOCK_OF_MANY = 768;
/// Most rows that count as few.
constexpr int64_t STREAMED_FEW = 4 * MAX_ROWS;
/// Inputs of a piece in L2 out of tile registers: two registers of rows stay in L1 while they are multiplied with it.
constexpr int64_t TILED_BLOCK = 384;
/// Inputs of a piece that is converted to floats once for all rows of a task; it fits L1.
constexpr int64_t WIDENED_BLOCK = 16384 / (4 * PANEL);
/// Calls f with a number of a weight's format. Tile registers multiply bf16 alone; see dispatch.cpp.
template <class F>
void with_weight([[maybe_unused]] DType dtype, F f) {
#if defined(WINNOW_TILES)
  f(bf16{});
#else
  with_type(dtype, f);
#endif
}

/// The index of a feature of a panel among those of one input, or of a pair of inputs.
template <class T>
constexpr int64_t place_of(int64_t feature) {
  if (!is_joined<typename OperandOf<T>::type, T>()) return feature;
  const int64_t vector = feature / WIDTH;
  return (vector / 2 * WIDTH + feature % WIDTH) * 2 + vector % 2;
}

template <class T>
void pack_weight(const PackedWeight &weight, const T *dense, int threads) {
  constexpr int PAIR = pair_size<typename OperandOf<T>::type>();
  const int64_t in = weight.in_features, out = weight.out_features;
  T *packed = reinterpret_cast<T *>(weight.packed);
#pragma omp parallel for num_threads(threads)
  for (int64_t panel = 0; panel < num_panels(out); ++panel)
    for (int64_t i = 0; i < in; ++i)
      for (int64_t j = 0; j < PANEL; ++j) {
        const int64_t feature = panel * PANEL + j;
        T *to = packed + panel * PANEL * in + (i / PAIR * PANEL + place_of<T>(j)) * PAIR + i % PAIR;
        *to = feature < out ? dense[feature * in + i] : T{};
      }
}

/// Numbers as floats.
template <class T>
void to_floats(const T *from, int64_t n, float *to) {
  int64_t i = 0;
  for (; i + WIDTH <= n; i += WIDTH) store(to + i, load(from + i));
  for (; i < n; ++i) to[i] = to_float(from[i]);
}

/// Rows of a task, out of `rows`. Row blocks in L2 are balanced across threads.
template <class T>
int64_t rows_of_task(int64_t rows, int64_t in) {
  if (!rows_stay<T>()) return std::min(ROW_BLOCK, rows);
  const int64_t most = std::clamp(STAYING / in / MAX_ROWS * MAX_ROWS, LEAST_STAYING, ROW_BLOCK);
  const int64_t tasks = (rows + most - 1) / most;
  return (rows + tasks - 1) / tasks;
}

/// Inputs that all rows of a task are multiplied with before the next ones. streams: every piece is read once.
template <class T>
int64_t inputs_of_piece(bool widens_piece, bool streams, int64_t rows) {
  if (widens_piece) return WIDENED_BLOCK;
  if (rows_stay<T>()) return PASSING_PIECE / (PANEL * sizeof(T));
#if defined(WINNOW_TILES)
  if (rows > STREAMED_FEW) return TILED_BLOCK;
#endif
  if (!streams) return INPUT_BLOCK;
  return rows <= STREAMED_FEW ? STREAMED_BLOCK : STREAMED_BLOCK_OF_MANY;
}

/// Sums of every task: some rows, and the panels p, p + apart, ... of the weight, PANELS of them.
///
/// finish: what `row_writer` or `gated_row_writer` returned.
template <class T, int PANELS, class Finish>
void multiply(const PackedWeight &weight, const LinearRows &rows, int64_t apart, int threads, Finish finish) {
  using Operand = typename OperandOf<T>::type;
  constexpr bool WIDENS = !std::is_same_v<Operand, T>, WIDENS_PIECE = WIDENS && !is_joined<Operand, T>();
  constexpr int64_t SUMS = ROW_BLOCK * PANEL;
  if (rows.rows == 0) return;
  const int64_t in = weight.in_features, out = weight.out_features, most = rows_of_task<T>(rows.rows, in);
  const int64_t blocks = (rows.rows + most - 1) / most, panels = num_panels(out) / PANELS;
  const T *packed = reinterpret_cast<const T *>(weight.packed), *given = reinterpret_cast<const T *>(rows.x);
  const bool streams = rows_stay<T>() || blocks == 1;
  const int64_t block = inputs_of_piece<T>(WIDENS_PIECE, streams, rows.rows);
#pragma omp parallel num_threads(threads) if (rows.rows * in * out >= PARALLEL_FROM)
  {
    const std::unique_ptr<float[]> widened(WIDENS ? new float[most * in] : nullptr);  // rows of a task, for all panels
    int64_t widened_from = -1;
    alignas(64) float sums[PANELS * SUMS];
    alignas(64) float piece[WIDENS_PIECE ? WIDENED_BLOCK * PANEL : 1];
    TileRegisters<Operand> registers(0);
#pragma omp for schedule(static)
    for (int64_t task = 0; task < panels * blocks; ++task) {
      const int64_t panel = rows_stay<T>() ? task % panels : task / blocks;
      const int64_t which = rows_stay<T>() ? task / panels : task % blocks, first = which * most;
      const int64_t count = std::min(most, rows.rows - first);
      const Operand *x;
      int64_t x_stride;
      if constexpr (WIDENS) {
        x = widened.get(), x_stride = in;
        if (first != widened_from)
          for (int64_t r = 0; r < count; ++r) to_floats(given + (first + r) * rows.x_stride, in, widened.get() + r * in);
        widened_from = first;
      } else {
        x = given + first * rows.x_stride, x_stride = rows.x_stride;
      }
      for (int64_t n = 0; n < PANELS; ++n) {
        const T *from = packed + (panel + n * apart) * PANEL * in;
        const T *next_panel = packed + (n + 1 < PANELS ? panel + (n + 1) * apart : panel + 1) * PANEL * in;
        for (int64_t i = 0; i < in; i += block) {
          const int64_t inputs = std::min(block, in - i);
          const T *b = from + i * PANEL;
          const char *ahead = reinterpret_cast<const char *>(i + inputs < in ? b + inputs * PANEL : next_panel);
          const char *end = ahead + inputs * PANEL * sizeof(T);
          if (!streams) {  // the same piece of this task's next panel: each block of rows prefetches its share
            const char *piece = reinterpret_cast<const char *>(from + PANEL * in + i * PANEL);
            const int64_t lines = (end - ahead) / 64;
            ahead = piece + lines * which / blocks * 64;
            end = piece + lines * (which + 1) / blocks * 64;
          }
          const bool last = n + 1 == PANELS && i + inputs == in;
          const auto multiply_by = [&](const auto *operand) {
            product_streaming<MAX_VECTORS>(registers, count, x + i, x_stride, operand, sums + n * SUMS, PANEL, inputs, i > 0,
                                           ahead, end, [&](int row, int some) {
                                             if (last) finish(sums + row * PANEL, sums + SUMS + row * PANEL, panel, first + row, some);
                                           });
          };
          if constexpr (WIDENS_PIECE) {
            if (count > MAX_ROWS) {
              to_floats(b, inputs * PANEL, piece);
              multiply_by(piece);
              continue;
            }
          }
          multiply_by(b);
        }
      }
    }
  }
}

}  // namespace

int64_t packed_size(int64_t in_features, int64_t out_features) { return num_panels(out_features) * PANEL * in_features; }

void pack(const PackedWeight &weight, const char *dense, int threads) {
  with_weight(weight.dtype, [&](auto type) {
    pack_weight(weight, reinterpret_cast<const decltype(type) *>(dense), threads);
  });
}

void unpack_rows(const PackedWeight &weight, const int64_t *features, int64_t count, char *out, int threads) {
  const int64_t in = weight.in_features;
  with_weight(weight.dtype, [&](auto type) {
    using T = decltype(type);
    constexpr int PAIR = pair_size<typename OperandOf<T>::type>();
    const T *packed = reinterpret_cast<const T *>(weight.packed);
#pragma omp parallel for num_threads(threads) if (count * in >= PARALLEL_LINES)
    for (int64_t row = 0; row < count; ++row) {
      const auto begin = [&](int64_t feature) {
        return packed + feature / PANEL * PANEL * in + place_of<T>(feature % PANEL) * PAIR;
      };
      const T *from = begin(features[row]), *next = begin(features[std::min(row + 1, count - 1)]);
      T *to = reinterpret_cast<T *>(out) + row * in;
      for (int64_t i = 0; i < in; i += PAIR) {
        __builtin_prefetch(next + i * PANEL);  // each of them is a line of its own
        std::copy(from + i * PANEL, from + i * PANEL + PAIR, to + i);
      }
    }
  });
}

void linear(const PackedWeight &weight, const LinearRows &rows, int threads) {
  with_weight(weight.dtype, [&](auto type) {
    using T = decltype(type);
    multiply<T, 1>(weight, rows, 0, threads, row_writer<T>(weight, rows));
  });
}

bool gates(int64_t size) { return size % PANEL == 0; }

void gated_linear(const PackedWeight &weight, const LinearRows &rows, Activation activation, int threads) {
  with_weight(weight.dtype, [&](auto type) {
    using T = decltype(type);
    const int64_t apart = weight.out_features / 2 / PANEL;
    multiply<T, 2>(weight, rows, apart, threads, gated_row_writer<T>(weight, rows, activation));
  });
}

}  // namespace winnow::WINNOW_ISA
