// Small matrix products out of packed operands: C [rows, N] (+)= A [rows, K] B [K, N], accumulated in float32, or those of
// integers in int32.
//
// Operands come in three forms. Floats: A [rows][K], B [K][N], where B may also be 16 bits wide and becomes floats on the
// way, bf16 out of registers that are joined. Pairs of bf16, where the processor multiplies them itself: A [rows][K],
// B [K / 2][N][2], so that two neighbours along K lie side by side (the form of AVX512-BF16). Integers: the same with int16.
#pragma once

#include <type_traits>

#include "coded.h"
#include "integers.h"

namespace winnow::WINNOW_ISA {

/// Neighbours along K that lie side by side.
template <class Operand>
constexpr int pair_size() {
  return 4 / sizeof(Operand);
}

/// What products of an operand are summed as.
template <class Operand>
struct SumOf {
  using type = float;
  using vector = vf;
};
template <>
struct SumOf<int16_t> {
  using type = int32_t;
  using vector = vi;
};

/// What two formats are multiplied as, such as activations with weights, or with KVs. Floats, unless the processor multiplies
/// both as they are.
template <class A, class B = A>
struct OperandOf {
  using type = float;
};

#if defined(__AVX512BF16__)
template <>
struct OperandOf<bf16, bf16> {
  using type = bf16;
};

template <>
struct OperandOf<Coded> {
  using type = bf16;
};

// Attention is compiled for this format alone, of activations and of plain KVs: products of bf16 change nothing for the others,
// which go the way of AVX-512 (dispatch.cpp).
#define WINNOW_EACH_FORMAT(apply) apply(bf16)
#else
#define WINNOW_EACH_FORMAT(apply) apply(float) apply(bf16) apply(f16)
#endif
#define WINNOW_EACH_KV(apply) WINNOW_EACH_FORMAT(apply) apply(Coded)

/// What coded vectors are decoded to, tile by tile.
using Decoded = OperandOf<Coded>::type;

/// Calls f with a number of the format of activations that attention is compiled for.
template <class F>
inline void with_act([[maybe_unused]] DType dtype, F f) {
#if defined(__AVX512BF16__)
  f(bf16{});
#else
  with_type(dtype, f);
#endif
}

/// Calls f with the type of a cache's KVs, and that of what they are multiplied as with a call's activations.
template <class F>
inline void with_kv_and_operand([[maybe_unused]] DType act, const Pool &cache, F f) {
  if (cache.coded) return f(Coded{}, Decoded{});
#if defined(__AVX512BF16__)
  f(bf16{}, bf16{});
#else
  with_types(act, cache.dtype, [&](auto one, auto kv) { f(kv, typename OperandOf<decltype(one), decltype(kv)>::type{}); });
#endif
}

/// Whether bf16 of B that become floats on the way are joined: 32 bits hold a lane of one register, then the same lane of the
/// next. To part them takes a shift and a mask, which cost next to nothing among the products. With AVX-512 that has not been
/// tried; there pieces of B become floats before many rows are multiplied with them.
template <class A, class B>
constexpr bool is_joined() {
#if defined(__AVX512F__)
  return false;
#else
  return std::is_same_v<A, float> && std::is_same_v<B, bf16>;
#endif
}

/// V registers of B as their products with A take them.
template <int V, class A, class B>
inline void load_operands(const B *from, typename SumOf<A>::vector *out) {
  if constexpr (is_joined<A, B>()) {
    static_assert(V % 2 == 0);
#pragma GCC unroll 4
    for (int v = 0; v < V; v += 2) {
      const vu both = load_vector<vu>(from + v * WIDTH);
      out[v] = (vf)(both << 16), out[v + 1] = (vf)(both & 0xffff0000u);
    }
  } else {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      if constexpr (pair_size<A>() > 1)
        out[v] = load_vector<typename SumOf<A>::vector>(from + v * WIDTH * pair_size<A>());
      else
        out[v] = load(from + v * WIDTH);
    }
  }
}

inline vf multiply_add(vf sum, const float *a, vf b) { return sum + *a * b; }

/// Neighbours of A in every lane.
template <class A>
inline vi broadcast_pair(const A *a) {
  int32_t pair;
  std::memcpy(&pair, a, sizeof pair);
  return broadcast(pair);
}

#if defined(__AVX512BF16__)
inline vf multiply_add(vf sum, const bf16 *a, vf b) {
  return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)broadcast_pair(a), (__m512bh)b);
}
#endif

inline vi multiply_add(vi sum, const int16_t *a, vi b) { return add_pairs(sum, broadcast_pair(a), b); }

/// Steps along K after which lines are prefetched again: with AVX-512 a step reads whole lines of B, else it takes several.
#if defined(__AVX512F__)
constexpr int STEPS_OF_LINES = 1;
#else
constexpr int STEPS_OF_LINES = 8;
#endif

