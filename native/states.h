// What the kernels of one step over recurrent states are given: one token of each sequence, whose state stays in its slot.
// Rows are dense unless a stride is named; strides count elements.
#pragma once

#include "types.h"

namespace winnow {

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
