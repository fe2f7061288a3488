// Vectors of the instruction set this file is compiled for, in GCC's and Clang's vector types.
//
// Everything lives in the instruction set's namespace: an inline function of the same name, compiled for a processor
// that has more, must never be linked into code for one that has less.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../types.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace winnow::WINNOW_ISA {

#if defined(__AVX512F__)
constexpr int WIDTH = 16;  // float lanes of a register
#elif defined(__AVX2__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif

typedef float vf __attribute__((vector_size(WIDTH * 4)));
typedef int32_t vi __attribute__((vector_size(WIDTH * 4)));
typedef uint32_t vu __attribute__((vector_size(WIDTH * 4)));
typedef uint16_t vh __attribute__((vector_size(WIDTH * 2)));

/// Number formats of activations and KVs, distinguished by type: both 16-bit ones are held as bits.
struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

/// Calls f with a number of the format, so that it knows the type.
template <class F>
inline void with_type(DType dtype, F f) {
  switch (dtype) {
    case DType::f32: return f(float{});
    case DType::bf16: return f(bf16{});
    case DType::f16: return f(f16{});
  }
}

/// Calls f with a number of each of two formats.
template <class F>
inline void with_types(DType first, DType second, F f) {
  with_type(first, [&](auto one) { with_type(second, [&](auto other) { f(one, other); }); });
}

template <class V, class T>
inline V load_vector(const T *from) {
  V out;
  std::memcpy(&out, from, sizeof out);
  return out;
}

template <class V, class T>
inline void store_vector(T *to, V value) {
  std::memcpy(to, &value, sizeof value);
}

inline vf broadcast(float x) { return x - vf{}; }  // x - 0: keeps the sign of zero
inline vi broadcast(int32_t x) { return x + vi{}; }

inline vf load(const float *from) { return load_vector<vf>(from); }

inline vf load(const bf16 *from) {
  // By intrinsics: GCC 12 widens vectors in halves, with four more shuffles.
#if defined(__AVX512F__)
  return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_vector<__m256i>(from)), 16);
#elif defined(__AVX2__)
  return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_vector<__m128i>(from)), 16);
#else
  return (vf)(__builtin_convertvector(load_vector<vh>(from), vu) << 16);
#endif
}

inline float to_float(float x) { return x; }

inline float to_float(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}

inline float to_float(f16 x) {
#if defined(__F16C__)
  return _cvtsh_ss(x.bits);
#endif
  // The bits of an f16 in the place of a float's are the same number times 2^-112, subnormals included.
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000) << 16, rest = static_cast<uint32_t>(x.bits & 0x7fff) << 13;
  uint32_t bits = rest;
  float out;
  if (rest >= 0x0f800000) {  // infinity or not a number
    bits = sign | rest | 0x7f800000;
    std::memcpy(&out, &bits, sizeof out);
    return out;
  }
  std::memcpy(&out, &bits, sizeof out);
  out *= 0x1p112f;
  std::memcpy(&bits, &out, sizeof bits);
  bits |= sign;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}

inline vf load(const f16 *from) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps(load_vector<__m256i>(from));
#elif defined(__F16C__)
  return (vf)_mm256_cvtph_ps(load_vector<__m128i>(from));
#else
  vf out;
  for (int i = 0; i < WIDTH; ++i) out[i] = to_float(from[i]);
  return out;
#endif
}

inline void store(float *to, vf value) { store_vector(to, value); }

#if !defined(__AVX512BF16__)
/// The nearest bf16, ties to even, in the upper half of each lane.
inline vu nearest_bf16(vf value) {
  const vu bits = (vu)value, rounded = bits + 0x7fff + ((bits >> 16) & 1);
  return value == value ? rounded : bits | 0x400000;
}
#endif

/// Rounds to nearest, ties to even.
inline void store(bf16 *to, vf value) {
#if defined(__AVX512BF16__)
  store_vector(to, _mm512_cvtneps_pbh((__m512)value));
#else
  store_vector(to, __builtin_convertvector(nearest_bf16(value) >> 16, vh));
#endif
}

inline f16 to_f16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint32_t sign = bits >> 16 & 0x8000;
  bits &= 0x7fffffff;
  uint32_t out;
  if (bits > 0x7f800000) {
    out = 0x7e00;
  } else if (bits >= 0x477ff000) {  // beyond the largest f16 after rounding
    out = 0x7c00;
  } else if (bits < 0x38800000) {  // a subnormal f16: let float addition round it
    float magnitude;
    std::memcpy(&magnitude, &bits, sizeof magnitude);
    magnitude += 0.5f;
    std::memcpy(&out, &magnitude, sizeof out);
    out -= 0x3f000000;
  } else {
    out = (bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13;
  }
  return {static_cast<uint16_t>(sign | out)};
}

