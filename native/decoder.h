// A decoder layer of Llama's kind, as one call, or as two: what lies before attention, and what lies after it.
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
  Activation activation;
  int64_t num_query_heads, num_kv_heads, head_dim;

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
  Buffer normed, gate_up, gated, qkv, attended;
};

/// x [tokens, hidden_size] -> normed and rotated queries and keys, and values:
/// [tokens, num_query_heads + 2 num_kv_heads, head_dim].
void before_attention(const Kernels &, const DecoderLayer &, const char *x, int64_t tokens, const Rotation &, char *qkv,
                      DecoderWorkspace &, int threads);

/// residual [tokens, hidden_size], the layer's input, and attended [tokens, num_query_heads * head_dim] -> the layer's
/// output, [tokens, hidden_size].
void after_attention(const Kernels &, const DecoderLayer &, const char *residual, const char *attended, int64_t tokens,
                     char *out, DecoderWorkspace &, int threads);

/// A batch over the cache that a layer attends to.
struct PagedStep {
  const Cache &cache;
  const Batch &batch;
  Workspace &work;
};

/// The whole layer, the index-th of the cache: x [tokens, hidden_size] -> out, of the same shape.
void decoder_layer(const Kernels &, const DecoderLayer &, int64_t index, const char *x, const Rotation &,
                   const AttentionSpec &, const PagedStep &, char *out, DecoderWorkspace &, int threads);

}  // namespace winnow
