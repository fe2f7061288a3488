// The largest attention that a repetition's queries pay the KVs of their context (winnow.eviction.replay).
//
// A log probability is a logit minus the log of the query's sum, so the largest needs no exponential per KV. Logits of few
// queries at a time fit L2: computed once, read twice. Keys are packed once for all queries. A maximum does not depend on the
// order, so neither threads nor parts of a pass change it.
#include <omp.h>

#include <cmath>

#include "attend.h"

namespace winnow::WINNOW_ISA {

namespace {

/// The KVs that take part, as one sequence: the scored ones first.
struct Chosen {
  int64_t judged, count, tiles;
  std::vector<int32_t> position;  // and index in the row; of whole tiles, of which the last ones repeat the last

  explicit Chosen(const Replay &call) : judged(call.judged()) {
    const auto take = [&](int64_t first, int64_t last) {
      for (; first < last; ++first) position.push_back(static_cast<int32_t>(first));
    };
    take(0, call.head), take(call.start, call.end), take(call.context_len, last_query(call) + 1);
    count = static_cast<int64_t>(position.size()), tiles = (count + TILE - 1) / TILE;
    position.resize(tiles * TILE, position.back());
  }

  static int64_t last_query(const Replay &call) { return call.first + (call.count - 1) * call.every; }

  /// How many of them a query at a position sees by their order.
  int64_t seen(const Replay &call, int64_t query_position) const { return count - (last_query(call) - query_position); }

  std::vector<int64_t> slots(const Replay &call, int64_t head) const {
    const Row row(call.cache, call.slot, call.layer, head);
    std::vector<int64_t> all(position.back() + 1), out(position.size());
    row.slots(0, position.back() + 1, all.data());
    std::transform(position.begin(), position.end(), out.begin(), [&](int32_t at) { return all[at]; });
    return out;
  }
};

/// One thread's memory for the rows of an item: queries times query heads of a group.
template <class Operand>
struct ItemMemory {
  float *logits;  // [tiles, rows, TILE]
  float *sums;    // [rows, WIDTH]
  float *row_max;  // [rows], then what is subtracted from a row's logits
  Operand *queries;

