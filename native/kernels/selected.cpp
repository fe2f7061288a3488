// Decode attention that reads few values (KCache, arXiv 2404.18057): every key is scored, and the largest weights of a query
// head say whose values are read. These may lie in a memory of their own, which is slower or farther away.
//
// A thread owns a query group, so that keys are read once and a value that several query heads choose is, too. Where there are
// fewer groups than occupy the threads, they score pieces of rows first. Logits and their sums are the same either way.
#if !defined(__AVX512BF16__)

#include <omp.h>

#include <cmath>
#include <functional>

#include "attend.h"
#include "direct.h"
#include "../types.h"

namespace winnow::WINNOW_ISA {

namespace {

/// Keys of a piece, where threads share a row.
constexpr int64_t PIECE = 16 * TILE;
/// Query groups for each thread from which on rows stay whole.
constexpr int64_t GROUPS_OF_THREAD = 4;

/// Up to TILE keys, or values. Pointers past the last repeat it.
template <class KV>
struct Vectors {
  int n = 0;
  int64_t slot[TILE];
  const KV *at[TILE];
  const f16 *scale[TILE];  // where KVs are coded

  /// Takes the KVs [first, first + count) of a row as the next ones.
  void add(const Cache &cache, bool values, const Row &row, int64_t first, int64_t count) {
    const int before = n;
    row.runs_in_blocks(first, count, [&](int64_t i, int64_t run, int64_t block, int64_t offset) {
      const int64_t to = before + i;
      for (int64_t j = 0; j < run; ++j) slot[to + j] = block * cache.block_size + offset + j;
      if constexpr (is_coded<KV>) {
        const CodedVectors &vectors = values ? cache.values : cache.keys;
        const KV *code = code_at(vectors, block, offset);
        const f16 *scales = scale_at(vectors, block, offset);
        for (int64_t j = 0; j < run; ++j) {
          at[to + j] = code + j * vectors.code.slot_bytes;
          scale[to + j] = scales + j * (vectors.scale.slot_bytes / 2);
        }
      } else {
        const KV *vector = reinterpret_cast<const KV *>(values ? cache.v : cache.k) + cache.at(block, offset);
        for (int64_t j = 0; j < run; ++j) at[to + j] = vector + j * cache.head_dim;
      }
    });
    n += static_cast<int>(count);
  }

  void repeat_last() { std::fill(at + n, at + TILE, at[n - 1]), std::fill(slot + n, slot + TILE, slot[n - 1]); }

  /// See Tile::scattered.
  bool scattered() const { return n == TILE && slot[TILE / 2] != slot[0] + TILE / 2; }

  CodedTile coded() const { return {at, scale, slot, n}; }
};

/// A token that selects values, in the query heads of one KV head.
struct Query {
  int64_t seq, token, head;
  int64_t sees;  // KVs of the row, the first ones
  int64_t logits = 0;  // where threads that share the row put them, in floats

  int64_t stride() const { return (sees + TILE - 1) / TILE * TILE; }
};

/// Two of them: the one that is computed and the one after it, which is prefetched meanwhile.
template <class KV>
struct VectorsAhead {
  Vectors<KV> both[2];
  int current = 0;

  Vectors<KV> &now() { return both[current]; }
  Vectors<KV> &next() { return both[current ^ 1]; }
};

/// A thread's memory for one query group.
struct GroupMemory {
  float *queries;  // [group, padded]
  float *tile;     // logits, then weights, [group, TILE]
  float *decoded;  // [TILE, padded]
  float *sums;     // [group, padded]
  float *logits;   // [group, stride], where the thread computes all of a row
  float *value;    // [2, stride]: logits that may be chosen
  int32_t *index;  // [stride]: their KVs
  int32_t *chosen; // [group, most]: KVs that a query head chose, in order
  float *weight;   // [group, most]
  int32_t *read;   // [stride]: KVs that any of them chose, in order
  uint64_t *bits;  // [stride / 64]
  int64_t most;

