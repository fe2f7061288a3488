// Attention of one item's queries over its keys: streaming softmax, for decoding and for prefill chunks alike.
#pragma once

#include <atomic>
#include <cmath>
#include <optional>

#include "direct.h"
#include "scores.h"

namespace winnow::WINNOW_ISA {

/// The items of a plan that a thread takes, batch by batch. Which thread takes which changes no result.
class WorkQueue {
 public:
  /// taken: batches that the threads of the team have taken.
  WorkQueue(const Plan &plan, std::atomic<size_t> &taken) : plan_(plan), taken_(taken) {}

  /// The next item, or null.
  const WorkItem *next() {
    if (item_ == end_) {
      const size_t batch = taken_++;
      if (batch >= plan_.item_batches.size()) return nullptr;
      item_ = plan_.item_batches[batch].first, end_ = plan_.item_batches[batch].end;
    }
    return &plan_.items[item_++];
  }

 private:
  const Plan &plan_;
  std::atomic<size_t> &taken_;
  int64_t item_ = 0, end_ = 0;
};

/// Two tiles of KVs: the one that is computed and the one after it, which may belong to the next item.
template <class KV>
struct Lookahead {
  Tile<KV> tiles[2];
  int current = 0;
  bool found = false;  // the current tile

  Tile<KV> &now() { return tiles[current]; }
  Tile<KV> &next() { return tiles[current ^ 1]; }

  void find(Tile<KV> &tile, const Attend &call, const WorkItem &item, int64_t first_key) {
    const Batch &batch = call.batch;
    const Row row(call.cache, batch.slots[item.seq], call.layer, item.head);
    tile.find(call, row, first_key, item.last_key, batch.position[batch.starts[item.seq] + item.first_query],
              keys_at_once(item.num_queries * call.group()));
  }
};

/// Multiply a row of sums by a factor.
inline void scale_row(float *row, int64_t n, float factor) {
  for (int64_t d = 0; d < n; d += WIDTH) store(row + d, load(row + d) * factor);
}

/// Write the finished attention of one token and query head.
inline void finish(const Attend &call, float *statistics, int64_t token, int64_t query_head, float *sums, float row_max,
                   float row_sum) {
  const int dim = static_cast<int>(call.cache.head_dim), padded = round_up(dim, WIDTH);
  const int64_t at = token * call.num_query_heads + query_head;
  if (call.sinks) {
    const float sink = call.sinks[query_head], higher = std::max(row_max, sink);
    const float factor = std::exp(row_max - higher);
    scale_row(sums, padded, factor);
    row_sum = row_sum * factor + std::exp(sink - higher);
    row_max = higher;
  }
  const float inverse = row_sum > 0 ? 1.0f / row_sum : 0.0f;
  statistics[2 * at] = row_max;
  statistics[2 * at + 1] = inverse;
  if (call.cache.coded) hadamard(sums, dim, static_cast<int>(call.cache.values.rotation));  // back from what is stored
  with_act(call.dtype, [&](auto type) {
    using Act = decltype(type);
    Act *out = reinterpret_cast<Act *>(call.out) + at * dim;
    for (int d = 0; d < dim; d += WIDTH) put(out + d, load(sums + d) * inverse, std::min(WIDTH, dim - d));
  });
}

/// Prefetch some queries of the query heads of one KV head.
inline void prefetch_queries(const Attend &call, int64_t token, int64_t count, int64_t first_head) {
  asm volatile("");  // see prefetch_accumulators
  const int64_t width = bytes_of(call.dtype), stride = call.q.token_stride * width, bytes = call.cache.head_dim * width;
  for (int64_t head = first_head; head < first_head + call.group(); ++head) {
    const char *query = call.q.data + token * stride + head * call.q.head_stride * width;
    for (int64_t i = 0; i < count; ++i, query += stride)
      for (int64_t d = 0; d < bytes; d += LINE<char>) __builtin_prefetch(query + d, 0, 2);
  }
}

/// Prefetch the memory that the outputs of some tokens go to, of the query heads of one KV head.
inline void prefetch_outputs(const Attend &call, const float *statistics, int64_t token, int64_t count, int64_t first_head) {
  asm volatile("");  // see prefetch_accumulators
  const int64_t bytes = call.cache.head_dim * bytes_of(call.dtype);
  for (int64_t at = token * call.num_query_heads + first_head; count > 0; --count, at += call.num_query_heads) {
    const char *out = call.out + at * bytes;
    for (int64_t d = 0; d < call.group() * bytes; d += LINE<char>) __builtin_prefetch(out + d, 1);
    __builtin_prefetch(statistics + 2 * at, 1);
  }
}

/// Where the weight of the j-th key is kept: TILE of them lie side by side, and the next ones `apart` floats on.
inline float *kept_at(float *kept, int j, int64_t apart) { return kept + j / TILE * apart + j % TILE; }

/// Fold a tile's logits of one query, times `scale`, into its running softmax; they become weights.
///
/// highest: the largest of the logits; those of KVs that the query does not see are NEG_INF. kept: where the weights are kept
/// too (kept_at), or null.
template <class Operand>
void online_softmax(const float *logits, Operand *weights, float *sums, float &row_max, float &row_sum, int width,
                    int64_t padded, float highest, float scale, float *kept, int64_t apart) {
  const float scaled = highest * scale, higher = std::max(row_max, scaled);
  if (higher == NEG_INF) {  // this query sees none of the tile, nor anything before it
    for (int j = 0; j < width; j += WIDTH) {
      store(weights + j, vf{});
      if (kept) store(kept_at(kept, j, apart), broadcast(MASKED));
    }
    return;
  }
  if (higher > row_max) {
    const float factor = row_max == NEG_INF ? 0.0f : std::exp(row_max - higher);
    scale_row(sums, padded, factor);
    row_sum *= factor;
    row_max = higher;
  }
  // e^(x scale - higher) as a power of 2. The weight of the largest logit is 1 to the last bit: a KV alone is the output.
  const float scale2 = scale * LOG2_E, higher2 = higher == scaled ? highest * scale2 : higher * LOG2_E;
  vf total{};
  for (int j = 0; j < width; j += WIDTH) {
    const vf x = load(logits + j), p = vexp2(rounded_product(x, scale2) - higher2);
    total += p;
    store(weights + j, p);
    if (kept) store(kept_at(kept, j, apart), x > NEG_INF ? p : broadcast(MASKED));
  }
  row_sum += horizontal_sum(total);
}

/// Prefetch the vectors `first` to n of the next tile, which the products of a shorter tile leave out.
template <class KV>
void prefetch_rest(const KV *const *next, int first, int n, int dim) {
  asm volatile("");  // see prefetch_accumulators
  for (int j = first; j < n; ++j)
    for (int d = 0; d < dim; d += LINE<KV>) __builtin_prefetch(next[j] + d, 0, 2);
}

/// Memory of a call that all threads share.
struct Results {
  float *partials;    // unfinished items
  float *statistics;  // see statistics_of
};

/// What a thread takes along from one item to the next.
template <class KV, class Operand>
struct ThreadState {
  ThreadState(WorkQueue queue, const Scratch<Operand> &scratch) : queue(queue), scratch(scratch) {}

