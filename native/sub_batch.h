// A batch cut by sequences into independent sub-batches.
#pragma once

#include "types.h"

namespace winnow {

/// Some sequences of a batch, in its order, as a batch of their own.
struct SubBatch {
  Batch batch;
  std::vector<int64_t> sequences;  // [B of the sub-batch]: their numbers in the whole batch
  std::vector<int64_t> tokens;  // [T of the sub-batch]: theirs, too
};

/// What a sequence's tokens cost, in multiplications.
struct TokenCost {
  double alone;   // independent of other tokens
  double per_kv;  // for every KV that it sees, in one row
};

/// Sub-batches of about the same cost, one for each thread; none where the sequences cannot be distributed evenly.
std::vector<SubBatch> partition_batch(const Batch &, const Cache &, const TokenCost &, int threads);

}  // namespace winnow
