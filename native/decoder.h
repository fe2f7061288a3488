// Llama-like decoders: a whole model in one call, or a layer, or a layer in two: before attention and after it.
#pragma once

#include <atomic>

#include "dispatch.h"

namespace winnow {

/// A linear layer.
struct Linear {
  PackedWeight weight;
  const char *bias;  // [out_features]; null: none
};

struct DecoderLayer {
  Linear qkv;  // queries, keys and values side by side
  Linear output;
  Linear gate_up;  // both side by side
  Linear down;
  RmsNorm input_norm, query_norm, key_norm, post_norm;
  RmsNorm output_norm, down_norm;  // applied to the products of those names before they are added to the layer's input
  Activation activation;
  int64_t num_query_heads, num_kv_heads, head_dim;

  /// Of weights and activations. KVs have the cache's.
  DType dtype() const { return qkv.weight.dtype; }
  int64_t hidden_size() const { return qkv.weight.in_features; }
};

/// The rotation of tokens at their positions.
struct Rotation {
  const char *cos, *sin;  // [tokens, rotary_dim]
  int64_t rotary_dim;
};

/// Memory between a layer's products; the same for every layer.
struct DecoderWorkspace {
  Buffer stream, cos, sin, normed, gate_up, gated, qkv, attended, projected, wanted, wanted_attended;
  Workspace attention;                       // of a thread that attends alone
  std::vector<DecoderWorkspace> of_threads;  // where each computes tokens of its own
  int64_t num_sub_batches = 0;               // of the last batch; see partition_batch
};

/// Products of rows that follow one another in groups, with a weight each, all of the same shape: [rows, out_features]. A
/// thread computes whole groups where these keep all busy. counts: rows of each group. biases: [out_features], or 0.
void grouped_linear(const Kernels &, const std::vector<const PackedWeight *> &, const std::vector<uintptr_t> &biases,
                    const char *x, char *out, const std::vector<int64_t> &counts, int threads);

/// x [tokens, hidden_size] -> normed and rotated queries and keys, and values:
/// [tokens, num_query_heads + 2 num_kv_heads, head_dim].
void pre_attention(const Kernels &, const DecoderLayer &, const char *x, int64_t tokens, const Rotation &, char *qkv,
                   DecoderWorkspace &, int threads);

/// x [tokens, hidden_size], the layer's input, becomes its output; attended [tokens, num_query_heads * head_dim].
void post_attention(const Kernels &, const DecoderLayer &, char *x, const char *attended, int64_t tokens,
                    DecoderWorkspace &, int threads);

/// The layers from `first` on, whose values lie apart from their keys, and what was read there.
struct FarLayers {
  const Cache cache;
  const int64_t first;
  std::atomic<int64_t> head_queries = 0, selected = 0, rows = 0, in_full = 0;

  /// Threads that compute sub-batches count at the same time.
  void count(const ValuesRead &);
  /// What was counted since the last call.
  ValuesRead take_counts();
};

/// A batch over the cache that a layer attends to.
struct PagedStep {
  const Cache &cache;
  const Batch &batch;
  Workspace &work;
  FarLayers *far;              // null: there are none
  const Selection *selection;  // in these; as far

  bool is_far(int64_t layer) const { return far && layer >= far->first; }
  const Cache &cache_of(int64_t layer) const { return is_far(layer) ? far->cache : cache; }
};

/// The whole layer, the index-th of the cache: x [tokens, hidden_size] becomes its output.
void decoder_layer(const Kernels &, const DecoderLayer &, int64_t index, char *x, const Rotation &, const AttentionSpec &,
                   const PagedStep &, DecoderWorkspace &, int threads);

/// A layer, how it attends, and its number in the cache.
struct StackedLayer {
  DecoderLayer layer;
  AttentionSpec spec;
  int64_t index;
};

/// Inputs of the first layer.
struct Embedding {
  const char *table;    // [num_tokens, hidden_size]; null: its rows are those of
  PackedWeight packed;  // this weight, which may be the head's
  int64_t num_tokens;
};

/// A model: embedding, layers from the bottom up, norm, head.
struct Decoder {
  Embedding embedding;
  std::vector<StackedLayer> layers;
  bool selects;  // only the wanted tokens' outputs of the last layer are read
  RmsNorm norm;
  Linear head;

  DType dtype() const { return head.weight.dtype; }
};

/// Cosines and sines of the positions from 0 on.
struct RotationTable {
  const char *cos, *sin;  // [positions, rotary_dim]
  int64_t rotary_dim;
};

/// Tokens of a batch whose logits are wanted.
struct Wanted {
  int64_t count;  // negative: all
  const int64_t *tokens;

  bool all() const { return count < 0; }
};

/// Compute the logits of the wanted tokens of a batch, [count, vocabulary]. Threads compute sequences of their own where there
/// are enough tokens and the sequences can be distributed evenly; else they share the work of each layer. Where the decoder
/// selects, the last layer computes outputs of the wanted tokens only: others attend in it only for accumulators.
void decode(const Kernels &, const Decoder &, const int64_t *tokens, const RotationTable &, const PagedStep &, const Wanted &,
            char *logits, DecoderWorkspace &, int threads);

}  // namespace winnow