  WorkQueue queue;
  const Scratch<Operand> scratch;
  Lookahead<KV> ahead;
  Buffer decoded;  // a tile of coded vectors
  std::optional<KeptScores> waiting;  // scores of an earlier row, computed between the products of this item
};

/// Tiles of an item that are left when its thread takes the next item: few, so that the threads end together, but enough for
/// that item's table entries to arrive.
constexpr int64_t TILES_BEFORE_NEXT = 2;

/// Attention of an item's queries over its keys. Phases: load the queries; for each tile of keys load it, then for some
/// queries at a time qk, softmax and pv; finish.
template <class KV, class Operand>
class ItemPass {
 public:
  /// kept_weights: where the item's weights are kept, or null.
  ItemPass(const Attend &call, const WorkItem &item, const Results &results, ThreadState<KV, Operand> &thread,
           float *kept_weights)
      : call_(call),
        item_(item),
        results_(results),
        thread_(thread),
        scratch_(thread.scratch),
        ahead_(thread.ahead),
        kept_weights_(kept_weights),
        dim_(static_cast<int>(call.cache.head_dim)),
        padded_(round_up(dim_, WIDTH)),
        group_(call.group()),
        rows_(static_cast<int>(item.num_queries * group_)),
        keys_(keys_at_once(rows_)),
        token_(call.batch.starts[item.seq] + item.first_query),
        sees_(row_of(item).length - call.batch.counts[item.seq] + item.first_query + 1),
        direct_(rows_ <= MOST_DIRECT_ROWS),
        values_(item.read),
        at_once_(direct_ ? item.num_queries : std::max<int64_t>(1, ROWS_AT_ONCE / group_)),
        only_scales_(call.scale > 0 && call.softcap == 0 && !call.reads_positions() && !call.cache.bias.data) {}

