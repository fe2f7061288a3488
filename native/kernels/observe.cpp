// Scores from attention: the second pass over the rows that have an observer (winnow.attention.AttentionObserver).
//
// Probabilities come from the weights that attention kept and the statistics of the first pass (kept.cpp). A decoding row's
// scores are finished from them; items of a chunk leave partial scores. For smoothing, and where the row of a chunk is cut into
// several items of the same queries, probabilities come from a second product with the keys. Sums over queries are per key, in
// the order of the queries, so work is cut by keys.
#include <numeric>

#include "scores.h"
#include "neighbours.h"

namespace winnow::WINNOW_ISA {

namespace {

/// The scores of some keys of a row: written at once, or left in `unsmoothed`.
template <class KV, class Operand>
void observe_piece(const Attend &call, const ScoreRow &score_row, int64_t first_key, int64_t last_key, const float *statistics,
                   float *unsmoothed, Buffer &memory) {
  const Cache &cache = call.cache;
  const Batch &batch = call.batch;
  const AttentionObserver &observer = *score_row.observer;
  const int dim = static_cast<int>(cache.head_dim), padded = round_up(dim, WIDTH);
  const int64_t group = call.group(), count = batch.counts[score_row.seq], start = batch.starts[score_row.seq];
  const Row row(cache, batch.slots[score_row.seq], call.layer, score_row.head);
  const int64_t terms = used_terms(observer, cache), block = queries_of_item(group, row.length);
  const int64_t before = row.length - count;  // keys that every query of the chunk sees
  const bool below = has_term(observer, terms, Term::below_average);
  const int64_t sums_size = TileSums::size(terms, group);
  const Scratch<Operand> scratch(memory, block * group, padded, sums_size + (is_coded<KV> ? padded * TILE : 0));
  const TileSums work(scratch.extra, group);
  [[maybe_unused]] Decoded *decoded_keys = reinterpret_cast<Decoded *>(scratch.extra + sums_size);

  Tile<KV> tiles[2];
  tiles[0].find(call, row, first_key, last_key, batch.position[start + score_row.first_query]);
  for (int64_t first = first_key, current = 0; first < last_key; first += TILE, current ^= 1) {
    Tile<KV> &tile = tiles[current], &next = tiles[first + TILE < last_key ? current ^ 1 : current];
    if (&next != &tile) next.find(call, row, first + TILE, last_key, batch.position[start + score_row.first_query]);
    if (observer.exclude_first && !call.reads_positions()) tile.positions(cache, tile.position);
    const float *bias = tile.biases(cache);
    const int width = round_up(tile.n, WIDTH);
    std::fill(work.sums, work.sums + terms * group * TILE, 0.0f);
    if (!tile.outside_window) {
      if constexpr (is_coded<KV>) {
        decode_keys(cache, tile, next, padded, decoded_keys);
        const DecodedTile key(decoded_keys, tile.n, TILE, padded);
        pack_keys(key.at, key.at, tile.n, padded, scratch.keys);
      } else {
        pack_keys(tile.key, next.key, tile.n, dim, scratch.keys);
      }
    }
    const int64_t first_query = std::max(score_row.first_query, first - before);  // others see nothing of this tile
    int64_t queries = 0;
    for (int64_t query = first_query; query < count && !tile.outside_window; query += queries) {
      queries = std::min(query / block * block + block, count) - query;
      const int rows = static_cast<int>(queries * group);
      pack_queries(call, start + query, queries, score_row.head, scratch.queries);
      product(rows, width, padded, scratch.queries, padded, scratch.keys, TILE, scratch.logits, TILE, false);
      for (int64_t i = 0; i < queries; ++i) {
        const int64_t token = start + query + i, position = batch.position[token], sees = before + query + i + 1;
        for (int64_t h = 0; h < group; ++h) {
          const int64_t at = token * call.num_query_heads + score_row.head * group + h;
          const float row_max = statistics[2 * at], inverse = statistics[2 * at + 1];
          float *logits = scratch.logits + (i * group + h) * TILE;
          finish_logits(logits, width, std::min<int64_t>(tile.n, sees - first), call, call.scale, tile.position, position,
                        call.slope(score_row.head * group + h), bias);
          for (int j = 0; j < width; j += WIDTH) {
            const vf x = load(logits + j);
            vf p = vexp(x - row_max) * inverse, counted = x > NEG_INF ? broadcast(1.0f) : vf{};
            store(work.p + h * TILE + j, far(observer, tile.position + j, position, p));
            store(work.counted + j, far(observer, tile.position + j, position, counted));
          }
        }
        const float average = below ? 1.0f / static_cast<float>(visible_keys(call, row, sees, position)) : 0.0f;
        add_query(observer, terms, group, width, average, work);
      }
    }
    for (int64_t term = 0; term < terms; ++term) {
      const int64_t heads = grouped_at_once(observer) ? 1 : group;
      const float *sums = work.sums + term * group * TILE;
      if (observer.smoothing_size) {
        for (int64_t h = 0; h < heads; ++h)
          std::copy(sums + h * TILE, sums + h * TILE + tile.n,
                    unsmoothed + score_row.sums + (term * group + h) * row.length + first);
      } else {
        aggregate(sums, heads, TILE, tile.n, observer, work.p);
        update_accumulators(cache, term, tile.slot, work.p, tile.n, observer.replace);
      }
    }
  }
}

/// Smooth the sums of a row over KVs near in position and write its scores.
void smooth_score_row(const Attend &call, const ScoreRow &score_row, const float *unsmoothed) {
  const Cache &cache = call.cache;
  const AttentionObserver &observer = *score_row.observer;
  const Row row(cache, call.batch.slots[score_row.seq], call.layer, score_row.head);
  const int64_t n = row.length, group = call.group();
  std::vector<int64_t> slots(n), order(n);
  row.slots(0, n, slots.data());
  std::iota(order.begin(), order.end(), 0);
  int64_t pooled = n;
  if (observer.smoothing_skip_window) {
    const int64_t window_start = call.batch.observe_from[score_row.seq];
    const auto end = std::stable_partition(order.begin(), order.end(),
                                           [&](int64_t i) { return cache.position[slots[i]] < window_start; });
    pooled = end - order.begin();
  }
  const auto earlier = [&](int64_t i, int64_t j) { return cache.position[slots[i]] < cache.position[slots[j]]; };
  // A row that was never compacted is in order already.
  if (!std::is_sorted(order.begin(), order.begin() + pooled, earlier))
    std::sort(order.begin(), order.begin() + pooled, earlier);

  std::vector<float> ordered(n), smoothed(n * group), together(n);
  const auto pool_row = [&](const float *x, float *out) {
    smooth(x, order.data(), n, pooled, observer.smoothing_size, observer.smoothing_max, ordered.data(), out);
  };
  for (int64_t term = 0; term < used_terms(observer, cache); ++term) {
    const int64_t heads = grouped_at_once(observer) ? 1 : group;
    const float *sums = unsmoothed + score_row.sums + term * group * n;
    if (observer.smoothing_per_query_head) {
      for (int64_t h = 0; h < heads; ++h)
        pool_row(sums + h * n, smoothed.data() + h * n);
      aggregate(smoothed.data(), heads, n, n, observer, together.data());
    } else {
      aggregate(sums, heads, n, n, observer, smoothed.data());
      pool_row(smoothed.data(), together.data());
    }
    update_accumulators(cache, term, slots.data(), together.data(), n, true);
  }
}

}  // namespace

template <class KV, class Operand>
void observe(const Attend &call, const Plan &plan, Workspace &work, Buffer &thread_memory) {
  const float *kept = work.kept.get<float>(plan.kept), *statistics = statistics_of(call, work);
  float *sums = work.sums.get<float>(plan.sums);
  const float *partial_scores = work.partial_scores.get<float>(plan.partial_scores);
#pragma omp for schedule(dynamic, 1)
  for (size_t i = 0; i < plan.observed.size(); ++i) {
    const ScoreRow &score_row = plan.score_rows[plan.observed[i].first];
    const int64_t first_key = plan.observed[i].second;
    const Row row(call.cache, call.batch.slots[score_row.seq], call.layer, score_row.head);
    const int64_t last_key = std::min(row.length, first_key + observed_keys(score_row.kept >= 0));
    if (score_row.kept >= 0) {
      const float *weights = kept + score_row.kept + first_key / TILE * kept_size(call.group());
      KeptScores scores(call, score_row, first_key, last_key, weights, statistics);
      while (scores.finish_tile()) continue;
    } else if (score_row.first_item < score_row.last_item)
      add_partial_scores(call, plan, score_row, first_key, last_key, partial_scores);
    else
      observe_piece<KV, Operand>(call, score_row, first_key, last_key, statistics, sums, thread_memory);
  }
  if (plan.sums) {
#pragma omp for schedule(dynamic, 1)
    for (size_t i = 0; i < plan.score_rows.size(); ++i)
      if (plan.score_rows[i].observer->smoothing_size) smooth_score_row(call, plan.score_rows[i], sums);
  }
}

#define WINNOW_OBSERVE(KV) \
  template void observe<KV, OperandOf<KV>::type>(const Attend &, const Plan &, Workspace &, Buffer &);
WINNOW_EACH_KV(WINNOW_OBSERVE)
#undef WINNOW_OBSERVE

}  // namespace winnow::WINNOW_ISA
