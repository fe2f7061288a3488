// Tile registers (AMX): eight of 16 rows by 64 bytes, and the few instructions that a product needs of them.
//
// They come in two forms of the same names: AMX's instructions, and with WINNOW_EMULATE_TILES plain loops (tests/emulated_tiles.h).
#pragma once

#include <cstddef>

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
}  // namespace winnow::WINNOW_ISA
#include "emulated_tiles.h"
namespace winnow::WINNOW_ISA {
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
