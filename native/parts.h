// A batch cut by sequences into parts that need nothing of each other.
#pragma once

#include "types.h"

namespace winnow {

/// Some sequences of a batch, in its order, as a batch of their own.
struct Part {
  Batch batch;
  std::vector<int64_t> tokens;  // [T of the part]: which of the whole batch's they are
};

/// What a sequence's tokens cost, in multiplications.
struct TokenCost {
  double alone;   // whatever the others are
  double per_kv;  // for every KV of a row that it sees, in one row
};

/// Parts that cost about the same, one for each thread; none where the sequences do not let themselves be shared out evenly.
std::vector<Part> share_out(const Batch &, const Cache &, const TokenCost &, int threads);

}  // namespace winnow
