// Decoders of Llama's kind: a whole model as one call, or a layer, or a layer as two: what lies before attention, and what lies
// after it.
#pragma once

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
  RmsNorm output_norm, down_norm;  // of what the products of those names add to the layer's input
  Activation activation;
  int64_t num_query_heads, num_kv_heads, head_dim;

  /// Of weights and activations. KVs have the cache's.
  DType dtype() const { return qkv.weight.dtype; }
  int64_t hidden_size() const { return qkv.weight.in_features; }
};

/// Where tokens stand, as the rotation wants it.
struct Rotation {
  const char *cos, *sin;  // [tokens, rotary_dim]
  int64_t rotary_dim;
};

/// What the layer needs between its products; the same memory serves every layer.
struct DecoderWorkspace {
  Buffer stream, cos, sin, normed, gate_up, gated, qkv, attended, projected, wanted, wanted_attended;
  Workspace attention;                       // where a thread attends alone
  std::vector<DecoderWorkspace> of_threads;  // where each takes tokens of its own
  int64_t num_sub_batches = 0;               // of the last batch; see sub_batch.h
};

/// x [tokens, hidden_size] -> normed and rotated queries and keys, and values:
/// [tokens, num_query_heads + 2 num_kv_heads, head_dim].
void pre_attention(const Kernels &, const DecoderLayer &, const char *x, int64_t tokens, const Rotation &, char *qkv,
                   DecoderWorkspace &, int threads);

/// x [tokens, hidden_size], the layer's input, becomes its output; attended [tokens, num_query_heads * head_dim].
void post_attention(const Kernels &, const DecoderLayer &, char *x, const char *attended, int64_t tokens,
                    DecoderWorkspace &, int threads);

/// A batch over the cache that a layer attends to.
struct PagedStep {
  const Cache &cache;
  const Batch &batch;
  Workspace &work;
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

/// What tokens are to the first layer.
struct Embedding {
  const char *table;    // [num_tokens, hidden_size]; null: its rows are those of
  PackedWeight packed;  // the head's weight
  int64_t num_tokens;
};

/// A model: embedding, layers from the bottom up, norm, head.
struct Decoder {
  Embedding embedding;
  std::vector<StackedLayer> layers;
  bool selects;  // nobody reads the last layer's output but that of wanted tokens
  RmsNorm norm;
  Linear head;

  DType dtype() const { return head.weight.dtype; }
};

/// Cosines and sines of the positions from 0 on.
struct RotationTable {
  const char *cos, *sin;  // [positions, rotary_dim]
  int64_t rotary_dim;
};

/// Tokens of a batch whose logits are asked for.
struct Wanted {
  int64_t count;  // negative: all
  const int64_t *tokens;

  bool all() const { return count < 0; }
};

/// A batch of tokens to the logits of those that are wanted, [count, vocabulary]. Threads take sequences of their own where
/// there are enough tokens and the sequences can be shared out evenly; else they share the work of each layer. Where the
/// decoder selects, the last layer computes no others than the wanted: they attend in it only for the scores.
void decode(const Kernels &, const Decoder &, const int64_t *tokens, const RotationTable &, const PagedStep &, const Wanted &,
            char *logits, DecoderWorkspace &, int threads);

}  // namespace winnow
