// Panels of a packed weight, and what becomes of the sums of one.
#pragma once

#include <algorithm>

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

}  // namespace winnow::WINNOW_ISA
