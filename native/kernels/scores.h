// From probabilities to scores: what the passes of `observe` share, and scores from the weights that attention kept.
#pragma once

#include "attend.h"

namespace winnow::WINNOW_ISA {

/// KVs that a query of a row sees.
inline int64_t visible_keys(const Attend &call, const Row &row, int64_t sees, int64_t query_position) {
  if (call.window == 0) return sees;
  const int64_t reach = call.reach(query_position);
  int64_t count = 0;
  int64_t slots[TILE];
  for (int64_t first = 0; first < sees; first += TILE) {
    const int64_t n = std::min<int64_t>(TILE, sees - first);
    row.slots(first, n, slots);
    for (int64_t i = 0; i < n; ++i) count += query_position - call.cache.position[slots[i]] < reach;
  }
  return count;
}

/// One more query head of a group, joined to those before it; the mean is divided at the end.
inline vf join(vf before, vf x, int64_t head, Group group) {
  if (head == 0) return x;
  return group == Group::max ? vmax(before, x) : before + x;
}

inline float share(const AttentionObserver &observer, int64_t group) {
  return observer.group == Group::mean ? 1.0f / static_cast<float>(group) : 1.0f;
}

/// What one query head adds to the scores of WIDTH KVs of its row.
///
/// p: zero where the query does not see a KV, or the KV is too near. counted: 1 where neither is so, else 0. average: 1 / KVs
/// the query sees.
inline vf contribution(Term term, vf p, vf counted, float average) {
  switch (term) {
    case Term::squared:
      return p * p;
    case Term::below_average:
      return p < average ? counted : vf{};
    default:
      return p;
  }
}

/// x, or zero where a KV is fewer than `exclude_first` positions before the query.
inline vf far(const AttentionObserver &observer, const int32_t *position, int64_t query_position, vf x) {
  if (!observer.exclude_first) return x;
  const vi age = static_cast<int32_t>(query_position) - load_vector<vi>(position);
  return age < static_cast<int32_t>(observer.exclude_first) ? vf{} : x;
}

/// A thread's memory for one tile.
struct TileSums {
  float *p;        // [group, TILE], see contribution
  float *counted;  // [TILE]
  float *sums;     // [terms, group, TILE]; [terms, 0] where query heads become one at once

  TileSums(float *memory, int64_t group) : p(memory), counted(p + group * TILE), sums(counted + TILE) {}

  static int64_t size(int64_t terms, int64_t group) { return (group + 1 + terms * group) * TILE; }
};

/// Add one query to the scores of a tile's KVs.
inline void add_query(const AttentionObserver &observer, int64_t terms, int64_t group, int width, float average,
                      const TileSums &tile) {
  const bool at_once = grouped_at_once(observer);
  for (int64_t term = 0; term < terms; ++term) {
    float *to = tile.sums + term * group * TILE;
    for (int j = 0; j < width; j += WIDTH) {
      vf together{};
      for (int64_t h = 0; h < group; ++h) {
        const vf p = load(tile.p + h * TILE + j), counted = load(tile.counted + j);
        const vf x = contribution(observer.terms[term], p, counted, average);
        if (at_once)
          together = join(together, x, h, observer.group);
        else
          store(to + h * TILE + j, load(to + h * TILE + j) + x);
      }
      if (at_once) {
        store(to + j, load(to + j) + together * share(observer, group));
      }
    }
  }
}

/// Query heads of a group as one: out [n] from x [heads, stride].
inline void aggregate(const float *x, int64_t heads, int64_t stride, int64_t n, const AttentionObserver &observer, float *out) {
  for (int64_t i = 0; i < n; ++i) {
    float together = x[i];
    for (int64_t h = 1; h < heads; ++h)
      together = observer.group == Group::max ? std::max(together, x[h * stride + i]) : together + x[h * stride + i];
    out[i] = together * (heads > 1 ? share(observer, heads) : 1.0f);
  }
}

/// Add x, [n], to an accumulator of the slots, or replace it. The first slot is as `adjacent` says.
inline void update_accumulators(const Cache &cache, int64_t term, const int64_t *slot, const float *x, int64_t n,
                                bool replace) {
  float *accumulator = cache.accumulators + term * cache.num_slots;
  const bool by_vectors = adjacent(cache);
  for (int64_t i = 0; i < n;) {
    float *to = accumulator + slot[i];
    if (by_vectors && i + WIDTH <= n) {
      const vf value = load(x + i);
      store(to, replace ? value : load(to) + value);
      i += WIDTH;
    } else {
      *to = replace ? x[i] : *to + x[i];
      ++i;
    }
  }
}

/// The scores of the keys [first_key, last_key) of a decoding row: a tile at a time, so that they can be computed between the
/// products of another row, whose KVs are being fetched.
class KeptScores {
 public:
  /// kept_weights: of the row's keys from first_key on.
  KeptScores(const Attend &call, const ScoreRow &score_row, int64_t first_key, int64_t last_key, const float *kept_weights,
             const float *statistics);

  /// Finishes the scores of the next tile, if there is one. Returns whether there are more.
  bool finish_tile();

 private:
  /// Tiles whose scores are prefetched: they are as scattered as blocks.
  static constexpr int64_t TILES_AHEAD = 4;

  /// Finds and prefetches the scores of the tile that begins with a key.
  void prefetch_tile(int64_t first);

  const Attend &call_;
  const AttentionObserver &observer_;
  const Row row_;
  const int64_t group_, terms_, token_, position_;
  int64_t first_;
  const int64_t last_;
  int64_t slots_[TILES_AHEAD][TILE];  // of the next tiles, see slots_to_read
  const float *kept_;                 // the weights of the next tile
  const float *statistic_;
  float average_ = 0;                 // for Term::below_average
  std::vector<float> factor_, row_max_;  // of each head: weights e^(logit - row_max) times the factor are probabilities
};

}  // namespace winnow::WINNOW_ISA
