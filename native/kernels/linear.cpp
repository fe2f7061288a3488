// Linear layers: rows times a weight that is packed once and then read from end to end.
//
// A packed weight is cut into panels of PANEL output features, one after the other; within a panel the features lie side
// by side for each input, or for each pair of inputs, as product.h wants its B. The last panel is filled up with zeros.
//
// A decode step has few rows and waits for memory: the weight is one stream. A prefill has many and waits for arithmetic:
// a panel's piece stays in the second-level cache while all rows pass by, and the next panel's is on its way there. Every
// output is summed by one thread and in one order, whatever the other rows are: a row's result depends neither on the batch
// nor on the number of threads.
#include <algorithm>
#include <memory>
#include <type_traits>

#include "../layers.h"
#include "activation.h"
#include "product.h"

namespace winnow::WINNOW_ISA {

namespace {

constexpr int PANEL = MAX_VECTORS * WIDTH;
/// Rows and inputs of a task: its sums, rows and piece of the panel fit into the caches nearest to a core.
constexpr int64_t ROW_BLOCK = 16 * MAX_ROWS, INPUT_BLOCK = 2048;
/// Inputs of a task that has all rows there are. Few rows: its piece of the panel stays in the first-level cache while they
/// pass by, and the next piece is on its way to the second. More rows give the second-level cache time to follow, and the
/// sums of a longer piece are stored less often.
constexpr int64_t STREAMED_BLOCK = 192, STREAMED_BLOCK_OF_MANY = 768;
/// Rows that are still few.
constexpr int64_t STREAMED_FEW = 4 * MAX_ROWS;
/// Inputs of a piece that becomes floats on the way, once for all rows of a task; it stays in the first-level cache.
constexpr int64_t WIDENED_BLOCK = 16384 / (4 * PANEL);
/// Rows that are widened together: a prompt of any length needs little memory.
constexpr int64_t WIDENED_ROWS = 6 * ROW_BLOCK;
/// Products below which waking other threads costs more than they save.
constexpr int64_t PARALLEL_FROM = 1 << 16;
/// The same of inputs that lie scattered, a line of memory each.
constexpr int64_t PARALLEL_LINES = 1 << 12;

int64_t num_panels(int64_t features) { return (features + PANEL - 1) / PANEL; }

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
        T *to = packed + panel * PANEL * in + (i / PAIR * PANEL + j) * PAIR + i % PAIR;
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

/// A number as it is after it has been stored.
template <class T>
vf rounded(vf x) {
  T stored[WIDTH];
  store(stored, x);
  return load(stored);
}

/// Sums of one row of a panel, with the bias and what is to be added, to where they belong.
template <class T>
void finish_row(const float *sums, const T *bias, const T *add, T *out, int64_t features) {
  for (int64_t j = 0; j < features; j += WIDTH) {
    const int n = static_cast<int>(std::min<int64_t>(WIDTH, features - j));
    vf sum = load(sums + j);
    if (bias) sum += get(bias + j, n);
    if (add) sum = rounded<T>(sum) + get(add + j, n);  // rounded before something is added, as everywhere else
    put(out + j, sum, n);
  }
}

/// Sums of one row of a panel of gates, and of the same panel of what they let pass, to where the product of both belongs.
template <class T>
void finish_gated_row(const float *gate, const float *up, const T *gate_bias, const T *up_bias, Activation activation,
                      T *out) {
  for (int64_t j = 0; j < PANEL; j += WIDTH) {
    vf g = load(gate + j), u = load(up + j);
    if (gate_bias) g += load(gate_bias + j), u += load(up_bias + j);
    store(out + j, activate(rounded<T>(g), activation) * rounded<T>(u));
  }
}

/// Sums of every task: ROW_BLOCK rows at most, and the panels p, p + apart, ... of the weight, PANELS of them.
///
/// finish: called with the sums [PANELS][ROW_BLOCK][PANEL] of some rows, p, and the first and the number of the rows.
template <class T, int PANELS, class Finish>
void multiply(const PackedWeight &weight, const LinearRows &rows, int64_t apart, int threads, Finish finish) {
  using Operand = typename OperandOf<T>::type;
  constexpr bool WIDENS = !std::is_same_v<Operand, T>;
  constexpr int64_t SUMS = ROW_BLOCK * PANEL;
  const int64_t in = weight.in_features, out = weight.out_features;
  const int64_t blocks = (rows.rows + ROW_BLOCK - 1) / ROW_BLOCK, tasks = num_panels(out) / PANELS * blocks;
  const T *packed = reinterpret_cast<const T *>(weight.packed), *given = reinterpret_cast<const T *>(rows.x);
  const bool streams = blocks == 1;
  const int64_t streamed = rows.rows <= STREAMED_FEW ? STREAMED_BLOCK : STREAMED_BLOCK_OF_MANY;
  const int64_t block = WIDENS ? WIDENED_BLOCK : streams ? streamed : INPUT_BLOCK;
  const std::unique_ptr<float[]> widened(WIDENS ? new float[rows.rows * in] : nullptr);  // all rows, for all panels
#pragma omp parallel num_threads(threads) if (rows.rows * in * out >= PARALLEL_FROM)
  {
    const Operand *x;
    int64_t x_stride;
    if constexpr (WIDENS) {
      x = widened.get(), x_stride = in;
#pragma omp for schedule(static)
      for (int64_t r = 0; r < rows.rows; ++r) to_floats(given + r * rows.x_stride, in, widened.get() + r * in);
    } else {
      x = given, x_stride = rows.x_stride;
    }
    alignas(64) float sums[PANELS * SUMS];
    alignas(64) float piece[WIDENS ? WIDENED_BLOCK * PANEL : 1];
#pragma omp for schedule(static)
    for (int64_t task = 0; task < tasks; ++task) {
      const int64_t panel = task / blocks, first = task % blocks * ROW_BLOCK;
      const int64_t count = std::min(ROW_BLOCK, rows.rows - first);
      for (int64_t n = 0; n < PANELS; ++n) {
        const T *from = packed + (panel + n * apart) * PANEL * in;
        const T *next_panel = packed + (n + 1 < PANELS ? panel + (n + 1) * apart : panel + 1) * PANEL * in;
        for (int64_t i = 0; i < in; i += block) {
          const int64_t inputs = std::min(block, in - i);
          const T *b = from + i * PANEL;
          const char *ahead = reinterpret_cast<const char *>(i + inputs < in ? b + inputs * PANEL : next_panel);
          const char *end = ahead + inputs * PANEL * sizeof(T);
          if (!streams) {  // the same piece of this task's next panel: each block of rows asks for its share
            const char *piece = reinterpret_cast<const char *>(from + PANEL * in + i * PANEL);
            const int64_t lines = (end - ahead) / 64, share = task % blocks;
            ahead = piece + lines * share / blocks * 64;
            end = piece + lines * (share + 1) / blocks * 64;
          }
          const bool last = n + 1 == PANELS && i + inputs == in;
          const auto multiply_by = [&](const auto *operand) {
            product_streaming<MAX_VECTORS>(count, x + first * x_stride + i, x_stride, operand, sums + n * SUMS, PANEL,
                                           inputs, i > 0, ahead, end, [&](int row, int some) {
                                             if (last) finish(sums + row * PANEL, panel, first + row, some);
                                           });
          };
          if constexpr (WIDENS) {
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

/// Calls f with some of the rows after others, where all of them would need too much memory.
template <class T, class F>
void for_rows(const LinearRows &rows, int64_t out_features, F f) {
  const bool widens = !std::is_same_v<typename OperandOf<T>::type, T>;
  const int64_t most = widens ? WIDENED_ROWS : rows.rows;
  for (int64_t first = 0; first < rows.rows; first += most) {
    LinearRows part = rows;
    part.rows = std::min(most, rows.rows - first);
    part.x += first * rows.x_stride * sizeof(T);
    part.out += first * out_features * sizeof(T);
    if (rows.add) part.add += first * out_features * sizeof(T);
    f(part);
  }
}

}  // namespace

int64_t packed_size(int64_t in_features, int64_t out_features) { return num_panels(out_features) * PANEL * in_features; }

void pack(const PackedWeight &weight, const char *dense, int threads) {
  with_type(weight.dtype, [&](auto type) {
    pack_weight(weight, reinterpret_cast<const decltype(type) *>(dense), threads);
  });
}

void unpack_rows(const PackedWeight &weight, const int64_t *features, int64_t count, char *out, int threads) {
  const int64_t in = weight.in_features;
  with_type(weight.dtype, [&](auto type) {
    using T = decltype(type);
    constexpr int PAIR = pair_size<typename OperandOf<T>::type>();
    const T *packed = reinterpret_cast<const T *>(weight.packed);
#pragma omp parallel for num_threads(threads) if (count * in >= PARALLEL_LINES)
    for (int64_t row = 0; row < count; ++row) {
      const auto begin = [&](int64_t feature) { return packed + feature / PANEL * PANEL * in + feature % PANEL * PAIR; };
      const T *from = begin(features[row]), *next = begin(features[std::min(row + 1, count - 1)]);
      T *to = reinterpret_cast<T *>(out) + row * in;
      for (int64_t i = 0; i < in; i += PAIR) {
        __builtin_prefetch(next + i * PANEL);  // each of them is a line of its own
        std::copy(from + i * PANEL, from + i * PANEL + PAIR, to + i);
      }
    }
  });
}

void linear(const PackedWeight &weight, const LinearRows &all, int threads) {
  with_type(weight.dtype, [&](auto type) {
    using T = decltype(type);
    const int64_t width = weight.out_features;
    for_rows<T>(all, width, [&](const LinearRows &rows) {
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
  });
}

bool gates(int64_t size) { return size % PANEL == 0; }

void gated_linear(const PackedWeight &weight, const LinearRows &all, Activation activation, int threads) {
  with_type(weight.dtype, [&](auto type) {
    using T = decltype(type);
    const int64_t size = weight.out_features / 2;
    for_rows<T>(all, size, [&](const LinearRows &rows) {
      const T *bias = reinterpret_cast<const T *>(rows.bias);
      T *out = reinterpret_cast<T *>(rows.out);
      multiply<T, 2>(weight, rows, size / PANEL, threads,
                     [=](const float *sums, int64_t panel, int64_t first, int64_t count) {
                       const int64_t feature = panel * PANEL;
                       const T *gate_bias = bias ? bias + feature : nullptr, *up_bias = bias ? bias + size + feature : nullptr;
                       for (int64_t r = 0; r < count; ++r)
                         finish_gated_row(sums + r * PANEL, sums + (ROW_BLOCK + r) * PANEL, gate_bias, up_bias,
                                          activation, out + (first + r) * size + feature);
                     });
    });
  });
}

}  // namespace winnow::WINNOW_ISA
