// The kernels of one instruction set, and the choice between them.
#pragma once

#include <string>
#include <vector>

#include "blocks.h"

namespace winnow {

struct Kernels {
  /// Store KVs of the batch's tokens in their slots, the last ones of their rows; their accumulators become 0.
  void (*write)(const Cache &, const Batch &, const NewKVs &, int threads);
  /// Move KVs between slots: fields, position, accumulators.
  void (*compact)(const Pool &, const int64_t *source, const int64_t *target, int64_t n, int threads);
  /// Move the KVs of rows that stay to the front of their row.
  void (*keep_best)(const Pool &, const RankedRows &, int threads);
  /// Attention of the batch's queries over the rows of one layer; changes accumulators as observers ask.
  void (*attend)(const Attend &, Workspace &);
  /// Attention of the batch's tokens that select values; leaves the others' outputs alone.
  ValuesRead (*attend_selected)(const Attend &, const Selection &, Workspace &);
  /// Raise accumulator 0 of a context's KVs to the largest attention that a repetition's queries pay them.
  void (*replay)(const Replay &, Workspace &);
  /// Ridge leverage of the keys of rows, float [rows, stride]; 0 past a row's length.
  void (*leverage)(const KeyRows &, float ridge, float *score, int threads);
  /// Minus the cosine of each key and the sum of directions of its row, both before rotation, float [rows, stride]; 0
  /// past the length.
  void (*key_difference)(const KeyRows &, const KeyDirections &, float *score, int threads);
  /// Smooth scores over KVs near in position, float [rows, stride]; 0 past a row's length.
  void (*smooth_rows)(const SmoothedRows &, float *out, int threads);
  /// Norm rows, in the same pass adding to them.
  void (*rms_norm)(const NormRows &, const RmsNorm &, int threads);
  /// Norm rows and add them to others.
  void (*add_normed)(const AddedRows &, const RmsNorm &, int threads);
  /// Norm the heads of queries and keys, where they have norms, and rotate them at their positions.
  void (*rotate)(const RotaryRows &, const RmsNorm &query_norm, const RmsNorm &key_norm, int threads);
  /// What stands between the two products of a gated feed-forward layer.
  void (*gate)(const GatedRows &, Activation, int threads);
  /// The most probable token of each row, int64 [count].
  void (*greedy)(const LogitRows &, int64_t *tokens, int threads);
  /// One token of sequences that keep a state, which changes where it lies.
  void (*conv_step)(const ConvStep &, int threads);
  void (*delta_step)(const DeltaStep &, int threads);
  void (*space_step)(const SpaceStep &, int threads);
  Products plain;
  BlockProducts blocks;

  /// Those that take a weight.
  const Products &products(const PackedWeight &weight) const {
    return weight.panels ? blocks.products : plain;
  }
};

/// Instruction sets that this build holds and this processor runs, slowest first. One is an emulation, never the last.
std::vector<std::string> instruction_sets();

/// The same for products of weights in blocks alone, which processors have instructions of their own for.
std::vector<std::string> block_instruction_sets();

/// The kernels of an instruction set out of `instruction_sets()`, with those of one out of `block_instruction_sets()` for weights
/// in blocks; empty: of the same instruction set.
/// Throws std::invalid_argument: it is none of them.
Kernels kernels_for(const std::string &name, const std::string &block_name);

/// As Kernels::attend. Tokens that select values read those of their largest weights alone; observers see all
/// weights either way.
ValuesRead attend_selected(const Kernels &, const Attend &, const Selection &, Workspace &);

}  // namespace winnow
