// The Walsh-Hadamard transform of a vector, operation by operation as winnow.cache.packing.hadamard.
#pragma once

#include <cmath>
#include <utility>

#include "simd.h"

namespace winnow::WINNOW_ISA {

/// Pairs of lanes i and i + H with i & H == 0 become (a + b, a - b). Products with 1 and -1 are exact, joined to a sum or not.
template <int H, int... I>
inline vf butterfly(vf x, std::integer_sequence<int, I...>) {
  const vf sign = {(I & H ? -1.0f : 1.0f)...};
  return __builtin_shufflevector(x, x, (I ^ H)...) + x * sign;
}

template <int H>
inline vf butterfly(vf x) {
  if constexpr (H < WIDTH)
    return butterfly<H>(x, std::make_integer_sequence<int, WIDTH>{});
  else
    return x;
}

/// Transforms each `block` channels of x in place. block: a power of two that divides dim; 1: nothing is changed. x has room
/// for whole vectors, whose lanes past dim are zero and stay so.
inline void hadamard(float *x, int dim, int block) {
  if (block == 1) return;
  for (int d = 0; d < dim; d += WIDTH) {
    vf y = butterfly<1>(load(x + d));
    if (block > 2) y = butterfly<2>(y);
    if (block > 4) y = butterfly<4>(y);
    if (block > 8) y = butterfly<8>(y);
    store(x + d, y);
  }
  for (int h = WIDTH; h < block; h *= 2)
    for (int first = 0; first < dim; first += 2 * h)
      for (int d = first; d < first + h; d += WIDTH) {
        const vf a = load(x + d), b = load(x + d + h);
        store(x + d, a + b);
        store(x + d + h, a - b);
      }
  const float factor = static_cast<float>(1.0 / std::sqrt(static_cast<double>(block)));
  for (int d = 0; d < dim; d += WIDTH) store(x + d, load(x + d) * factor);
}

}  // namespace winnow::WINNOW_ISA
