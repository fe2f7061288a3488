// Kernels that store and move KVs.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "coded.h"

namespace winnow::WINNOW_ISA {

namespace {

constexpr int64_t MOVES_AHEAD = 8;

void clear_accumulators(const Pool &pool, int64_t slot) {
  for (int64_t n = 0; n < pool.num_accumulators; ++n) pool.accumulators[n * pool.num_slots + slot] = 0.0f;
}

/// Move a KV from one slot to another: its fields, position and accumulators.
void move(const Pool &pool, int64_t from, int64_t to) {
  const int64_t old_block = from / pool.block_size, old_offset = from % pool.block_size;
  const int64_t new_block = to / pool.block_size, new_offset = to % pool.block_size;
  for (const Field &field : pool.fields)
    std::memcpy(field.at(new_block, new_offset), field.at(old_block, old_offset), field.slot_bytes);
  pool.position[to] = pool.position[from];
  for (int64_t n = 0; n < pool.num_accumulators; ++n) {
    float *accumulator = pool.accumulators + n * pool.num_slots;
    accumulator[to] = accumulator[from];
  }
}

/// Ask for the memory of a KV that is moved soon: kept KVs are scattered, so the processor cannot guess where.
void prefetch(const Pool &pool, int64_t slot) {
  const int64_t block = slot / pool.block_size, offset = slot % pool.block_size;
  for (const Field &field : pool.fields) {
    const char *from = field.at(block, offset);
    for (int64_t byte = 0; byte < field.slot_bytes; byte += 64) __builtin_prefetch(from + byte);
  }
  __builtin_prefetch(pool.position + slot);
}

/// Copy a vector of n numbers from one format to another.
template <class From, class To>
void convert(const char *from, char *to, int64_t n) {
  for (int64_t d = 0; d < n; d += WIDTH) {
    const int part = static_cast<int>(std::min<int64_t>(WIDTH, n - d));
    put(reinterpret_cast<To *>(to) + d, get(reinterpret_cast<const From *>(from) + d, part), part);
  }
}

/// Encode a vector of the activations and store it in a slot.
void write_coded(const CodedVectors &vectors, DType dtype, int64_t dim, const char *from, int64_t block, int64_t offset) {
  thread_local Buffer memory;
  float *x = memory.get<float>(dim + WIDTH);
  with_type(dtype, [&](auto type) { convert<decltype(type), float>(from, reinterpret_cast<char *>(x), dim); });
  for (int64_t d = dim; d % WIDTH; ++d) x[d] = 0.0f;
  encode(vectors, static_cast<int>(dim), x, block, offset);
}

/// Store a vector of the activations as it came. Infinity could make a logit -inf, which attention takes for a mask; NaN is
/// noticed.
void write_wide(DType act, DType dtype, int64_t dim, const char *from, char *to) {
  with_types(act, dtype, [&](auto type, auto kept) {
    using Act = decltype(type);
    using Kept = decltype(kept);
    convert<Act, Kept>(from, to, dim);
    Kept *x = reinterpret_cast<Kept *>(to);
    for (int64_t d = 0; d < dim; ++d)
      if (std::isinf(to_float(x[d]))) put(x + d, broadcast(std::numeric_limits<float>::quiet_NaN()), 1);
  });
}

/// Keep the key and the value of a sequence's token wide, if it is one of the first or the last. after: tokens that follow.
void write_wide(const WideWindow &window, const Row &row, const NewKVs &kvs, int64_t position, int64_t after, const char *k,
                const char *v) {
  if (position >= window.sinks && after >= window.recent) return;
  const int64_t place = window.place(position);
  if (row.head == 0) window.positions(row.seq_slot, row.layer)[place] = static_cast<int32_t>(position);
  write_wide(kvs.dtype, window.dtype, window.head_dim, k, window.at(window.k, row.seq_slot, row.layer, row.head, place));
  write_wide(kvs.dtype, window.dtype, window.head_dim, v, window.at(window.v, row.seq_slot, row.layer, row.head, place));
}

/// As `write`. store: called with the key and the value of a token, and the slot where they go.
template <class Store>
void write_each(const Cache &cache, const Batch &batch, const NewKVs &kvs, int threads, Store store) {
  const Heads k = kvs.k, v = kvs.v;
  const int64_t act = bytes_of(kvs.dtype);
  const int64_t pieces = batch.num_seqs() * cache.num_heads;
#pragma omp parallel num_threads(threads) if (kvs.last - kvs.first >= 16)
  {
#pragma omp for schedule(dynamic, 4)
    for (int64_t piece = 0; piece < pieces; ++piece) {
      const int64_t seq = piece / cache.num_heads, head = piece % cache.num_heads;
      const int64_t end = batch.starts[seq] + batch.counts[seq];
      const int64_t from = std::max(batch.starts[seq], kvs.first), count = std::min(end, kvs.last) - from;
      if (count <= 0) continue;
      const Row row(cache, batch.slots[seq], kvs.layer, head);
      const WideWindow *window = batch.temporary[seq] ? nullptr : cache.window(kvs.layer);
      row.runs_in_blocks(row.length - (end - from), count, [&](int64_t i, int64_t n, int64_t block, int64_t offset) {
        for (int64_t token = from + i; token < from + i + n; ++token, ++offset) {
          const int64_t slot = block * cache.block_size + offset;
          const char *key = k.data + (token * k.token_stride + head * k.head_stride) * act;
          const char *value = v.data + (token * v.token_stride + head * v.head_stride) * act;
          store(key, value, block, offset);
          if (window) write_wide(*window, row, kvs, batch.position[token], end - 1 - token, key, value);
          if (cache.bias.data) *reinterpret_cast<f16 *>(cache.bias.at(block, offset)) = f16{};
          cache.position[slot] = static_cast<int32_t>(batch.position[token]);
          clear_accumulators(cache, slot);
        }
      });
    }
  }
}

/// A number that is larger where the float is.
uint32_t ordered(float x) {
  x += 0.0f;  // -0 becomes 0, which is its equal
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}

/// How many of n numbers are below another one.
int64_t count_below(const uint32_t *x, int64_t n, uint32_t most) {
  uint32_t count = 0;
  for (int64_t i = 0; i < n; ++i) count += x[i] < most;
  return count;
}

/// The count-th smallest of n numbers, count > 0: bit by bit, which takes no branch that depends on them.
uint32_t smallest(const uint32_t *x, int64_t n, int64_t count) {
  uint32_t found = 0;
  for (uint32_t bit = 1u << 31; bit; bit >>= 1)
    if (count_below(x, n, found | bit) < count) found |= bit;
  return found;
}

/// A thread's memory for the KVs of one row, [n] each.
struct Choice {
  std::vector<uint32_t> score, age;  // ordered
  std::vector<int64_t> slot;         // in the pool
  std::vector<int64_t> holes, rest;  // evicted KVs among the first `kept` slots; kept KVs behind them
  std::vector<uint32_t> equals;      // ages of KVs with the highest evicted score

