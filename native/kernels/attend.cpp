// Attention over paged rows: streaming softmax over tiles of keys, for decoding and for prefill chunks alike.
#include "attend.h"
#include "direct.h"
#include "kept.h"

#include <atomic>
#include <cmath>
#include <omp.h>
#include <optional>

namespace winnow::WINNOW_ISA {

namespace {

/// A thread's way through the items of a plan. Which thread takes which changes no result.
class Walk {
 public:
  /// taken: turns that the threads of the team have taken.
  Walk(const Plan &plan, std::atomic<size_t> &taken) : plan_(plan), taken_(taken) {}

  /// The next item, or null.
  const Item *next() {
    if (item_ == end_) {
      const size_t turn = taken_++;
      if (turn + 1 >= plan_.turns.size()) return nullptr;
      item_ = plan_.turns[turn], end_ = plan_.turns[turn + 1];
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
  int turn = 0;
  bool found = false;  // the tile whose turn it is

  Tile<KV> &now() { return tiles[turn]; }
  Tile<KV> &next() { return tiles[turn ^ 1]; }

  void find(Tile<KV> &tile, const Attend &call, const Item &item, int64_t first_key) {
    const Batch &batch = call.batch;
    const Row row(call.cache, batch.slots[item.seq], call.layer, item.head);
    tile.find(call, row, first_key, item.last_key, batch.position[batch.starts[item.seq] + item.first_query],
              keys_at_once(item.num_queries * call.group()));
  }
};

/// Multiply a row of sums by a factor.
void scale_row(float *row, int64_t n, float factor) {
  for (int64_t d = 0; d < n; d += WIDTH) store(row + d, load(row + d) * factor);
}

/// Write the finished attention of one token and query head.
inline void finish(const Attend &call, float *outputs, float *statistics, int64_t token, int64_t query_head, float *sums,
            float most, float mass) {
  const int dim = static_cast<int>(call.cache.head_dim), padded = round_up(dim, WIDTH);
  const int64_t at = token * call.num_query_heads + query_head;
  if (call.sinks) {
    const float sink = call.sinks[query_head], higher = std::max(most, sink);
    const float factor = std::exp(most - higher);
    scale_row(sums, padded, factor);
    mass = mass * factor + std::exp(sink - higher);
    most = higher;
  }
  const float inverse = mass > 0 ? 1.0f / mass : 0.0f;
  statistics[2 * at] = most;
  statistics[2 * at + 1] = inverse;
  with_act(call.dtype, [&](auto type) {
    using Act = decltype(type);
    Act *out = reinterpret_cast<Act *>(call.out) + at * dim;
    for (int d = 0; d < dim; d += WIDTH) {
      const vf x = load(sums + d) * inverse;
      if (d + WIDTH <= dim)
        store(out + d, x);
      else
        store_part(out + d, x, dim - d);
      if (outputs) store(outputs + at * padded + d, x);
    }
  });
}

/// Ask for some queries of the query heads of one KV head.
inline void ask_for_queries(const Attend &call, int64_t token, int64_t count, int64_t first_head) {
  asm volatile("");  // see ask_for_scores
  const int64_t width = bytes_of(call.dtype), stride = call.q.token_stride * width, bytes = call.cache.head_dim * width;
  for (int64_t head = first_head; head < first_head + call.group(); ++head) {
    const char *query = call.q.data + token * stride + head * call.q.head_stride * width;
    for (int64_t i = 0; i < count; ++i, query += stride)
      for (int64_t d = 0; d < bytes; d += LINE<char>) __builtin_prefetch(query + d, 0, 2);
  }
}

/// Ask for the memory that the finished attention of some tokens goes to, of the query heads of one KV head.
inline void ask_for_outputs(const Attend &call, const float *statistics, int64_t token, int64_t count, int64_t first_head) {
  asm volatile("");  // see ask_for_scores
  const int64_t bytes = call.cache.head_dim * bytes_of(call.dtype);
  for (int64_t at = token * call.num_query_heads + first_head; count > 0; --count, at += call.num_query_heads) {
    const char *out = call.out + at * bytes;
    for (int64_t d = 0; d < call.group() * bytes; d += LINE<char>) __builtin_prefetch(out + d, 1);
    __builtin_prefetch(statistics + 2 * at, 1);
  }
}

/// Where the weight of the j-th key is kept: TILE of them lie side by side, and the next ones `apart` floats on.
float *kept_at(float *kept, int j, int64_t apart) { return kept + j / TILE * apart + j % TILE; }

/// Fold a tile's logits of one query, times `scale`, into its running softmax; they become weights.
///
/// highest: the largest of the logits; those of KVs that the query does not see are NEVER. kept: where the weights are kept
/// too (kept_at), or null.
template <class Operand>
void fold(const float *logits, Operand *weights, float *sums, float &most, float &mass, int width, int64_t padded,
          float highest, float scale, float *kept, int64_t apart) {
  const float scaled = highest * scale, higher = std::max(most, scaled);
  if (higher == NEVER) {  // this query sees none of the tile, nor anything before it
    for (int j = 0; j < width; j += WIDTH) {
      store(weights + j, vf{});
      if (kept) store(kept_at(kept, j, apart), broadcast(UNSEEN));
    }
    return;
  }
  if (higher > most) {
    const float factor = most == NEVER ? 0.0f : std::exp(most - higher);
    scale_row(sums, padded, factor);
    mass *= factor;
    most = higher;
  }
  // e^(x scale - higher) as a power of 2. The weight of the largest logit is 1 to the last bit: a KV alone is the output.
  const float scale2 = scale * LOG2_E, higher2 = higher == scaled ? highest * scale2 : higher * LOG2_E;
  vf total{};
  for (int j = 0; j < width; j += WIDTH) {
    const vf x = load(logits + j), p = vexp2(rounded_product(x, scale2) - higher2);
    total += p;
    store(weights + j, p);
    if (kept) store(kept_at(kept, j, apart), x > NEVER ? p : broadcast(UNSEEN));
  }
  mass += horizontal_sum(total);
}

/// Ask for the vectors `first` to n of the next tile, which a shorter present one does not ask for in passing.
template <class KV>
void ask_for_rest(const KV *const *next, int first, int n, int dim) {
  asm volatile("");  // see ask_for_scores
  for (int j = first; j < n; ++j)
    for (int d = 0; d < dim; d += LINE<KV>) __builtin_prefetch(next[j] + d, 0, 2);
}

/// Tiles of an item that are left when its thread takes the next item: few, for the threads to end together, but what the
/// tables say of that item has to arrive.
constexpr int64_t TILES_BEFORE_NEXT = 2;

/// Returns the next item. waiting: the scores of a row before, worked out meanwhile as far as the item goes. kept_weights:
/// where the item's weights are kept, or null.
template <class KV, class Operand>
const Item *attend_item(const Attend &call, const Item &item, Walk &walk, Lookahead<KV> &ahead,
                        std::optional<KeptScores<KV>> &waiting, const Scratch<Operand> &scratch, float *partials,
                        float *kept_weights, float *outputs, float *statistics) {
  const Cache &cache = call.cache;
  const Batch &batch = call.batch;
  const int dim = static_cast<int>(cache.head_dim), padded = round_up(dim, WIDTH);
  const int64_t group = call.group();
  const int rows = static_cast<int>(item.num_queries * group);
  const int64_t token = batch.starts[item.seq] + item.first_query;
  const Row row(cache, batch.slots[item.seq], call.layer, item.head);
  // How many keys the item's first query sees; each further one sees one more.
  const int64_t sees = row.length - batch.counts[item.seq] + item.first_query + 1;

  const bool direct = rows <= MOST_DIRECT_ROWS;
  const bool values = item.read || outputs;
  const int64_t at_once = direct ? item.num_queries : std::max<int64_t>(1, ROWS_AT_ONCE / group);
  // Logits of nearly every model are only scaled, which needs no pass of its own.
  const bool only_scales = call.scale > 0 && call.softcap == 0 && call.window == 0;
  const float scale_before = only_scales ? 1.0f : call.scale, scale_after = only_scales ? call.scale : 1.0f;
  pack_queries(call, token, item.num_queries, item.head, scratch.queries);
  std::fill(scratch.most, scratch.most + rows, NEVER);
  std::fill(scratch.mass, scratch.mass + rows, 0.0f);
  std::fill(scratch.sums, scratch.sums + rows * padded, 0.0f);

  // Stores of finished rows wait for memory, but among products nobody waits for them.
  int64_t finished = 0;
  const auto finish_until = [&](int64_t end) {
    for (; finished < end; ++finished) {
      float *sums = scratch.sums + finished * padded;
      if (direct) put_in_order<Operand>(sums, padded);
      finish(call, outputs, statistics, token + finished / group, item.head * group + finished % group, sums,
                 scratch.most[finished], scratch.mass[finished]);
    }
  };

  if (!ahead.found) ahead.find(ahead.now(), call, item, item.first_key);
  const int keys = keys_at_once(rows);
  const Item *next_item = nullptr;
  bool took_next = false;
  const auto take_next = [&] {
    next_item = walk.next(), took_next = true;
    if (next_item) Row(cache, batch.slots[next_item->seq], call.layer, next_item->head).ask(next_item->first_key);
  };
  // Tiles of other sizes are not asked for in passing.
  const auto alike = [&] { return next_item && keys_at_once(next_item->num_queries * group) == keys; };
  const int64_t apart = kept_size(rows);
  for (int64_t first = item.first_key; first < item.last_key; first += keys, ahead.turn ^= 1) {
    Tile<KV> &tile = ahead.now(), &next = ahead.next();
    const bool more = first + keys < item.last_key, ends = !more && item.partial < 0;
    if (!took_next && first + TILES_BEFORE_NEXT * keys >= item.last_key) take_next();
    if (more)
      ahead.find(next, call, item, first + keys);
    else if (alike())
      ahead.find(next, call, *next_item, next_item->first_key);
    const int width = round_up(tile.n, WIDTH);
    const bool scattered = tile.scattered();
    float *kept = kept_weights ? kept_weights + (first - item.first_key) / TILE * apart : nullptr;
    if (tile.out_of_sight) {
      for (int j = 0; kept && j < tile.n; j += TILE, kept += apart) {
        std::fill(kept, kept + rows * TILE, UNSEEN);
        std::fill(kept + rows * TILE, kept + rows * (TILE + 1), NEVER);
      }
      continue;
    }
    // What is asked for among the products with keys, and with values.
    const KV *const *early = direct && values ? next.early() : next.key, *const *late = direct ? next.late() : next.value;
    ask_for_rest(early, width, next.n, dim);
    if (values) ask_for_rest(late, width, next.n, dim);
    if (!direct) {
      for (int j = 0; j < tile.n; j += TILE)
        pack_keys(tile.key + j, next.key + j, std::min(tile.n - j, TILE), dim, scratch.keys + j * padded);
      if (values) pack_values(tile.value, next.value, tile.n, dim, scratch.values);
    }
    int64_t queries = 0;
    for (int64_t query = 0; query < item.num_queries; query += queries) {
      queries = std::min(at_once, item.num_queries - query);
      const int64_t first_row = query * group, some = queries * group;
      // Of the tile's keys, what the last of these queries sees.
      const int seen = static_cast<int>(std::min<int64_t>(tile.n, sees + query + queries - 1 - first));
      if (ends && values) ask_for_outputs(call, statistics, token + query, queries, item.head * group);
      if (!more && next_item)
        ask_for_queries(call, batch.starts[next_item->seq] + next_item->first_query + query,
                            std::min(queries, next_item->num_queries - query), next_item->head * group);
      if (seen <= 0) continue;
      const int seen_width = round_up(seen, WIDTH);
      const Operand *packed = scratch.queries + first_row * padded;
      float *sums = scratch.sums + first_row * padded;
      if (direct)
        direct_products<Product>(some, tile.key, early, tile.n, scattered, dim, packed, padded, scratch.logits);
      else
        for (int j = 0; j < seen_width; j += TILE)
          product(some, std::min(seen_width - j, TILE), padded, packed, padded, scratch.keys + j * padded, TILE,
                  scratch.logits + j, keys, false);
      for (int64_t i = 0; i < some; ++i) {
        const int64_t r = first_row + i, asking = query + i / group;
        const int64_t visible = std::min<int64_t>(tile.n, sees + asking - first);
        const bool all_seen = visible == seen_width;
        float *logits = scratch.logits + i * keys, *kept_row = kept ? kept + r * TILE : nullptr;
        const float highest = only_scales && all_seen ? highest_logit(logits, seen_width)
                                                      : finish_logits(logits, seen_width, visible, call, scale_before,
                                                                      tile.position, batch.position[token + asking]);
        fold(logits, scratch.weights + i * keys, sums + i * padded, scratch.most[r], scratch.mass[r], seen_width,
             values ? padded : 0, highest, scale_after, kept_row, apart);
        for (int j = seen_width; kept && j < width; j += WIDTH) store(kept_at(kept_row, j, apart), broadcast(UNSEEN));
      }
      // By now the next keys are on their way, which this does not need to wait for.
      if (waiting && !waiting->finish_tile()) waiting.reset();
      if (!values) continue;
      if (direct)
        direct_sums(some, tile.value, late, tile.n, dim, scratch.weights, padded, sums);
      else
        product(some, padded, round_up(seen, pair_size<Operand>()), scratch.weights, keys, scratch.values, padded, sums,
                padded, true);
      if (ends) finish_until(first_row + some);
    }
    for (int j = 0; kept && j < tile.n; j += TILE, kept += apart)
      std::copy(scratch.most, scratch.most + rows, kept + rows * TILE);
  }

  if (!took_next) take_next();
  ahead.found = item.first_key < item.last_key && alike();

  if (item.partial < 0) {
    finish_until(rows);
    return next_item;
  }
  for (int r = 0; r < rows; ++r) {
    float *to = partials + item.partial + r * (padded + 2), *sums = scratch.sums + r * padded;
    if (direct) put_in_order<Operand>(sums, padded);
    std::copy(sums, sums + padded, to);
    to[padded] = scratch.most[r];
    to[padded + 1] = scratch.mass[r];
  }
  return next_item;
}

/// Merge the items of the same queries, in the order of their keys.
inline void merge_items(const Attend &call, const Merge &merge, float *partials, float *outputs, float *statistics) {
  const int64_t group = call.group(), padded = round_up(static_cast<int>(call.cache.head_dim), WIDTH);
  const int64_t rows = merge.num_queries * group, size = rows * (padded + 2);
  for (int64_t r = 0; r < rows; ++r) {
    float *sums = partials + merge.partial + r * (padded + 2);
    float most = sums[padded], mass = sums[padded + 1];
    for (int64_t i = 1; i < merge.num_partials; ++i) {
      const float *other = sums + i * size;
      const float higher = std::max(most, other[padded]);
      if (higher == NEVER) continue;
      const float ours = std::exp(most - higher), theirs = std::exp(other[padded] - higher);
      for (int64_t d = 0; d < padded; d += WIDTH) store(sums + d, load(sums + d) * ours + load(other + d) * theirs);
      mass = mass * ours + other[padded + 1] * theirs;
      most = higher;
    }
    finish(call, outputs, statistics, call.batch.starts[merge.seq] + merge.first_query + r / group,
               merge.head * group + r % group, sums, most, mass);
  }
}

template <class KV, class Operand>
void attend_as(const Attend &call, Workspace &work) {
  const int64_t padded = round_up(static_cast<int>(call.cache.head_dim), WIDTH);
  const Plan plan(call);
  float *partials = work.partials.get<float>(plan.partials);
  float *kept = work.kept.get<float>(plan.kept);
  float *statistics = statistics_of(call, work);
  float *outputs = plan.keeps_outputs ? work.outputs.get<float>(call.batch.num_tokens() * call.num_query_heads * padded)
                                      : nullptr;
  float *told = work.told.get<float>(plan.told);
  work.sums.get<float>(plan.sums);
  if (static_cast<int>(work.threads.size()) < call.threads) work.threads.resize(call.threads);
  std::atomic<size_t> taken = 0;
#pragma omp parallel num_threads(call.threads)
  {
    Buffer &memory = work.threads[omp_get_thread_num()];
    const Scratch<Operand> scratch(memory, plan.max_rows, padded, 2 * plan.most_kept + plan.most_told);
    const TileRegisters<Operand> registers(plan.max_rows);  // of the passes of `observe` too
    Walk walk(plan, taken);
    Lookahead<KV> ahead;
    float *weights_of_waiting = scratch.extra + plan.most_kept, *weights_to_finish = scratch.extra;
    std::optional<KeptScores<KV>> waiting;
    const auto finish_waiting = [&] {
      while (waiting && waiting->finish_tile()) continue;
      waiting.reset();
    };
    for (const Item *item = walk.next(), *next; item; item = next) {
      const Unit *unit = item->unit >= 0 ? &plan.units[item->unit] : nullptr;
      const bool tells = item->told >= 0, finishes = unit && !tells;
      float *weights = finishes         ? weights_to_finish
                       : tells          ? scratch.extra + 2 * plan.most_kept
                       : item->kept >= 0 ? kept + item->kept
                                        : nullptr;
      next = attend_item<KV>(call, *item, walk, ahead, waiting, scratch, partials, weights, outputs, statistics);
      finish_waiting();
      if (finishes) {
        waiting.emplace(call, *unit, item->first_key, item->last_key, weights, statistics, outputs);
        std::swap(weights_to_finish, weights_of_waiting);
        if (outputs) finish_waiting();  // their values are still in the cache
      } else if (tells) {
        observe_item(call, *unit, *item, weights, statistics, told + item->told);
      }
    }
    finish_waiting();
#pragma omp barrier
    if (!plan.merges.empty()) {
#pragma omp for schedule(dynamic, 8)
      for (size_t i = 0; i < plan.merges.size(); ++i)
        merge_items(call, plan.merges[i], partials, outputs, statistics);
    }
    if (!plan.units.empty()) observe<KV, Operand>(call, plan, work, memory);
  }
}

}  // namespace

void attend(const Attend &call, Workspace &work) {
  // Activations are read and written at the ends of an item: between them all is KVs and operands.
  with_act_and_kv(call.dtype, call.cache.dtype, [&](auto act, auto kv) {
    attend_as<decltype(kv), typename OperandOf<decltype(act), decltype(kv)>::type>(call, work);
  });
}

}  // namespace winnow::WINNOW_ISA
