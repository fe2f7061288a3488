// Scores from the weights that attention kept, so that no logit is computed twice.
#include <cmath>

#include "direct.h"
#include "scores.h"

namespace winnow::WINNOW_ISA {

namespace {

/// `p` and `counted` of a weight that attention kept, where `factor` makes it a probability.
inline void from_weight(vf weight, float factor, vf &p, vf &counted) {
  p = vmax(weight, vf{}) * factor;  // UNSEEN is below zero
  counted = weight < 0.0f ? vf{} : broadcast(1.0f);
}

/// What makes the weights of a tile, e^(logit - most), probabilities: the row's largest logit is `highest`.
inline float factor_of(float most, float highest, float inverse) {
  return most == highest ? inverse : inverse * std::exp(most - highest);  // mostly they are the same
}

/// Keys whose scores are asked for before their turn: they lie as scattered as blocks.
constexpr int64_t KEYS_AHEAD = 4 * TILE;

/// Calls f with the term as a constant, so that it is not looked at for every KV.
template <class F>
inline void with_term(Term term, F f) {
  switch (term) {
    case Term::attention: return f(std::integral_constant<Term, Term::attention>{});
    case Term::squared: return f(std::integral_constant<Term, Term::squared>{});
    case Term::group_squared: return f(std::integral_constant<Term, Term::group_squared>{});
    case Term::below_average: return f(std::integral_constant<Term, Term::below_average>{});
    case Term::value_aware: return f(std::integral_constant<Term, Term::value_aware>{});
  }
}

}  // namespace

template <class KV>
void observe_kept(const Attend &call, const Unit &unit, int64_t first_key, int64_t last_key, const float *kept_weights,
                  const float *statistics, const float *outputs) {
  const Cache &cache = call.cache;
  const Observe &observe = *unit.observe;
  const int64_t group = call.group(), token = call.batch.starts[unit.seq], position = call.batch.position[token];
  const int64_t terms = used_terms(observe, cache);
  const Row row(cache, call.batch.slots[unit.seq], call.layer, unit.head);
  const bool below = has_term(observe, terms, Term::below_average);
  const float average = below ? 1.0f / static_cast<float>(visible_keys(call, row, row.length, position)) : 0.0f;
  const float *statistic = statistics + 2 * (token * call.num_query_heads + unit.head * group);
  const int dim = static_cast<int>(cache.head_dim), padded = round_up(dim, WIDTH);
  const bool value_aware = has_term(observe, terms, Term::value_aware);
  const float *output = value_aware ? outputs + (token * call.num_query_heads + unit.head * group) * padded : nullptr;
  // Of each value from each query head's output; what makes each head's weights of a tile probabilities.
  std::vector<float> distance(value_aware ? group * TILE : 0), factor(group);
  Tile<KV> tiles[2];
  if (value_aware) tiles[0].find(call, row, first_key, last_key, position);
  int64_t slots[MANY_ROWS_KEYS];  // no item has more keys
  slots_to_read(cache, row, first_key, last_key - first_key, slots);
  int32_t tile_position[TILE] = {};
  float out[TILE] = {};

  for (int64_t first = first_key, asked = first_key; first < last_key; first += TILE) {
    for (; asked < std::min(last_key, first + KEYS_AHEAD); asked += LINE<float>)
      ask_for_scores(cache, observe, slots[asked - first_key]);
    const int64_t n = std::min<int64_t>(TILE, last_key - first), *slot = slots + first - first_key;
    const float *kept = kept_weights + first / TILE * kept_size(group), *most = kept + group * TILE;
    if (observe.exclude_first) positions_of(cache, slot, n, tile_position);
    if (value_aware) {
      const int64_t turn = (first - first_key) / TILE % 2;
      Tile<KV> &tile = tiles[turn], &next = tiles[first + TILE < last_key ? turn ^ 1 : turn];
      if (&next != &tile) next.find(call, row, first + TILE, last_key, position);
      direct_products<SquaredDistance>(group, tile.value, next.value, n, tile.scattered(), dim, output, padded, distance.data());
    }
    for (int64_t h = 0; h < group; ++h) factor[h] = factor_of(most[h], statistic[2 * h], statistic[2 * h + 1]);
    for (int64_t term = 0; term < terms; ++term) {
      with_term(observe.terms[term], [&](auto constant) {
        constexpr Term kind = decltype(constant)::value;
        for (int64_t j = 0; j < n; j += WIDTH) {
          vf together{};
          for (int64_t h = 0; h < group; ++h) {
            vf p, counted;
            from_weight(load(kept + h * TILE + j), factor[h], p, counted);
            together = join(together, told(kind, p, counted, average, distance.data() + h * TILE + j), h, observe.group);
          }
          together *= share(observe, group);
          store(out + j, far(observe, tile_position + j, position, kind == Term::group_squared ? together * together : together));
        }
      });
      put_scores(cache, term, slot, out, n, observe.replace);
    }
  }
}

void observe_item(const Attend &call, const Unit &unit, const Item &item, const float *kept_weights,
                  const float *statistics, float *told) {
  const Cache &cache = call.cache;
  const Batch &batch = call.batch;
  const Observe &observe = *unit.observe;
  const int64_t group = call.group(), rows = item.num_queries * group, terms = used_terms(observe, cache);
  const Row row(cache, batch.slots[unit.seq], call.layer, unit.head);
  const int64_t before = row.length - batch.counts[unit.seq] + item.first_query;  // keys that all its queries see
  const int64_t first_token = batch.starts[unit.seq] + item.first_query;
  const bool below = has_term(observe, terms, Term::below_average);
  const int64_t heads = told_heads(observe, group);
  const bool adds_up = terms == 1 && observe.terms[0] == Term::attention && !observe.exclude_first &&
                       observe.group != Group::max;
  std::vector<float> memory(TileSums::size(terms, group)), factors(rows);
  const TileSums work(memory.data(), group);
  int64_t slot[TILE];
  int32_t position[TILE] = {};

  for (int64_t first = 0; first < item.last_key; first += TILE, told += terms * heads * TILE) {
    const int64_t n = std::min<int64_t>(TILE, item.last_key - first);
    const int width = round_up(static_cast<int>(n), WIDTH);
    const float *kept = kept_weights + first / TILE * kept_size(rows), *most = kept + rows * TILE;
    // Queries before the first one that counts, and those that see nothing of this tile, tell nothing.
    const int64_t first_query = std::max({int64_t{0}, unit.first_query - item.first_query, first - before});
    for (int64_t query = first_query; query < item.num_queries; ++query) {
      const float *statistic = statistics + 2 * ((first_token + query) * call.num_query_heads + unit.head * group);
      for (int64_t h = 0; h < group; ++h)
        factors[query * group + h] = factor_of(most[query * group + h], statistic[2 * h], statistic[2 * h + 1]);
    }
    if (adds_up) {
      for (int j = 0; j < TILE; j += WIDTH) {
        vf sum{};
        for (int64_t r = first_query * group; r < rows && j < width; ++r)
          sum += vmax(load(kept + r * TILE + j), vf{}) * factors[r];
        store(told + j, sum * share(observe, group));
      }
      continue;
    }
    if (observe.exclude_first) {
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
          store(work.p + h * TILE + j, far(observe, position + j, now, p));
          store(work.counted + j, far(observe, position + j, now, counted));
        }
      const float average = below ? 1.0f / static_cast<float>(visible_keys(call, row, sees, now)) : 0.0f;
      add_query(observe, terms, group, width, average, work);
    }
    for (int64_t term = 0; term < terms; ++term) {
      const float *sums = work.sums + term * group * TILE;
      if (heads == group)
        std::copy(sums, sums + group * TILE, told + term * group * TILE);
      else
        aggregate(sums, grouped_at_once(observe, observe.terms[term]) ? 1 : group, TILE, TILE, observe, told + term * TILE);
    }
  }
}

