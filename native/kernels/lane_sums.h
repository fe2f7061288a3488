// Sums over the lanes of vectors, for as many vectors at once as one has lanes.
//
// A step joins two vectors: of each, one part is added to the other. Where the parts of a stay in their lanes and those of b in
// the others, one shuffle brings what is added to them.
#pragma once

#include "pack.h"

namespace winnow::WINNOW_ISA {

/// Fours of vectors whose sums fill a vector.
constexpr int FOURS = WIDTH / 4;

#if defined(__AVX512F__)
/// a's halves added up, in the first half, and b's in the second.
inline vf join_halves(vf a, vf b) {
  const vf other = (vf)_mm512_shuffle_f32x4((__m512)a, (__m512)b, 0x4e);
  return (vf)_mm512_mask_blend_ps(0xff00, (__m512)a, (__m512)b) + other;
}

/// Of every four lanes, a's pairs added up in the first two and b's in the others.
inline vf join_pairs(vf a, vf b) {
  const vf other = (vf)_mm512_shuffle_ps((__m512)a, (__m512)b, 0x4e);
  return (vf)_mm512_mask_blend_ps(0xcccc, (__m512)a, (__m512)b) + other;
}
#elif defined(__AVX2__)
inline vf join_halves(vf a, vf b) {
  const vf other = (vf)_mm256_permute2f128_ps((__m256)a, (__m256)b, 0x21);
  return (vf)_mm256_blend_ps((__m256)a, (__m256)b, 0xf0) + other;
}

inline vf join_pairs(vf a, vf b) {
  const vf other = (vf)_mm256_shuffle_ps((__m256)a, (__m256)b, 0x4e);
  return (vf)_mm256_blend_ps((__m256)a, (__m256)b, 0xcc) + other;
}
#endif

/// Four vectors become one, for sums_of.
inline vf add_up_four(vf a, vf b, vf c, vf d) {
#if defined(__AVX2__)
  return join_pairs(join_halves(a, b), join_halves(c, d));
#else
  vf rows[WIDTH] = {a, b, c, d};
  transpose(rows);
  return rows[0] + rows[1] + rows[2] + rows[3];
#endif
}

/// The sums of WIDTH vectors, one in each lane, from what add_up_four makes of each four of them: those of the first four, of
/// the second and so on; by_turns: the first of each four, then the second of each.
template <bool by_turns>
inline vf sums_of(const vf fours[WIDTH / 4]) {
#if defined(__AVX512F__)
  const auto add = [](__m512 x, __m512 y) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x88), _mm512_shuffle_f32x4(x, y, 0xdd));
  };
  const __m512 x = add((__m512)fours[0], (__m512)fours[1]), y = add((__m512)fours[2], (__m512)fours[3]);
  const __m512 sums = _mm512_add_ps(_mm512_shuffle_ps(x, y, 0x88), _mm512_shuffle_ps(x, y, 0xdd));
  const __m512i from = by_turns ? _mm512_setr_epi32(0, 8, 2, 10, 4, 12, 6, 14, 1, 9, 3, 11, 5, 13, 7, 15)
                                : _mm512_setr_epi32(0, 4, 1, 5, 8, 12, 9, 13, 2, 6, 3, 7, 10, 14, 11, 15);
  return (vf)_mm512_permutexvar_ps(from, sums);
#elif defined(__AVX2__)
  const __m256 x = (__m256)fours[0], y = (__m256)fours[1];
  const __m256 sums = _mm256_add_ps(_mm256_shuffle_ps(x, y, 0x88), _mm256_shuffle_ps(x, y, 0xdd));
  const __m256i from = by_turns ? _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7) : _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  return (vf)_mm256_permutevar8x32_ps(sums, from);
#else
  return fours[0];
#endif
}

}  // namespace winnow::WINNOW_ISA
