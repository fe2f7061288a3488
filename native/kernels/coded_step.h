// Decodes vectors of the instruction set out of the codes of channels that lie side by side in bytes.
#pragma once

#include "coded.h"

namespace winnow::WINNOW_ISA {

// A step decodes the vectors of channels that lie in the same bytes: one, or two where a byte has more than one code.

constexpr int vectors_of_step(Format format) { return format >= Format::int4 ? 2 : 1; }

/// Calls f with the format as a constant.
template <class F>
inline void with_format(Format format, F f) {
  switch (format) {
#define WINNOW_FORMAT(name) \
  case Format::name: return f(std::integral_constant<Format, Format::name>{});
    WINNOW_FORMAT(f32)
    WINNOW_FORMAT(bf16)
    WINNOW_FORMAT(f16)
    WINNOW_FORMAT(fp8_e4m3)
    WINNOW_FORMAT(int8)
    WINNOW_FORMAT(int4)
    WINNOW_FORMAT(int3)
    WINNOW_FORMAT(int2)
#undef WINNOW_FORMAT
  }
}

/// Calls f with each outlier of a tile: the KV's number, its channel, and what is added there.
template <class F>
inline void for_outliers(const CodedVectors &vectors, int64_t block_size, const CodedTile &tile, F f) {
  if (!vectors.num_outliers) return;
  for (int j = 0; j < tile.n; ++j) {
    const int64_t block = tile.slot[j] / block_size, offset = tile.slot[j] % block_size;
    const auto *rest = reinterpret_cast<const f16 *>(vectors.outlier.at(block, offset));
    const auto *channel = reinterpret_cast<const uint8_t *>(vectors.channel.at(block, offset));
    for (int64_t i = 0; i < vectors.num_outliers; ++i) f(j, channel[i], to_float(rest[i]));
  }
}

/// Bytes from one step to the next.
constexpr int step_bytes(Format format) {
  switch (format) {
    case Format::f32: return 4 * WIDTH;
    case Format::bf16:
    case Format::f16: return 2 * WIDTH;
    case Format::int3: return 12;
    case Format::int2: return 8;
    default: return WIDTH;
  }
}

inline vi widen_signed(const void *code) {
#if defined(__AVX512F__)
  return (vi)_mm512_cvtepi8_epi32(load_vector<__m128i>(code));
#elif defined(__AVX2__)
  return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(code)));
#else
  vi out;
  for (int i = 0; i < WIDTH; ++i) out[i] = static_cast<const int8_t *>(code)[i];
  return out;
#endif
}

inline vi widen(const uint8_t *code) {
#if defined(__AVX512F__)
  return (vi)_mm512_cvtepu8_epi32(load_vector<__m128i>(code));
#elif defined(__AVX2__)
  return (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(code)));
#else
  vi out;
  for (int i = 0; i < WIDTH; ++i) out[i] = code[i];
  return out;
#endif
}

/// The number that a byte of e4m3fn stands for, but for NaN. Its bits in the place of a float's are that number times 2^-120,
/// subnormals included.
inline float from_e4m3(int code) {
  const uint32_t bits = static_cast<uint32_t>(code & 0x80) << 24 | static_cast<uint32_t>(code & 0x7f) << 20;
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out * 0x1p120f;
}

inline vf to_floats(vi x) { return __builtin_convertvector(x, vf); }

/// The numbers of e4m3fn divided by 256: as bits of float16 they have that exponent.
inline vf load_e4m3(const uint8_t *code) {
#if defined(__AVX512F__)
  const __m256i x = _mm256_cvtepu8_epi16(load_vector<__m128i>(code));
  const __m256i sign = _mm256_and_si256(_mm256_slli_epi16(x, 8), _mm256_set1_epi16(static_cast<int16_t>(0x8000)));
  const __m256i rest = _mm256_and_si256(_mm256_slli_epi16(x, 7), _mm256_set1_epi16(0x3f80));
  return (vf)_mm512_cvtph_ps(_mm256_or_si256(sign, rest));
#else
  f16 x[WIDTH];
  for (int i = 0; i < WIDTH; ++i) x[i].bits = static_cast<uint16_t>((code[i] & 0x80) << 8 | (code[i] & 0x7f) << 7);
  return load(x);
#endif
}

