#include "coded.h"

#include <algorithm>

#include "coded_step.h"

namespace winnow::WINNOW_ISA {

namespace {

/// Bytes in a line of memory.
constexpr int64_t LINE_BYTES = 64;

/// A group of codes with `bits` each, packed as winnow.cache.packing has them; `add` has the same meaning as in decode_group.
template <int bits>
inline void unpack(const uint8_t *code, int group, float scale, float least, float *out) {
  constexpr int PARTS = 8 / bits, MASK = (1 << bits) - 1;
  const int size = group / PARTS;
  for (int part = 0; part < PARTS; ++part)
    for (int j = 0; j < size; ++j)
      out[part * size + j] = static_cast<float>(code[j] >> (part * bits) & MASK) * scale + least;
}

/// Decode a group of channels.
template <Format F>
inline void decode_group(const uint8_t *code, int group, float scale, float least, float *out) {
  if constexpr (F == Format::int8) {
    for (int c = 0; c < group; ++c) out[c] = static_cast<float>(static_cast<int8_t>(code[c])) * scale;
  } else if constexpr (F == Format::fp8_e4m3) {
    for (int c = 0; c < group; ++c) out[c] = from_e4m3(code[c]) * scale;
  } else if constexpr (F == Format::int4) {
    unpack<4>(code, group, scale, least, out);
  } else if constexpr (F == Format::int2) {
    unpack<2>(code, group, scale, least, out);
  } else {
    static_assert(F == Format::int3);
    unpack<2>(code, group, scale, least, out);
    const uint8_t *high = code + group / 4;
    const int size = group / 8;
    for (int part = 0; part < 8; ++part)
      for (int j = 0; j < size; ++j) out[part * size + j] += static_cast<float>(high[j] >> part & 1) * 4.0f * scale;
  }
}

constexpr int bits_of(Format format) {
  switch (format) {
    case Format::int4: return 4;
    case Format::int3: return 3;
    case Format::int2: return 2;
    default: return 8;
  }
}

template <Format F>
void decode_coded(const CodedVectors &vectors, int dim, const CodedTile &tile, int j, float *out) {
  const auto *code = reinterpret_cast<const uint8_t *>(tile.code[j]);
  const f16 *scale = tile.scale[j];
  const f16 *least = vectors.min.data ? scale + (vectors.min.data - vectors.scale.data) / 2 : nullptr;
  const int group = static_cast<int>(vectors.group);
  for (int d = 0; d < dim; d += group, code += group * bits_of(F) / 8) {
    const float lowest = least ? to_float(*least++) : 0.0f;
    decode_group<F>(code, group, to_float(*scale++), lowest, out + d);
  }
}

template <class KV>
void decode_plain(int dim, const KV *from, float *out) {
  for (int d = 0; d < dim; d += WIDTH) store(out + d, get(from + d, std::min(WIDTH, dim - d)));
}

void decode_vector(const CodedVectors &vectors, int dim, const CodedTile &tile, int j, float *out) {
  const Coded *from = tile.code[j];
  with_format(vectors.format, [&](auto format) {
    if constexpr (is_plain(format))
      with_type(static_cast<DType>(format()), [&](auto type) { decode_plain(dim, reinterpret_cast<const decltype(type) *>(from), out); });
    else
      decode_coded<format>(vectors, dim, tile, j, out);
  });
}

/// Prefetch a vector's codes and scales.
inline void prefetch_vector(const CodedVectors &vectors, const CodedTile &tile, int j) {
  asm volatile("");  // see prefetch_accumulators
  const char *code = reinterpret_cast<const char *>(tile.code[j]);
  for (int64_t byte = 0; byte < vectors.code.slot_bytes; byte += LINE_BYTES) __builtin_prefetch(code + byte, 0, 2);
  if (is_plain(vectors.format)) return;
  const char *scale = reinterpret_cast<const char *>(tile.scale[j]);
  __builtin_prefetch(scale, 0, 2);
  if (vectors.min.data) __builtin_prefetch(scale + (vectors.min.data - vectors.scale.data), 0, 2);
}

/// Decode a tile whose groups are whole steps.
template <Format F>
void decode_steps(const CodedVectors &vectors, int dim, int padded, const CodedTile &tile, const CodedTile &next, float *out) {
  constexpr int V = vectors_of_step(F);
  const int group = static_cast<int>(vectors.group);
  const int64_t away = vectors.min.data ? (vectors.min.data - vectors.scale.data) / 2 : 0;
  for (int j = 0; j < tile.n; ++j, out += padded) {
    if (j < next.n) prefetch_vector(vectors, next, j);
    const auto *code = reinterpret_cast<const uint8_t *>(tile.code[j]);
    const f16 *scale = tile.scale[j];
    for (int first = 0; first < dim; first += group, ++scale) {
      const float by = to_float(*scale) * unit_of(F), least = V == 2 ? to_float(scale[away]) : 0.0f;
      for (int d = first; d < first + group / V; d += WIDTH, code += step_bytes(F)) {
        vf x[V];
        decode_step<F, true>(code, by, least, x);
        store(out + d, x[0]);
        if constexpr (V == 2) store(out + d + group / 2, x[1]);
      }
    }
  }
}

}  // namespace

void decode_tile(const CodedVectors &vectors, int64_t block_size, int dim, int padded, const CodedTile &tile,
                 const CodedTile &next, float *out) {
  const bool by_steps = !is_plain(vectors.format) && groups_are_steps(vectors, dim);
  with_format(vectors.format, [&](auto format) {
    if constexpr (!is_plain(format))
      if (by_steps) decode_steps<format>(vectors, dim, padded, tile, next, out);
  });
  for (int j = 0; j < tile.n && !by_steps; ++j) {
    if (j < next.n) prefetch_vector(vectors, next, j);
    std::fill(out + (j + 1) * padded - WIDTH, out + (j + 1) * padded, 0.0f);
    decode_vector(vectors, dim, tile, j, out + j * padded);
  }
  for_outliers(vectors, block_size, tile, [&](int j, int channel, float rest) { out[j * padded + channel] += rest; });
  for (int j = tile.n; j < next.n; ++j) prefetch_vector(vectors, next, j);
}

void decode_slots(const CodedVectors &vectors, const Blocks &blocks, const int64_t *slot, int n, int padded, float *out) {
  constexpr int MAX_SLOTS = 128;
  const Coded *code[MAX_SLOTS];
  const f16 *scale[MAX_SLOTS];
  for (int j = 0; j < n; ++j) {
    const int64_t block = slot[j] / blocks.block_size, offset = slot[j] % blocks.block_size;
    code[j] = code_at(vectors, block, offset), scale[j] = scale_at(vectors, block, offset);
  }
  decode_tile(vectors, blocks.block_size, static_cast<int>(blocks.head_dim), padded, {code, scale, slot, n}, {}, out);
}

}  // namespace winnow::WINNOW_ISA
