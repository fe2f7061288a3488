// Smoothing of a row's scores over KVs near in position (winnow.attention.Smoothing).
#pragma once

#include <algorithm>
#include <cstdint>

namespace winnow::WINNOW_ISA {

/// Smooth x, [n], over neighbours in `order`; entries from `pooled` on are no neighbours and count as zero.
/// `ordered` is memory for n floats.
inline void smooth(const float *x, const int64_t *order, int64_t n, int64_t pooled, int64_t smoothing_size, bool smoothing_max,
                   float *ordered, float *out) {
  const int64_t reach = smoothing_size / 2;
  for (int64_t i = 0; i < n; ++i) ordered[i] = i < pooled ? x[order[i]] : 0.0f;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t first = std::max<int64_t>(0, i - reach), last = std::min(n, i + reach + 1);
    float together = ordered[first];
    for (int64_t j = first + 1; j < last; ++j)
      together = smoothing_max ? std::max(together, ordered[j]) : together + ordered[j];
    out[order[i]] = smoothing_max ? together : together / static_cast<float>(smoothing_size);
  }
}

}  // namespace winnow::WINNOW_ISA
