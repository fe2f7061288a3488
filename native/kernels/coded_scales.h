// What products with coded KVs in place read besides the codes, and what they prefetch.
#pragma once

#include <algorithm>

#include "direct.h"
#include "coded_step.h"

namespace winnow::WINNOW_ISA {

/// Scales of a tile as floats, [TILE, groups], and so the minima; those past n repeat the last.
struct TileScales {
  // Whole vectors are read from any KV on.
  alignas(64) float scale[TILE * MAX_GROUPS + WIDTH], least[TILE * MAX_GROUPS + WIDTH];
};

/// Convert numbers that lie side by side for the KVs of a block, `groups` for each KV. run: KVs in the first block.
inline void convert_each(const f16 *const *from, int64_t away, int n, int groups, int run, int block_size, float factor,
                         float *out) {
  for (int j = 0; j < n; j += run, run = block_size) {
    run = std::min(run, n - j);
    const f16 *first = from[j] + away;
    float *to = out + j * groups;
    for (int i = 0, size = run * groups; i < size; i += WIDTH) {
      const int part = std::min(WIDTH, size - i);
      put(to + i, get(first + i, part) * factor, part);
    }
  }
  for (int j = n; j < round_up(n, WIDTH); ++j)
    std::copy(out + (n - 1) * groups, out + n * groups, out + j * groups);
}

inline void convert_scales(const CodedVectors &vectors, int64_t block_size, const CodedTile &tile, int groups,
                           TileScales &out) {
  if (is_plain(vectors.format)) return;
  const int size = static_cast<int>(std::min<int64_t>(block_size, TILE));
  const int run = static_cast<int>(std::min<int64_t>(block_size - tile.slot[0] % block_size, TILE));
  convert_each(tile.scale, 0, tile.n, groups, run, size, unit_of(vectors.format), out.scale);
  if (!vectors.min.data) return;
  convert_each(tile.scale, (vectors.min.data - vectors.scale.data) / 2, tile.n, groups, run, size, 1.0f, out.least);
}

/// What is prefetched while a tile is multiplied: a KV's codes, and the scales of it and its neighbours. A few at a time:
/// requests in bursts would wait for each other.
template <Format F, int DIM>
class Prefetch {
 public:
  Prefetch(const CodedVectors &vectors, const CodedTile &next)
      : code_(next.code),
        scale_(next.scale),
        bytes_(DIM ? DIM / (WIDTH * vectors_of_step(F)) * step_bytes(F) : vectors.code.slot_bytes),
        away_(vectors.min.data ? (vectors.min.data - vectors.scale.data) / 2 : 0) {}

  /// j: of the next tile, or past its end.
  void operator()(int j) const {
    asm volatile("");  // see prefetch_accumulators
    const char *code = reinterpret_cast<const char *>(code_[j]);
    for (int64_t byte = 0; byte < bytes_; byte += LINE<char>) __builtin_prefetch(code + byte, 0, 2);
    if (is_plain(F) || j % KVS_OF_LINE) return;
    __builtin_prefetch(scale_[j], 0, 2);
    if (vectors_of_step(F) == 2) __builtin_prefetch(scale_[j] + away_, 0, 2);
  }

 private:
  static constexpr int KVS_OF_LINE = 8;  // or more

  const Coded *const *code_;
  const f16 *const *scale_;
  int64_t bytes_, away_;
};

inline const uint8_t *bytes_of_codes(const Coded *code) { return reinterpret_cast<const uint8_t *>(code); }

}  // namespace winnow::WINNOW_ISA
