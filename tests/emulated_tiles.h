// AMX's tile registers (native/kernels/tile_registers.h) as plain loops that read the same configuration from the same bytes, so that
// everything that is built on them can be tested on processors without AMX.
#pragma once

#include <cmath>
#include <cstdlib>

namespace winnow::WINNOW_ISA {

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

}  // namespace winnow::WINNOW_ISA
