// Attention over paged rows: items in any threads, then those of the same queries merged, then scores.
#include <omp.h>

#include "item_pass.h"

namespace winnow::WINNOW_ISA {

namespace {

/// Merge the items of the same queries, in the order of their keys.
void merge_items(const Attend &call, const Merge &merge, const Results &results) {
  const int64_t group = call.group(), padded = round_up(static_cast<int>(call.cache.head_dim), WIDTH);
  const int64_t rows = merge.num_queries * group, size = rows * (padded + 2);
  for (int64_t r = 0; r < rows; ++r) {
    float *sums = results.partials + merge.partial + r * (padded + 2);
    float row_max = sums[padded], row_sum = sums[padded + 1];
    for (int64_t i = 1; i < merge.num_partials; ++i) {
      const float *other = sums + i * size;
      const float higher = std::max(row_max, other[padded]);
      if (higher == NEG_INF) continue;
      const float ours = std::exp(row_max - higher), theirs = std::exp(other[padded] - higher);
      for (int64_t d = 0; d < padded; d += WIDTH) store(sums + d, load(sums + d) * ours + load(other + d) * theirs);
      row_sum = row_sum * ours + other[padded + 1] * theirs;
      row_max = higher;
    }
    finish(call, results.statistics, call.batch.starts[merge.seq] + merge.first_query + r / group,
           merge.head * group + r % group, sums, row_max, row_sum);
  }
}

template <class KV, class Operand>
void attend_as(const Attend &call, Workspace &work) {
  const int64_t padded = round_up(static_cast<int>(call.cache.head_dim), WIDTH);
  const Plan plan(call);
  const Results results{work.partials.get<float>(plan.partials), statistics_of(call, work)};
  float *kept = work.kept.get<float>(plan.kept);
  float *partial_scores = work.partial_scores.get<float>(plan.partial_scores);
  work.sums.get<float>(plan.sums);
  if (static_cast<int>(work.threads.size()) < call.threads) work.threads.resize(call.threads);
  std::atomic<size_t> taken = 0;
#pragma omp parallel num_threads(call.threads)
  {
    Buffer &memory = work.threads[omp_get_thread_num()];
    const int64_t weights_size = 2 * plan.max_row_weights + plan.max_chunk_weights;
    ThreadState<KV, Operand> thread(WorkQueue(plan, taken), Scratch<Operand>(memory, plan.max_rows, padded, weights_size));
    const TileRegisters<Operand> registers(plan.max_rows);  // of the passes of `observe` too
    float *weights_to_finish = thread.scratch.extra, *weights_of_waiting = weights_to_finish + plan.max_row_weights;
    float *weights_of_chunk = weights_of_waiting + plan.max_row_weights;
    auto &waiting = thread.waiting;
    const auto finish_waiting = [&] {
      while (waiting && waiting->finish_tile()) continue;
      waiting.reset();
    };
    for (const WorkItem *item = thread.queue.next(), *next; item; item = next) {
      const ScoreRow *score_row = item->score_row >= 0 ? &plan.score_rows[item->score_row] : nullptr;
      const bool adds = item->partial_scores >= 0, finishes = score_row && !adds;
      float *weights = finishes          ? weights_to_finish
                       : adds            ? weights_of_chunk
                       : item->kept >= 0 ? kept + item->kept
                                         : nullptr;
      next = ItemPass<KV, Operand>(call, *item, results, thread, weights).run();
      finish_waiting();
      if (finishes) {
        waiting.emplace(call, *score_row, item->first_key, item->last_key, weights, results.statistics);
        std::swap(weights_to_finish, weights_of_waiting);
      } else if (adds) {
        observe_item(call, *score_row, *item, weights, results.statistics, partial_scores + item->partial_scores);
      }
    }
    finish_waiting();
#pragma omp barrier
    if (!plan.merges.empty()) {
#pragma omp for schedule(dynamic, 8)
      for (size_t i = 0; i < plan.merges.size(); ++i)
        merge_items(call, plan.merges[i], results);
    }
    if (!plan.score_rows.empty()) observe<KV, Operand>(call, plan, work, memory);
  }
}

}  // namespace

void attend(const Attend &call, Workspace &work) {
  // Activations are read and written at the ends of an item: between them all is KVs and operands.
  with_kv_and_operand(call.dtype, call.cache, [&](auto kv, auto operand) {
    attend_as<decltype(kv), decltype(operand)>(call, work);
  });
}

}  // namespace winnow::WINNOW_ISA
