// The products of direct.h, in registers of every instruction set.
#include "direct.h"


namespace winnow::WINNOW_ISA {

namespace {

/// Parts of a scattered tile that are read in turn, a key of each. Divides WIDTH.
constexpr int STREAMS = 4;
/// Vectors of a tile that different rows prefetch in shares, so that memory is busy all the time.
constexpr int SHARED = TILE / STREAMS;
/// Prefetch a share of four vectors, every `every`th of `next`, with each WIDTH of their DIM elements that are multiplied. Line
/// by line in memory order, which is faster than in the order of the products, and a few at a time: requests in bursts would
/// wait for each other.
template <int DIM, class KV>
inline void prefetch_share(const KV *const *next, int every, int d) {
  constexpr int lines = DIM / LINE<KV>, share = 4 * WIDTH / LINE<KV>;
  const int first = d / WIDTH * share;
  for (int line = first; line < first + share; ++line)
    __builtin_prefetch(next[line / lines * every] + line % lines * LINE<KV>, 0, 2);
}

/// Prefetch them at once, where the number of elements is not known at compile time.
template <class KV>
inline void prefetch_four(const KV *const *next, int every, int dim) {
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j)
    for (int d = 0; d < dim; d += LINE<KV>) __builtin_prefetch(next[j * every] + d, 0, 2);
}

/// R rows with four keys, every `every`th of `each`: their products reduced by add_up_four, FOURS vectors apart.
template <int R, int DIM, class KV>
inline void dot4(const KV *const *each, const KV *const *next, int every, int dim, const float *rows, int padded,
                      vf *out) {
  constexpr int N = R > 3 && WIDTH < 16 ? 2 : 4;  // their sums stay in registers
  vf sums[R][4];
  if (DIM == 0) prefetch_four(next, every, dim);
#pragma GCC unroll 2
  for (int first = 0; first < 4; first += N) {
    const KV *from[N];
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j) from[j] = each[(first + j) * every];
    vf sum[R][N] = {};
    const auto add = [&](int d, auto read) __attribute__((always_inline)) {
      if constexpr (DIM > 0) prefetch_share<DIM>(next, every, d);
      vf row[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) row[r] = load(rows + r * padded + d);
#pragma GCC unroll 4
      for (int j = 0; j < N; ++j) {
        const vf x = read(from[j] + d);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) sum[r][j] += row[r] * x;
      }
    };
    const int whole = dim / WIDTH * WIDTH;
    // Unrolling is faster in the caches, but slower from memory where blocks are adjacent.
#pragma GCC unroll 1
    for (int d = 0; d < whole; d += WIDTH) add(d, [](const KV *x) { return load(x); });
    if (whole < dim) add(whole, [&](const KV *x) { return load_part(x, dim - whole); });
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int j = 0; j < N; ++j) sums[r][first + j] = sum[r][j];
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) out[r * FOURS] = add_up_four(sums[r][0], sums[r][1], sums[r][2], sums[r][3]);
}

#if defined(__AVX512BF16__)
/// The same of rows and keys that are multiplied in pairs: 16 elements of one key and 16 of another at once, so that what is in
/// the registers are halves that are joined already.
template <int R, int DIM>
inline void dot4(const bf16 *const *each, const bf16 *const *next, int every, int dim, const bf16 *rows, int padded,
                      vf *out) {
  if (DIM == 0) prefetch_four(next, every, dim);
  __m512 sum[R][2] = {};
  const auto add = [&](int d, auto read) __attribute__((always_inline)) {
    if constexpr (DIM > 0) prefetch_share<DIM>(next, every, d);
    __m512bh row[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) row[r] = (__m512bh)_mm512_broadcast_i64x4(load_vector<__m256i>(rows + r * padded + d));
#pragma GCC unroll 2
    for (int pair = 0; pair < 2; ++pair) {
      const bf16 *const *keys = each + 2 * pair * every;
      const __m512i one = _mm512_castsi256_si512(read(keys[0] + d));
      const __m512bh both = (__m512bh)_mm512_inserti64x4(one, read(keys[every] + d), 1);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) sum[r][pair] = _mm512_dpbf16_ps(sum[r][pair], row[r], both);
    }
  };
  const int whole = dim / WIDTH * WIDTH;