  GroupMemory(Buffer &buffer, int64_t group, int64_t padded, int64_t stride, int64_t most_values, bool whole_rows)
      : most(most_values) {
    int64_t size = 0;
    const auto reserve = [&size](int64_t n) {
      const int64_t at = size;
      size += (n + 15) / 16 * 16;
      return at;
    };
    const int64_t at[] = {reserve(group * padded), reserve(group * TILE),    reserve(TILE * padded),
                          reserve(group * padded), reserve(whole_rows ? group * stride : 0),
                          reserve(2 * stride),     reserve(stride),          reserve(group * most),
                          reserve(group * most),   reserve(stride),          reserve(stride / 32)};
    float *memory = buffer.get<float>(size);
    queries = memory + at[0], tile = memory + at[1], decoded = memory + at[2], sums = memory + at[3];
    logits = memory + at[4], value = memory + at[5], index = reinterpret_cast<int32_t *>(memory + at[6]);
    chosen = reinterpret_cast<int32_t *>(memory + at[7]), weight = memory + at[8];
    read = reinterpret_cast<int32_t *>(memory + at[9]), bits = reinterpret_cast<uint64_t *>(memory + at[10]);
  }
};

/// The largest `most` of n logits that are not masked: their indices in order; of equal ones the first. Returns how many.
///
/// n: whole vectors, filled up with NEG_INF. value: room for 2 n numbers; index: for n.
int64_t choose_largest(const float *logits, int64_t n, int64_t most, float *value, int32_t *index, int32_t *out) {
  // At least `most` logits reach the most-th largest of any maxima over disjoint sets of them: few others do.
  float least = NEG_INF;
  const int64_t vectors = n / WIDTH, wanted = std::max<int64_t>(1, 2 * most / WIDTH);
  const int64_t set = std::max<int64_t>(1, vectors / wanted);
  if (n > 2 * most) {
    int64_t count = 0;
    for (int64_t first = 0; first < vectors; first += set, count += WIDTH) {
      vf highest = load(logits + first * WIDTH);
      for (int64_t i = first + 1; i < std::min(first + set, vectors); ++i) highest = vmax(highest, load(logits + i * WIDTH));
      store(value + count, highest);
    }
    std::nth_element(value, value + most - 1, value + count, std::greater<float>());
    least = value[most - 1];
  }
  int64_t count = 0;
  for (int64_t first = 0; first < n; first += WIDTH) {
    const vf x = load(logits + first);
    if (horizontal_max(x) < least) continue;
    for (int i = 0; i < WIDTH; ++i) {
      value[count] = x[i], index[count] = static_cast<int32_t>(first + i);
      count += x[i] >= least && x[i] > NEG_INF;
    }
  }
  if (count <= most) {
    std::copy(index, index + count, out);
    return count;
  }
  float *ordered = value + n;
  std::copy(value, value + count, ordered);
  std::nth_element(ordered, ordered + most - 1, ordered + count, std::greater<float>());
  const float last = ordered[most - 1];
  int64_t equal = most, found = 0;
  for (int64_t i = 0; i < count; ++i) equal -= value[i] > last;
  for (int64_t i = 0; found < most; ++i) {
    const bool ties = value[i] == last && equal > 0;
    out[found] = index[i];
    found += value[i] > last || ties;
    equal -= ties;
  }
  return found;
}

/// Attention of a token in the query heads of one KV head.
template <class KV>
class GroupPass {
 public:
  GroupPass(const Attend &call, const Selection &selection, const Query &query, const GroupMemory &memory)
      : call_(call),
        selection_(selection),
        cache_(call.cache),
        row_(call.cache, call.batch.slots[query.seq], call.layer, query.head),
        memory_(memory),
        token_(query.token),
        head_(query.head),
        sees_(query.sees),
        group_(static_cast<int>(call.group())),
        dim_(static_cast<int>(call.cache.head_dim)),
        padded_(round_up(dim_, WIDTH)) {}

