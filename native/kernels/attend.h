// What the passes of attention share: the plan of a call, tiles of a row, and one query's logits.
//
// A call runs in passes, each a parallel loop over independent work:
// 1. attention of every item, the scores of rows that are one item, and partial scores of the items of a chunk,
// 2. merging items of the same queries,
// 3. the other scores,
// 4. smoothing scores.
// How the work is cut depends on the batch alone, never on the number of threads, so neither do the results.
#pragma once

#include <limits>

#include "../types.h"
#include "hadamard.h"
#include "pack.h"
#include "tile_product.h"
#include "wide.h"

namespace winnow::WINNOW_ISA {

constexpr float NEG_INF = -std::numeric_limits<float>::infinity();

/// Rows that read a tile once it is packed: queries times query heads of a group. Keeps the sums of an item in the L2 cache.
constexpr int64_t ITEM_ROWS = 96;
/// Rows whose logits are computed together: they fit L1, and fill tile registers.
#if defined(WINNOW_TILES)
constexpr int64_t ROWS_AT_ONCE = 96;
#else
constexpr int64_t ROWS_AT_ONCE = 24;
#endif
/// Keys of an item, so that few long rows still occupy many threads. Many rows reuse a tile more, so they split less.
constexpr int64_t FEW_ROWS = 32, FEW_ROWS_KEYS = 2048, MANY_ROWS_KEYS = 8192;

/// Queries of an item. Twice as many over a short row, whose weights for the scores take the same memory.
inline int64_t queries_of_item(int64_t group, int64_t row_length) {
  const int64_t rows = row_length <= MANY_ROWS_KEYS / 2 ? 2 * ITEM_ROWS : ITEM_ROWS;
  return std::max<int64_t>(1, rows / group);
}

/// Keys that rows meet at once, as many for all items of a batch. Few rows wait for memory, and wider tiles would prefetch it
/// in larger bursts.
inline int keys_at_once(int64_t rows) { return rows <= FEW_ROWS ? TILE : WIDE_TILE; }

/// Rows times keys of an item batch, where rows are many; the least number of batches, so that threads end together.
constexpr int64_t BATCH_WORK = ITEM_ROWS * 2048, MIN_BATCHES = 32;

/// Some queries of a sequence over some keys of one of its rows.
struct WorkItem {
  int64_t seq, head, first_query, num_queries;
  int64_t first_key, last_key;
  int64_t partial;  // where its unfinished result goes, in floats; -1: it is the only item of these queries
  int64_t kept;     // where its weights are kept for the scores, in floats; -1: nowhere, or in its thread's memory
  int64_t score_row;       // that it finishes, being a whole row, or adds partial scores to; -1: none
  int64_t partial_scores;  // where those go, in floats; -1: it has none
  bool read;        // whether its output is read; else it is for the scores alone
};

/// Items that a thread takes at once: [first, end).
struct ItemBatch {
  int64_t first, end;
};

/// Items of the same queries.
struct Merge {
  int64_t seq, head, first_query, num_queries;
  int64_t partial, num_partials;
};

/// A row whose scores change.
struct ScoreRow {
  int64_t seq, head, first_query;  // queries before it do not count
  int64_t kept;                    // the weights of its only query, in floats; -1: nowhere
  int64_t sums;                    // where its sums lie, in floats
  const AttentionObserver *observer;
  int64_t first_item, last_item;   // that have partial scores; none: probabilities are computed anew
};

struct Plan {
  std::vector<WorkItem> items;
  std::vector<ItemBatch> item_batches;
  std::vector<Merge> merges;
  std::vector<ScoreRow> score_rows;
  std::vector<std::pair<int64_t, int64_t>> observed;  // (score row, first key) of the key ranges that `observe` works on
  int64_t partials = 0, kept = 0, sums = 0, partial_scores = 0;  // floats
  // Floats that an item keeps in its thread's memory: a decoding row to finish, and an item of a chunk for partial scores.
  int64_t max_row_weights = 0, max_chunk_weights = 0;
  int64_t max_rows = 0;

  explicit Plan(const Attend &call);