#pragma GCC unroll 1  // as above
  for (int d = 0; d < whole; d += WIDTH) add(d, [](const bf16 *x) { return load_vector<__m256i>(x); });
  // A load with a mask takes what whole ones leave to the products.
  if (whole < dim) add(whole, [&](const bf16 *x) { return _mm256_maskz_loadu_epi16((1u << (dim - whole)) - 1, x); });
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) out[r * FOURS] = join_pairs((vf)sum[r][0], (vf)sum[r][1]);
}
#endif

/// As direct_products, of R rows; keys of `streams` parts in turn, 1 or STREAMS. DIM: dim where it is known, else 0.
template <int R, int streams, int DIM, class KV, class Operand>
[[gnu::noinline]] void dot_tile(const KV *const *each, const KV *const *next, int n, int any_dim, const Operand *rows,
                                int padded, float *out) {
  const int dim = DIM > 0 ? DIM : any_dim;
  constexpr bool by_turns = streams > 1;
  constexpr int step = by_turns ? 1 : 4;
  const int length = by_turns ? TILE / streams : n, every = by_turns ? length : 1;
  for (int first = 0; first < length; first += WIDTH / streams) {
    vf fours[R][FOURS];
#pragma GCC unroll 4
    for (int i = 0; i < FOURS; ++i) {
      const int at = first + i * step;
      dot4<R, DIM>(each + at, next + at, every, dim, rows, padded, &fours[0][i]);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const vf sums = sums_of<by_turns>(fours[r]);
      float *to = out + r * TILE + first;
      if (!by_turns) {
        store(to, sums);
        continue;
      }
#pragma GCC unroll 4
      for (int s = 0; s < streams; ++s)
        std::memcpy(to + s * length, reinterpret_cast<const float *>(&sums) + s * FOURS, FOURS * sizeof(float));
    }
  }
}

/// As direct_sums, of R rows.
template <int R, class KV>
[[gnu::noinline]] void multiply_values(const KV *const *value, const KV *const *next, int n, int dim, const float *weights,
                                       int padded, float *sums) {
  constexpr int V = R == 1 ? 8 : R <= 3 ? 4 : 2;
  const auto columns = [&](int d, auto vectors) {
    constexpr int C = decltype(vectors)::value;
    vf sum[R][C];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) sum[r][c] = load(sums + r * padded + d + c * WIDTH);
    for (int j = 0; j < n; ++j) {
      vf w[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) w[r] = broadcast(weights[r * TILE + j]);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) {
        if ((d + c * WIDTH) % LINE<KV> == 0) __builtin_prefetch(next[j] + d + c * WIDTH, 0, 2);
        const vf v = get(value[j] + d + c * WIDTH, C > 1 || dim - d > WIDTH ? WIDTH : dim - d);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) sum[r][c] += w[r] * v;
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) store(sums + r * padded + d + c * WIDTH, sum[r][c]);
  };
  int d = 0;
  for (; d + V * WIDTH <= dim; d += V * WIDTH) columns(d, std::integral_constant<int, V>{});
  for (; d < dim; d += WIDTH) columns(d, std::integral_constant<int, 1>{});
}

