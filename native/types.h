// What Python hands to the kernels: plain data, the same for every instruction set.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <new>
#include <numeric>
#include <vector>

namespace winnow {

enum class DType : int32_t { f32, bf16, f16 };

inline int64_t bytes_of(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

/// How keys, or values, are laid out: block_size of them side by side, then the next block block_stride elements on.
struct Blocks {
  int64_t block_size, block_stride, head_dim;

  /// Where a vector of a block begins, in elements.
  int64_t at(int64_t block, int64_t offset) const { return block * block_stride + offset * head_dim; }
  /// The same of a flat slot number.
  int64_t at(int64_t slot) const { return at(slot / block_size, slot % block_size); }
};

/// A part of every KV in a pool, such as its key: slots of a block side by side.
struct Field {
  char *data;
  int64_t slot_bytes, block_bytes;  // from one slot, or block, to the next

  char *at(int64_t block, int64_t offset) const { return data + block * block_bytes + offset * slot_bytes; }
};

/// How a vector is stored; see winnow.cache.formats, whose names these are.
enum class Format : int32_t { f32, bf16, f16, fp8_e4m3, int8, int4, int3, int2 };

constexpr bool is_plain(Format format) { return format <= Format::f16; }

/// Keys, or values, as a codec stores them: code[i] * scale + min for each channel, with a scale and a min for each group of
/// channels. Plain vectors are codes without either.
struct CodedVectors {
  Format format;
  Field code;
  int64_t group;    // channels
  Field scale, min; // f16 [groups]; both have the same strides. min.data is null where codes are symmetric
  int64_t num_outliers;
  Field outlier, channel;  // f16 and uint8 [num_outliers]: added to these channels
  int64_t rotation;        // channels that are mixed by a Hadamard transform before they are stored; 1: none
};

/// The memory of a cache; see winnow.cache.KVPool. Moving a KV copies its fields; attention reads those of keys and values.
struct Pool : Blocks {
  std::vector<Field> fields;
  char *k, *v;        // [num_slots] vectors of dtype, which need not be that of a model's activations; unless coded
  int32_t *position;  // [num_slots]
  float *accumulators;  // [num_accumulators, num_slots]
  int64_t num_slots, num_accumulators;
  DType dtype;
  bool coded;  // KVs are stored as `keys` and `values` say, else as k and v
  CodedVectors keys, values;
  Field bias;  // f16 [1], added to a KV's logits; data is null where there is none
};

/// Vectors of consecutive layers that are kept beside coded ones as they came; see winnow.cache.wide.WideWindow.
struct WideWindow {
  int64_t first_layer, num_layers, num_heads, head_dim;
  int64_t sinks, recent;  // places of first positions, and those in which the others take turns
  DType dtype;
  char *k, *v;        // [max_seqs, num_layers, num_heads, places, head_dim] of dtype
  int32_t *position;  // [max_seqs, num_layers, places]: whose vectors a place holds

  int64_t places() const { return sinks + recent; }
  bool has(int64_t layer) const { return first_layer <= layer && layer < first_layer + num_layers; }

  /// The place of a position, which another may hold; -1: it has none.
  int64_t place(int64_t at) const { return at < sinks ? at : recent ? sinks + at % recent : -1; }

  /// Which positions the places of a sequence hold.
  int32_t *positions(int64_t seq_slot, int64_t layer) const {
    return position + (seq_slot * num_layers + layer - first_layer) * places();
  }
  /// Where one of the vectors `x`, which is k or v, begins.
  char *at(char *x, int64_t seq_slot, int64_t layer, int64_t head, int64_t place) const {
    const int64_t row = (seq_slot * num_layers + layer - first_layer) * num_heads + head;
    return x + (row * places() + place) * head_dim * bytes_of(dtype);
  }
};

/// A pool, and the tables of its rows' blocks; see winnow.cache.BlockTables.
struct Cache : Pool {
  const int32_t *pages;       // [num_pages, num_layers, table_heads, page_entries]: block ids
  const int32_t *page_table;  // [max_seqs, pages_per_seq]
  const int32_t *lengths;     // [max_seqs, num_layers, table_heads]
  int64_t num_layers;
  int64_t num_heads, table_heads;  // of the layers that are asked for; of the layer that has most
  int64_t page_entries, pages_per_seq;
  std::vector<WideWindow> windows;

  /// What is kept wide of a layer, or null.
  const WideWindow *window(int64_t layer) const {
    for (const WideWindow &each : windows)
      if (each.has(layer)) return &each;
    return nullptr;
  }
};

/// One row: a sequence's KVs in one layer and head.
class Row {
 public:
  Row(const Cache &cache, int64_t seq_slot, int64_t layer, int64_t head)
      : length(cache.lengths[(seq_slot * cache.num_layers + layer) * cache.table_heads + head]),
        seq_slot(seq_slot),
        layer(layer),
        head(head),
        cache_(cache),
        table_(cache.page_table + seq_slot * cache.pages_per_seq),
        offset_((layer * cache.table_heads + head) * cache.page_entries) {}

  const int64_t length, seq_slot, layer, head;

  /// Calls f with each run of the KVs [first, first + n) that lies in one block: how many of them come before it, how many
  /// they are, the block, and their first slot in it.
  template <class F>
  void runs_in_blocks(int64_t first, int64_t n, F f) const {
    const int64_t size = cache_.block_size, block = first / size;
    int64_t offset = first % size, page = block / cache_.page_entries, entry = block % cache_.page_entries;
    for (int64_t i = 0; i < n; offset = 0) {
      const int64_t count = std::min(n - i, size - offset);
      f(i, count, static_cast<int64_t>(entries(page)[entry]), offset);
      i += count;
      if (++entry == cache_.page_entries) {
        entry = 0;
        if (++page < cache_.pages_per_seq) __builtin_prefetch(entries(page));
      }
    }
  }

  /// The same with the flat number of the first slot.
  template <class F>
  void runs(int64_t first, int64_t n, F f) const {
    runs_in_blocks(first, n, [&](int64_t i, int64_t count, int64_t block, int64_t offset) {
      f(i, count, block * cache_.block_size + offset);
    });
  }

  /// Prefetch the table entries of the KV `first` and the ones after it.
  void prefetch_entries(int64_t first) const {
    const int64_t block = first / cache_.block_size;
    __builtin_prefetch(entries(block / cache_.page_entries) + block % cache_.page_entries);
  }

  /// Flat slot numbers of the KVs [first, first + n).
  void slots(int64_t first, int64_t n, int64_t *out) const {
    runs(first, n, [out](int64_t i, int64_t count, int64_t slot) { std::iota(out + i, out + i + count, slot); });
  }

 private:
  const int32_t *entries(int64_t page) const {
    return cache_.pages + table_[page] * cache_.num_layers * cache_.table_heads * cache_.page_entries + offset_;
  }

  const Cache &cache_;
  const int32_t *table_;
  const int64_t offset_;
};

enum class Term : int32_t { attention, squared, below_average };
enum class Group : int32_t { sum, mean, max };

/// See winnow.attention.AttentionObserver and Smoothing, field by field.
struct AttentionObserver {
  std::vector<Term> terms;
  Group group;
  int64_t exclude_first;
  bool replace;
  int64_t smoothing_size;  // 0: none
  bool smoothing_max;      // else the average
  bool smoothing_per_query_head, smoothing_skip_window;
};

/// See winnow.attention.Spans.
struct Batch {
  std::vector<int64_t> slots, counts, starts;  // [B]
  std::vector<int64_t> position;               // [T]
  std::vector<int64_t> observer;               // [B]: index into observers, or -1
  std::vector<int64_t> observe_from;           // [B]
  std::vector<AttentionObserver> observers;
  std::vector<bool> temporary;                 // [B]: whose KVs are dropped again, and leave windows as they are

  /// Add a sequence of another batch, whose tokens begin at `start` here.
  void add(const Batch &other, int64_t seq, int64_t start) {
    slots.push_back(other.slots[seq]);
    counts.push_back(other.counts[seq]);
    starts.push_back(start);
    observer.push_back(other.observer[seq]);
    observe_from.push_back(other.observe_from[seq]);
    temporary.push_back(other.temporary[seq]);
  }
  int64_t num_seqs() const { return static_cast<int64_t>(slots.size()); }
  int64_t num_tokens() const { return static_cast<int64_t>(position.size()); }
  /// The highest position and one.
  int64_t end() const { return position.empty() ? 0 : *std::max_element(position.begin(), position.end()) + 1; }
};

/// A [tokens, heads, head_dim] tensor whose last dimension is dense; strides count elements.
struct Heads {
  char *data;
  int64_t token_stride, head_stride;
};

/// Keys and values of the batch's tokens [first, last) in one layer.
struct NewKVs {
  int64_t layer;
  DType dtype;  // of k and v; they are stored in the cache's
  Heads k, v;
  int64_t first, last;
};

/// See winnow.attention.AttentionSpec.
struct AttentionSpec {
  float scale;
  int64_t window;      // 0: none
  float softcap;       // 0: none
  const float *sinks, *slopes;  // [num_query_heads], or null
  bool chunked;        // the window begins anew at its every multiple

  /// How many positions a query sees, its own included, where there is a window.
  int64_t reach(int64_t position) const { return chunked ? position % window + 1 : window; }
  bool reads_positions() const { return window > 0 || slopes; }
  float slope(int64_t query_head) const { return slopes ? slopes[query_head] : 0.0f; }
};

/// One layer's attention over a batch. out is [T, num_query_heads, head_dim], dense.
struct Attend : AttentionSpec {
  const Cache &cache;
  const Batch &batch;
  int64_t layer;
  DType dtype;  // of q and out
  Heads q;
  char *out;
  int64_t num_query_heads;
  int threads;
  const std::vector<bool> *read = nullptr;  // [T]: whether a token's output is read; null: all are

  int64_t group() const { return num_query_heads / cache.num_heads; }
};

/// Queries of a pass that repeats a context, and the KVs that they score; see winnow.eviction.replay.
///
/// A query's softmax goes over the context's KVs [0, head) and [start, end), and those behind the context up to itself. KVs of
/// a row are in the order of their positions, from 0 on without a gap.
struct Replay : AttentionSpec {
  const Cache &cache;
  int64_t layer, slot;
  int64_t head, start, end, context_len;
  DType dtype;                    // of q
  Heads q;                        // [count, num_query_heads, head_dim]
  int64_t count, first, every;    // queries, the position of the first one, and from one to the next
  int64_t num_query_heads;
  int threads;

  int64_t group() const { return num_query_heads / cache.num_heads; }
  int64_t judged() const { return head + end - start; }
};

/// Rows of keys anywhere in a pool, padded to `stride` slots each.
struct KeyRows : Blocks {
  DType dtype;
  const char *k;          // [num_slots] vectors
  const int64_t *slot;    // [rows, stride]
  const int32_t *length;  // [rows]: KVs of each row
  int64_t rows, stride;
  bool coded;          // keys are stored as `keys` says, else as k
  CodedVectors keys;
};

/// How keys are rotated at their positions: pairs of dimensions from `first` on, neighbours where interleaved, else halves.
struct KeyRotation {
  const float *cos, *sin;  // [positions, stride], stride: pairs, padded to a multiple of 16
  int64_t pairs, stride, first;
  bool interleaved;
};

/// Sums of the directions of rows' keys before rotation.
struct KeyDirections {
  float *sum;               // [rows, head_dim]; the keys from position `counted` on are added
  const int32_t *counted;   // [rows]
  const int32_t *position;  // [rows, stride]
  int64_t stride;
  KeyRotation turn;
};

/// Rows to evict from: `kept` KVs of each stay, those that must and then those of the highest scores.
struct RankedRows {
  const int64_t *block;    // [rows, stride / block_size]
  const int32_t *length;   // [rows]: KVs of each row
  const int32_t *kept;     // [rows]
  const float *score;      // [rows, stride]
  const bool *must_stay;   // [rows, stride], no more of a row than are kept
  int64_t rows, stride;    // stride: slots, those of whole blocks
};

/// Scores to smooth over KVs near in position; see winnow.attention.Smoothing.
struct SmoothedRows {
  const float *x;           // [rows, stride]
  const int32_t *position;  // [rows, stride]
  const int32_t *length;    // [rows]
  int64_t rows, stride;
  int64_t smoothing_size;
  bool smoothing_max;  // else the average
};

/// Memory that grows on demand and is kept between calls, so that a step allocates none.
class Buffer {
 public:
  /// At least n elements of T, aligned for every instruction set; what they hold is undefined.
  template <class T>
  T *get(int64_t n) {
    const size_t bytes = (n * sizeof(T) + 63) / 64 * 64;
    if (bytes > size_) {
      memory_.reset();  // first: two of them need not fit
      memory_.reset(static_cast<char *>(::operator new(bytes, std::align_val_t{64})));
      size_ = bytes;
    }
    return reinterpret_cast<T *>(memory_.get());
  }

 private:
  struct Release {
    void operator()(char *memory) const { ::operator delete(memory, std::align_val_t{64}); }
  };
  std::unique_ptr<char, Release> memory_;
  size_t size_ = 0;
};

/// Temporary memory of attention.
struct Workspace {
  Buffer partials, statistics, kept, partial_scores, sums;
  std::vector<Buffer> threads;
};

/// Which tokens of a batch select values, and how many.
struct Selection {
  int64_t most;      // values that a query head reads: those of its largest weights
  bool renormalize;  // their weights add up to what those of all KVs do; else they are as softmaxed
  std::vector<int64_t> from;  // [B]: the first position of each sequence whose query selects

  bool selects(const Batch &batch, int64_t seq, int64_t token) const { return batch.position[token] >= from[seq]; }
};

/// What was read of a layer's values.
struct ValuesRead {
  int64_t head_queries = 0;  // that selected values: tokens times query heads
  int64_t selected = 0;      // values, summed over these
  int64_t rows = 0;          // values read for them: one that several query heads of a group select is read once
  int64_t in_full = 0;       // values of rows that other tokens read in full
};

}  // namespace winnow