  /// Attends to all keys of the item. Returns the next item of the thread, or null.
  const WorkItem *run() {
    load_queries();
    if (!ahead_.found) ahead_.find(ahead_.now(), call_, item_, item_.first_key);
    for (int64_t first = item_.first_key; first < item_.last_key; first += keys_, ahead_.current ^= 1) {
      const bool more = first + keys_ < item_.last_key;
      look_ahead(first, more);
      float *kept = kept_weights_ ? kept_weights_ + (first - item_.first_key) / TILE * kept_size(rows_) : nullptr;
      if (ahead_.now().outside_window)
        keep_unseen(kept);
      else
        attend_tile(first, more, kept);
    }
    if (!took_next_) take_next();
    ahead_.found = item_.first_key < item_.last_key && next_is_alike();
    if (item_.partial < 0)
      finish_until(rows_);
    else
      store_partial();
    return next_item_;
  }

 private:
  /// Some queries of the item and what they see of a tile.
  struct Queries {
    int64_t query, count;      // of the item's
    int64_t first_row, rows;   // the same in rows
    int seen, seen_width;      // of the tile's keys, what the last of them sees; rounded up
  };

  Row row_of(const WorkItem &item) const { return Row(call_.cache, call_.batch.slots[item.seq], call_.layer, item.head); }

  void load_queries() const {
    pack_queries(call_, token_, item_.num_queries, item_.head, scratch_.queries);
    std::fill(scratch_.row_max, scratch_.row_max + rows_, NEG_INF);
    std::fill(scratch_.row_sum, scratch_.row_sum + rows_, 0.0f);
    std::fill(scratch_.sums, scratch_.sums + rows_ * padded_, 0.0f);
  }

  /// Finds the tile after the one that begins with a key. more: it belongs to the same item.
  void look_ahead(int64_t first, bool more) {
    if (!took_next_ && first + TILES_BEFORE_NEXT * keys_ >= item_.last_key) take_next();
    if (more)
      ahead_.find(ahead_.next(), call_, item_, first + keys_);
    else if (next_is_alike())
      ahead_.find(ahead_.next(), call_, *next_item_, next_item_->first_key);
  }

  void take_next() {
    next_item_ = thread_.queue.next(), took_next_ = true;
    if (next_item_) row_of(*next_item_).prefetch_entries(next_item_->first_key);
  }

  /// Whether the next item's tiles have the same size; others are not prefetched.
  bool next_is_alike() const { return next_item_ && keys_at_once(next_item_->num_queries * group_) == keys_; }

  /// A tile that no query sees.
  void keep_unseen(float *kept) const {
    for (int j = 0; kept && j < ahead_.now().n; j += TILE, kept += kept_size(rows_)) {
      std::fill(kept, kept + rows_ * TILE, MASKED);
      std::fill(kept + rows_ * TILE, kept + rows_ * (TILE + 1), NEG_INF);
    }
  }

  void attend_tile(int64_t first, bool more, float *kept) {
    Tile<KV> &tile = ahead_.now();
    const Tile<KV> &next = ahead_.next();
    const bool ends = !more && item_.partial < 0;
    // What is prefetched during the products with keys, and with values.
    const KV *const *first_half = direct_ && values_ ? next.first_half() : next.key;
    const KV *const *second_half = direct_ && values_ ? next.second_half() : next.value;
    load_tile(tile, next, first_half, second_half);
    const float *bias = tile.biases(call_.cache);
    int64_t count = 0;
    for (int64_t query = 0; query < item_.num_queries; query += count) {
      count = std::min(at_once_, item_.num_queries - query);
      const int seen = static_cast<int>(std::min<int64_t>(tile.n, sees_ + query + count - 1 - first));
      const Queries queries{query, count, query * group_, count * group_, seen, round_up(seen, WIDTH)};
      if (ends && values_) prefetch_outputs(call_, results_.statistics, token_ + query, count, item_.head * group_);
      if (!more && next_item_)
        prefetch_queries(call_, call_.batch.starts[next_item_->seq] + next_item_->first_query + query,
                        std::min(count, next_item_->num_queries - query), next_item_->head * group_);
      if (seen <= 0) continue;
      qk(tile, first_half, queries);
      softmax(tile, bias, first, queries, kept);
      // By now the next keys are being fetched, which this does not need.
      if (thread_.waiting && !thread_.waiting->finish_tile()) thread_.waiting.reset();
      if (!values_) continue;
      pv(tile, second_half, queries);
      // Stores of finished rows are slow, but overlap with the products of the others.
      if (ends) finish_until(queries.first_row + queries.rows);
    }
    for (int j = 0; kept && j < tile.n; j += TILE, kept += kept_size(rows_))
      std::copy(scratch_.row_max, scratch_.row_max + rows_, kept + rows_ * TILE);
  }

