// Tokens that read the values of their largest weights alone; see winnow.values.value_tier.
#pragma once

#include "types.h"

namespace winnow {

/// Which tokens of a batch select values, and how many.
struct Selection {
  int64_t most;      // values that a query head reads: those of its largest weights
  bool renormalize;  // their weights add up to what those of all KVs do; else they are as softmaxed
  std::vector<int64_t> from;  // [B]: the first position of each sequence whose query selects

  bool selects(const Batch &batch, int64_t seq, int64_t token) const { return batch.position[token] >= from[seq]; }
};

/// What was read of a layer's values.
struct ValuesRead {
  int64_t head_queries = 0;  // that selected values: tokens times query heads
  int64_t selected = 0;      // values, summed over these
  int64_t rows = 0;          // values read for them: one that several query heads of a group select is read once
  int64_t in_full = 0;       // values of rows that other tokens read in full
};

}  // namespace winnow