void add_told(const Attend &call, const Plan &plan, const Unit &unit, int64_t first_key, int64_t last_key,
              const float *told) {
  const Observe &observe = *unit.observe;
  const int64_t terms = used_terms(observe, call.cache), heads = told_heads(observe, call.group());
  const Row row(call.cache, call.batch.slots[unit.seq], call.layer, unit.head);
  std::vector<float> sums(heads * TILE);
  int64_t slot[TILE];
  float out[TILE];
  for (int64_t first = first_key; first < last_key; first += TILE) {
    const int64_t n = std::min<int64_t>(TILE, last_key - first);
    row.slots(first, n, slot);
    for (int64_t term = 0; term < terms; ++term) {
      std::fill(sums.begin(), sums.end(), 0.0f);
      for (int64_t i = unit.last_item; i-- > unit.first_item;) {  // they lie in falling order of their queries
        const Item &item = plan.items[i];
        if (item.told < 0 || item.last_key <= first) continue;
        const float *from = told + item.told + (first / TILE * terms + term) * heads * TILE;
        for (int64_t j = 0; j < heads * TILE; j += WIDTH) store(&sums[j], load(&sums[j]) + load(from + j));
      }
      aggregate(sums.data(), grouped_at_once(observe, observe.terms[term]) ? 1 : heads, TILE, n, observe, out);
      put_scores(call.cache, term, slot, out, n, observe.replace);
    }
  }
}

template void observe_kept<float>(const Attend &, const Unit &, int64_t, int64_t, const float *, const float *, const float *);
template void observe_kept<bf16>(const Attend &, const Unit &, int64_t, int64_t, const float *, const float *, const float *);
template void observe_kept<f16>(const Attend &, const Unit &, int64_t, int64_t, const float *, const float *, const float *);

}  // namespace winnow::WINNOW_ISA