  /// Logits of the keys [first, last) of the row: [group, stride], of which it writes those columns, and NEG_INF up to the
  /// next whole vector.
  void score(int64_t first, int64_t last, float *logits, int64_t stride) const {
    pack_queries();
    VectorsAhead<KV> ahead;
    const auto find = [&](Vectors<KV> &to, int64_t from) {
      to.n = 0;
      if (from >= last) return;
      to.add(cache_, false, row_, from, std::min<int64_t>(TILE, last - from));
      to.repeat_last();
    };
    find(ahead.now(), first);
    for (; first < last; first += TILE, ahead.current ^= 1) {
      find(ahead.next(), first + TILE);
      const Vectors<KV> &tile = ahead.now();
      multiply(tile, ahead.next());
      int32_t position[TILE];
      if (call_.reads_positions()) {
        positions_of(cache_, tile.slot, tile.n, position);
        std::fill(position + tile.n, position + round_up(tile.n, WIDTH), position[tile.n - 1]);
      }
      const int width = round_up(tile.n, WIDTH);
      for (int h = 0; h < group_; ++h) {
        float *from = memory_.tile + h * TILE;
        finish_logits(from, width, tile.n, call_, call_.scale, position, call_.batch.position[token_],
                      call_.slope(head_ * group_ + h));
        std::copy(from, from + width, logits + h * stride + first);
      }
    }
  }

  /// From the logits of all keys to the output of the group.
  ValuesRead finish(const float *logits, int64_t stride) const {
    const int64_t width = round_up(static_cast<int>(sees_), WIDTH), most = std::min(selection_.most, sees_);
    ValuesRead found;
    found.head_queries = group_;
    std::fill(memory_.bits, memory_.bits + stride / 64, 0);
    std::vector<int64_t> counts(group_);
    for (int h = 0; h < group_; ++h) {
      int32_t *chosen = memory_.chosen + h * memory_.most;
      const float *of_head = logits + h * stride;
      counts[h] = most ? choose_largest(of_head, width, most, memory_.value, memory_.index, chosen) : 0;
      counts[h] = weigh(of_head, width, h, counts[h]);
      for (int64_t i = 0; i < counts[h]; ++i) memory_.bits[chosen[i] / 64] |= uint64_t{1} << (chosen[i] % 64);
      found.selected += counts[h];
    }
    for (int64_t word = 0; word < stride / 64; ++word)
      for (uint64_t bits = memory_.bits[word]; bits; bits &= bits - 1)
        memory_.read[found.rows++] = static_cast<int32_t>(word * 64 + __builtin_ctzll(bits));
    add_values(found.rows, counts);
    for (int h = 0; h < group_; ++h) write(h);
    return found;
  }

 private:
  void pack_queries() const {
    with_act(call_.dtype, [&](auto type) {
      using Act = decltype(type);
      const Act *q = reinterpret_cast<const Act *>(call_.q.data) + token_ * call_.q.token_stride;
      for (int h = 0; h < group_; ++h)
        pack_query(q + (head_ * group_ + h) * call_.q.head_stride, dim_, memory_.queries + h * padded_);
    });
    for (int h = 0; cache_.coded && h < group_; ++h)
      hadamard(memory_.queries + h * padded_, dim_, static_cast<int>(cache_.keys.rotation));
  }

  /// Raw logits of a tile: memory_.tile.
  void multiply(const Vectors<KV> &tile, const Vectors<KV> &next) const {
    if constexpr (is_coded<KV>) {
      if (decodes_in_registers(cache_.keys, group_, dim_)) {
        coded_products(cache_.keys, cache_.block_size, tile.coded(), next.coded(), group_, dim_, call_.dtype,
                       memory_.queries, memory_.tile);
        return;
      }
      decode_tile(cache_.keys, cache_.block_size, dim_, padded_, tile.coded(), next.coded(), memory_.decoded);
      const DecodedTile keys(memory_.decoded, tile.n, TILE, padded_);
      direct_products(group_, keys.at, keys.at, tile.n, false, padded_, memory_.queries, padded_, memory_.tile);
    } else {
      direct_products(group_, tile.at, next.n ? next.at : tile.at, tile.n, tile.scattered(), dim_,
                               static_cast<const float *>(memory_.queries), padded_, memory_.tile);
    }
  }