inline void store(f16 *to, vf value) {
#if defined(__AVX512F__)
  store_vector(to, _mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
  store_vector(to, _mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int i = 0; i < WIDTH; ++i) to[i] = to_f16(value[i]);
#endif
}

/// A number as it is after it has been stored.
template <class T>
inline vf rounded(vf x) {
#if !defined(__AVX512BF16__)
  if constexpr (std::is_same_v<T, bf16>) return (vf)(nearest_bf16(x) & 0xffff0000u);
#endif
  T stored[WIDTH];
  store(stored, x);
  return load(stored);
}

/// The first n < WIDTH elements; the others read as zero.
template <class T>
inline vf load_part(const T *from, int n) {
  T padded[WIDTH] = {};
  std::memcpy(padded, from, n * sizeof(T));
  return load(padded);
}

template <class T>
inline void store_part(T *to, vf value, int n) {
  T padded[WIDTH];
  store(padded, value);
  std::memcpy(to, padded, n * sizeof(T));
}

/// As load and store, of the first n <= WIDTH elements.
template <class T>
inline vf get(const T *from, int n) {
  return n == WIDTH ? load(from) : load_part(from, n);
}

template <class T>
inline void put(T *to, vf value, int n) {
  if (n == WIDTH)
    store(to, value);
  else
    store_part(to, value, n);
}

/// x times a factor as a number of its own: never joined with a sum that it enters, so that equal products cancel out.
inline vf rounded_product(vf x, vf factor) {
  vf out = x * factor;
#if defined(__x86_64__)
  asm("" : "+v"(out));
#elif defined(__aarch64__)
  asm("" : "+w"(out));
#endif
  return out;
}

inline vf rounded_product(vf x, float factor) { return rounded_product(x, broadcast(factor)); }

// By intrinsics, as above: GCC 12 makes a comparison and a blend of a conditional expression.
inline vf vmax(vf a, vf b) {
#if defined(__AVX512F__)
  return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}

inline vf vmin(vf a, vf b) {
#if defined(__AVX512F__)
  return (vf)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (vf)_mm256_min_ps((__m256)a, (__m256)b);
#else
  return a < b ? a : b;
#endif
}

#if defined(__AVX2__) && !defined(__AVX512F__)
/// What an operation makes of the eight lanes, taken in halves.
template <class Op>
inline float reduce(vf x, Op op) {
  __m128 half = op(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
  half = op(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(op(half, _mm_movehdup_ps(half)));
}
#endif

inline float horizontal_max(vf x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)x);
#elif defined(__AVX2__)
  return reduce(x, [](__m128 a, __m128 b) { return _mm_max_ps(a, b); });
#else
  float out = x[0];
  for (int i = 1; i < WIDTH; ++i) out = x[i] > out ? x[i] : out;
  return out;
#endif
}

inline float horizontal_sum(vf x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)x);
#elif defined(__AVX2__)
  return reduce(x, [](__m128 a, __m128 b) { return _mm_add_ps(a, b); });
#else
  float out = 0.0f;
  for (int i = 0; i < WIDTH; ++i) out += x[i];
  return out;
#endif
}

#if defined(__AVX512F__)
/// e^x to 2 ulp for x < 88; 0 where that is below the smallest float, also for -infinity.
inline vf vexp(vf x) {
  const __m512 clamped = _mm512_max_ps((__m512)x, _mm512_set1_ps(-110.0f));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(clamped, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
  const vf r = (vf)_mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f),
                                    _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), clamped));
  vf p = broadcast(1.3981999507e-3f);
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  return (vf)_mm512_scalef_ps((__m512)p, n);
}
#else
/// e^x to 2 ulp for |x| < 87; 0 below, also for -infinity.
inline vf vexp(vf x) {
  const vf clamped = vmin(vmax(x, broadcast(-87.0f)), broadcast(88.0f));
  // n = round(x / ln 2): adding 1.5 * 2^23 leaves the integer in the lowest bits.
  const vf magic = broadcast(12582912.0f);
  const vf shifted = clamped * 1.44269504f + magic;
  const vf n = shifted - magic;
  const vf r = clamped - n * 0.693359375f + n * 2.12194440e-4f;
  vf p = broadcast(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const vi exponent = ((vi)shifted << 23) + 0x3f800000;
  const vf out = p * (vf)exponent;
  return x < -87.0f ? vf{} : out;
}
#endif

constexpr float LOG2_E = 1.44269504f;

/// 2^x to 2e-7 of it; beyond the largest float infinity, or 2^127 without AVX-512; 0 where it is below the smallest, or without
/// AVX-512 the smallest normal one, also for -infinity. Cheaper than e^x, for its logarithm is in the coefficients.
inline vf vexp2(vf x) {
#if defined(__AVX512F__)
  const __m512 clamped = _mm512_max_ps((__m512)x, _mm512_set1_ps(-160.0f));
  const __m512 n = _mm512_roundscale_ps(clamped, _MM_FROUND_TO_NEAREST_INT);
  const vf r = (vf)clamped - (vf)n;
#else
  const vf clamped = vmin(vmax(x, broadcast(-126.0f)), broadcast(127.0f));
  const vf magic = broadcast(12582912.0f);  // as in vexp
  const vf shifted = clamped + magic;
  const vf r = clamped - (shifted - magic);
#endif
  // Least largest relative error for |r| <= 1/2 of a polynomial that is 1 at 0.
  vf p = broadcast(1.3264726908e-3f);
  p = p * r + 9.6715126604e-3f;
  p = p * r + 5.5507337442e-2f;
  p = p * r + 2.4022242085e-1f;
  p = p * r + 6.9314697760e-1f;
  p = p * r + 1.0f;
#if defined(__AVX512F__)
  return (vf)_mm512_scalef_ps((__m512)p, n);
#else
  const vi exponent = ((vi)shifted << 23) + 0x3f800000;
  const vf out = p * (vf)exponent;
  return x < -126.0f ? vf{} : out;
#endif
}

/// tanh to 2e-7. The series near zero keeps its relative accuracy there.
inline vf vtanh(vf x) {
  const vf y = vmin(vmax(x, broadcast(-10.0f)), broadcast(10.0f));
  const vf far = 1.0f - 2.0f / (vexp(2.0f * y) + 1.0f);
  const vf s = y * y;
  const vf near = y * (1.0f + s * (-0.333333333f + s * (0.133333333f + s * -0.0539682540f)));
  return s < 0.01f ? near : far;
}

}  // namespace winnow::WINNOW_ISA
