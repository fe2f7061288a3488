// How vectors become codes: winnow.cache.formats, operation by operation. Compiled without fused multiply-add, which would
// round once where two operations round twice.
#include <algorithm>
#include <cmath>
#include <limits>

#include "coded.h"
#include "hadamard.h"

namespace winnow::WINNOW_ISA {

namespace {

/// Round to the nearest whole number, ties to even; |x| < 2^22.
inline float to_whole(float x) {
  constexpr float MAGIC = 12582912.0f;  // 1.5 * 2^23
  return (x + MAGIC) - MAGIC;
}

/// x / scale held in [low, high], 0 where that is no number.
inline float scaled(float x, float scale, float low, float high) {
  const float y = x / scale;
  if (!(std::fabs(y) <= std::numeric_limits<float>::max()) || scale == 0.0f) return std::min(std::max(0.0f, low), high);
  return std::min(std::max(y, low), high);
}

/// The nearest e4m3fn of a number in -448..448, ties to even.
inline uint8_t to_e4m3(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint32_t sign = bits >> 24 & 0x80;
  bits &= 0x7fffffff;
  if (bits < 0x3c800000) {  // below 2^-6, the smallest normal one: let float addition round it to multiples of 2^-9
    float magnitude;
    std::memcpy(&magnitude, &bits, sizeof magnitude);
    magnitude += 16384.0f;  // 2^14, whose last bit is 2^-9
    std::memcpy(&bits, &magnitude, sizeof bits);
    return static_cast<uint8_t>(sign | (bits - 0x46800000));
  }
  return static_cast<uint8_t>(sign | ((bits - 0x3c000000 + 0x7ffff + (bits >> 20 & 1)) >> 20));
}

/// The least and the greatest of some numbers; both are NaN if one of them is.
struct Range {
  float least = std::numeric_limits<float>::infinity(), greatest = -least;
  bool ordered = true;