  /// The weights of what a query head chose. Returns how many are not 0; the others are forgotten.
  int64_t weigh(const float *logits, int64_t width, int h, int64_t count) const {
    int32_t *chosen = memory_.chosen + h * memory_.most;
    float *weight = memory_.weight + h * memory_.most;
    float row_max = call_.sinks ? call_.sinks[head_ * group_ + h] : NEG_INF;
    for (int64_t i = 0; i < count; ++i) row_max = std::max(row_max, logits[chosen[i]]);  // the largest is among them
    if (row_max == NEG_INF) return 0;
    const auto exponential = [row_max](vf x) { return vexp2((x - row_max) * LOG2_E); };
    vf total{};
    for (int64_t i = 0; i < width; i += WIDTH) total += exponential(load(logits + i));
    const float all = horizontal_sum(total);
    vf kept{};
    for (int64_t i = 0; i < count; i += WIDTH) {
      const int part = static_cast<int>(std::min<int64_t>(WIDTH, count - i));
      vf x = broadcast(NEG_INF);
      for (int j = 0; j < part; ++j) x[j] = logits[chosen[i + j]];
      const vf p = exponential(x);
      put(weight + i, p, part);
      kept += p;
    }
    float scale = 1.0f / (call_.sinks ? all + std::exp(call_.sinks[head_ * group_ + h] - row_max) : all);
    if (selection_.renormalize) scale *= all / horizontal_sum(kept);
    int64_t left = 0;
    for (int64_t i = 0; i < count; ++i) {
      weight[left] = weight[i] * scale, chosen[left] = chosen[i];
      left += weight[left] > 0.0f;
    }
    return left;
  }

  /// Weights times values: memory_.sums.
  void add_values(int64_t count, const std::vector<int64_t> &counts) const {
    std::fill(memory_.sums, memory_.sums + group_ * padded_, 0.0f);
    std::vector<int64_t> used(group_, 0);
    VectorsAhead<KV> ahead;
    const auto find = [&](Vectors<KV> &to, int64_t from) {
      to.n = 0;
      if (from >= count) return;
      for (int64_t i = from; i < std::min(count, from + TILE); ++i) to.add(cache_, true, row_, memory_.read[i], 1);
      to.repeat_last();
    };
    find(ahead.now(), 0);
    for (int64_t first = 0; first < count; first += TILE, ahead.current ^= 1) {
      find(ahead.next(), first + TILE);
      const Vectors<KV> &tile = ahead.now(), &next = ahead.next();
      for (int h = 0; h < group_; ++h) {
        const int32_t *chosen = memory_.chosen + h * memory_.most;
        const float *weight = memory_.weight + h * memory_.most;
        for (int j = 0; j < TILE; ++j) {
          const bool here = j < tile.n && used[h] < counts[h] && chosen[used[h]] == memory_.read[first + j];
          memory_.tile[h * TILE + j] = here ? weight[used[h]] : 0.0f;
          used[h] += here;
        }
      }
      if constexpr (is_coded<KV>) {
        decode_tile(cache_.values, cache_.block_size, dim_, padded_, tile.coded(), next.coded(), memory_.decoded);
        const DecodedTile values(memory_.decoded, tile.n, TILE, padded_);
        direct_sums(group_, values.at, values.at, tile.n, padded_, static_cast<const float *>(memory_.tile), padded_,
                    memory_.sums);
      } else {
        direct_sums(group_, tile.at, next.n ? next.at : tile.at, tile.n, dim_, static_cast<const float *>(memory_.tile),
                    padded_, memory_.sums);
      }
    }
  }

  void write(int h) const {
    float *sums = memory_.sums + h * padded_;
    if (cache_.coded) hadamard(sums, dim_, static_cast<int>(cache_.values.rotation));  // back from what is stored
    with_act(call_.dtype, [&](auto type) {
      using Act = decltype(type);
      Act *out = reinterpret_cast<Act *>(call_.out) + (token_ * call_.num_query_heads + head_ * group_ + h) * dim_;
      for (int d = 0; d < dim_; d += WIDTH) put(out + d, load(sums + d), std::min(WIDTH, dim_ - d));
    });
  }

