// What an instruction set offers for the linear layers of one kind of weights.
#pragma once

#include "blocks.h"

namespace winnow {

/// Linear layers of one kind of weights.
struct Products {
  /// Elements that a packed weight takes.
  int64_t (*packed_size)(int64_t in_features, int64_t out_features);
  /// Bring a dense weight [out_features, in_features], into packed form.
  void (*pack)(const PackedWeight &, const char *dense, int threads);
  /// Rows of the dense weight, `features` of them, out of the packed one: [count, in_features].
  void (*unpack_rows)(const PackedWeight &, const int64_t *features, int64_t count, char *out, int threads);
  /// x times the weight, transposed, plus the bias.
  void (*linear)(const PackedWeight &, const LinearRows &, int threads);
  /// Whether `gated_linear` takes a layer of `size` gates.
  bool (*gates)(int64_t size);
  /// As linear, of a weight of gates and as many features that they let pass, side by side: activation(gate) * feature.
  void (*gated_linear)(const PackedWeight &, const LinearRows &, Activation, int threads);
  /// Whether bf16 is multiplied in matrix units (AMX's tile registers).
  bool matrix_units = false;
};

/// Linear layers of weights in blocks.
struct BlockProducts {
  Products products;  // but for packed_size and pack
  /// Bytes that panels of a kind take.
  int64_t (*bytes)(BlockKind, int64_t in_features, int64_t out_features);
  /// Bring rows of a file into panels, one after the other.
  void (*pack)(const RawBlocks &, char *panels, int threads);
  /// Numbers of all rows, [out_features, in_features].
  void (*dequantize)(const RawBlocks &, DType, char *out, int threads);
};

}  // namespace winnow