  void add(float x) {
    ordered &= x == x;
    least = std::min(least, x);
    greatest = std::max(greatest, x);
  }
};

/// The same of whole vectors, which are taken by vectors.
inline Range range_of(const float *x, int n, bool magnitudes) {
  const auto read = [&](int i) { return magnitudes ? (vf)((vi)load(x + i) & 0x7fffffff) : load(x + i); };
  vf low = read(0), high = low;
  vi ordered = low == low;
  for (int i = WIDTH; i < n; i += WIDTH) {
    const vf y = read(i);
    low = vmin(low, y), high = vmax(high, y);
    ordered &= y == y;
  }
  Range out;
  out.least = -horizontal_max(-low), out.greatest = horizontal_max(high);
  for (int i = 0; i < WIDTH; ++i) out.ordered &= ordered[i] != 0;
  return out;
}

/// Whether a group's numbers divided by its scale are all finite, and so is each of its steps.
inline bool divides(float scale, const Range &range) {
  return range.ordered && scale > 0.0f && scale <= std::numeric_limits<float>::max();
}

/// to_whole of (x - least) / scale held in [low, high], of whole vectors; `least` is taken off first.
inline void to_codes(const float *x, int n, float least, float scale, float low, float high, uint8_t *code) {
  typedef int8_t bytes __attribute__((vector_size(WIDTH)));
  const vf magic = broadcast(12582912.0f);  // as to_whole
  for (int i = 0; i < n; i += WIDTH) {
    const vf y = (load(x + i) - least) / scale;
    const vf whole = (vmin(vmax(y, broadcast(low)), broadcast(high)) + magic) - magic;
    store_vector(code + i, __builtin_convertvector(__builtin_convertvector(whole, vi), bytes));
  }
}

inline f16 stored(float x, bool ordered) { return ordered ? to_f16(x) : f16{0x7e00}; }

template <bool floating>
void encode_symmetric(int group, const float *x, uint8_t *code, f16 *scale) {
  constexpr float MOST = floating ? 448.0f : 127.0f;
  const bool whole = group % WIDTH == 0;
  Range range;
  if (whole)
    range = range_of(x, group, true);
  else
    for (int c = 0; c < group; ++c) range.add(std::fabs(x[c]));
  *scale = stored(range.greatest / MOST, range.ordered);
  const float by = to_float(*scale);
  if (!floating && whole && divides(by, range)) return to_codes(x, group, 0.0f, by, -MOST, MOST, code);
  for (int c = 0; c < group; ++c) {
    const float y = scaled(x[c], by, -MOST, MOST);
    code[c] = floating ? to_e4m3(y) : static_cast<uint8_t>(static_cast<int8_t>(to_whole(y)));
  }
}

/// Pack the codes of a group, one in a byte; see winnow.cache.packing.
void pack_codes(int bits, int group, const uint8_t *from, uint8_t *to) {
  const auto interleave = [&](int width, int shift, uint8_t *out) {
    const int parts = 8 / width, size = group / parts, mask = (1 << width) - 1;
    for (int j = 0; j < size; ++j) {
      int packed = 0;
      for (int part = 0; part < parts; ++part) packed |= (from[part * size + j] >> shift & mask) << (part * width);
      out[j] = static_cast<uint8_t>(packed);
    }
    return out + size;
  };
  if (bits == 3)
    interleave(1, 2, interleave(2, 0, to));
  else
    interleave(bits, 0, to);
}

constexpr int MAX_GROUP = 1024;
constexpr int MAX_OUTLIERS = 8;

/// The channels of the largest numbers, ties go to the first; NaN counts as the largest.
void find_outliers(int dim, const float *x, int64_t count, uint8_t *channel) {
  for (int64_t i = 0; i < count; ++i) {
    int found = -1;
    for (int d = 0; d < dim; ++d) {
      if (std::find(channel, channel + i, d) != channel + i) continue;
      if (found >= 0 && x[found] != x[found]) break;
      if (found < 0 || std::fabs(x[d]) > std::fabs(x[found]) || x[d] != x[d]) found = d;
    }
    channel[i] = static_cast<uint8_t>(found);
  }
}

void encode_affine(const CodedVectors &vectors, int bits, int dim, const float *x, int64_t block, int64_t offset) {
  const int group = static_cast<int>(vectors.group);
  const auto levels = static_cast<float>((1 << bits) - 1);
  auto *code = reinterpret_cast<uint8_t *>(vectors.code.at(block, offset));
  auto *scale = reinterpret_cast<f16 *>(vectors.scale.at(block, offset));
  auto *min = reinterpret_cast<f16 *>(vectors.min.at(block, offset));
  const int64_t count = vectors.num_outliers;
  uint8_t channel[MAX_OUTLIERS], codes[MAX_GROUP];
  find_outliers(dim, x, count, channel);
  const auto is_outlier = [&](int d) { return std::find(channel, channel + count, d) != channel + count; };
  for (int first = 0; first < dim; first += group, ++scale, ++min, code += group * bits / 8) {
    const auto in_group = [&](int d) { return first <= d && d < first + group; };
    const bool whole = group % WIDTH == 0 && std::none_of(channel, channel + count, in_group);
    Range range;
    if (whole)
      range = range_of(x + first, group, false);
    else
      for (int d = first; d < first + group; ++d)
        if (!is_outlier(d)) range.add(x[d]);
    *min = stored(range.least, range.ordered);
    const float least = to_float(*min), spread = (range.greatest - least) / levels;
    *scale = stored(std::max(spread, 0.0f), range.ordered && spread == spread);
    const float by = to_float(*scale);
    if (whole && divides(by, range) && std::fabs(least) <= std::numeric_limits<float>::max()) {
      to_codes(x + first, group, least, by, 0.0f, levels, codes);
      pack_codes(bits, group, codes, code);
      continue;
    }
    for (int c = 0; c < group; ++c) {
      codes[c] = static_cast<uint8_t>(to_whole(scaled(x[first + c] - least, by, 0.0f, levels)));
      for (int64_t i = 0; i < count; ++i) {
        if (channel[i] != first + c) continue;
        const float rest = x[first + c] - (static_cast<float>(codes[c]) * by + least);
        const f16 outlier = to_f16(rest);
        const bool finite = (outlier.bits & 0x7c00) != 0x7c00;
        reinterpret_cast<f16 *>(vectors.outlier.at(block, offset))[i] = finite ? outlier : f16{0x7e00};
      }
    }
    pack_codes(bits, group, codes, code);
  }
  if (count) std::copy(channel, channel + count, reinterpret_cast<uint8_t *>(vectors.channel.at(block, offset)));
}

template <class KV>
void encode_plain(int dim, const float *x, char *to) {
  for (int d = 0; d < dim; d += WIDTH) put(reinterpret_cast<KV *>(to) + d, load(x + d), std::min(WIDTH, dim - d));
}

}  // namespace

void encode(const CodedVectors &vectors, int dim, float *x, int64_t block, int64_t offset) {
  hadamard(x, dim, static_cast<int>(vectors.rotation));
  char *code = vectors.code.at(block, offset);
  const auto symmetric = [&](auto floating) {
    const int group = static_cast<int>(vectors.group);
    auto *scale = reinterpret_cast<f16 *>(vectors.scale.at(block, offset));
    for (int d = 0; d < dim; d += group)
      encode_symmetric<floating>(group, x + d, reinterpret_cast<uint8_t *>(code) + d, scale++);
  };
  switch (vectors.format) {
    case Format::f32: return encode_plain<float>(dim, x, code);
    case Format::bf16: return encode_plain<bf16>(dim, x, code);
    case Format::f16: return encode_plain<f16>(dim, x, code);
    case Format::fp8_e4m3: return symmetric(std::true_type{});
    case Format::int8: return symmetric(std::false_type{});
    case Format::int4: return encode_affine(vectors, 4, dim, x, block, offset);
    case Format::int3: return encode_affine(vectors, 3, dim, x, block, offset);
    case Format::int2: return encode_affine(vectors, 2, dim, x, block, offset);
  }
}

}  // namespace winnow::WINNOW_ISA