 private:
  void batch_items(int64_t group);
};

/// The weights of a tile that attention keeps for the scores: e^(logit - row_max) for [rows, TILE], MASKED where the query does
/// not see a KV, and then `row_max` for [rows]. So no exponential is computed twice.
constexpr float MASKED = -1.0f;

inline int64_t kept_size(int64_t rows) { return rows * (TILE + 1); }

/// Keys of a piece of `observe`. Weights that were kept are soon read: a short piece would mostly wait for its first scores.
inline int64_t observed_keys(bool kept) { return kept ? FEW_ROWS_KEYS : 4 * TILE; }

/// Whether the query heads of a group become one number for each query, not at the end.
inline bool grouped_at_once(const AttentionObserver &observer) { return observer.group == Group::max && !observer.replace; }

/// Query heads with partial scores of their own: where they are aggregated after all queries, and not by a sum.
inline int64_t partial_score_heads(const AttentionObserver &observer, int64_t group) {
  return observer.group == Group::max && observer.replace ? group : 1;
}

/// Terms that have a score to go to.
inline int64_t used_terms(const AttentionObserver &observer, const Cache &cache) {
  return std::min<int64_t>(observer.terms.size(), cache.num_accumulators);
}

inline bool has_term(const AttentionObserver &observer, int64_t terms, Term term) {
  return std::find(observer.terms.begin(), observer.terms.begin() + terms, term) != observer.terms.begin() + terms;
}

/// One thread's memory: operands and results of a tile.
template <class Operand>
struct Scratch {
  float *logits;      // [rows, keys_at_once]
  float *sums;        // [rows, padded]
  float *row_max, *row_sum; // [rows]: running maximum of the logits, and sum of e^(logit - maximum)
  Operand *queries;   // [rows, padded]
  Operand *weights;   // [rows, keys_at_once]
  Operand *keys;      // see pack_keys; one tile after the other
  Operand *values;    // see pack_values
  float *extra;       // of extra_size

  Scratch(Buffer &buffer, int64_t rows, int64_t padded, int64_t extra_size = 0) {
    int64_t bytes = 0;
    const auto reserve = [&bytes](int64_t n, int64_t width) {
      const int64_t at = bytes;
      bytes += (n * width + 63) / 64 * 64;
      return at;
    };
    const int64_t width = sizeof(Operand), keys_of = keys_at_once(rows), tile = keys_of * padded;
    const int64_t at[] = {reserve(rows * keys_of, 4), reserve(rows * padded, 4),     reserve(rows, 4),
                          reserve(rows, 4),           reserve(rows * padded, width), reserve(rows * keys_of, width),
                          reserve(tile, width),       reserve(tile, width),          reserve(extra_size, 4)};
    char *memory = buffer.get<char>(bytes);
    logits = reinterpret_cast<float *>(memory + at[0]);
    sums = reinterpret_cast<float *>(memory + at[1]);
    row_max = reinterpret_cast<float *>(memory + at[2]);
    row_sum = reinterpret_cast<float *>(memory + at[3]);
    queries = reinterpret_cast<Operand *>(memory + at[4]);
    weights = reinterpret_cast<Operand *>(memory + at[5]);
    keys = reinterpret_cast<Operand *>(memory + at[6]);
    values = reinterpret_cast<Operand *>(memory + at[7]);
    extra = reinterpret_cast<float *>(memory + at[8]);
  }
};

/// Whether WIDTH slots from the first of a block on, or from WIDTH after one, lie side by side.
inline bool adjacent(const Cache &cache) { return cache.block_size % WIDTH == 0; }

/// Positions of the KVs in n slots of a row, the first one as `adjacent` says.
inline void positions_of(const Cache &cache, const int64_t *slot, int64_t n, int32_t *out) {
  int64_t i = 0;
  if (adjacent(cache))
    for (; i + WIDTH <= n; i += WIDTH) store_vector(out + i, load_vector<vi>(cache.position + slot[i]));
  for (; i < n; ++i) out[i] = cache.position[slot[i]];
}

/// Biases of the KVs in n slots of a row, as positions_of, and 0 up to whole vectors.
inline void biases_of(const Cache &cache, const int64_t *slot, int64_t n, float *out) {
  const auto at = [&](int64_t i) {
    return reinterpret_cast<const f16 *>(cache.bias.at(slot[i] / cache.block_size, slot[i] % cache.block_size));
  };
  int64_t i = 0;
  if (adjacent(cache))
    for (; i + WIDTH <= n; i += WIDTH) store(out + i, load(at(i)));
  for (; i < n; ++i) out[i] = to_float(*at(i));
  for (; i % WIDTH; ++i) out[i] = 0.0f;
}

/// Slots of the KVs [first, first + n) of a row, as far as positions_of and update_accumulators look at them.
inline void slots_to_read(const Cache &cache, const Row &row, int64_t first, int64_t n, int64_t *out) {
  const int64_t by_vectors = adjacent(cache) ? n / WIDTH * WIDTH : 0;
  row.runs(first, n, [=](int64_t i, int64_t count, int64_t slot) {
    int64_t j = 0;
    for (; j < count && i + j < by_vectors; j += WIDTH) out[i + j] = slot + j;
    for (; j < count; ++j) out[i + j] = slot + j;
  });
}

/// Addresses of KVs of a row that are computed at once. Pointers past the last repeat it: they read finite numbers, of weight
/// 0.
template <class KV>
struct Tile {
  int n = 0;
  bool outside_window = false;  // all of them
  int64_t slot[WIDE_TILE];
  int32_t position[WIDE_TILE];  // where attention reads_positions
  float bias[WIDE_TILE];  // see biases
  const KV *key[WIDE_TILE], *value[WIDE_TILE];
  const KV *in_memory_order[2 * TILE];  // keys and values of TILE adjacent KVs
  const f16 *key_scale[WIDE_TILE], *value_scale[WIDE_TILE];  // where KVs are coded
  WideKVs wide;  // where KVs are coded

