// What attention tells the scores: the second look at the rows whose policy asks (winnow.attention.Observe).
//
// Probabilities come from weights that attention kept and the statistics of the first pass: of a decoding row, whose scores
// are then finished, and of the items of a chunk, which leave sums to be added up. Where weights are not enough (pooling, and
// values where there are many queries) or the row of a chunk is cut into several items of the same queries, they come from a
// second product with the keys. Sums over queries are made key by key, so a piece is some keys of a row, and the order of the
// additions is that of the queries.
#include <cmath>
#include <numeric>

#include "attend.h"
#include "direct.h"
#include "neighbours.h"

namespace winnow::WINNOW_ISA {

namespace {

// Where a KV takes all attention, leaving it out would change the output without bound; so 1 - p is kept above this.
constexpr float LEAST_REST = 1e-4f;

/// KVs that a query of a row sees.
int64_t visible_keys(const Attend &call, const Row &row, int64_t sees, int64_t query_position) {
  if (call.window == 0) return sees;
  int64_t count = 0;
  int64_t slots[TILE];
  for (int64_t first = 0; first < sees; first += TILE) {
    const int64_t n = std::min<int64_t>(TILE, sees - first);
    row.slots(first, n, slots);
    for (int64_t i = 0; i < n; ++i) count += query_position - call.cache.position[slots[i]] < call.window;
  }
  return count;
}

/// |v_j - o|^2 for the values of a tile, packed as keys are, [dim, TILE], and one output.
void squared_distances(const float *values, const float *output, int dim, int width, float *out) {
  for (int j = 0; j < width; j += WIDTH) {
    vf total{};
    for (int d = 0; d < dim; ++d) {
      const vf difference = load(values + d * TILE + j) - output[d];
      total += difference * difference;
    }
    store(out + j, total);
  }
}

/// One more query head of a group, joined to those before it; the mean is divided at the end.
inline vf join(vf before, vf x, int64_t head, Group group) {
  if (head == 0) return x;
  return group == Group::max ? vmax(before, x) : before + x;
}

inline float share(const Observe &observe, int64_t group) {
  return observe.group == Group::mean ? 1.0f / static_cast<float>(group) : 1.0f;
}

/// What one query head tells about WIDTH KVs of its row.
///
/// p: zero where the query does not see a KV, or the KV is too near. counted: 1 where neither is so, else 0. average: 1 / KVs
/// the query sees. distance: |v - o|^2.
inline vf told(Term term, vf p, vf counted, float average, const float *distance) {
  switch (term) {
    case Term::squared:
      return p * p;
    case Term::below_average:
      return p < average ? counted : vf{};
    case Term::value_aware: {
      const vf ratio = p / vmax(1.0f - p, broadcast(LEAST_REST));
      return ratio * ratio * load(distance);
    }
    default:
      return p;
  }
}

/// Zero in `p` and `counted` where a KV is fewer than `exclude_first` positions before the query.
inline void forget_near(const Observe &observe, const int32_t *position, int64_t query_position, vf &p, vf &counted) {
  if (!observe.exclude_first) return;
  const vi age = static_cast<int32_t>(query_position) - load_vector<vi>(position);
  const auto near = age < static_cast<int32_t>(observe.exclude_first);
  p = near ? vf{} : p;
  counted = near ? vf{} : counted;
}

/// `p` and `counted` of a weight that attention kept, where `factor` makes it a probability.
inline void from_weight(vf weight, float factor, vf &p, vf &counted) {
  p = vmax(weight, vf{}) * factor;  // UNSEEN is below zero
  counted = weight < 0.0f ? vf{} : broadcast(1.0f);
}

/// A thread's memory for one tile.
struct TileSums {
  float *p;         // [group, TILE], see told
  float *counted;   // [TILE]
  float *distance;  // [group, TILE]
  float *sums;      // [terms, group, TILE]; [terms, 0] where query heads become one at once

  TileSums(float *memory, int64_t group)
      : p(memory), counted(p + group * TILE), distance(counted + TILE), sums(distance + group * TILE) {}

