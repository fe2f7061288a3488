// Scores from the weights that attention kept, so that no logit is computed twice.
#include <cmath>

#include "direct.h"
#include "scores.h"

namespace winnow::WINNOW_ISA {

namespace {

/// `p` and `counted` of a weight that attention kept, where `factor` makes it a probability.
inline void from_weight(vf weight, float factor, vf &p, vf &counted) {
  p = vmax(weight, vf{}) * factor;  // MASKED is below zero
  counted = weight < 0.0f ? vf{} : broadcast(1.0f);
}

/// The factor from a tile's weights, e^(logit - row_max), to probabilities. highest: the row's largest logit.
inline float factor_of(float row_max, float highest, float inverse) {
  return row_max == highest ? inverse : inverse * std::exp(row_max - highest);  // the usual case
}

/// Calls f with the term as a constant, so that it is not tested for every KV.
template <class F>
inline void with_term(Term term, F f) {
  switch (term) {
    case Term::attention: return f(std::integral_constant<Term, Term::attention>{});
    case Term::squared: return f(std::integral_constant<Term, Term::squared>{});
    case Term::below_average: return f(std::integral_constant<Term, Term::below_average>{});
  }
}

}  // namespace

KeptScores::KeptScores(const Attend &call, const ScoreRow &score_row, int64_t first_key, int64_t last_key,
                       const float *kept_weights, const float *statistics)
    : call_(call),
      observer_(*score_row.observer),
      row_(call.cache, call.batch.slots[score_row.seq], call.layer, score_row.head),
      group_(call.group()),
      terms_(used_terms(observer_, call.cache)),
      token_(call.batch.starts[score_row.seq]),
      position_(call.batch.position[token_]),
      first_(first_key),
      last_(last_key),
      kept_(kept_weights),
      factor_(group_),
      row_max_(group_, NEG_INF) {
  statistic_ = statistics + 2 * (token_ * call.num_query_heads + score_row.head * group_);
  if (has_term(observer_, terms_, Term::below_average))
    average_ = 1.0f / static_cast<float>(visible_keys(call, row_, row_.length, position_));
  for (int64_t first = first_; first < first_ + TILES_AHEAD * TILE; first += TILE) prefetch_tile(first);
}

void KeptScores::prefetch_tile(int64_t first) {
  if (first >= last_) return;
  const int64_t n = std::min<int64_t>(TILE, last_ - first);
  int64_t *slot = slots_[first / TILE % TILES_AHEAD];
  slots_to_read(call_.cache, row_, first, n, slot);
  for (int64_t i = 0; i < n; i += LINE<float>) prefetch_accumulators(call_.cache, observer_, slot[i]);
}

bool KeptScores::finish_tile() {
  if (first_ >= last_) return false;
  const Cache &cache = call_.cache;
  const AttentionObserver &observer = observer_;
  const int64_t n = std::min<int64_t>(TILE, last_ - first_), *slot = slots_[first_ / TILE % TILES_AHEAD];
  int32_t tile_position[TILE] = {};
  if (observer.exclude_first) positions_of(cache, slot, n, tile_position);
  const float *row_max = kept_ + group_ * TILE;
  for (int64_t h = 0; h < group_; ++h) {
    if (row_max[h] == row_max_[h]) continue;
    row_max_[h] = row_max[h];
    factor_[h] = factor_of(row_max[h], statistic_[2 * h], statistic_[2 * h + 1]);
  }
  float out[TILE] = {};
  for (int64_t term = 0; term < terms_; ++term) {
    with_term(observer.terms[term], [&](auto constant) {
      constexpr Term kind = decltype(constant)::value;
      for (int64_t j = 0; j < n; j += WIDTH) {
        vf together{};
        for (int64_t h = 0; h < group_; ++h) {
          vf p, counted;
          from_weight(load(kept_ + h * TILE + j), factor_[h], p, counted);
          together = join(together, contribution(kind, p, counted, average_), h, observer.group);
        }
        together *= share(observer, group_);
        store(out + j, far(observer, tile_position + j, position_, together));
      }
    });
    update_accumulators(cache, term, slot, out, n, observer.replace);
  }
  prefetch_tile(first_ + TILES_AHEAD * TILE);
  first_ += TILE, kept_ += kept_size(group_);
  return first_ < last_;
}

void observe_item(const Attend &call, const ScoreRow &score_row, const WorkItem &item, const float *kept_weights,
                  const float *statistics, float *partial_scores) {
  const Cache &cache = call.cache;
  const Batch &batch = call.batch;
  const AttentionObserver &observer = *score_row.observer;
  const int64_t group = call.group(), rows = item.num_queries * group, terms = used_terms(observer, cache);
  const Row row(cache, batch.slots[score_row.seq], call.layer, score_row.head);
  const int64_t before = row.length - batch.counts[score_row.seq] + item.first_query;  // keys that all its queries see
  const int64_t first_token = batch.starts[score_row.seq] + item.first_query;
  const bool below = has_term(observer, terms, Term::below_average);
  const int64_t heads = partial_score_heads(observer, group);
  const bool adds_up = terms == 1 && observer.terms[0] == Term::attention && !observer.exclude_first &&
                       observer.group != Group::max;
  std::vector<float> memory(TileSums::size(terms, group)), factors(rows);
  const TileSums work(memory.data(), group);
  int64_t slot[TILE];
  int32_t position[TILE] = {};

  for (int64_t first = 0; first < item.last_key; first += TILE, partial_scores += terms * heads * TILE) {
    const int64_t n = std::min<int64_t>(TILE, item.last_key - first);
    const int width = round_up(static_cast<int>(n), WIDTH);
    const float *kept = kept_weights + first / TILE * kept_size(rows), *row_max = kept + rows * TILE;
    // Queries before the first one that counts, and those that see nothing of this tile, add nothing.
    const int64_t first_query = std::max({int64_t{0}, score_row.first_query - item.first_query, first - before});
    for (int64_t query = first_query; query < item.num_queries; ++query) {
      const float *statistic = statistics + 2 * ((first_token + query) * call.num_query_heads + score_row.head * group);
      for (int64_t h = 0; h < group; ++h)
        factors[query * group + h] = factor_of(row_max[query * group + h], statistic[2 * h], statistic[2 * h + 1]);
    }
    if (adds_up) {
      for (int j = 0; j < TILE; j += WIDTH) {
        vf sum{};
        for (int64_t r = first_query * group; r < rows && j < width; ++r)
          sum += vmax(load(kept + r * TILE + j), vf{}) * factors[r];
        store(partial_scores + j, sum * share(observer, group));
      }
      continue;
    }
    if (observer.exclude_first) {
      row.slots(first, n, slot);
      positions_of(cache, slot, n, position);
    }
    std::fill(work.sums, work.sums + terms * group * TILE, 0.0f);
    for (int64_t query = first_query; query < item.num_queries; ++query) {
      const int64_t now = batch.position[first_token + query], sees = before + query + 1;
      for (int64_t h = 0; h < group; ++h)
        for (int j = 0; j < width; j += WIDTH) {
          vf p, counted;
          from_weight(load(kept + (query * group + h) * TILE + j), factors[query * group + h], p, counted);
          store(work.p + h * TILE + j, far(observer, position + j, now, p));
          store(work.counted + j, far(observer, position + j, now, counted));
        }
      const float average = below ? 1.0f / static_cast<float>(visible_keys(call, row, sees, now)) : 0.0f;
      add_query(observer, terms, group, width, average, work);
    }
    for (int64_t term = 0; term < terms; ++term) {
      const float *sums = work.sums + term * group * TILE;
      if (heads == group)
        std::copy(sums, sums + group * TILE, partial_scores + term * group * TILE);
      else
        aggregate(sums, grouped_at_once(observer) ? 1 : group, TILE, TILE, observer,
                  partial_scores + term * TILE);
    }
  }
}

void add_partial_scores(const Attend &call, const Plan &plan, const ScoreRow &score_row, int64_t first_key,
                        int64_t last_key, const float *partial_scores) {
  const AttentionObserver &observer = *score_row.observer;
  const int64_t terms = used_terms(observer, call.cache), heads = partial_score_heads(observer, call.group());
  const Row row(call.cache, call.batch.slots[score_row.seq], call.layer, score_row.head);
  std::vector<float> sums(heads * TILE);
  int64_t slot[TILE];
  float out[TILE];
  for (int64_t first = first_key; first < last_key; first += TILE) {
    const int64_t n = std::min<int64_t>(TILE, last_key - first);
    row.slots(first, n, slot);
    for (int64_t term = 0; term < terms; ++term) {
      std::fill(sums.begin(), sums.end(), 0.0f);
      for (int64_t i = score_row.last_item; i-- > score_row.first_item;) {  // in descending order of their queries
        const WorkItem &item = plan.items[i];
        if (item.partial_scores < 0 || item.last_key <= first) continue;
        const float *from = partial_scores + item.partial_scores + (first / TILE * terms + term) * heads * TILE;
        for (int64_t j = 0; j < heads * TILE; j += WIDTH) store(&sums[j], load(&sums[j]) + load(from + j));
      }
      aggregate(sums.data(), grouped_at_once(observer) ? 1 : heads, TILE, n, observer, out);
      update_accumulators(call.cache, term, slot, out, n, observer.replace);
    }
  }
}

}  // namespace winnow::WINNOW_ISA