  /// query_position: of the first query that reads the tile; the window of any other begins later. size: KVs of a tile.
  void find(const Attend &call, const Row &row, int64_t first, int64_t last, int64_t query_position, int size = TILE) {
    const Cache &cache = call.cache;
    n = static_cast<int>(std::min<int64_t>(last - first, size));
    if (n == 0) return;
    row.runs_in_blocks(first, n, [&](int64_t i, int64_t count, int64_t block, int64_t offset) {
      const int64_t at = block * cache.block_size + offset;
      for (int64_t j = 0; j < count; ++j) slot[i + j] = at + j;
      if (cache.bias.data) __builtin_prefetch(cache.bias.at(block, offset));
      if constexpr (is_coded<KV>)
        find_coded(cache, i, count, block, offset);
      else
        find_plain(cache, i, count, block, offset);
    });
    if constexpr (is_coded<KV>) wide.find(cache, row, slot, n);
    std::fill(slot + n, slot + size, slot[n - 1]);
    std::fill(key + n, key + size, key[n - 1]);
    std::fill(value + n, value + size, value[n - 1]);
    if (n == TILE && !scattered()) memory_order(cache.block_size - first % cache.block_size, cache.block_size);
    if (call.reads_positions()) positions(cache, position);
    if (call.window > 0)
      outside_window = query_position - *std::max_element(position, position + n) >= call.reach(query_position);
  }

  /// Whether its blocks are not adjacent in memory. Hardware prefetchers follow several streams at once, but each ends with its
  /// block; so keys of such tiles are best read from several blocks in turn.
  bool scattered() const { return n == TILE && slot[TILE / 2] != slot[0] + TILE / 2; }

  /// What to prefetch during the products with the previous keys, and with the previous values: together all keys and values.
  /// Hardware prefetchers reach further if that follows memory order, where a block's values lie right behind its keys.
  const KV *const *first_half() const { return n == TILE && !scattered() ? in_memory_order : key; }
  const KV *const *second_half() const { return n == TILE && !scattered() ? in_memory_order + TILE : value; }

  /// What is decoded, where KVs are coded.
  CodedTile coded_keys() const { return {key, key_scale, slot, n}; }
  CodedTile coded_values() const { return {value, value_scale, slot, n}; }

  /// What is added to logits of its keys, or null. Read when it is needed, as by then it has been fetched.
  const float *biases(const Cache &cache) {
    if (!cache.bias.data) return nullptr;
    biases_of(cache, slot, n, bias);
    return bias;
  }

  void positions(const Cache &cache, int32_t *out) const {
    positions_of(cache, slot, n, out);
    std::fill(out + n, out + round_up(n, TILE), out[n - 1]);
  }