/// R rows by V vectors of C, kept in registers. Strides count elements; b_stride those of N alone.
///
/// ahead: a stream to prefetch, LINES lines of it in every STEPS_OF_LINES along K.
template <int R, int V, int LINES = 0, class A, class B>
inline void product_part(const A *a, int a_stride, const B *b, int b_stride, typename SumOf<A>::type *c, int c_stride, int k,
                         bool accumulate, const char *ahead = nullptr) {
  using Vector = typename SumOf<A>::vector;
  constexpr int PAIR = pair_size<A>(), STRETCH = STEPS_OF_LINES * PAIR;
  Vector sum[R][V];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) sum[r][v] = accumulate ? load_vector<Vector>(c + r * c_stride + v * WIDTH) : Vector{};
  const auto add = [&](int first, int last) __attribute__((always_inline)) {
    for (int i = first; i < last; i += PAIR) {
      Vector from_b[V];
      load_operands<V, A>(b + i * b_stride, from_b);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) sum[r][v] = multiply_add(sum[r][v], a + r * a_stride + i, from_b[v]);
    }
  };
  int i = 0;
  // The same loop where nothing is prefetched: GCC 12 spills the sums of the other one to memory, at every step.
  for (; i + STRETCH <= k; i += STRETCH) {
#pragma GCC unroll 8
    for (int line = 0; line < LINES; ++line, ahead += 64) __builtin_prefetch(ahead, 0, 2);
    add(i, i + STRETCH);
  }
  if constexpr (STEPS_OF_LINES > 1) add(i, k);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) store_vector(c + r * c_stride + v * WIDTH, sum[r][v]);
}

#if defined(__AVX512F__)
constexpr int MAX_ROWS = 6, MAX_VECTORS = 4;  // 24 sums, 4 of B and one of A out of 32 registers
#elif defined(__AVX2__)
constexpr int MAX_ROWS = 6, MAX_VECTORS = 2;  // 12, 2 and one of 16
#else
constexpr int MAX_ROWS = 4, MAX_VECTORS = 2;  // of 16
#endif

/// As product_part, of 1 to MAX_ROWS rows.
template <int V, int LINES = 0, class A, class B>
inline void product_rows(int rows, const A *a, int a_stride, const B *b, int b_stride, typename SumOf<A>::type *c,
                         int c_stride, int k, bool accumulate, const char *ahead = nullptr) {
  switch (rows) {
#define WINNOW_ROWS(n)                                                                          \
  case n:                                                                                       \
    return product_part<n, V, LINES>(a, a_stride, b, b_stride, c, c_stride, k, accumulate, ahead);
    WINNOW_ROWS(1)
    WINNOW_ROWS(2)
    WINNOW_ROWS(3)
    WINNOW_ROWS(4)
#if defined(__AVX2__)
    WINNOW_ROWS(5)
    WINNOW_ROWS(6)
#endif
#undef WINNOW_ROWS
  }
}

template <int V, class A, class B>
inline void product_columns(int rows, const A *a, int a_stride, const B *b, int b_stride, typename SumOf<A>::type *c,
                            int c_stride, int k, bool accumulate) {
  // Parts as equal as can be: one of a row or two would wait for its own sums.
  for (int parts = (rows + MAX_ROWS - 1) / MAX_ROWS; parts > 0; --parts) {
    const int n = (rows + parts - 1) / parts;
    product_rows<V>(n, a, a_stride, b, b_stride, c, c_stride, k, accumulate);
    rows -= n, a += n * a_stride, c += n * c_stride;
  }
}

/// As product_columns; meanwhile memory from `ahead` to `end` is brought nearer.
///
/// done: called with each part of the rows, the first and how many, as soon as it is there and still in the cache.
template <int V, class A, class B, class Done>
inline void product_streaming(int rows, const A *a, int a_stride, const B *b, typename SumOf<A>::type *c, int c_stride,
                              int k, bool accumulate, const char *ahead, const char *end, Done done) {
  constexpr int WIDE = V * WIDTH;
  const int stretches = k / (STEPS_OF_LINES * pair_size<A>());
  int parts = (rows + MAX_ROWS - 1) / MAX_ROWS;
  const int64_t each = (end - ahead + parts * 64 - 1) / (parts * 64);  // lines for each part
  for (int first = 0; parts > 0; --parts) {
    const int n = (rows + parts - 1) / parts;
    const auto multiply = [&](auto lines) {
      product_rows<V, lines()>(n, a, a_stride, b, WIDE, c, c_stride, k, accumulate, ahead);
      ahead += 64 * lines() * stretches;
    };
    if (ahead >= end)
      multiply(std::integral_constant<int, 0>{});
    else if (each <= stretches)
      multiply(std::integral_constant<int, 1>{});
    else if (each <= 2 * stretches)
      multiply(std::integral_constant<int, 2>{});
    else if (STEPS_OF_LINES == 1 || each <= 4 * stretches)
      multiply(std::integral_constant<int, 4>{});
    else
      multiply(std::integral_constant<int, STEPS_OF_LINES == 1 ? 4 : 8>{});
    done(first, n);
    first += n, rows -= n, a += n * a_stride, c += n * c_stride;
  }
}

/// n is a multiple of WIDTH; k is even for pairs.
template <class Operand>
inline void product(int rows, int n, int k, const Operand *a, int a_stride, const Operand *b, int b_stride, float *c,
                    int c_stride, bool accumulate) {
  constexpr int PAIR = pair_size<Operand>();
  constexpr int step = MAX_VECTORS * WIDTH;
  for (; n >= step; n -= step, b += step * PAIR, c += step)
    product_columns<MAX_VECTORS>(rows, a, a_stride, b, b_stride, c, c_stride, k, accumulate);
  for (; n >= WIDTH; n -= WIDTH, b += WIDTH * PAIR, c += WIDTH)
    product_columns<1>(rows, a, a_stride, b, b_stride, c, c_stride, k, accumulate);
}

}  // namespace winnow::WINNOW_ISA
