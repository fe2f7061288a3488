// Weights in blocks: codes of few bits, and a scale and a minimum for each 32 or 16 inputs of a feature, as GGUF has them.
//
// A packed weight is cut into panels of features, and a panel into records of 32 inputs: codes, then what scales them. Codes lie
// in planes, of 8, 4 or 2 bits and of the 1 or 2 above them. A plane is made of words of 16 bits, one for each feature of a
// panel and either of two neighbouring inputs, which hold the codes of several pairs of inputs. A code becomes a number by a
// table of its plane, and the numbers of both planes add up. Every panel has a kind of its own.
#pragma once

#include <cstdint>

#include "layers.h"

namespace winnow {

/// Inputs of a record, and of a super-block, whose scales are integers of 8 bits times one of 16.
constexpr int64_t BLOCK = 32, SUPER_BLOCK = 256;

/// The field of a word that holds the codes of the i-th of `fields` pairs: pairs two apart lie at the same bits of its two bytes.
constexpr int field_of(int i, int fields) { return i / 2 % 2 * (fields / 2) + i / 4 * 2 + i % 2; }

/// GGUF's names; f8_e4m3 is 32 codes in E4M3 behind a scale in float32.
enum class BlockKind : int32_t { q4_0, q4_1, q5_0, q5_1, q8_0, q2_k, q3_k, q4_k, q5_k, q6_k, iq4_nl, mxfp4, f8_e4m3, iq4_xs };

struct BlockForm {
  int low_bits, high_bits;  // of the planes; 0: there is none
  int16_t low_step, low_first, high_step, high_first;  // number of code c: c * step + first
  bool minimum;  // numbers are code * scale + minimum, else code * scale
  bool halves;   // scales are of 16 inputs
  bool super;    // scales are of super-blocks
  int raw_block, raw_bytes;  // inputs and bytes of a block of the file
  bool floats = false;       // codes are floats, and scales of 32 bits

  constexpr int scales() const { return halves ? 2 : 1; }
  /// Bytes that a feature takes in a record, and before the records of a super-block.
  constexpr int64_t record_bytes() const {
    return (low_bits + high_bits) * BLOCK / 8 + scales() * (super ? 1 : floats ? 4 : 2) * (minimum ? 2 : 1);
  }
  constexpr int64_t head_bytes() const { return super ? (minimum ? 4 : 2) : 0; }
  constexpr int64_t bytes(int64_t in) const { return in / BLOCK * record_bytes() + in / SUPER_BLOCK * head_bytes(); }
  /// Where the b-th record of a panel begins, and its super-block.
  constexpr int64_t super_at(int64_t b) const { return b / 8 * (head_bytes() + 8 * record_bytes()); }
  constexpr int64_t record_at(int64_t b) const {
    return super ? super_at(b) + head_bytes() + b % 8 * record_bytes() : b * record_bytes();
  }
};

constexpr BlockForm BLOCK_FORMS[] = {
    {4, 0, 1, -8, 0, 0, false, false, false, 32, 18},    // q4_0
    {4, 0, 1, 0, 0, 0, true, false, false, 32, 20},      // q4_1
    {4, 1, 1, -16, 16, 0, false, false, false, 32, 22},  // q5_0
    {4, 1, 1, 0, 16, 0, true, false, false, 32, 24},     // q5_1
    {8, 0, 1, 0, 0, 0, false, false, false, 32, 34},      // q8_0
    {2, 0, 1, 0, 0, 0, true, true, true, 256, 84},       // q2_k
    {2, 1, 1, -4, 4, 0, false, true, true, 256, 110},    // q3_k
    {4, 0, 1, 0, 0, 0, true, false, true, 256, 144},     // q4_k
    {4, 1, 1, 0, 16, 0, true, false, true, 256, 176},    // q5_k
    {4, 2, 1, -32, 16, 0, false, true, true, 256, 210},  // q6_k
    {4, 0, 0, 0, 0, 0, false, false, false, 32, 18},     // iq4_nl
    {4, 0, 0, 0, 0, 0, false, false, false, 32, 17},     // mxfp4
    {8, 0, 0, 0, 0, 0, false, false, false, 32, 36, true},  // f8_e4m3
    {4, 0, 0, 0, 0, 0, false, false, true, 256, 136},    // iq4_xs
};

/// Numbers of codes that do not follow one another.
constexpr int16_t IQ4_NL[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int16_t MXFP4[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

constexpr const BlockForm &form_of(BlockKind kind) { return BLOCK_FORMS[static_cast<int>(kind)]; }

constexpr int16_t low_number(BlockKind kind, int code) {
  if (kind == BlockKind::iq4_nl || kind == BlockKind::iq4_xs) return IQ4_NL[code];
  if (kind == BlockKind::mxfp4) return MXFP4[code];
  if (kind == BlockKind::q8_0) return static_cast<int8_t>(code);
  return static_cast<int16_t>(code * form_of(kind).low_step + form_of(kind).low_first);
}

constexpr int16_t high_number(BlockKind kind, int code) {
  return static_cast<int16_t>(code * form_of(kind).high_step + form_of(kind).high_first);
}

/// Rows of blocks as a file has them, [out_features, raw bytes of a row].
struct RawBlocks {
  BlockKind kind;
  const char *data;
  int64_t in_features, out_features;

  int64_t row_bytes() const { return in_features / form_of(kind).raw_block * form_of(kind).raw_bytes; }
};

/// Where a panel of a packed weight begins, in bytes, and its kind.
struct BlockPanel {
  int64_t at, kind;
};

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