  /// Packs a tile as operands, unless it is multiplied in place.
  void load_tile(const Tile<KV> &tile, const Tile<KV> &next, const KV *const *first_half, const KV *const *second_half) const {
    if constexpr (is_coded<KV>) {
      load_coded(tile, next);
    } else {
      const int width = round_up(tile.n, WIDTH);
      prefetch_rest(first_half, width, next.n, dim_);
      if (values_) prefetch_rest(second_half, width, next.n, dim_);
      if (direct_) return;
      for (int j = 0; j < tile.n; j += TILE)
        pack_keys(tile.key + j, next.key + j, std::min(tile.n - j, TILE), dim_, scratch_.keys + j * padded_);
      if (values_) pack_values(tile.value, next.value, tile.n, dim_, scratch_.values);
    }
  }

  /// As load_tile, of coded KVs. Those that are multiplied in place are decoded right before.
  void load_coded(const Tile<KV> &tile, const Tile<KV> &next) const {
    if (direct_) return;
    // Values come last, so keys may lie in their memory until they are packed. As floats they are packed when they are decoded.
    constexpr bool IN_PLACE = std::is_same_v<Operand, float>;
    Operand *decoded = IN_PLACE ? scratch_.values : thread_.decoded.template get<Operand>(int64_t{keys_} * padded_);
    const DecodedTile each(decoded, tile.n, keys_, padded_);
    decode_keys(call_.cache, tile, next, padded_, decoded);
    for (int j = 0; j < tile.n; j += TILE)
      pack_keys(each.at + j, each.at + j, std::min(tile.n - j, TILE), padded_, scratch_.keys + j * padded_);
    if (!values_) return;
    decode_values(call_.cache, tile, next, padded_, decoded);
    if (!IN_PLACE) pack_values(each.at, each.at, tile.n, padded_, scratch_.values);
  }

  /// Raw logits of some queries and a tile's keys: [rows, keys].
  void qk(const Tile<KV> &tile, const KV *const *first_half, const Queries &queries) const {
    const int rows = static_cast<int>(queries.rows);
    const Operand *packed = scratch_.queries + queries.first_row * padded_;
    if (direct_) {
      if constexpr (is_coded<KV>) {
        const Cache &cache = call_.cache;
        const Tile<KV> &next = ahead_.next();
        if constexpr (std::is_same_v<Operand, float>)
          if (!tile.wide.n && decodes_in_registers(cache.keys, rows, dim_)) {
            coded_products(cache.keys, cache.block_size, tile.coded_keys(), next.coded_keys(), rows, dim_,
                           call_.dtype, packed, scratch_.logits);
            return;
          }
        decode_keys(cache, tile, next, padded_, scratch_.keys);
        const DecodedTile keys(scratch_.keys, tile.n, TILE, padded_);
        direct_products(rows, keys.at, keys.at, tile.n, false, padded_, packed, padded_, scratch_.logits);
      } else {
        direct_products(rows, tile.key, first_half, tile.n, tile.scattered(), dim_, packed, padded_,
                                 scratch_.logits);
      }
      return;
    }
    for (int j = 0; j < queries.seen_width; j += TILE)
      product(rows, std::min(queries.seen_width - j, TILE), padded_, packed, padded_, scratch_.keys + j * padded_, TILE,
              scratch_.logits + j, keys_, false);
  }

