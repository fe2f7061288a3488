// Rows of activations as the codes that int8 weights are multiplied with; winnow.models.fast.int8_linear has the formulas.
#pragma once

#include <limits>

#include "product.h"

namespace winnow::WINNOW_ISA {

// With VNNI codes of activations stay 8 bits wide, and those of weights have 128 added: signed times unsigned. Elsewhere codes
// of activations are 16 bits wide, and those of weights become so on the way.
#if defined(WINNOW_VNNI)
using Code = int8_t;
using WeightCode = uint8_t;
constexpr int32_t WEIGHT_ZERO = 128;
#else
using Code = int16_t;
using WeightCode = int8_t;
constexpr int32_t WEIGHT_ZERO = 0;
#endif
/// Inputs that lie side by side.
constexpr int TOGETHER = pair_size<Code>();
/// Inputs of a row that share a scale: one outlier of a row would take the bits of all its others. Beside weights in blocks
/// (Q8_0) they are the inputs of a block.
template <bool BLOCKS>
constexpr int64_t GROUP = BLOCKS ? 32 : 128;

template <bool BLOCKS>
constexpr int64_t num_groups(int64_t in) {
  return (in + GROUP<BLOCKS> - 1) / GROUP<BLOCKS>;
}

/// What sums over a group of a row need to become numbers: (sum - zero) * scale.
struct GroupScale {
  float scale;
  int32_t zero;
};

/// Codes of n numbers of a row that share a scale; room for WIDTH more is overwritten.
template <class T>
inline GroupScale quantize_group(const T *x, int64_t n, Code *out) {
  vi bits{};  // of a magnitude: ordered as the magnitudes are, what is no number above all
  for (int64_t i = 0; i < n; i += WIDTH)
    bits = larger(bits, (vi)get(x + i, static_cast<int>(std::min<int64_t>(WIDTH, n - i))) & 0x7fffffff);
  int32_t most = bits[0];
  for (int i = 1; i < WIDTH; ++i) most = std::max(most, bits[i]);
  float largest;
  std::memcpy(&largest, &most, sizeof largest);
  constexpr float SMALLEST = 1e-30f;  // 127 / largest stays finite
  const bool finite = most < 0x7f800000, zero = !finite || largest < SMALLEST;
  const float inverse = zero ? 0.0f : 127.0f / largest;
  vi sum{};
  for (int64_t i = 0; i < n; i += WIDTH) {
    const vf part = get(x + i, static_cast<int>(std::min<int64_t>(WIDTH, n - i)));
    const vi codes = zero ? vi{} : nearest(rounded_product(part, inverse));
    sum += codes;
    store_codes(out + i, codes);
  }
  int32_t total = 0;
  for (int lane = 0; lane < WIDTH; ++lane) total += sum[lane];
  const float scale = !finite ? std::numeric_limits<float>::quiet_NaN() : largest < SMALLEST ? 0.0f : largest / 127.0f;
  return {scale, WEIGHT_ZERO * total};
}

/// Codes of a row of `in` numbers, and zeros up to `padded`; room for WIDTH more is overwritten. scales: [num_groups(in)].
template <bool BLOCKS, class T>
inline void quantize_row(const T *x, int64_t in, int64_t padded, Code *out, GroupScale *scales) {
  constexpr int64_t SIZE = GROUP<BLOCKS>;
  for (int64_t i = 0; i < in; i += SIZE) scales[i / SIZE] = quantize_group(x + i, std::min(SIZE, in - i), out + i);
  std::fill(out + in, out + padded, Code{});
}

}  // namespace winnow::WINNOW_ISA
