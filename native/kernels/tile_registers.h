// Tile registers (AMX): eight of 16 rows by 64 bytes, and the few instructions that a product needs of them.
//
// They come in two forms of the same names. Where the compiler may use AMX they are its instructions. With
// WINNOW_EMULATE_TILES they are plain loops that read the same configuration from the same bytes, so that everything
// that is built on them can be tested on processors without AMX.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdlib>

#include "simd.h"

#if defined(__AMX_BF16__) || defined(WINNOW_EMULATE_TILES)
#define WINNOW_TILES
#endif

namespace winnow::WINNOW_ISA {

/// What a thread holds while it multiplies with `Operand`: nothing, unless that is done in tile registers.
template <class Operand>
struct TileRegisters {
  explicit TileRegisters(int64_t /*most_rows*/) {}
};

#if defined(WINNOW_TILES)

constexpr int TMM_ROWS = 16, TMM_BYTES = 64, NUM_TMM = 8;

/// What LDTILECFG reads, as Intel's manual lays it out. Of registers that do not exist everything is zero.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64 && offsetof(TileConfig, row_bytes) == 16 && offsetof(TileConfig, rows) == 48);

#if defined(__AMX_BF16__)

// Not the intrinsics: GCC 12's name registers by macros, which no template can use, and do not say that they read
// memory, so that what is to be read may be written after them.
inline void configure_tmm(const TileConfig &config) { asm volatile("ldtilecfg %0" : : "m"(config)); }

inline void release_tmm() { asm volatile("tilerelease"); }

template <int T>
inline void zero_tmm() {
  asm volatile("tilezero %%tmm%c0" : : "i"(T));
}

/// Strides count bytes, from one row to the next.
template <int T>
inline void load_tmm(const void *from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(T) : "memory");
}

template <int T>
inline void store_tmm(void *to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(T) : "memory");
}

/// C += A B: float32 [16, 16], bf16 [16, 32], and bf16 [32, 16] as pairs [16][16][2].
template <int C, int A, int B>
inline void multiply_tmm(const bf16 *) {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}

#else

/// One thread's registers. Whatever the processor refuses ends the process, as it does there.
class EmulatedTiles {
 public:
  struct Register {
    char row[TMM_ROWS][TMM_BYTES];
  };

  void configure(const TileConfig &config) {
    std::memcpy(config_, &config, sizeof config_);
    require(config_[0] == 1);
    for (int i = 1; i < 64; ++i) require(config_[i] == 0 || (i >= 16 && i < 32) || (i >= 48 && i < 56));
    for (int t = 0; t < NUM_TMM; ++t)
      require(rows(t) <= TMM_ROWS && row_bytes(t) <= TMM_BYTES && row_bytes(t) % 4 == 0);
  }

  void release() { config_[0] = 0; }

  int rows(int t) const { return config_[48 + t]; }
  int row_bytes(int t) const { return config_[16 + 2 * t] | config_[17 + 2 * t] << 8; }

  Register &operator[](int t) {
    require(config_[0] == 1 && rows(t) > 0 && row_bytes(t) > 0);
    return registers_[t];
  }

  static void require(bool holds) {
    if (!holds) std::abort();
  }

  /// Of registers whose product is to be added to C.
  void require_match(int c, int a, int b) const {
    require(rows(c) == rows(a) && 4 * rows(b) == row_bytes(a) && row_bytes(b) == row_bytes(c));
  }

 private:
  uint8_t config_[64] = {};
  Register registers_[NUM_TMM];
};

inline thread_local EmulatedTiles emulated_tiles;

inline void configure_tmm(const TileConfig &config) { emulated_tiles.configure(config); }

inline void release_tmm() { emulated_tiles.release(); }

template <int T>
inline void zero_tmm() {
  std::memset(&emulated_tiles[T], 0, sizeof(EmulatedTiles::Register));
}

template <int T>
inline void load_tmm(const void *from, int64_t stride) {
  zero_tmm<T>();
  for (int r = 0; r < emulated_tiles.rows(T); ++r)
    std::memcpy(emulated_tiles[T].row[r], static_cast<const char *>(from) + r * stride, emulated_tiles.row_bytes(T));
}

template <int T>
inline void store_tmm(void *to, int64_t stride) {
  for (int r = 0; r < emulated_tiles.rows(T); ++r)
    std::memcpy(static_cast<char *>(to) + r * stride, emulated_tiles[T].row[r], emulated_tiles.row_bytes(T));
}

/// As Intel's manual has it: both of each pair are summed apart, and together added to C. There numbers below the
/// smallest normal one count as zero; here they do not.
template <int C, int A, int B>
inline void multiply_tmm(const bf16 *) {
  constexpr int PAIRS = TMM_BYTES / 4;
  EmulatedTiles &tiles = emulated_tiles;
  const int pairs = tiles.row_bytes(A) / 4, columns = tiles.row_bytes(C) / 4;
  tiles.require_match(C, A, B);
  bf16 a[TMM_ROWS][2 * PAIRS], b[TMM_ROWS][2 * PAIRS];
  float c[TMM_ROWS][PAIRS];
  std::memcpy(a, &tiles[A], sizeof a);
  std::memcpy(b, &tiles[B], sizeof b);
  std::memcpy(c, &tiles[C], sizeof c);
  for (int m = 0; m < tiles.rows(C); ++m) {
    float first[PAIRS] = {}, second[PAIRS] = {};
    for (int k = 0; k < pairs; ++k)
      for (int n = 0; n < columns; ++n) {
        first[n] = std::fma(to_float(a[m][2 * k]), to_float(b[k][2 * n]), first[n]);
        second[n] = std::fma(to_float(a[m][2 * k + 1]), to_float(b[k][2 * n + 1]), second[n]);
      }
    for (int n = 0; n < columns; ++n) c[m][n] += first[n] + second[n];
  }
  std::memcpy(&tiles[C], c, sizeof c);
}

#endif

/// Held by a thread whose products have up to `most_rows` rows; without a whole register of them it needs none.
/// Released at the end, since other libraries configure them for themselves.
template <>
class TileRegisters<bf16> {
 public:
  explicit TileRegisters(int64_t most_rows) {
    if (most_rows >= TMM_ROWS) take(TMM_ROWS, TMM_ROWS);
  }

  ~TileRegisters() {
    if (upper_) release_tmm();
  }

  TileRegisters(const TileRegisters &) = delete;
  TileRegisters &operator=(const TileRegisters &) = delete;

  /// Let the registers of C and A hold that many rows, those of the upper rows and those below (tile_product.h).
  void take(int upper, int lower) {
    if (upper == upper_ && lower == lower_) return;
    upper_ = upper, lower_ = lower;
    TileConfig config;
    std::fill(config.row_bytes, config.row_bytes + NUM_TMM, TMM_BYTES);
    std::fill(config.rows, config.rows + NUM_TMM, TMM_ROWS);
    for (int t : {0, 1, 4}) config.rows[t] = static_cast<uint8_t>(upper);
    for (int t : {2, 3, 5}) config.rows[t] = static_cast<uint8_t>(lower);
    configure_tmm(config);
  }

 private:
  int upper_ = 0, lower_ = 0;
};

#endif

}  // namespace winnow::WINNOW_ISA