#if defined(__AVX512BF16__)
/// The same of weights and values that are multiplied in pairs: those of two KVs. Two whole vectors of sums lie as `unpack`
/// leaves them, which needs no shuffle across the register; see put_in_order.
template <int R>
[[gnu::noinline]] void multiply_values(const bf16 *const *value, const bf16 *const *next, int n, int dim, const bf16 *weights,
                                       int padded, float *sums) {
  const auto columns = [&](int d, auto vectors) {
    constexpr int C = decltype(vectors)::value;
    const auto at = [=](int r, int c) { return sums + r * padded + d + c * WIDTH; };
    const auto there = [=](int c) { return C > 2 || c == 0 || d + WIDTH < padded; };  // the last pair of vectors may be one
    __m512 sum[R][C];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) sum[r][c] = there(c) ? _mm512_loadu_ps(at(r, c)) : _mm512_setzero_ps();
    for (int j = 0; j < n; j += 2) {
      __m512bh pair[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        int32_t bits;
        std::memcpy(&bits, weights + r * TILE + j, sizeof bits);
        pair[r] = (__m512bh)_mm512_set1_epi32(bits);
      }
#pragma GCC unroll 2
      for (int c = 0; c < C; c += 2) {
        const int from = d + c * WIDTH, left = dim - from;
        __builtin_prefetch(next[j] + from, 0, 2);
        __builtin_prefetch(next[j + 1] + from, 0, 2);
        const auto read = [=](const bf16 *x) { return C > 2 ? load_vector<__m512i>(x) : load_pairs(x, left); };
        const __m512i first = read(value[j] + from), second = read(value[j + 1] + from);
        const bool whole = C > 2 || d + 2 * WIDTH <= padded;
        const __m512i one = whole ? _mm512_unpacklo_epi16(first, second) : Interleaved(first, second).low;
        const __m512i other = _mm512_unpackhi_epi16(first, second);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          sum[r][c] = _mm512_dpbf16_ps(sum[r][c], pair[r], (__m512bh)one);
          sum[r][c + 1] = _mm512_dpbf16_ps(sum[r][c + 1], pair[r], (__m512bh)other);
        }
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c)
        if (there(c)) _mm512_storeu_ps(at(r, c), sum[r][c]);
  };
  int d = 0;
  for (; d + 4 * WIDTH <= dim; d += 4 * WIDTH) columns(d, std::integral_constant<int, 4>{});
  for (; d < dim; d += 2 * WIDTH) columns(d, std::integral_constant<int, 2>{});
}
#endif

/// Calls f with as many of the rows as are multiplied at once, as a constant, the first of them, and which of the next tile's
/// vectors to prefetch meanwhile. Every turn prefetches its share of adjacent vectors: `each` stands for the rest.
template <class KV, class F>
inline void for_direct_rows(int rows, const KV *const *each, const KV *const *next, int n, F f) {
  if (rows <= DIRECT_ROWS) return with_rows(rows, [&](auto count) { f(count, 0, next); });
  const int turns = (rows + DIRECT_ROWS - 1) / DIRECT_ROWS, width = round_up(n, WIDTH);
  const KV *ahead[TILE];
  for (int turn = 0, first = 0; turn < turns; ++turn) {
    for (int j = 0; j < width; ++j) ahead[j] = j % SHARED * turns / SHARED == turn ? next[j] : each[j];
    const int some = (rows - first + turns - turn - 1) / (turns - turn);
    with_rows(some, [&](auto count) { f(count, first, ahead); });
    first += some;
  }
}

}  // namespace

template <class KV, class Operand>
inline void direct_products(int rows, const KV *const *each, const KV *const *next, int n, bool scattered, int dim,
                     const Operand *with, int padded, float *out) {
  for_direct_rows(rows, each, next, n, [&](auto count, int first, const KV *const *ahead) {
    const auto dot_rows = [&](auto streams, auto known) {
      dot_tile<count, streams, known>(each, ahead, n, dim, with + first * padded, padded, out + first * TILE);
    };
    const auto with_streams = [&](auto streams) {
      // Loops of known length take a fifth less time where there are registers enough.
      if constexpr (WIDTH == 16) {
        if (dim == 64) return dot_rows(streams, std::integral_constant<int, 64>{});
        if (dim == 128) return dot_rows(streams, std::integral_constant<int, 128>{});
      }
      dot_rows(streams, std::integral_constant<int, 0>{});
    };
    scattered ? with_streams(std::integral_constant<int, STREAMS>{}) : with_streams(std::integral_constant<int, 1>{});
  });
}

template <class KV, class Operand>
void direct_sums(int rows, const KV *const *value, const KV *const *next, int n, int dim, const Operand *weights, int padded,
                 float *sums) {
  for_direct_rows(rows, value, next, n, [&](auto count, int first, const KV *const *ahead) {
    multiply_values<count>(value, ahead, n, dim, weights + first * TILE, padded, sums + first * padded);
  });
}

#define WINNOW_DIRECT(KV)                                                                                             \
  template void direct_products(int, const KV *const *, const KV *const *, int, bool, int, const OperandOf<KV>::type *, \
                                int, float *);                                                                        \
  template void direct_sums(int, const KV *const *, const KV *const *, int, int, const OperandOf<KV>::type *, int, float *);
WINNOW_EACH_FORMAT(WINNOW_DIRECT)
#undef WINNOW_DIRECT

}  // namespace winnow::WINNOW_ISA
