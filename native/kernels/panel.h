// Panels of a packed weight, and what becomes of the sums of one.
#pragma once

#include <algorithm>

#include "../layers.h"
#include "activation.h"
#include "product.h"

namespace winnow::WINNOW_ISA {

/// Output features of a panel.
constexpr int PANEL = MAX_VECTORS * WIDTH;
/// Most rows of a task: their sums fit L1 beside a piece of a panel.
constexpr int64_t ROW_BLOCK = 16 * MAX_ROWS;
/// Multiplications below which waking other threads costs more than they save.
constexpr int64_t PARALLEL_FROM = 1 << 16;
/// The same for scattered inputs, a cache line each.
constexpr int64_t PARALLEL_LINES = 1 << 12;

inline int64_t num_panels(int64_t features) { return (features + PANEL - 1) / PANEL; }

/// Sums of one row of a panel, with the bias and what is to be added, to where they belong.
template <class T>
inline void finish_row(const float *sums, const T *bias, const T *add, T *out, int64_t features) {
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
inline void finish_gated_row(const float *gate, const float *up, const T *gate_bias, const T *up_bias, Activation activation,
                      T *out) {
  for (int64_t j = 0; j < PANEL; j += WIDTH) {
    vf g = load(gate + j), u = load(up + j);
    if (gate_bias) g += load(gate_bias + j), u += load(up_bias + j);
    store(out + j, activate(rounded<T>(g), activation) * rounded<T>(u));
  }
}

/// Returns what writes sums [rows][PANEL] of a panel: finish(sums, unused, panel, first row, rows).
template <class T>
auto row_writer(const PackedWeight &weight, const LinearRows &rows) {
  const T *bias = reinterpret_cast<const T *>(rows.bias), *add = reinterpret_cast<const T *>(rows.add);
  T *out = reinterpret_cast<T *>(rows.out);
  return [=, width = weight.out_features](const float *sums, const float *, int64_t panel, int64_t first, int64_t count) {
    const int64_t feature = panel * PANEL, features = std::min<int64_t>(PANEL, width - feature);
    for (int64_t r = 0; r < count; ++r) {
      const int64_t at = (first + r) * width + feature;
      finish_row(sums + r * PANEL, bias ? bias + feature : nullptr, add ? add + at : nullptr, out + at, features);
    }
  };
}

/// The same for a panel of gates and the panel that they gate: finish(gates, ups, panel, first row, rows).
template <class T>
auto gated_row_writer(const PackedWeight &weight, const LinearRows &rows, Activation activation) {
  const T *bias = reinterpret_cast<const T *>(rows.bias);
  T *out = reinterpret_cast<T *>(rows.out);
  return [=, size = weight.out_features / 2](const float *gates, const float *ups, int64_t panel, int64_t first,
                                             int64_t count) {
    const int64_t feature = panel * PANEL;
    const T *gate_bias = bias ? bias + feature : nullptr, *up_bias = bias ? bias + size + feature : nullptr;
    for (int64_t r = 0; r < count; ++r)
      finish_gated_row(gates + r * PANEL, ups + r * PANEL, gate_bias, up_bias, activation,
                       out + (first + r) * size + feature);
  };
}

}  // namespace winnow::WINNOW_ISA
