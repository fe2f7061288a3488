#include "sub_batch.h"

#include <algorithm>

namespace winnow {

namespace {

/// Largest ratio of the costliest sub-batch to the mean. Threads that synchronise in every layer lose about as much.
constexpr double MAX_IMBALANCE = 1.03;

double cost_of(const Batch &batch, const Cache &cache, int64_t seq, const TokenCost &cost) {
  const int64_t count = batch.counts[seq];
  double kvs = 0;  // that a token in the middle sees, in all rows
  for (int64_t layer = 0; layer < cache.num_layers; ++layer)
    for (int64_t head = 0; head < cache.num_heads; ++head)
      kvs += static_cast<double>(Row(cache, batch.slots[seq], layer, head).length) - static_cast<double>(count) / 2;
  return static_cast<double>(count) * (cost.alone + cost.per_kv * kvs);
}

void add_sequence(const Batch &batch, int64_t seq, SubBatch &sub_batch) {
  Batch &own = sub_batch.batch;
  const int64_t first = batch.starts[seq], end = first + batch.counts[seq];
  own.slots.push_back(batch.slots[seq]);
  own.counts.push_back(batch.counts[seq]);
  own.starts.push_back(own.num_tokens());
  own.position.insert(own.position.end(), batch.position.begin() + first, batch.position.begin() + end);
  own.observer.push_back(batch.observer[seq]);
  own.observe_from.push_back(batch.observe_from[seq]);
  sub_batch.sequences.push_back(seq);
  for (int64_t token = first; token < end; ++token) sub_batch.tokens.push_back(token);
}

}  // namespace

std::vector<SubBatch> partition_batch(const Batch &batch, const Cache &cache, const TokenCost &cost, int threads) {
  std::vector<std::pair<double, int64_t>> sequences;  // (what it costs, which)
  double all = 0;
  for (int64_t seq = 0; seq < batch.num_seqs(); ++seq) {
    sequences.emplace_back(cost_of(batch, cache, seq, cost), seq);
    all += sequences.back().first;
  }
  // The costliest first, each to the least loaded thread.
  std::stable_sort(sequences.begin(), sequences.end(), [](const auto &a, const auto &b) { return a.first > b.first; });
  std::vector<double> load(threads);
  std::vector<int> whose(sequences.size());
  for (const auto &[own, seq] : sequences) {
    const auto least = std::min_element(load.begin(), load.end());
    *least += own;
    whose[seq] = static_cast<int>(least - load.begin());
  }
  if (*std::max_element(load.begin(), load.end()) * threads > all * MAX_IMBALANCE) return {};
  std::vector<SubBatch> sub_batches(threads);
  for (SubBatch &sub_batch : sub_batches) sub_batch.batch.observers = batch.observers;
  for (int64_t seq = 0; seq < batch.num_seqs(); ++seq) add_sequence(batch, seq, sub_batches[whose[seq]]);
  return sub_batches;
}

}  // namespace winnow