  static int64_t size(int64_t terms, int64_t group) { return (2 * group + 1 + terms * group) * TILE; }
};

/// Add what one query tells about the KVs of a tile.
void add_query(const Observe &observe, int64_t terms, int64_t group, int width, float average, const TileSums &tile) {
  for (int64_t term = 0; term < terms; ++term) {
    const Term kind = observe.terms[term];
    const bool at_once = grouped_at_once(observe, kind);
    float *to = tile.sums + term * group * TILE;
    for (int j = 0; j < width; j += WIDTH) {
      vf together{};
      for (int64_t h = 0; h < group; ++h) {
        const vf x = told(kind, load(tile.p + h * TILE + j), load(tile.counted + j), average, tile.distance + h * TILE + j);
        if (at_once)
          together = join(together, x, h, observe.group);
        else
          store(to + h * TILE + j, load(to + h * TILE + j) + x);
      }
      if (at_once) {
        together *= share(observe, group);
        store(to + j, load(to + j) + (kind == Term::group_squared ? together * together : together));
      }
    }
  }
}

/// Query heads of a group as one: out [n] from x [heads, stride].
void aggregate(const float *x, int64_t heads, int64_t stride, int64_t n, const Observe &observe, float *out) {
  for (int64_t i = 0; i < n; ++i) {
    float together = x[i];
    for (int64_t h = 1; h < heads; ++h)
      together = observe.group == Group::max ? std::max(together, x[h * stride + i]) : together + x[h * stride + i];
    out[i] = together * (heads > 1 ? share(observe, heads) : 1.0f);
  }
}

/// Add x, [n], to a score of the slots, or put it in its place. The first slot is the first of a block, or WIDTH after one.
void put_scores(const Cache &cache, int64_t term, const int64_t *slot, const float *x, int64_t n, bool replace) {
  float *score = cache.score + term * cache.num_slots;
  const bool adjacent = cache.block_size % WIDTH == 0;  // each WIDTH of them
  for (int64_t i = 0; i < n;) {
    float *to = score + slot[i];
    if (adjacent && i + WIDTH <= n) {
      const vf value = load(x + i);
      store(to, replace ? value : load(to) + value);
      i += WIDTH;
    } else {
      *to = replace ? x[i] : *to + x[i];
      ++i;
    }
  }
}

/// The scores of some keys of a unit: written at once, or left in `sums` to be pooled.
template <class KV>
void observe_piece(const Attend &call, const Unit &unit, int64_t first_key, int64_t last_key, const float *statistics,
                   const float *outputs, float *pooled_sums, Buffer &memory) {
  using Operand = typename OperandOf<KV>::type;
  const Cache &cache = call.cache;
  const Batch &batch = call.batch;
  const Observe &observe = *unit.observe;
  const int dim = static_cast<int>(cache.head_dim), padded = round_up(dim, WIDTH);
  const int64_t group = call.group(), count = batch.counts[unit.seq], start = batch.starts[unit.seq];
  const int64_t terms = used_terms(observe, cache), block = std::max<int64_t>(1, ITEM_ROWS / group);
  const Row row(cache, batch.slots[unit.seq], call.layer, unit.head);
  const int64_t before = row.length - count;  // keys that every query of the chunk sees
  const bool below = has_term(observe, terms, Term::below_average);
  const bool value_aware = has_term(observe, terms, Term::value_aware);
  const int64_t sums_size = TileSums::size(terms, group);
  const Scratch<Operand> scratch(memory, block * group, padded, sums_size + (value_aware ? padded * TILE : 0));
  const TileSums work(scratch.extra, group);
  float *values = scratch.extra + sums_size;

  Tile<KV> tiles[2];
  tiles[0].find(call, row, first_key, last_key, batch.position[start + unit.first_query]);
  for (int64_t first = first_key, turn = 0; first < last_key; first += TILE, turn ^= 1) {
    Tile<KV> &tile = tiles[turn], &next = tiles[first + TILE < last_key ? turn ^ 1 : turn];
    if (&next != &tile) next.find(call, row, first + TILE, last_key, batch.position[start + unit.first_query]);
    if (observe.exclude_first && !call.window) tile.positions(cache, tile.position);
    const int width = round_up(tile.n, WIDTH);
    std::fill(work.sums, work.sums + terms * group * TILE, 0.0f);
    if (!tile.out_of_sight) {
      pack_keys(tile.key, next.key, tile.n, dim, scratch.keys);
      if (value_aware) pack_keys(tile.value, next.value, tile.n, dim, values);
    }
    const int64_t first_query = std::max(unit.first_query, first - before);  // others see nothing of this tile
    for (int64_t query = first_query; query < count && !tile.out_of_sight; query += block) {
      const int64_t queries = std::min(block, count - query);
      pack_queries<KV>(call, start + query, queries, unit.head, scratch.queries);
      product(static_cast<int>(queries * group), width, padded, scratch.queries, padded, scratch.keys, TILE,
              scratch.logits, TILE, false);
      for (int64_t i = 0; i < queries; ++i) {
        const int64_t token = start + query + i, position = batch.position[token], sees = before + query + i + 1;
        for (int64_t h = 0; h < group; ++h) {
          const int64_t at = token * call.num_query_heads + unit.head * group + h;
          const float most = statistics[2 * at], inverse = statistics[2 * at + 1];
          float *logits = scratch.logits + (i * group + h) * TILE;
          finish_logits(logits, width, std::min<int64_t>(tile.n, sees - first), call, tile.position, position);
          for (int j = 0; j < width; j += WIDTH) {
            const vf x = load(logits + j);
            vf p = vexp(x - most) * inverse, counted = x > NEVER ? broadcast(1.0f) : vf{};
            forget_near(observe, tile.position + j, position, p, counted);
            store(work.p + h * TILE + j, p);
            store(work.counted + j, counted);
          }
          if (value_aware) squared_distances(values, outputs + at * padded, dim, width, work.distance + h * TILE);
        }
        const float average = below ? 1.0f / static_cast<float>(visible_keys(call, row, sees, position)) : 0.0f;
        add_query(observe, terms, group, width, average, work);
      }
    }
    for (int64_t term = 0; term < terms; ++term) {
      const int64_t heads = grouped_at_once(observe, observe.terms[term]) ? 1 : group;
      const float *sums = work.sums + term * group * TILE;
      if (observe.pool_size) {
        for (int64_t h = 0; h < heads; ++h)
          std::copy(sums + h * TILE, sums + h * TILE + tile.n,
                    pooled_sums + unit.sums + (term * group + h) * row.length + first);
      } else {
        aggregate(sums, heads, TILE, tile.n, observe, work.p);
        put_scores(cache, term, tile.slot, work.p, tile.n, observe.replace);
      }
    }
  }
}

/// The scores of some keys of a unit, from what the items of its row told.
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

/// Pool the sums of a unit over neighbours in position and write its scores.
void pool_unit(const Attend &call, const Unit &unit, const float *pooled_sums) {
  const Cache &cache = call.cache;
  const Observe &observe = *unit.observe;
  const Row row(cache, call.batch.slots[unit.seq], call.layer, unit.head);
  const int64_t n = row.length, group = call.group();
  std::vector<int64_t> slots(n), order(n);
  row.slots(0, n, slots.data());
  std::iota(order.begin(), order.end(), 0);
  int64_t pooled = n;
  if (observe.pool_skip_window) {
    const int64_t window_start = call.batch.observe_from[unit.seq];
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
    smooth(x, order.data(), n, pooled, observe.pool_size, observe.pool_max, ordered.data(), out);
  };
  for (int64_t term = 0; term < used_terms(observe, cache); ++term) {
    const int64_t heads = grouped_at_once(observe, observe.terms[term]) ? 1 : group;
    const float *sums = pooled_sums + unit.sums + term * group * n;
    if (observe.pool_per_query_head) {
      for (int64_t h = 0; h < heads; ++h)
        pool_row(sums + h * n, smoothed.data() + h * n);
      aggregate(smoothed.data(), heads, n, n, observe, together.data());
    } else {
      aggregate(sums, heads, n, n, observe, smoothed.data());
      pool_row(smoothed.data(), together.data());
    }
    put_scores(cache, term, slots.data(), together.data(), n, true);
  }
}

/// Keys whose scores are asked for before their turn: they lie as scattered as blocks.
constexpr int64_t KEYS_AHEAD = 4 * TILE;

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
  std::vector<float> distance(group * TILE);  // of each value from each query head's output
  Tile<KV> tiles[2];
  if (value_aware) tiles[0].find(call, row, first_key, last_key, position);
  int64_t slot[TILE];
  int32_t tile_position[TILE] = {};
  float out[TILE];

