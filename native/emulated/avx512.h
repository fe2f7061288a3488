// The AVX-512 intrinsics that the kernels use, as plain loops, so that their code for such processors can be tested on
// others: `-DWINNOW_EMULATE_AVX512=ON` includes this file first, in place of the compiler's AVX-512.
//
// Values are those of Intel's manual, but for sums over a register, whose order the compiler's header decides. Slow.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#define WINNOW_EMULATE_AVX512
// What kernels ask for to know the instruction set. After <immintrin.h>, which would take them for the compiler's own.
#define __AVX512F__ 1
#define __AVX512BW__ 1
#define __AVX512VL__ 1
#define __AVX512DQ__ 1
#if defined(WINNOW_EMULATE_AVX512_VNNI)
#define __AVX512VNNI__ 1
#endif
#if defined(WINNOW_EMULATE_AVX512_BF16)
#define __AVX512BF16__ 1
#endif

namespace {

using u16x16 = uint16_t __attribute__((vector_size(32)));
using u16x32 = uint16_t __attribute__((vector_size(64)));
using u32x16 = uint32_t __attribute__((vector_size(64)));
using u64x8 = uint64_t __attribute__((vector_size(64)));
using f32x16 = float __attribute__((vector_size(64)));

/// Out of f(i) for every lane.
template <class V, class F>
inline V lanes(F f) {
  V out;
  for (unsigned i = 0; i < sizeof(V) / sizeof(out[0]); ++i) out[i] = f(i);
  return out;
}

template <class V>
inline V read(const void *from) {
  V out;
  std::memcpy(&out, from, sizeof out);
  return out;
}

template <class V>
inline void write(void *to, V value) {
  std::memcpy(to, &value, sizeof value);
}

/// Lanes of a and b in turn, out of the lower or the upper half of every 128 bits.
template <class V>
inline V unpack(V a, V b, bool upper) {
  constexpr unsigned LANES = 16 / sizeof(a[0]);
  return lanes<V>([&](unsigned i) {
    const unsigned from = i / LANES * LANES + upper * LANES / 2 + i % LANES / 2;
    return (i % 2 ? b : a)[from];
  });
}

/// Four quarters of four lanes: two of a, then two of b, each named by two bits.
template <class V>
inline V shuffle_quarters(V a, V b, int which) {
  return lanes<V>([&](unsigned i) { return (i < 8 ? a : b)[(which >> i / 4 * 2 & 3) * 4 + i % 4]; });
}

inline float float_of(uint32_t bits) {
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}

/// A bf16 as products read it: what is below the smallest normal number counts as zero.
inline float factor(uint16_t bits) { return float_of((bits & 0x7f80 ? bits : bits & 0x8000u) << 16); }

inline uint16_t nearest_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if ((bits & 0x7fffffff) > 0x7f800000) return bits >> 16 | 0x40;  // not a number
  if ((bits & 0x7f800000) == 0) return bits >> 16 & 0x8000;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

namespace emulated {

// Made, read and written.
inline __m512 setzero_ps() { return __m512{}; }
inline __m512 set1_ps(float x) { return lanes<__m512>([&](unsigned) { return x; }); }
inline __m512i set1_epi16(int16_t x) { return (__m512i)lanes<u16x32>([&](unsigned) { return x; }); }
inline __m512i set1_epi32(int32_t x) { return (__m512i)lanes<u32x16>([&](unsigned) { return x; }); }
template <class... I>
inline __m512i setr_epi32(I... lane) {
  return (__m512i)u32x16{static_cast<uint32_t>(lane)...};
}
inline __m512 loadu_ps(const void *from) { return read<__m512>(from); }
inline __m512i load_si512(const void *from) {
  if (reinterpret_cast<uintptr_t>(from) % 64) std::abort();
  return read<__m512i>(from);
}
inline __m512i maskz_loadu_epi16(uint32_t mask, const void *from) {
  return (__m512i)lanes<u16x32>([&](unsigned i) { return mask >> i & 1 ? static_cast<const uint16_t *>(from)[i] : 0; });
}
inline __m256i maskz_loadu_epi16_256(uint32_t mask, const void *from) {
  return (__m256i)lanes<u16x16>([&](unsigned i) { return mask >> i & 1 ? static_cast<const uint16_t *>(from)[i] : 0; });
}
inline void storeu_ps(void *to, __m512 x) { write(to, x); }
inline void storeu_si512(void *to, __m512i x) { write(to, x); }

// Halves and whole registers.
inline __m512i castsi256_si512(__m256i a) {
  return (__m512i)lanes<u64x8>([&](unsigned i) { return i < 4 ? a[i] : 0; });
}
inline __m512i broadcast_i64x4(__m256i a) {
  return (__m512i)lanes<u64x8>([&](unsigned i) { return a[i % 4]; });
}
inline __m512i inserti64x4(__m512i a, __m256i b, unsigned half) {
  return (__m512i)lanes<u64x8>([&](unsigned i) { return i / 4 == half ? b[i % 4] : a[i]; });
}

// Sums, products and the larger of two.
inline __m512i add_epi16(__m512i a, __m512i b) { return (__m512i)((u16x32)a + (u16x32)b); }
inline __m512i add_epi32(__m512i a, __m512i b) { return (__m512i)((u32x16)a + (u32x16)b); }
inline __m512i slli_epi32(__m512i a, unsigned bits) { return (__m512i)((u32x16)a << bits); }
inline __m512 add_ps(__m512 a, __m512 b) { return (__m512)((f32x16)a + (f32x16)b); }
inline __m512 mul_ps(__m512 a, __m512 b) {
  __m512 out = a * b;
  asm("" : "+m"(out));  // never joined with a sum that it enters
  return out;
}
inline __m512 fnmadd_ps(__m512 a, __m512 b, __m512 c) {
  return lanes<__m512>([&](unsigned i) { return std::fma(-a[i], b[i], c[i]); });
}
inline __m512 max_ps(__m512 a, __m512 b) {
  return lanes<__m512>([&](unsigned i) { return a[i] > b[i] ? a[i] : b[i]; });
}
inline __m512 min_ps(__m512 a, __m512 b) {
  return lanes<__m512>([&](unsigned i) { return a[i] < b[i] ? a[i] : b[i]; });
}
inline float reduce_add_ps(__m512 a) {
  for (unsigned half = 8; half; half /= 2)
    for (unsigned i = 0; i < half; ++i) a[i] += a[i + half];
  return a[0];
}
inline float reduce_max_ps(__m512 a) {
  float most = a[0];
  for (unsigned i = 1; i < 16; ++i) most = a[i] > most ? a[i] : most;
  return most;
}
/// To whole numbers; no kernel asks for fractions.
inline __m512 roundscale_ps(__m512 a, int rounding) {
  if (rounding != _MM_FROUND_TO_NEAREST_INT) std::abort();
  return lanes<__m512>([&](unsigned i) { return std::nearbyint(a[i]); });
}
inline __m512 scalef_ps(__m512 a, __m512 power) {
  return lanes<__m512>([&](unsigned i) {
    if (std::isnan(power[i])) return power[i];
    return std::ldexp(a[i], static_cast<int>(std::clamp(std::floor(power[i]), -400.0f, 400.0f)));
  });
}
inline __m512i max_epi32(__m512i a, __m512i b) {
  using i32x16 = int32_t __attribute__((vector_size(64)));
  return (__m512i)lanes<i32x16>([&](unsigned i) { return std::max(((i32x16)a)[i], ((i32x16)b)[i]); });
}
/// Sums of the products of two neighbours.
inline __m512i madd_epi16(__m512i a, __m512i b) {
  const u16x32 x = (u16x32)a, y = (u16x32)b;
  const auto product = [&](unsigned i) { return static_cast<int16_t>(x[i]) * static_cast<int16_t>(y[i]); };
  return (__m512i)lanes<u32x16>([&](unsigned i) { return product(2 * i) + product(2 * i + 1); });
}
/// Products of four neighbours, unsigned and signed, joined to the sum.
inline __m512i dpbusd_epi32(__m512i sum, __m512i a, __m512i b) {
  const auto *x = reinterpret_cast<const uint8_t *>(&a);
  const auto *y = reinterpret_cast<const int8_t *>(&b);
  return (__m512i)lanes<u32x16>([&](unsigned i) {
    uint32_t out = ((u32x16)sum)[i];
    for (unsigned j = 4 * i; j < 4 * i + 4; ++j) out += x[j] * y[j];
    return out;
  });
}
/// Products of two neighbours, joined to the sum.
inline __m512i dpwssd_epi32(__m512i sum, __m512i a, __m512i b) { return add_epi32(sum, madd_epi16(a, b)); }
/// One pair after the other is joined to the sum, the odd numbers first.
inline __m512 dpbf16_ps(__m512 sum, __m512bh a, __m512bh b) {
  const u16x32 x = (u16x32)a, y = (u16x32)b;
  return lanes<__m512>([&](unsigned i) {
    const float odd = std::fma(factor(x[2 * i + 1]), factor(y[2 * i + 1]), sum[i]);
    return std::fma(factor(x[2 * i]), factor(y[2 * i]), odd);
  });
}

// Other formats.
inline __m512i cvtepu16_epi32(__m256i a) {
  return (__m512i)lanes<u32x16>([&](unsigned i) { return ((u16x16)a)[i]; });
}
inline __m512i cvtepu8_epi32(__m128i a) {
  return (__m512i)lanes<u32x16>([&](unsigned i) { return reinterpret_cast<const uint8_t *>(&a)[i]; });
}
inline __m512i cvtepi8_epi32(__m128i a) {
  return (__m512i)lanes<u32x16>([&](unsigned i) { return reinterpret_cast<const int8_t *>(&a)[i]; });
}
inline __m512i cvtepi8_epi16(__m256i a) {
  return (__m512i)lanes<u16x32>([&](unsigned i) { return reinterpret_cast<const int8_t *>(&a)[i]; });
}
inline __m512i cvtepu8_epi16(__m256i a) {
  return (__m512i)lanes<u16x32>([&](unsigned i) { return reinterpret_cast<const uint8_t *>(&a)[i]; });
}
inline __m512i cvtps_epi32(__m512 a) {
  return (__m512i)lanes<u32x16>([&](unsigned i) { return static_cast<int32_t>(std::nearbyint(a[i])); });
}
inline __m128i cvtepi32_epi8(__m512i a) {
  using u8x16 = uint8_t __attribute__((vector_size(16)));
  return (__m128i)lanes<u8x16>([&](unsigned i) { return ((u32x16)a)[i]; });
}
inline __m256i cvtepi32_epi16(__m512i a) {
  return (__m256i)lanes<u16x16>([&](unsigned i) { return ((u32x16)a)[i]; });
}
inline __m512 cvtph_ps(__m256i a) {
  return lanes<__m512>([&](unsigned i) { return _cvtsh_ss(((u16x16)a)[i]); });
}
inline __m256i cvtps_ph(__m512 a, int rounding) {
  if (rounding != _MM_FROUND_TO_NEAREST_INT) std::abort();
  return (__m256i)lanes<u16x16>([&](unsigned i) { return _cvtss_sh(a[i], _MM_FROUND_TO_NEAREST_INT); });
}
inline __m256i cvtneps_pbh(__m512 a) {
  return (__m256i)lanes<u16x16>([&](unsigned i) { return nearest_bf16(a[i]); });
}

// Lanes in another order.
inline __m512 mask_blend_ps(unsigned mask, __m512 a, __m512 b) {
  return lanes<__m512>([&](unsigned i) { return (mask >> i & 1 ? b : a)[i]; });
}
inline __m512 permutexvar_ps(__m512i from, __m512 a) {
  return lanes<__m512>([&](unsigned i) { return a[((u32x16)from)[i] % 16]; });
}
inline __m512 permutex2var_ps(__m512 a, __m512i from, __m512 b) {
  return lanes<__m512>([&](unsigned i) {
    const unsigned at = ((u32x16)from)[i] % 32;
    return (at < 16 ? a : b)[at % 16];
  });
}
inline __m512i permutex2var_epi16(__m512i a, __m512i from, __m512i b) {
  return (__m512i)lanes<u16x32>([&](unsigned i) {
    const unsigned at = ((u16x32)from)[i] % 64;
    return ((u16x32)(at < 32 ? a : b))[at % 32];
  });
}
inline __m512 shuffle_ps(__m512 a, __m512 b, int which) {
  return lanes<__m512>([&](unsigned i) { return (i % 4 < 2 ? a : b)[i / 4 * 4 + (which >> i % 4 * 2 & 3)]; });
}
inline __m512 shuffle_f32x4(__m512 a, __m512 b, int which) { return shuffle_quarters(a, b, which); }
inline __m512i shuffle_i32x4(__m512i a, __m512i b, int which) {
  return (__m512i)shuffle_quarters((u32x16)a, (u32x16)b, which);
}
inline __m512i unpacklo_epi16(__m512i a, __m512i b) { return (__m512i)unpack((u16x32)a, (u16x32)b, false); }
inline __m512i unpackhi_epi16(__m512i a, __m512i b) { return (__m512i)unpack((u16x32)a, (u16x32)b, true); }
inline __m512i unpacklo_epi32(__m512i a, __m512i b) { return (__m512i)unpack((u32x16)a, (u32x16)b, false); }
inline __m512i unpackhi_epi32(__m512i a, __m512i b) { return (__m512i)unpack((u32x16)a, (u32x16)b, true); }
inline __m512i unpacklo_epi64(__m512i a, __m512i b) { return (__m512i)unpack((u64x8)a, (u64x8)b, false); }
inline __m512i unpackhi_epi64(__m512i a, __m512i b) { return (__m512i)unpack((u64x8)a, (u64x8)b, true); }

}  // namespace emulated
}  // namespace