 private:
  void find_plain(const Cache &cache, int64_t i, int64_t count, int64_t block, int64_t offset) {
    const int64_t vector = cache.at(block, offset);
    const KV *k = reinterpret_cast<const KV *>(cache.k) + vector, *v = reinterpret_cast<const KV *>(cache.v) + vector;
    for (int64_t j = 0; j < count; ++j) key[i + j] = k + j * cache.head_dim, value[i + j] = v + j * cache.head_dim;
  }

  void find_coded(const Cache &cache, int64_t i, int64_t count, int64_t block, int64_t offset) {
    const auto find = [&](const CodedVectors &vectors, const KV **code, const f16 **scale) {
      const KV *first_code = code_at(vectors, block, offset);
      const f16 *first_scale = scale_at(vectors, block, offset);
      const int64_t scales = vectors.scale.slot_bytes / 2;
      for (int64_t j = 0; j < count; ++j)
        code[i + j] = first_code + j * vectors.code.slot_bytes, scale[i + j] = first_scale + j * scales;
    };
    find(cache.keys, key, key_scale);
    find(cache.values, value, value_scale);
  }

  /// Fills in_memory_order. run: KVs in the first block; each further block has `size`.
  void memory_order(int64_t run, int64_t size) {
    for (int64_t i = 0; i < TILE; i += run, run = size) {
      run = std::min(run, TILE - i);
      std::copy(key + i, key + i + run, in_memory_order + 2 * i);
      std::copy(value + i, value + i + run, in_memory_order + 2 * i + run);
    }
  }
};

inline vi lanes() {
  vi out;
  for (int i = 0; i < WIDTH; ++i) out[i] = i;
  return out;
}

/// Scale, soft-cap, bias and mask a query's raw logits of a tile in place; returns the largest.
///
/// visible: how many of the tile's first keys the query may see by their order. scale: what is left to scale. position: of the
/// tile's keys, read where attention reads_positions. slope: of the query head. bias: of the tile's keys, or null.
inline float finish_logits(float *logits, int n, int64_t visible, const AttentionSpec &call, float scale,
                           const int32_t *position, int64_t query_position, float slope, const float *bias = nullptr) {
  vf highest = broadcast(NEG_INF);
  const vi lane = lanes();
  const int32_t reach = call.window > 0 ? static_cast<int32_t>(call.reach(query_position)) : 0;
  for (int j = 0; j < n; j += WIDTH) {
    vf x = load(logits + j) * scale;
    if (call.softcap > 0) x = call.softcap * vtanh(x / call.softcap);
    if (bias) x += load(bias + j);
    if (slope != 0.0f)
      x -= slope * __builtin_convertvector(static_cast<int32_t>(query_position) - load_vector<vi>(position + j), vf);
    if (visible < j + WIDTH) x = lane + j < static_cast<int32_t>(visible) ? x : broadcast(NEG_INF);
    if (call.window > 0) {
      const vi age = static_cast<int32_t>(query_position) - load_vector<vi>(position + j);
      x = age < reach ? x : broadcast(NEG_INF);
    }
    store(logits + j, x);
    highest = vmax(highest, x);
  }
  return horizontal_max(highest);
}

/// The largest of a query's raw logits, where they are only scaled.
inline float highest_logit(const float *logits, int n) {
  vf highest = load(logits);
  for (int j = WIDTH; j < n; j += WIDTH) highest = vmax(highest, load(logits + j));
  return horizontal_max(highest);
}

/// Numbers [n, padded] as operands; `make` writes them as floats.
template <class Make>
inline void as_decoded([[maybe_unused]] int n, [[maybe_unused]] int padded, Decoded *out, Make make) {
  if constexpr (std::is_same_v<Decoded, float>) {
    make(out);
  } else {
    thread_local Buffer memory;
    float *x = memory.get<float>(int64_t{n} * padded);
    make(x);
    for (int i = 0; i < n * padded; i += WIDTH) store(out + i, load(x + i));
  }
}

/// Decode one side of a tile, or take what is kept wide of it: out [n, padded]. next: prefetched meanwhile.
inline void decode_side(const Cache &cache, const CodedVectors &side, const CodedTile &tile, const CodedTile &next,
                        const WideKVs &wide, const char *const *wide_vectors, int padded, Decoded *out) {
  const int dim = static_cast<int>(cache.head_dim);
  as_decoded(tile.n, padded, out, [&](float *x) {
    decode_tile(side, cache.block_size, dim, padded, tile, next, x);
    widen(wide, wide_vectors, dim, padded, side.rotation, x);
  });
}

inline void decode_keys(const Cache &cache, const Tile<Coded> &tile, const Tile<Coded> &next, int padded, Decoded *out) {
  decode_side(cache, cache.keys, tile.coded_keys(), next.coded_keys(), tile.wide, tile.wide.key, padded, out);
}

inline void decode_values(const Cache &cache, const Tile<Coded> &tile, const Tile<Coded> &next, int padded, Decoded *out) {
  decode_side(cache, cache.values, tile.coded_values(), next.coded_values(), tile.wide, tile.wide.value, padded, out);
}

/// Where decoded vectors lie, those from n on repeating the last; for products that read them in place.
struct DecodedTile {
  const Decoded *at[WIDE_TILE];

