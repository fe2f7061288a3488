// Vectors of integers: rounding to them, and sums of products of 16-bit ones.
#pragma once

#include "simd.h"

namespace winnow::WINNOW_ISA {

inline vi larger(vi a, vi b) {
#if defined(__AVX512F__)
  return (vi)_mm512_max_epi32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (vi)_mm256_max_epi32((__m256i)a, (__m256i)b);
#else
  return a > b ? a : b;
#endif
}

/// The nearest integers, ties to even, of numbers below 2^22.
inline vi nearest(vf x) {
#if defined(__AVX512F__)
  return (vi)_mm512_cvtps_epi32((__m512)x);
#elif defined(__AVX2__)
  return (vi)_mm256_cvtps_epi32((__m256)x);
#else
  return (vi)(x + 12582912.0f) - 0x4b400000;
#endif
}

inline void store_codes(int16_t *to, vi codes) {
#if defined(__AVX512F__)
  store_vector(to, _mm512_cvtepi32_epi16((__m512i)codes));
#elif defined(__AVX2__)
  store_vector(to, _mm_packs_epi32(_mm256_castsi256_si128((__m256i)codes), _mm256_extracti128_si256((__m256i)codes, 1)));
#else
  typedef int16_t narrow __attribute__((vector_size(WIDTH * 2)));
  store_vector(to, __builtin_convertvector(codes, narrow));
#endif
}

#if defined(__AVX2__) && !defined(__AVX512F__)
/// Of eight codes of 8 bits those four apart side by side: as codes of weights lie.
inline void store_codes(int8_t *to, vi codes) {
  int16_t words[WIDTH];
  store_codes(words, codes);
  const __m128i bytes = _mm_packs_epi16(load_vector<__m128i>(words), __m128i{}), order = _mm_set1_epi64x(0x0703060205010400);
  _mm_storel_epi64((__m128i *)to, _mm_shuffle_epi8(bytes, order));
}
#endif

#if defined(WINNOW_VNNI)
/// Adds to each lane the products of its four 8-bit integers in a, above 0, and b. WINNOW_VNNI: AVX-VNNI's encoding (vex), or
/// that of AVX-512 (evex), of which vectors of 256 bits need nothing else.
inline vi add_quads(vi sum, vi a, vi b) {
  asm("%{" WINNOW_VNNI "%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
  return sum;
}
#endif

/// Adds to each lane the products of its two 16-bit integers in a and b.
inline vi add_pairs(vi sum, vi a, vi b) {
#if defined(__AVX512VNNI__)
  return (vi)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif defined(WINNOW_VNNI)
  asm("%{" WINNOW_VNNI "%} vpdpwssd %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
  return sum;
#elif defined(__AVX512F__)
  return sum + (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return sum + (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
  return sum + (vi)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
  return sum + (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}

}  // namespace winnow::WINNOW_ISA
