// What the kernels around a layer's matrix products are given. All rows are dense unless a stride is named; strides
// count elements.
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

}  // namespace winnow
