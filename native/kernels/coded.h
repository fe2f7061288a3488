// KVs that a codec stores in few bits (winnow.cache.formats), decoded tile by tile on their way to the products.
//
// A tile of decoded vectors stays in the first-level cache, where the loops for plain floats read it. So all formats of keys
// and of values share these loops.
#pragma once

#include "simd.h"

namespace winnow::WINNOW_ISA {

/// A byte of a coded vector, as the type of KVs: their format is known when a kernel is called.
struct Coded {
  uint8_t byte;
};

template <class KV>
constexpr bool is_coded = std::is_same_v<KV, Coded>;

/// What is read of n keys, or values.
struct CodedTile {
  const Coded *const *code;
  const f16 *const *scale;  // see scale_at
  const int64_t *slot;
  int n;
};

/// The first scale of a vector; its minima are as far from it as one field is from the other.
inline const f16 *scale_at(const CodedVectors &vectors, int64_t block, int64_t offset) {
  return reinterpret_cast<const f16 *>(vectors.scale.at(block, offset));
}

inline const Coded *code_at(const CodedVectors &vectors, int64_t block, int64_t offset) {
  return reinterpret_cast<const Coded *>(vectors.code.at(block, offset));
}

/// Decode a tile: out [n, padded], zeros past `dim`. Meanwhile `next` is prefetched, which need not be there (n = 0).
void decode_tile(const CodedVectors &vectors, int64_t block_size, int dim, int padded, const CodedTile &tile,
                 const CodedTile &next, float *out);

/// As decode_tile, of any slots, up to 128.
void decode_slots(const CodedVectors &vectors, const Blocks &blocks, const int64_t *slot, int n, int padded, float *out);

/// Encode a vector, bit for bit as winnow.cache.formats does, and store it in a slot. x: [dim] floats with room for whole
/// vectors, zeros past dim; changed.
void encode(const CodedVectors &vectors, int dim, float *x, int64_t block, int64_t offset);

}  // namespace winnow::WINNOW_ISA
