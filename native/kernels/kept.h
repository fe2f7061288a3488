// Scores of a decoding row from the weights that attention kept.
#pragma once

#include "attend.h"

namespace winnow::WINNOW_ISA {

/// The scores of the keys [first_key, last_key) of a decoding row: a tile at a time, so that they can be computed between the
/// products of another row, whose KVs are being fetched.
class KeptScores {
 public:
  /// kept_weights: of the row's keys from first_key on.
  KeptScores(const Attend &call, const ScoreRow &score_row, int64_t first_key, int64_t last_key, const float *kept_weights,
             const float *statistics);

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
  const float *statistic_;
  float average_ = 0;                 // for Term::below_average
  std::vector<float> factor_, row_max_;  // of each head: weights e^(logit - row_max) times the factor are probabilities
};

}  // namespace winnow::WINNOW_ISA
