// What the kernels around a layer's matrix products are given, and those of one step over recurrent states: one token of each
// sequence, whose state stays in its slot. All rows are dense unless a stride is named; strides count elements.
#pragma once

#include "types.h"

namespace winnow {

/// Root-mean-square norm: x / sqrt(mean(x^2) + eps) * weight.
struct RmsNorm {
  const char *weight;  // [size]; null: there is no such norm
  float eps;
  bool one_plus;  // the factor is 1 + weight (Gemma)
};

/// Rows to norm, each from x to out.
struct NormRows {
  DType dtype;
  char *x;          // [tokens, size]
  const char *add;  // [tokens, size], added to x in place before the norm; null: nothing
  char *out;        // [tokens, size]
  int64_t tokens, size;
};

/// Rows to norm and to add to others: sum += norm(x).
struct AddedRows {
  DType dtype;
  const char *x;  // [tokens, size]
  char *sum;      // [tokens, size]
  int64_t tokens, size;
};

/// Heads to rotate in place, the query heads followed by the key heads in every row.
struct RotaryRows {
  DType dtype;
  char *heads;  // [tokens, num_query_heads + num_kv_heads, head_dim]
  int64_t token_stride, tokens, num_query_heads, num_kv_heads, head_dim;
  const char *cos, *sin;  // [tokens, rotary_dim]
  int64_t rotary_dim;     // dimensions that are rotated, the first ones, in pairs of one from each half
};

enum class Activation : int32_t { silu, gelu_tanh };

/// Feed-forward rows: out = activation(gate) * up.
struct GatedRows {
  DType dtype;
  const char *gate_up;  // [tokens, 2 * size]: gate, then up
  char *out;            // [tokens, size]
  int64_t tokens, size;
};

struct BlockPanel;

/// A weight [out_features, in_features] in the form that `linear` reads: see kernels/linear.cpp, or blocks.h.
struct PackedWeight {
  DType dtype;  // of the rows that it is multiplied with, and of the weight unless it is in blocks
  char *packed;
  int64_t in_features, out_features;
  const BlockPanel *panels = nullptr;  // of a weight in blocks; null: any other
};

/// Rows to multiply with a weight, of its dtype.
struct LinearRows {
  const char *x;  // [rows, in_features]
  int64_t x_stride;
  const char *bias;  // [out_features]; null: none
  const char *add;   // [rows, out_features], added to the rounded product; null: nothing. May be `out`
  char *out;         // [rows, out_features]
  int64_t rows;
};

/// Logits of the tokens to choose from, a row for each sequence.
struct LogitRows {
  DType dtype;
  const char *logits;  // [count, size]
  int64_t stride, count, size;
};

/// The states of one layer and kind.
struct StateSlots {
  char *base;
  int64_t stride;  // of a slot
  const int64_t *slots;
  int64_t seqs;

  template <class T>
  T *of(int64_t seq) const {
    return reinterpret_cast<T *>(base) + slots[seq] * stride;
  }
};

/// Rows of one input, [seqs, ...].
struct SeqRows {
  const char *base;
  int64_t stride;  // of a sequence

  template <class T>
  const T *of(int64_t seq) const {
    return reinterpret_cast<const T *>(base) + seq * stride;
  }
};

/// A convolution over each channel's last inputs, the newest of them last.
struct ConvStep {
  DType dtype;
  StateSlots state;   // [channels, length]
  SeqRows x;          // [channels]
  const char *weight;  // [channels, taps], taps <= length
  const char *bias;    // [channels]; null: none
  char *out;           // [seqs, channels]
  int64_t channels, length, taps;
  bool silu;  // of the sum
};

/// The gated delta rule: S <- d S, S <- S + k (rate (v - k S)), out = q S (Gated DeltaNet, arXiv 2412.06464, equation 10).
struct DeltaStep {
  DType dtype;
  StateSlots state;    // float [heads, key_size, value_size]
  SeqRows query, key;  // [key_heads, key_size]
  SeqRows value;       // [heads, value_size]
  const float *log_decay;  // [seqs, heads, decay_size]
  const float *rate;       // [seqs, heads]
  char *out;               // [seqs, heads, value_size]
  int64_t key_heads, heads, key_size, value_size;
  int64_t decay_size;  // 1, or key_size: each row of a state has its own (Kimi Linear)
  bool norm;           // queries and keys to length 1
};

/// A selective state space: S <- e^(dt A) S + dt x B, out = S C + D x (Mamba, Mamba-2).
struct SpaceStep {
  DType dtype;
  StateSlots state;   // float [heads, head_size, state_size]
  SeqRows x;          // [heads, head_size]
  SeqRows b, c;       // [groups, state_size]
  const float *dt;    // [seqs, heads]
  const float *a;     // [heads, a_size]
  const float *d;     // [heads]; null: none
  char *out;          // [seqs, heads, head_size]
  int64_t heads, head_size, state_size, groups;
  int64_t a_size;  // 1, or state_size: each column of a state has its own (Mamba's first kind)
};

}  // namespace winnow
