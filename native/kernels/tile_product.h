// The products of product.h out of tile registers, for pairs of bf16.
//
// A register holds 16 rows of A by 64 bytes along K, or 16 pairs along K by 16 columns of B, each as they lie in memory, or 16
// rows by 16 columns of C. What fills none is left to vectors: the rest of K, and in attention fewer than 16 rows. In linear
// layers registers of A and C take fewer rows, so that every row is summed in one order, whichever rows are beside it.
#pragma once

#include <algorithm>

#include "product.h"
#include "tile_registers.h"

namespace winnow::WINNOW_ISA {

#if defined(WINNOW_TILES)

constexpr int TMM_COLUMNS = TMM_BYTES / 4;

/// Elements along K that a register holds.
template <class A>
constexpr int TMM_DEPTH = TMM_BYTES / sizeof(A);

/// Memory to bring nearer meanwhile: some lines of it in every step along K.
struct Ahead {
  const char *at = nullptr;
  int lines = 0;

  void step() {
    for (int line = 0; line < lines; ++line, at += 64) __builtin_prefetch(at, 0, 2);
  }
};

/// R by V registers of C, each 1 or 2; k is a multiple of TMM_DEPTH. Four hold C, two A and two B.
template <int R, int V, class A, class B>
inline void tile_part(const A *a, int a_stride, const B *b, int b_stride, typename SumOf<A>::type *c, int c_stride, int k,
                      bool accumulate, Ahead &ahead) {
  constexpr bool BELOW = R == 2, BESIDE = V == 2, BOTH = BELOW && BESIDE;
  const int64_t a_bytes = a_stride * sizeof(A), b_bytes = b_stride * 4, c_bytes = c_stride * 4;
  typename SumOf<A>::type *below = c + TMM_ROWS * c_stride;
  if (accumulate) {
    load_tmm<0>(c, c_bytes);
    if constexpr (BESIDE) load_tmm<1>(c + TMM_COLUMNS, c_bytes);
    if constexpr (BELOW) load_tmm<2>(below, c_bytes);
    if constexpr (BOTH) load_tmm<3>(below + TMM_COLUMNS, c_bytes);
  } else {
    zero_tmm<0>();
    if constexpr (BESIDE) zero_tmm<1>();
    if constexpr (BELOW) zero_tmm<2>();
    if constexpr (BOTH) zero_tmm<3>();
  }
  for (; k > 0; k -= TMM_DEPTH<A>, a += TMM_DEPTH<A>, b += TMM_DEPTH<A> * b_stride) {
    ahead.step();
    load_tmm<4>(a, a_bytes);
    if constexpr (BELOW) load_tmm<5>(a + TMM_ROWS * a_stride, a_bytes);
    load_tmm<6>(b, b_bytes);
    if constexpr (BESIDE) load_tmm<7>(b + TMM_COLUMNS * pair_size<A>(), b_bytes);
    multiply_tmm<0, 4, 6>(a);
    if constexpr (BESIDE) multiply_tmm<1, 4, 7>(a);
    if constexpr (BELOW) multiply_tmm<2, 5, 6>(a);
    if constexpr (BOTH) multiply_tmm<3, 5, 7>(a);
  }
  store_tmm<0>(c, c_bytes);
  if constexpr (BESIDE) store_tmm<1>(c + TMM_COLUMNS, c_bytes);
  if constexpr (BELOW) store_tmm<2>(below, c_bytes);
  if constexpr (BOTH) store_tmm<3>(below + TMM_COLUMNS, c_bytes);
}

/// n is a multiple of TMM_COLUMNS.
template <int R, class A, class B>
inline void tile_rows(int n, const A *a, int a_stride, const B *b, int b_stride, typename SumOf<A>::type *c, int c_stride,
                      int k, bool accumulate, Ahead &ahead) {
  for (; n >= 2 * TMM_COLUMNS; n -= 2 * TMM_COLUMNS, b += 2 * TMM_COLUMNS * pair_size<A>(), c += 2 * TMM_COLUMNS)
    tile_part<R, 2>(a, a_stride, b, b_stride, c, c_stride, k, accumulate, ahead);
  if (n) tile_part<R, 1>(a, a_stride, b, b_stride, c, c_stride, k, accumulate, ahead);
}

/// The part of a product that fills registers: all but the last rows of A, and K but for the rest that it returns. The thread
/// holds TileRegisters for as many rows.
template <class A, class B>
inline int tile_product(int rows, int n, int k, const A *a, int a_stride, const B *b, int b_stride,
                        typename SumOf<A>::type *c, int c_stride, bool accumulate) {
  const int rest = k % TMM_DEPTH<A>;
  int row = 0;
  Ahead nothing;
  for (; rows - row >= 2 * TMM_ROWS; row += 2 * TMM_ROWS)
    tile_rows<2>(n, a + row * a_stride, a_stride, b, b_stride, c + row * c_stride, c_stride, k - rest, accumulate,
                 nothing);
  if (row < rows)
    tile_rows<1>(n, a + row * a_stride, a_stride, b, b_stride, c + row * c_stride, c_stride, k - rest, accumulate,
                 nothing);
  return rest;
}

/// Rows of a product that fill registers.
template <class A>
inline int rows_of_tiles(int rows, int k) {
  return k < TMM_DEPTH<A> ? 0 : rows / TMM_ROWS * TMM_ROWS;
}

/// Preferred to the template of product.h. The thread holds TileRegisters for as many rows.
inline void product(int rows, int n, int k, const bf16 *a, int a_stride, const bf16 *b, int b_stride, float *c,
                    int c_stride, bool accumulate) {
  const int whole = rows_of_tiles<bf16>(rows, k);
  if (whole) {
    const int rest = tile_product(whole, n, k, a, a_stride, b, b_stride, c, c_stride, accumulate), deep = k - rest;
    if (rest) product<bf16>(whole, n, rest, a + deep, a_stride, b + deep * b_stride, b_stride, c, c_stride, true);
  }
  if (whole < rows)
    product<bf16>(rows - whole, n, k, a + whole * a_stride, a_stride, b, b_stride, c + whole * c_stride, c_stride,
                  accumulate);
}

/// As product_streaming of product.h. The thread's registers are set for the rows at hand; B is packed for V vectors.
template <int V, class Done>
inline void product_streaming(TileRegisters<bf16> &registers, int rows, const bf16 *a, int a_stride, const bf16 *b, float *c,
                              int c_stride, int k, bool accumulate, const char *ahead, const char *end, Done done) {
  constexpr int WIDE = V * WIDTH, MOST = 2 * TMM_ROWS;
  static_assert(WIDE % (2 * TMM_COLUMNS) == 0);
  const int deep = k / TMM_DEPTH<bf16> * TMM_DEPTH<bf16>;
  const int64_t lines = ahead < end ? (end - ahead + 63) / 64 : 0;
  const int64_t steps = int64_t{(rows + MOST - 1) / MOST} * (deep / TMM_DEPTH<bf16>) * (WIDE / (2 * TMM_COLUMNS));
  Ahead stream{ahead, steps ? static_cast<int>((lines + steps - 1) / steps) : 0};
  for (int first = 0; first < rows; first += MOST, a += MOST * a_stride, c += MOST * c_stride) {
    const int n = std::min(MOST, rows - first), upper = std::min(TMM_ROWS, n), lower = n - upper;
    registers.take(upper, lower ? lower : TMM_ROWS);
    if (deep && lower)
      tile_rows<2>(WIDE, a, a_stride, b, WIDE, c, c_stride, deep, accumulate, stream);
    else if (deep)
      tile_rows<1>(WIDE, a, a_stride, b, WIDE, c, c_stride, deep, accumulate, stream);
    if (deep < k)
      product_columns<V>(n, a + deep, a_stride, b + deep * WIDE, WIDE, c, c_stride, k - deep, accumulate || deep);
    done(first, n);
  }
}

/// Sums of rows with a piece of a panel in L1, [rows][V * WIDTH].
template <int V>
inline void product_panel(TileRegisters<bf16> &registers, int64_t rows, const bf16 *a, int64_t a_stride, const bf16 *b, float *c,
                          int64_t k, bool accumulate) {
  product_streaming<V>(registers, int(rows), a, int(a_stride), b, c, V * WIDTH, int(k), accumulate, nullptr, nullptr, [](int, int) {});
}

#endif

/// The same without tile registers.
template <int V, class A>
inline void product_panel(TileRegisters<A> & /*registers*/, int64_t rows, const A *a, int64_t a_stride, const A *b,
                          typename SumOf<A>::type *c, int64_t k, bool accumulate) {
  product_columns<V>(int(rows), a, int(a_stride), b, V * WIDTH, c, V * WIDTH, int(k), accumulate);
}

/// As product_streaming of product.h: without tile registers a thread holds none.
template <int V, class A, class B, class Done>
inline void product_streaming(TileRegisters<A> & /*registers*/, int rows, const A *a, int a_stride, const B *b,
                              typename SumOf<A>::type *c, int c_stride, int k, bool accumulate, const char *ahead,
                              const char *end, Done done) {
  product_streaming<V>(rows, a, a_stride, b, c, c_stride, k, accumulate, ahead, end, done);
}

}  // namespace winnow::WINNOW_ISA