  const Attend &call_;
  const Selection &selection_;
  const Cache &cache_;
  const Row row_;
  const GroupMemory &memory_;
  const int64_t token_, head_, sees_;
  const int group_, dim_, padded_;
};

/// The tokens that select values, in every KV head.
std::vector<Query> queries_of(const Attend &call, const Selection &selection) {
  const Batch &batch = call.batch;
  std::vector<Query> queries;
  for (int64_t seq = 0; seq < batch.num_seqs(); ++seq)
    for (int64_t i = 0; i < batch.counts[seq]; ++i) {
      const int64_t token = batch.starts[seq] + i;
      if (!selection.selects(batch, seq, token) || (call.read && !(*call.read)[token])) continue;
      for (int64_t head = 0; head < call.cache.num_heads; ++head) {
        const Row row(call.cache, batch.slots[seq], call.layer, head);
        queries.push_back({seq, token, head, row.length - batch.counts[seq] + i + 1});
      }
    }
  return queries;
}

template <class KV>
ValuesRead attend_selected_as(const Attend &call, const Selection &selection, Workspace &work) {
  std::vector<Query> queries = queries_of(call, selection);
  const int64_t group = call.group(), padded = round_up(static_cast<int>(call.cache.head_dim), WIDTH);
  const bool whole_rows = call.threads == 1 || static_cast<int64_t>(queries.size()) >= GROUPS_OF_THREAD * call.threads;
  std::vector<std::pair<size_t, int64_t>> pieces;  // that threads share: a query, and its first key
  int64_t longest = 0, size = 0;
  for (size_t i = 0; i < queries.size(); ++i) {
    longest = std::max(longest, queries[i].sees);
    queries[i].logits = size;
    if (whole_rows) continue;
    size += group * queries[i].stride();
    for (int64_t first = 0; first < queries[i].sees; first += PIECE) pieces.emplace_back(i, first);
  }
  float *logits = work.kept.get<float>(size);
  if (static_cast<int>(work.threads.size()) < call.threads) work.threads.resize(call.threads);
  const int64_t stride = (longest + TILE - 1) / TILE * TILE, most = std::min(selection.most, longest);
  int64_t head_queries = 0, selected = 0, rows = 0;
#pragma omp parallel num_threads(call.threads) reduction(+ : head_queries, selected, rows)
  {
    const GroupMemory memory(work.threads[omp_get_thread_num()], group, padded, stride, most, whole_rows);
#pragma omp for schedule(dynamic, 1)
    for (size_t i = 0; i < pieces.size(); ++i) {
      const Query &query = queries[pieces[i].first];
      const int64_t first = pieces[i].second;
      GroupPass<KV>(call, selection, query, memory)
          .score(first, std::min(query.sees, first + PIECE), logits + query.logits, query.stride());
    }
#pragma omp for schedule(dynamic, 1)
    for (size_t i = 0; i < queries.size(); ++i) {
      const Query &query = queries[i];
      const GroupPass<KV> pass(call, selection, query, memory);
      if (whole_rows) pass.score(0, query.sees, memory.logits, query.stride());
      const ValuesRead found = pass.finish(whole_rows ? memory.logits : logits + query.logits, query.stride());
      head_queries += found.head_queries, selected += found.selected, rows += found.rows;
    }
  }
  return {head_queries, selected, rows, 0};
}

}  // namespace

ValuesRead attend_selected(const Attend &call, const Selection &selection, Workspace &work) {
  if (call.cache.coded) return attend_selected_as<Coded>(call, selection, work);
  ValuesRead found;
  with_type(call.cache.dtype, [&](auto kv) { found = attend_selected_as<decltype(kv)>(call, selection, work); });
  return found;
}

}  // namespace winnow::WINNOW_ISA

#else

#include "../types.h"

namespace winnow {

namespace avx512 {
ValuesRead attend_selected(const Attend &, const Selection &, Workspace &);
}

namespace WINNOW_ISA {

/// As attention to KVs of other formats (dispatch.cpp): products of bf16 save nothing where memory is the limit.
ValuesRead attend_selected(const Attend &call, const Selection &selection, Workspace &work) {
  return avx512::attend_selected(call, selection, work);
}

}  // namespace WINNOW_ISA

}  // namespace winnow

#endif
