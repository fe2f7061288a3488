// How a call of attention is cut: items, the batches in which threads take them, merges, and the rows whose scores change. It
// depends on the batch alone.
#include "attend.h"

namespace winnow::WINNOW_ISA {

namespace {

int64_t keys_of_item(int64_t rows) { return rows <= FEW_ROWS ? FEW_ROWS_KEYS : MANY_ROWS_KEYS; }

/// Whether the output of any of some tokens is read.
bool are_read(const Attend &call, int64_t first, int64_t count) {
  if (!call.read) return true;
  const auto from = call.read->begin() + first;
  return std::find(from, from + count, true) != from + count;
}

}  // namespace

Plan::Plan(const Attend &call) {
  const Cache &cache = call.cache;
  const Batch &batch = call.batch;
  const int64_t group = call.group(), padded = round_up(static_cast<int>(cache.head_dim), WIDTH);
  const size_t num_rows = batch.num_seqs() * cache.num_heads;
  items.reserve(num_rows), score_rows.reserve(num_rows), item_batches.reserve(num_rows);
  // Chunks are last in a batch and cost most: compute them first, so that no thread starts one at the end.
  for (int64_t seq = batch.num_seqs() - 1; seq >= 0; --seq) {
    const int64_t count = batch.counts[seq];
    const AttentionObserver *observer = batch.observer[seq] < 0 ? nullptr : &batch.observers[batch.observer[seq]];
    const int64_t from = observer ? std::max<int64_t>(0, batch.observe_from[seq] - batch.position[batch.starts[seq]]) : count;
    const int64_t terms = observer && from < count ? used_terms(*observer, cache) : 0;
    for (int64_t head = 0; head < cache.num_heads; ++head) {
      const Row row(cache, batch.slots[seq], call.layer, head);
      const int64_t max_queries = queries_of_item(group, row.length);
      const int64_t score_row = static_cast<int64_t>(score_rows.size()), first_item = static_cast<int64_t>(items.size());
      const bool by_weights = terms && !observer->smoothing_size;  // scores need no more than the weights
      // A decoding row of one item finishes its scores at once; a row of several needs all of them.
      const bool finishes = by_weights && count == 1 && row.length <= keys_of_item(group);
      int64_t weights = -1;
      if (by_weights && count == 1) {
        const int64_t size = (row.length + TILE - 1) / TILE * kept_size(group);
        if (finishes)
          max_row_weights = std::max(max_row_weights, size);
        else
          weights = kept, kept += size;
      }
      // The last queries have the longest row and may be the fewest: if they are one item, so are all others.
      const bool by_items = by_weights && count > 1 && row.length <= keys_of_item(((count - 1) % max_queries + 1) * group);
      for (int64_t query = (count - 1) / max_queries * max_queries; query >= 0; query -= max_queries) {
        const int64_t queries = std::min(max_queries, count - query), rows = queries * group;
        const int64_t last = row.length - count + query + queries;
        const bool counts = query + queries > from, adds = by_items && counts;
        const bool read = are_read(call, batch.starts[seq] + query, queries);
        const int64_t keys = keys_of_item(rows);
        const int64_t pieces = std::max<int64_t>(1, (last + keys - 1) / keys);
        max_rows = std::max(max_rows, rows);
        if (!read && !counts) continue;
        if (pieces > 1) merges.push_back({seq, head, query, queries, partials, pieces});
        for (int64_t piece = 0; piece < pieces; ++piece) {
          const int64_t first = piece * keys;
          items.push_back({seq, head, query, queries, first, std::min(last, first + keys), pieces > 1 ? partials : -1,
                           weights < 0 ? -1 : weights + first / TILE * kept_size(group),
                           adds || finishes ? score_row : -1, adds ? partial_scores : -1, read});
          if (pieces > 1) partials += rows * (padded + 2);
        }
        if (adds) {
          const int64_t tiles = (last + TILE - 1) / TILE;
          partial_scores += tiles * terms * partial_score_heads(*observer, group) * TILE;
          max_chunk_weights = std::max(max_chunk_weights, tiles * kept_size(rows));
        }
      }
      if (terms) {
        const int64_t piece = observed_keys(weights >= 0);
        for (int64_t key = 0; key < row.length && !finishes; key += piece) observed.emplace_back(score_row, key);
        score_rows.push_back({seq, head, from, weights, sums, observer, first_item,
                         by_items ? static_cast<int64_t>(items.size()) : first_item});
        if (observer->smoothing_size) sums += terms * group * row.length;
      }
    }
  }
  batch_items(group);
}

/// Threads take short items several at a time: one at a time they would contend for the counter.
void Plan::batch_items(int64_t group) {
  // Few rows are bound by memory, so keys count; many rows by computation, so keys times rows do.
  const auto is_few = [group](const WorkItem &item) { return item.num_queries * group <= FEW_ROWS; };
  const auto work_of = [&](const WorkItem &item) {
    const int64_t keys = item.last_key - item.first_key;
    return is_few(item) ? keys : keys * item.num_queries * group;
  };
  int64_t many = 0;
  for (const WorkItem &item : items)
    if (!is_few(item)) many += work_of(item);
  const int64_t max_many = std::min(BATCH_WORK, many / MIN_BATCHES);
  int64_t work = 0;
  for (size_t i = 0; i < items.size(); ++i) {
    const bool few = is_few(items[i]);
    const int64_t item = static_cast<int64_t>(i), own = work_of(items[i]), max_work = few ? FEW_ROWS_KEYS : max_many;
    if (i == 0 || few != is_few(items[i - 1]) || work + own > max_work) {
      item_batches.push_back({item, item});
      work = 0;
    }
    item_batches.back().end = item + 1;
    work += own;
  }
}

}  // namespace winnow::WINNOW_ISA
