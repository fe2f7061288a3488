// What a gated feed-forward layer does to its gates.
#pragma once

#include "../layers.h"
#include "simd.h"

namespace winnow::WINNOW_ISA {

/// x / (1 + e^-y): silu for y = x. The tanh form of gelu is the same with y = 2 sqrt(2 / pi) (x + 0.044715 x^3).
inline vf activate(vf x, Activation activation) {
  const vf y = activation == Activation::silu ? x : 1.59576912f * (x + 0.044715f * x * x * x);
  return x / (1.0f + vexp2(y * -LOG2_E));
}

}  // namespace winnow::WINNOW_ISA