  for (int64_t first = first_key, asked = first_key; first < last_key; first += TILE) {
    // Not in a function of its own: GCC takes one that only prefetches for one that does nothing, and leaves it out.
    for (; asked < std::min(last_key, first + KEYS_AHEAD); asked += LINE<float>) {
      row.slots(asked, 1, slot);
      for (int64_t n = 0; n < cache.num_scores; ++n) __builtin_prefetch(cache.score + n * cache.num_slots + slot[0], 1);
      if (observe.exclude_first) __builtin_prefetch(cache.position + slot[0]);
    }
    const int64_t n = std::min<int64_t>(TILE, last_key - first);
    const float *kept = kept_weights + unit.kept + first / TILE * kept_size(group), *most = kept + group * TILE;
    row.slots(first, n, slot);
    if (observe.exclude_first)
      for (int64_t i = 0; i < n; ++i) tile_position[i] = cache.position[slot[i]];
    if (value_aware) {
      const int64_t turn = (first - first_key) / TILE % 2;
      Tile<KV> &tile = tiles[turn], &next = tiles[first + TILE < last_key ? turn ^ 1 : turn];
      if (&next != &tile) next.find(call, row, first + TILE, last_key, position);
      direct_products<SquaredDistance>(group, tile.value, next.value, n, dim, output, padded, distance.data());
    }
    for (int64_t term = 0; term < terms; ++term) {
      const Term kind = observe.terms[term];
      std::fill(out, out + TILE, 0.0f);
      for (int64_t h = 0; h < group; ++h) {
        const float factor = statistic[2 * h + 1] * std::exp(most[h] - statistic[2 * h]);
        for (int64_t j = 0; j < n; j += WIDTH) {
          vf p, counted;
          from_weight(load(kept + h * TILE + j), factor, p, counted);
          forget_near(observe, tile_position + j, position, p, counted);
          store(out + j, join(load(out + j), told(kind, p, counted, average, &distance[h * TILE + j]), h, observe.group));
        }
      }
      if (observe.group == Group::mean || kind == Term::group_squared)
        for (int64_t j = 0; j < n; j += WIDTH) {
          const vf x = load(out + j) * share(observe, group);
          store(out + j, kind == Term::group_squared ? x * x : x);
        }
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
    for (int64_t r = first_query * group; r < rows; ++r) {
      const int64_t at = (first_token + r / group) * call.num_query_heads + unit.head * group + r % group;
      // Mostly the tile's maximum is the row's.
      const float higher = statistics[2 * at], inverse = statistics[2 * at + 1];
      factors[r] = most[r] == higher ? inverse : inverse * std::exp(most[r] - higher);
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
      for (int64_t i = 0; i < n; ++i) position[i] = cache.position[slot[i]];
    }
    std::fill(work.sums, work.sums + terms * group * TILE, 0.0f);
    for (int64_t query = first_query; query < item.num_queries; ++query) {
      const int64_t now = batch.position[first_token + query], sees = before + query + 1;
      for (int64_t h = 0; h < group; ++h)
        for (int j = 0; j < width; j += WIDTH) {
          vf p, counted;
          from_weight(load(kept + (query * group + h) * TILE + j), factors[query * group + h], p, counted);
          forget_near(observe, position + j, now, p, counted);
          store(work.p + h * TILE + j, p);
          store(work.counted + j, counted);
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

template <class KV>
void observe(const Attend &call, const Plan &plan, Workspace &work, Buffer &thread_memory) {
  const float *kept = work.kept.get<float>(plan.kept), *statistics = statistics_of(call, work);
  const float *outputs = plan.keeps_outputs ? work.outputs.get<float>(0) : nullptr;
  float *sums = work.sums.get<float>(plan.sums);
  const float *told = work.told.get<float>(plan.told);
#pragma omp for schedule(dynamic, 4)
  for (size_t i = 0; i < plan.observed.size(); ++i) {
    const Unit &unit = plan.units[plan.observed[i].first];
    const int64_t first_key = plan.observed[i].second;
    const Row row(call.cache, call.batch.slots[unit.seq], call.layer, unit.head);
    const int64_t last_key = std::min(row.length, first_key + OBSERVED_KEYS);
    if (unit.kept >= 0)
      observe_kept<KV>(call, unit, first_key, last_key, kept, statistics, outputs);
    else if (unit.first_item < unit.last_item)
      add_told(call, plan, unit, first_key, last_key, told);
    else
      observe_piece<KV>(call, unit, first_key, last_key, statistics, outputs, sums, thread_memory);
  }
  if (plan.sums) {
#pragma omp for schedule(dynamic, 1)
    for (size_t i = 0; i < plan.units.size(); ++i)
      if (plan.units[i].observe->pool_size) pool_unit(call, plan.units[i], sums);
  }
}

template void observe_kept<float>(const Attend &, const Unit &, int64_t, int64_t, const float *, const float *, const float *);
template void observe_kept<bf16>(const Attend &, const Unit &, int64_t, int64_t, const float *, const float *, const float *);
template void observe_kept<f16>(const Attend &, const Unit &, int64_t, int64_t, const float *, const float *, const float *);

template void observe<float>(const Attend &, const Plan &, Workspace &, Buffer &);
template void observe<bf16>(const Attend &, const Plan &, Workspace &, Buffer &);
template void observe<f16>(const Attend &, const Plan &, Workspace &, Buffer &);

}  // namespace winnow::WINNOW_ISA