  explicit Choice(int64_t n) : score(n), age(n), slot(n), holes(n), rest(n) {}

  /// Find the KVs of a row to evict: lowest score first, ties go to the older KV. Returns how many are among the first `kept`
  /// slots.
  int64_t choose(int64_t n, int64_t kept) {
    const uint32_t last = smallest(score.data(), n, n - kept);
    const int64_t below = count_below(score.data(), n, last);
    equals.clear();
    for (int64_t i = 0; i < n; ++i)
      if (score[i] == last) equals.push_back(age[i]);
    const uint32_t last_age = smallest(equals.data(), static_cast<int64_t>(equals.size()), n - kept - below);
    const auto evicted = [&](int64_t i) { return score[i] < last || (score[i] == last && age[i] <= last_age); };
    int64_t num_holes = 0, num_rest = 0;
    for (int64_t i = 0; i < kept; ++i) holes[num_holes] = i, num_holes += evicted(i);
    for (int64_t i = kept; i < n; ++i) rest[num_rest] = i, num_rest += !evicted(i);
    return std::min(num_holes, num_rest);  // equal unless two KVs have the same position
  }
};

}  // namespace

void write(const Cache &cache, const Batch &batch, const NewKVs &kvs, int threads) {
  const int64_t dim = cache.head_dim;
  if (cache.coded) {
    write_each(cache, batch, kvs, threads, [&cache, &kvs, dim](const char *k, const char *v, int64_t block, int64_t offset) {
      write_coded(cache.keys, kvs.dtype, dim, k, block, offset);
      write_coded(cache.values, kvs.dtype, dim, v, block, offset);
    });
    return;
  }
  const auto write_plain = [&](auto copy) {
    const int64_t width = bytes_of(cache.dtype);
    write_each(cache, batch, kvs, threads, [&cache, width, copy](const char *k, const char *v, int64_t block, int64_t offset) {
      const int64_t vector = cache.at(block, offset) * width;
      copy(k, cache.k + vector);
      copy(v, cache.v + vector);
    });
  };
  if (kvs.dtype == cache.dtype) {
    const int64_t bytes = cache.head_dim * bytes_of(cache.dtype);
    write_plain([bytes](const char *from, char *to) { std::memcpy(to, from, bytes); });
    return;
  }
  void (*copy)(const char *, char *, int64_t) = nullptr;
  with_types(kvs.dtype, cache.dtype, [&](auto act, auto kv) { copy = convert<decltype(act), decltype(kv)>; });
  write_plain([=](const char *from, char *to) { copy(from, to, dim); });
}

void compact(const Pool &pool, const int64_t *source, const int64_t *target, int64_t n, int threads) {
#pragma omp parallel for num_threads(threads) if (n > 256)
  for (int64_t i = 0; i < n; ++i) {
    if (i + MOVES_AHEAD < n) prefetch(pool, source[i + MOVES_AHEAD]), prefetch(pool, target[i + MOVES_AHEAD]);
    move(pool, source[i], target[i]);
  }
}

void keep_best(const Pool &pool, const RankedRows &rows, int threads) {
#pragma omp parallel num_threads(threads)
  {
    Choice choice(rows.stride);
#pragma omp for schedule(dynamic, 8)
    for (int64_t r = 0; r < rows.rows; ++r) {
      const int64_t n = rows.length[r], kept = rows.kept[r], size = pool.block_size, first = r * rows.stride;
      if (kept >= n) continue;
      for (int64_t i = 0; i < n; i += size) {
        const int64_t slot = rows.block[(first + i) / size] * size, end = std::min(i + size, n);
        std::iota(&choice.slot[i], &choice.slot[i] + (end - i), slot);
        std::copy(pool.position + slot, pool.position + slot + (end - i), &choice.age[i]);
      }
      for (int64_t i = 0; i < n; ++i)
        choice.score[i] = ordered(rows.must_stay[first + i] ? std::numeric_limits<float>::infinity() : rows.score[first + i]);
      const int64_t moves = choice.choose(n, kept);
      for (int64_t i = 0; i < moves; ++i) move(pool, choice.slot[choice.rest[i]], choice.slot[choice.holes[i]]);
    }
  }
}

}  // namespace winnow::WINNOW_ISA