  /// Logits become weights. kept: where those of the tile are kept too, or null.
  void softmax(const Tile<KV> &tile, const float *bias, int64_t first, const Queries &queries, float *kept) const {
    // Most models only scale logits, which needs no pass of its own.
    const float scale_before = only_scales_ ? 1.0f : call_.scale, scale_after = only_scales_ ? call_.scale : 1.0f;
    const int width = round_up(tile.n, WIDTH), seen_width = queries.seen_width;
    const int64_t apart = kept_size(rows_);
    for (int64_t i = 0; i < queries.rows; ++i) {
      const int64_t r = queries.first_row + i, query = queries.query + i / group_;
      const int64_t visible = std::min<int64_t>(tile.n, sees_ + query - first);
      const bool all_seen = visible == seen_width;
      float *logits = scratch_.logits + i * keys_, *kept_row = kept ? kept + r * TILE : nullptr;
      const float highest = only_scales_ && all_seen
                                ? highest_logit(logits, seen_width)
                                : finish_logits(logits, seen_width, visible, call_, scale_before, tile.position,
                                                call_.batch.position[token_ + query],
                                                call_.slope(item_.head * group_ + i % group_), bias);
      online_softmax(logits, scratch_.weights + i * keys_, scratch_.sums + r * padded_, scratch_.row_max[r],
                     scratch_.row_sum[r], seen_width, values_ ? padded_ : 0, highest, scale_after, kept_row, apart);
      for (int j = seen_width; kept && j < width; j += WIDTH) store(kept_at(kept_row, j, apart), broadcast(MASKED));
    }
  }

  /// Adds weights times values to the sums of some queries.
  void pv(const Tile<KV> &tile, const KV *const *second_half, const Queries &queries) const {
    const int rows = static_cast<int>(queries.rows);
    float *sums = scratch_.sums + queries.first_row * padded_;
    if (direct_) {
      if constexpr (is_coded<KV>) {
        const Cache &cache = call_.cache;
        const Tile<KV> &next = ahead_.next();
        if constexpr (std::is_same_v<Operand, float>)
          if (!tile.wide.n && decodes_in_registers(cache.values, rows, dim_)) {
            coded_sums(cache.values, cache.block_size, tile.coded_values(), next.coded_values(), rows, dim_,
                       call_.dtype, scratch_.weights, sums);
            return;
          }
        decode_values(cache, tile, next, padded_, scratch_.values);
        const DecodedTile values(scratch_.values, tile.n, TILE, padded_);
        direct_sums(rows, values.at, values.at, tile.n, padded_, scratch_.weights, padded_, sums);
      } else {
        direct_sums(rows, tile.value, second_half, tile.n, dim_, scratch_.weights, padded_, sums);
      }
    } else
      product(rows, padded_, round_up(queries.seen, pair_size<Operand>()), scratch_.weights, keys_, scratch_.values,
              padded_, sums, padded_, true);
  }

  /// Writes the outputs of the rows before `end` that are not written yet.
  void finish_until(int64_t end) {
    for (; finished_ < end; ++finished_) {
      float *sums = scratch_.sums + finished_ * padded_;
      if (direct_) put_in_order<Operand>(sums, padded_);
      finish(call_, results_.statistics, token_ + finished_ / group_, item_.head * group_ + finished_ % group_, sums,
             scratch_.row_max[finished_], scratch_.row_sum[finished_]);
    }
  }

  /// Stores the unfinished rows, to be merged with those of other items.
  void store_partial() const {
    for (int r = 0; r < rows_; ++r) {
      float *to = results_.partials + item_.partial + r * (padded_ + 2), *sums = scratch_.sums + r * padded_;
      if (direct_) put_in_order<Operand>(sums, padded_);
      std::copy(sums, sums + padded_, to);
      to[padded_] = scratch_.row_max[r];
      to[padded_ + 1] = scratch_.row_sum[r];
    }
  }

  const Attend &call_;
  const WorkItem &item_;
  const Results &results_;
  ThreadState<KV, Operand> &thread_;
  const Scratch<Operand> &scratch_;
  Lookahead<KV> &ahead_;
  float *const kept_weights_;
  const int dim_, padded_;
  const int64_t group_;
  const int rows_, keys_;  // queries times query heads; keys of a tile
  const int64_t token_;    // of the first query
  const int64_t sees_;     // how many keys the first query sees; each further one sees one more
  const bool direct_;      // keys and values are multiplied in place
  const bool values_;      // outputs are read
  const int64_t at_once_;  // queries
  const bool only_scales_;
  int64_t finished_ = 0;   // rows
  const WorkItem *next_item_ = nullptr;
  bool took_next_ = false;
};

}  // namespace winnow::WINNOW_ISA