// The kernels' spelling. GCC has one of them as a macro.
#undef _mm512_setr_epi32
#define _mm512_add_epi16 emulated::add_epi16
#define _mm512_add_epi32 emulated::add_epi32
#define _mm512_add_ps emulated::add_ps
#define _mm512_broadcast_i64x4 emulated::broadcast_i64x4
#define _mm512_castsi256_si512 emulated::castsi256_si512
#define _mm512_cvtepi32_epi16 emulated::cvtepi32_epi16
#define _mm512_cvtepi32_epi8 emulated::cvtepi32_epi8
#define _mm512_cvtepi8_epi16 emulated::cvtepi8_epi16
#define _mm512_cvtepi8_epi32 emulated::cvtepi8_epi32
#define _mm512_cvtepu16_epi32 emulated::cvtepu16_epi32
#define _mm512_cvtepu8_epi32 emulated::cvtepu8_epi32
#define _mm512_cvtepu8_epi16 emulated::cvtepu8_epi16
#define _mm512_cvtneps_pbh emulated::cvtneps_pbh
#define _mm512_cvtph_ps emulated::cvtph_ps
#define _mm512_cvtps_epi32 emulated::cvtps_epi32
#define _mm512_cvtps_ph emulated::cvtps_ph
#define _mm512_dpbf16_ps emulated::dpbf16_ps
#define _mm512_dpbusd_epi32 emulated::dpbusd_epi32
#define _mm512_dpwssd_epi32 emulated::dpwssd_epi32
#define _mm512_fnmadd_ps emulated::fnmadd_ps
#define _mm512_inserti64x4 emulated::inserti64x4
#define _mm512_load_si512 emulated::load_si512
#define _mm512_loadu_ps emulated::loadu_ps
#define _mm512_madd_epi16 emulated::madd_epi16
#define _mm512_mask_blend_ps emulated::mask_blend_ps
#define _mm512_maskz_loadu_epi16 emulated::maskz_loadu_epi16
#define _mm512_max_epi32 emulated::max_epi32
#define _mm512_max_ps emulated::max_ps
#define _mm512_min_ps emulated::min_ps
#define _mm512_mul_ps emulated::mul_ps
#define _mm512_permutex2var_epi16 emulated::permutex2var_epi16
#define _mm512_permutex2var_ps emulated::permutex2var_ps
#define _mm512_permutexvar_ps emulated::permutexvar_ps
#define _mm512_reduce_add_ps emulated::reduce_add_ps
#define _mm512_reduce_max_ps emulated::reduce_max_ps
#define _mm512_roundscale_ps emulated::roundscale_ps
#define _mm512_scalef_ps emulated::scalef_ps
#define _mm512_set1_epi16 emulated::set1_epi16
#define _mm512_set1_epi32 emulated::set1_epi32
#define _mm512_set1_ps emulated::set1_ps
#define _mm512_setr_epi32 emulated::setr_epi32
#define _mm512_setzero_ps emulated::setzero_ps
#define _mm512_shuffle_f32x4 emulated::shuffle_f32x4
#define _mm512_shuffle_i32x4 emulated::shuffle_i32x4
#define _mm512_shuffle_ps emulated::shuffle_ps
#define _mm512_slli_epi32 emulated::slli_epi32
#define _mm512_storeu_ps emulated::storeu_ps
#define _mm512_storeu_si512 emulated::storeu_si512
#define _mm512_unpackhi_epi16 emulated::unpackhi_epi16
#define _mm512_unpackhi_epi32 emulated::unpackhi_epi32
#define _mm512_unpackhi_epi64 emulated::unpackhi_epi64
#define _mm512_unpacklo_epi16 emulated::unpacklo_epi16
#define _mm512_unpacklo_epi32 emulated::unpacklo_epi32
#define _mm512_unpacklo_epi64 emulated::unpacklo_epi64
#define _mm256_maskz_loadu_epi16 emulated::maskz_loadu_epi16_256