  DecodedTile(const Decoded *vectors, int n, int size, int padded) {
    for (int j = 0; j < size; ++j) at[j] = vectors + std::min(j, n - 1) * padded;
  }
};

/// Rotate rows of queries, [rows, padded], as coded keys are.
template <class Operand>
inline void rotate_queries(const Pool &cache, int64_t rows, int padded, Operand *queries) {
  const int dim = static_cast<int>(cache.head_dim), rotation = cache.coded ? static_cast<int>(cache.keys.rotation) : 1;
  if (rotation == 1) return;
  for (int64_t row = 0; row < rows; ++row, queries += padded) {
    if constexpr (std::is_same_v<Operand, float>)
      hadamard(queries, dim, rotation);
    else
      as_decoded(1, padded, queries, [&](float *x) {
        for (int d = 0; d < padded; d += WIDTH) store(x + d, load(queries + d));
        hadamard(x, dim, rotation);
      });
  }
}

/// Pack queries as rows of A, query by query, head by head of the group. They are rotated as keys are.
template <class Operand>
inline void pack_queries(const Attend &call, int64_t first_token, int64_t num_queries, int64_t head, Operand *out) {
  const int dim = static_cast<int>(call.cache.head_dim), padded = round_up(dim, WIDTH);
  with_act(call.dtype, [&](auto type) {
    using Act = decltype(type);
    const Act *q = reinterpret_cast<const Act *>(call.q.data);
    for (int64_t i = 0; i < num_queries; ++i)
      for (int64_t h = 0; h < call.group(); ++h)
        pack_query(q + (first_token + i) * call.q.token_stride + (head * call.group() + h) * call.q.head_stride, dim,
                   out + (i * call.group() + h) * padded);
  });
  rotate_queries(call.cache, num_queries * call.group(), padded, out);
}

/// Prefetch the accumulators of the keys that share a cache line, and their positions where near ones do not count. Into L2, as
/// KVs, which are prefetched at the same time: L1 has too few fill buffers for both.
inline void prefetch_accumulators(const Cache &cache, const AttentionObserver &observer, int64_t slot) {
  asm volatile("");  // GCC takes a function that only prefetches for one that does nothing, and leaves its calls out
  for (int64_t n = 0; n < cache.num_accumulators; ++n)
    __builtin_prefetch(cache.accumulators + n * cache.num_slots + slot, 0, 2);
  if (observer.exclude_first) __builtin_prefetch(cache.position + slot, 0, 2);
}

/// (largest logit, 1 / sum of e^(logit - largest)) of every token and query head, [T, num_query_heads, 2].
inline float *statistics_of(const Attend &call, Workspace &work) {
  return work.statistics.get<float>(call.batch.num_tokens() * call.num_query_heads * 2);
}

/// Partial scores from the queries of an item, out of the weights that it kept: sums for each of its tiles and terms,
/// [tiles, terms, partial_score_heads, TILE].
void observe_item(const Attend &call, const ScoreRow &score_row, const WorkItem &item, const float *kept_weights,
                  const float *statistics, float *partial_scores);

/// The scores of some keys of a row: the sum of its items' partial scores.
void add_partial_scores(const Attend &call, const Plan &plan, const ScoreRow &score_row, int64_t first_key,
                        int64_t last_key, const float *partial_scores);

/// Passes that change scores. Called by all threads of a team, after attention is complete.
template <class KV, class Operand>
void observe(const Attend &call, const Plan &plan, Workspace &work, Buffer &thread_memory);

}  // namespace winnow::WINNOW_ISA
