// Scores of a decoding row from the weights that attention kept.
#pragma once

#include "attend.h"

namespace winnow::WINNOW_ISA {

/// The scores of the keys [first_key, last_key) of a decoding row: a tile at a time, so that they can be computed between the
/// products of another row, whose KVs are being fetched.
template <class KV>
class KeptScores {
 public:
  /// kept_weights: of the row's keys from first_key on. outputs: read for Term::value_aware.
  KeptScores(const Attend &call, const ScoreRow &score_row, int64_t first_key, int64_t last_key, const float *kept_weights,
             const float *statistics, const float *outputs);

  /// Finishes the scores of the next tile, if there is one. Returns whether there are more.
  bool finish_tile();

 private:
  /// Tiles whose scores are prefetched: they are as scattered as blocks.
  static constexpr int64_t TILES_AHEAD = 4;

  /// Finds and prefetches the scores of the tile that begins with a key.
  void prefetch_tile(int64_t first);

  const Attend &call_;
  const AttentionObserver &observer_;
  const Row row_;
  const int64_t group_, terms_, token_, position_;
  int64_t first_;
  const int64_t last_;
  int64_t slots_[TILES_AHEAD][TILE];  // of the next tiles, see slots_to_read
  const float *kept_;                 // the weights of the next tile
  const float *statistic_, *output_;
  const bool value_aware_;
  float average_ = 0;                 // for Term::below_average
  std::vector<float> distance_;       // of each value from each query head's output
  std::vector<float> factor_, row_max_;  // of each head: weights e^(logit - row_max) times the factor are probabilities
  Tile<KV> tiles_[2];                 // where values are read
  std::vector<Decoded> decoded_;      // those of a tile, where they are coded
  int current_ = 0;                   // which of them is next
};

}  // namespace winnow::WINNOW_ISA