/// What its scales are multiplied by, so that codes become the format's numbers.
constexpr float unit_of(Format format) { return format == Format::fp8_e4m3 ? 256.0f : 1.0f; }

#if defined(__AVX512F__)
inline vi lane_numbers() {
  vi out;
  for (int i = 0; i < WIDTH; ++i) out[i] = i;
  return out;
}

/// What each code stands for, in a register: the value of code i in the lanes whose number ends with the bits of i.
template <int BITS>
inline vf values_of_codes(float scale, float least) {
  return to_floats(lane_numbers() & ((1 << BITS) - 1)) * scale + least;
}

/// The lanes of `table` that codes name by their lowest four bits.
inline vf look_up(vi code, vf table) { return (vf)_mm512_permutexvar_ps((__m512i)code, (__m512)table); }

/// Lane numbers divided by a power of two.
template <int SHIFT>
inline vi lane_part() {
  return lane_numbers() >> SHIFT;
}
#endif

/// Decode a step. SCALED: with the scale, which otherwise all channels of a vector share.
template <Format F, bool SCALED>
inline void decode_step(const uint8_t *code, float scale, [[maybe_unused]] float least, vf *out) {
  if constexpr (F == Format::f32) {
    out[0] = load(reinterpret_cast<const float *>(code));
  } else if constexpr (F == Format::bf16) {
    out[0] = load(reinterpret_cast<const bf16 *>(code));
  } else if constexpr (F == Format::f16) {
    out[0] = load(reinterpret_cast<const f16 *>(code));
  } else if constexpr (F == Format::int8 || F == Format::fp8_e4m3) {
    const vf x = F == Format::int8 ? to_floats(widen_signed(code)) : load_e4m3(code);
    out[0] = SCALED ? x * scale : x;
  } else if constexpr (F == Format::int4) {
    const vi both = widen(code);
#if defined(__AVX512F__)
    const vf table = values_of_codes<4>(scale, least);
    out[0] = look_up(both, table), out[1] = look_up(both >> 4, table);
#else
    out[0] = to_floats(both & 15) * scale + least, out[1] = to_floats(both >> 4) * scale + least;
#endif
  } else {
#if defined(__AVX512F__)  // a group of 32
    int64_t bytes;
    std::memcpy(&bytes, code, sizeof bytes);
    const vi low = (vi)_mm512_cvtepu8_epi32(_mm_set1_epi64x(bytes)), shift = lane_part<3>() * 2;
    if constexpr (F == Format::int2) {
      const vf table = values_of_codes<2>(scale, least);
      out[0] = look_up(low >> shift, table), out[1] = look_up(low >> (shift + 4), table);
    } else {
      int32_t more;
      std::memcpy(&more, code + 8, sizeof more);
      const vi high = (vi)_mm512_cvtepu8_epi32(_mm_set1_epi32(more)), high_shift = lane_part<2>();
      const vf table = values_of_codes<3>(scale, least);
      const auto code_of = [&](int base) { return (low >> (shift + base) & 3) | (high >> (high_shift + base) & 1) << 2; };
      out[0] = look_up(code_of(0), table), out[1] = look_up(code_of(4), table);
    }
#else
    out[0] = out[1] = vf{};
#endif
  }
}

/// Whether a vector is a whole number of steps, none of which belongs to two groups.
inline bool groups_are_steps(const CodedVectors &vectors, int dim) {
  if (dim % WIDTH) return false;
  switch (vectors.format) {
    case Format::int4: return vectors.group % (2 * WIDTH) == 0;
    case Format::int3:
    case Format::int2: return WIDTH == 16 && vectors.group == 32;
    default: return vectors.group % WIDTH == 0;
  }
}

}  // namespace winnow::WINNOW_ISA