  ItemMemory(Buffer &buffer, int64_t rows, int64_t tiles, int64_t padded) {
    const int64_t logits_size = rows * tiles * TILE, sums_size = rows * WIDTH, row_max_size = (rows + 15) / 16 * 16;
    logits = buffer.get<float>(logits_size + sums_size + row_max_size + rows * padded);
    sums = logits + logits_size, row_max = sums + sums_size;
    queries = reinterpret_cast<Operand *>(row_max + row_max_size);
  }
};

/// Raise `largest`, [judged in whole tiles], to the log probabilities of `queries` from `query` on.
template <class Operand>
void observe_queries(const Replay &call, const Chosen &chosen, int64_t head, int64_t query, int64_t queries,
                     const Operand *keys, const ItemMemory<Operand> &memory, float *largest) {
  const int dim = static_cast<int>(call.cache.head_dim), padded = round_up(dim, WIDTH);
  const int64_t group = call.group();
  const int rows = static_cast<int>(queries * group);
  with_act(call.dtype, [&](auto type) {
    using Act = decltype(type);
    const Act *q = reinterpret_cast<const Act *>(call.q.data);
    for (int r = 0; r < rows; ++r)
      pack_query(q + (query + r / group) * call.q.token_stride + (head * group + r % group) * call.q.head_stride, dim,
                 memory.queries + r * padded);
  });
  rotate_queries(call.cache, rows, padded, memory.queries);
  const auto position = [&](int64_t r) { return call.first + (query + r / group) * call.every; };
  const int64_t seen = chosen.seen(call, position(rows - 1)), tiles = (seen + TILE - 1) / TILE;
  const auto width = [&](int64_t tile) {
    return round_up(static_cast<int>(std::min<int64_t>(seen - tile * TILE, TILE)), WIDTH);
  };

  for (int r = 0; r < rows; ++r) memory.row_max[r] = call.sinks ? call.sinks[head * group + r % group] : NEG_INF;
  for (int64_t tile = 0; tile < tiles; ++tile) {
    float *logits = memory.logits + tile * rows * TILE;
    product(rows, width(tile), padded, memory.queries, padded, keys + tile * TILE * padded, TILE, logits, TILE, false);
    for (int r = 0; r < rows; ++r) {
      const int64_t visible = chosen.seen(call, position(r)) - tile * TILE;
      const float highest = finish_logits(logits + r * TILE, width(tile), visible, call, call.scale,
                                          chosen.position.data() + tile * TILE, position(r),
                                          call.slope(head * group + r % group));
      memory.row_max[r] = std::max(memory.row_max[r], highest);
    }
  }

  for (int r = 0; r < rows; ++r) store(memory.sums + r * WIDTH, vf{});
  for (int64_t tile = 0; tile < tiles; ++tile) {
    for (int r = 0; r < rows; ++r) {
      const float *logits = memory.logits + (tile * rows + r) * TILE;
      const vf off = broadcast(memory.row_max[r]);
      vf sum = load(memory.sums + r * WIDTH);
      for (int j = 0; j < width(tile); j += WIDTH) sum += vexp2((load(logits + j) - off) * LOG2_E);
      store(memory.sums + r * WIDTH, sum);
    }
  }
  for (int r = 0; r < rows; ++r) {
    float &row_max = memory.row_max[r], sum = horizontal_sum(load(memory.sums + r * WIDTH));
    if (call.sinks) sum += std::exp(call.sinks[head * group + r % group] - row_max);
    row_max += std::log(sum);
  }

  for (int64_t first = 0; first < chosen.judged; first += TILE) {
    const float *logits = memory.logits + first * rows;
    for (int j = 0; j < TILE && first + j < chosen.judged; j += WIDTH) {
      vf best = load(largest + first + j);
      for (int64_t h = 0; h < group; ++h) {
        vf of_head = broadcast(NEG_INF);
        for (int r = static_cast<int>(h); r < rows; r += static_cast<int>(group))
          of_head = vmax(of_head, load(logits + r * TILE + j) - memory.row_max[r]);
        best = vmax(best, of_head);
      }
      store(largest + first + j, best);
    }
  }
}

template <class KV, class Operand>
void replay_as(const Replay &call, Workspace &work) {
  const Cache &cache = call.cache;
  const int dim = static_cast<int>(cache.head_dim), padded = round_up(dim, WIDTH);
  const Chosen chosen(call);
  const int64_t heads = cache.num_heads, group = call.group();
  const int64_t queries = std::max<int64_t>(1, ROWS_AT_ONCE / group), items = (call.count + queries - 1) / queries;
  const int64_t rows = queries * group, key_size = chosen.tiles * TILE * padded;
  const int64_t width = (chosen.judged + TILE - 1) / TILE * TILE;
  Operand *keys = work.partials.get<Operand>(heads * key_size);
  float *largest = work.sums.get<float>(call.threads * heads * width);
  std::fill(largest, largest + call.threads * heads * width, NEG_INF);
  if (static_cast<int>(work.threads.size()) < call.threads) work.threads.resize(call.threads);
  std::vector<std::vector<int64_t>> slots;
  for (int64_t head = 0; head < heads; ++head) slots.push_back(chosen.slots(call, head));
#pragma omp parallel num_threads(call.threads)
  {
    const int thread = omp_get_thread_num();
    const ItemMemory<Operand> memory(work.threads[thread], rows, chosen.tiles, padded);
    const TileRegisters<Operand> registers(rows);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < heads * chosen.tiles; ++i) {
      const int64_t head = i / chosen.tiles, tile = i % chosen.tiles;
      const int64_t *slot = slots[head].data() + tile * TILE;
      Operand *packed = keys + head * key_size + tile * TILE * padded;
      if constexpr (is_coded<KV>) {
        std::vector<Decoded> decoded(TILE * padded);
        as_decoded(TILE, padded, decoded.data(),
                   [&](float *x) { decode_slots(cache.keys, cache, slot, TILE, padded, x); });
        const DecodedTile at(decoded.data(), TILE, TILE, padded);
        pack_keys(at.at, at.at, TILE, padded, packed);
      } else {
        const KV *at[TILE];
        for (int j = 0; j < TILE; ++j) at[j] = reinterpret_cast<const KV *>(cache.k) + cache.at(slot[j]);
        pack_keys(at, at, TILE, dim, packed);
      }
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < heads * items; ++i) {
      const int64_t head = i / items, query = (i % items) * queries;
      observe_queries(call, chosen, head, query, std::min(queries, call.count - query), keys + head * key_size,
                          memory, largest + (thread * heads + head) * width);
    }
#pragma omp for schedule(static)
    for (int64_t head = 0; head < heads; ++head)
      for (int64_t j = 0; j < chosen.judged; ++j) {
        float best = NEG_INF;
        for (int t = 0; t < call.threads; ++t) best = std::max(best, largest[(t * heads + head) * width + j]);
        float &accumulator = cache.accumulators[slots[head][j]];
        accumulator = std::max(accumulator, std::exp(best));
      }
  }
}

}  // namespace

void replay(const Replay &call, Workspace &work) {
  if (call.count == 0) return;
  with_kv_and_operand(call.dtype, call.cache, [&](auto kv, auto operand) {
    replay_as<decltype(kv), decltype(operand)>(call, work);
  });
}

}  // namespace winnow::WINNOW_ISA
