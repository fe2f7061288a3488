// Linear layers: rows times a weight that is packed once and then read from end to end.
//
// A packed weight is cut into panels of PANEL output features, one after the other; within a panel the features lie side
// by side for each input, or for each pair of inputs, as product.h wants its B. The last panel is filled up with zeros.
//
// A decode step has few rows and waits for memory: the weight is one stream. A prefill has many and waits for arithmetic:
// a panel's piece stays in the second-level cache while all rows pass by. Every output is summed by one thread and in one
// order, whatever the other rows are: a row's result depends neither on the batch nor on the number of threads.
#include <algorithm>
#include <type_traits>
#include <vector>

#include "../layers.h"
#include "product.h"

namespace winnow::WINNOW_ISA {

namespace {

constexpr int PANEL = MAX_VECTORS * WIDTH;
/// Rows and inputs of a task: its sums, rows and piece of the panel fit into the caches nearest to a core.
constexpr int64_t ROW_BLOCK = 16 * MAX_ROWS, INPUT_BLOCK = 2048;
/// Inputs of a task that has all rows there are: its piece of the panel stays in the first-level cache while they pass by,
/// and the next piece is on its way to the second.
constexpr int64_t STREAMED_BLOCK = 192;
/// Products below which waking other threads costs more than they save.
constexpr int64_t PARALLEL_FROM = 1 << 16;

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

/// The rows of a task as their products take them: as they are, or as floats.
template <class Operand, class T>
class TaskRows {
 public:
  TaskRows(const T *x, int64_t stride) : x_(x), stride_(stride) {}

  /// Inputs from `first` on of `rows` rows, `stride()` apart.
  const Operand *inputs(int64_t row, int64_t rows, int64_t first, int64_t count) {
    if constexpr (std::is_same_v<Operand, T>) {
      return x_ + row * stride_ + first;
    } else {
      floats_.resize(ROW_BLOCK * INPUT_BLOCK);
      for (int64_t r = 0; r < rows; ++r) {
        const T *from = x_ + (row + r) * stride_ + first;
        float *to = floats_.data() + r * INPUT_BLOCK;
        int64_t i = 0;
        for (; i + WIDTH <= count; i += WIDTH) store(to + i, load(from + i));
        for (; i < count; ++i) to[i] = to_float(from[i]);
      }
      return floats_.data();
    }
  }

  int64_t stride() const {
    if constexpr (std::is_same_v<Operand, T>)
      return stride_;
    else
      return INPUT_BLOCK;
  }

 private:
  const T *x_;
  int64_t stride_;
  std::vector<float> floats_;
};

/// Sums of one row of a panel, with the bias and what is to be added, to where they belong.
template <class T>
void finish_row(const float *sums, const T *bias, const T *add, T *out, int64_t features) {
  for (int64_t j = 0; j < features; j += WIDTH) {
    const int n = static_cast<int>(std::min<int64_t>(WIDTH, features - j));
    vf sum = load(sums + j);
    if (bias) sum += get(bias + j, n);
    if (add) {
      T rounded[WIDTH];  // a product is rounded before something is added, as everywhere else
      store(rounded, sum);
      sum = load(rounded) + get(add + j, n);
    }
    put(out + j, sum, n);
  }
}

template <class T>
void multiply(const PackedWeight &weight, const LinearRows &rows, int threads) {
  using Operand = typename OperandOf<T>::type;
  const int64_t in = weight.in_features, out = weight.out_features;
  const int64_t blocks = (rows.rows + ROW_BLOCK - 1) / ROW_BLOCK, tasks = num_panels(out) * blocks;
  const T *packed = reinterpret_cast<const T *>(weight.packed), *bias = reinterpret_cast<const T *>(rows.bias);
  const T *add = reinterpret_cast<const T *>(rows.add);
  T *to = reinterpret_cast<T *>(rows.out);
  const bool streams = blocks == 1;
  const int64_t block = streams ? STREAMED_BLOCK : INPUT_BLOCK;
#pragma omp parallel num_threads(threads) if (rows.rows * in * out >= PARALLEL_FROM)
  {
    TaskRows<Operand, T> task_rows(reinterpret_cast<const T *>(rows.x), rows.x_stride);
    alignas(64) float sums[ROW_BLOCK * PANEL];
#pragma omp for schedule(static)
    for (int64_t task = 0; task < tasks; ++task) {
      const int64_t panel = task / blocks, first = task % blocks * ROW_BLOCK;
      const int64_t count = std::min(ROW_BLOCK, rows.rows - first);
      for (int64_t i = 0; i < in; i += block) {
        const int64_t inputs = std::min(block, in - i);
        const Operand *x = task_rows.inputs(first, count, i, inputs);
        const T *b = packed + panel * PANEL * in + i * PANEL;
        if (streams)
          product_streaming<MAX_VECTORS>(count, x, task_rows.stride(), b, sums, PANEL, inputs, i > 0);
        else
          product_columns<MAX_VECTORS>(count, x, task_rows.stride(), b, PANEL, sums, PANEL, inputs, i > 0);
      }
      const int64_t feature = panel * PANEL, features = std::min<int64_t>(PANEL, out - feature);
      for (int64_t r = 0; r < count; ++r) {
        const int64_t at = (first + r) * out + feature;
        finish_row(sums + r * PANEL, bias ? bias + feature : nullptr, add ? add + at : nullptr, to + at, features);
      }
    }
  }
}

}  // namespace

int64_t packed_size(int64_t in_features, int64_t out_features) { return num_panels(out_features) * PANEL * in_features; }

void pack(const PackedWeight &weight, const char *dense, int threads) {
  with_type(weight.dtype, [&](auto type) {
    pack_weight(weight, reinterpret_cast<const decltype(type) *>(dense), threads);
  });
}

void linear(const PackedWeight &weight, const LinearRows &rows, int threads) {
  with_type(weight.dtype, [&](auto type) { multiply<decltype(type)>(weight, rows, threads); });
}

}  // namespace winnow::WINNOW_ISA
