// Blocks of a file to panels of a packed weight, and both to numbers: those of GGUF's own formulas to the last bit.
#include <algorithm>

#include "../blocks.h"
#include "block_panel.h"

namespace winnow::WINNOW_ISA {

namespace {

/// The codes of 32 inputs, and what makes numbers of them: code * (scale * steps) - least * least_steps.
struct Block {
  uint8_t code[BLOCK];
  f16 scale_bits, least_bits;
  float scale, least;
  int steps[2], least_steps[2];
};

f16 half_at(const uint8_t *from) {
  f16 out;
  std::memcpy(&out, from, sizeof out);
  return out;
}

/// Scales of 6 bits of a super-block's j-th block (Q4_K, Q5_K).
void six_bit_scales(const uint8_t *from, int64_t j, int &scale, int &least) {
  if (j < 4) {
    scale = from[j] & 63, least = from[j + 4] & 63;
  } else {
    scale = (from[j + 4] & 15) | (from[j - 4] >> 6 << 4), least = (from[j + 4] >> 4) | (from[j] >> 6 << 4);
  }
}

/// The i-th scale of 6 bits of a super-block (Q3_K).
int six_bit_scale(const uint8_t *from, int i) {
  const int low = i < 8 ? from[i] & 15 : from[i - 8] >> 4;
  return (low | (from[8 + i % 4] >> (i / 4 * 2) & 3) << 4) - 32;
}

void nibbles(const uint8_t *from, uint8_t *code) {
  for (int i = 0; i < 16; ++i) code[i] = from[i] & 15, code[16 + i] = from[i] >> 4;
}

/// The b-th 32 inputs of a row.
Block read_block(BlockKind kind, const char *row, int64_t b) {
  const BlockForm &form = form_of(kind);
  const uint8_t *raw = reinterpret_cast<const uint8_t *>(row) + b * BLOCK / form.raw_block * form.raw_bytes;
  const int j = static_cast<int>(b % 8), part = j / 4, shift = j % 4 * 2;  // of a super-block
  Block out{};
  out.steps[0] = out.steps[1] = out.least_steps[0] = out.least_steps[1] = 1;
  switch (kind) {
    case BlockKind::q4_0:
    case BlockKind::iq4_nl:
      out.scale_bits = half_at(raw), nibbles(raw + 2, out.code);
      break;
    case BlockKind::q4_1:
      out.scale_bits = half_at(raw), out.least_bits = half_at(raw + 2), nibbles(raw + 4, out.code);
      break;
    case BlockKind::q5_0:
    case BlockKind::q5_1: {
      const uint8_t *bits = raw + (kind == BlockKind::q5_0 ? 2 : 4);
      out.scale_bits = half_at(raw), out.least_bits = half_at(raw + 2), nibbles(bits + 4, out.code);
      for (int i = 0; i < BLOCK; ++i) out.code[i] |= (bits[i / 8] >> i % 8 & 1) << 4;
      break;
    }
    case BlockKind::q8_0:
      out.scale_bits = half_at(raw), std::memcpy(out.code, raw + 2, BLOCK);
      break;
    case BlockKind::q2_k:
      out.scale_bits = half_at(raw + 80), out.least_bits = half_at(raw + 82);
      for (int h = 0; h < 2; ++h) out.steps[h] = raw[2 * j + h] & 15, out.least_steps[h] = raw[2 * j + h] >> 4;
      for (int i = 0; i < BLOCK; ++i) out.code[i] = raw[16 + 32 * part + i] >> shift & 3;
      break;
    case BlockKind::q3_k:
      out.scale_bits = half_at(raw + 108);
      for (int h = 0; h < 2; ++h) out.steps[h] = six_bit_scale(raw + 96, 2 * j + h);
      for (int i = 0; i < BLOCK; ++i) out.code[i] = (raw[32 + 32 * part + i] >> shift & 3) | (raw[i] >> j & 1) << 2;
      break;
    case BlockKind::q4_k:
    case BlockKind::q5_k: {
      const uint8_t *code = raw + (kind == BlockKind::q4_k ? 16 : 48) + j / 2 * 32;
      out.scale_bits = half_at(raw), out.least_bits = half_at(raw + 2);
      six_bit_scales(raw + 4, j, out.steps[0], out.least_steps[0]);
      const int fifth = kind == BlockKind::q5_k ? 1 << j : 0;
      for (int i = 0; i < BLOCK; ++i) out.code[i] = (code[i] >> j % 2 * 4 & 15) | (raw[16 + i] & fifth ? 16 : 0);
      break;
    }
    case BlockKind::q6_k:
      out.scale_bits = half_at(raw + 208);
      for (int h = 0; h < 2; ++h) out.steps[h] = static_cast<int8_t>(raw[192 + 2 * j + h]);
      for (int i = 0; i < BLOCK; ++i)
        out.code[i] = (raw[64 * part + 32 * (j % 2) + i] >> j % 4 / 2 * 4 & 15) | (raw[128 + 32 * part + i] >> shift & 3) << 4;
      break;
    case BlockKind::iq4_xs:
      out.scale_bits = half_at(raw), nibbles(raw + 8 + 16 * j, out.code);
      out.steps[0] = ((raw[4 + j / 2] >> j % 2 * 4 & 15) | (raw[2 + part] >> shift & 3) << 4) - 32;
      break;
    case BlockKind::mxfp4: {  // 2^(e - 128), which bf16 holds but for the two smallest: its exponent is one of 8 bits
      const uint8_t e = raw[0];
      out.scale_bits = {static_cast<uint16_t>(e > 1 ? (e - 1) << 7 : 0x20 << e)}, nibbles(raw + 1, out.code);
      out.scale = to_float(bf16{out.scale_bits.bits});
      return out;
    }
    case BlockKind::f8_e4m3:
      std::memcpy(&out.scale, raw, sizeof out.scale), std::memcpy(out.code, raw + 4, BLOCK);
      return out;
  }
  out.scale = to_float(out.scale_bits);
  out.least = form.super ? to_float(out.least_bits) : -to_float(out.least_bits);
  return out;
}

/// Numbers of a kind's codes.
struct Numbers {
  float of_code[256];

  explicit Numbers(BlockKind kind) {
    const BlockForm &form = form_of(kind);
    for (int code = 0; code < 256; ++code)
      of_code[code] = form.floats ? from_e4m3(code)
                                  : low_number(kind, code & ((1 << form.low_bits) - 1)) + high_number(kind, code >> form.low_bits);
  }

  /// Those of a block.
  template <class T>
  void write(const BlockForm &form, const Block &block, T *out) const {
    alignas(64) float numbers[BLOCK];
    for (int i = 0; i < BLOCK; ++i) numbers[i] = of_code[block.code[i]];
    for (int i = 0; i < BLOCK; i += WIDTH) {
      const int which = form.halves ? i / 16 : 0;
      const vf product = load(numbers + i) * (block.scale * static_cast<float>(block.steps[which]));
      store(out + i, form.minimum ? product - block.least * static_cast<float>(block.least_steps[which]) : product);
    }
  }
};

/// A plane of a panel's records.
class Plane {
 public:
  /// begin: bytes of a record before it.
  Plane(int width, int64_t begin) : width_(width), begin_(begin) {
    const int fields = width ? 16 / width : 1;
    for (int i = 0; i < BLOCK && width; ++i) word_[i] = i / 2 / fields * 2 * WIDTH + i % 2, shift_[i] = field_of(i / 2 % fields, fields) * width;
  }

  void set(char *record, int feature, int input, int code) const {
    if (width_ == 8)
      *byte(record, feature, input) = static_cast<char>(code);
    else if (width_)
      *word(record, feature, input) |= static_cast<uint16_t>(code << shift_[input]);
  }

  int get(char *record, int feature, int input) const {
    if (width_ == 8) return static_cast<uint8_t>(*byte(record, feature, input));
    return width_ ? *word(record, feature, input) >> shift_[input] & ((1 << width_) - 1) : 0;
  }

 private:
  uint16_t *word(char *record, int feature, int input) const {
    uint16_t *words = reinterpret_cast<uint16_t *>(record + begin_);
    return words + feature / WIDTH * width_ * 2 * WIDTH + feature % WIDTH * 2 + word_[input];
  }

  /// Those of a pair's first inputs lie before those of its second.
  char *byte(char *record, int feature, int input) const {
    return record + begin_ + (feature / WIDTH * BLOCK + input) * WIDTH + feature % WIDTH;
  }

  int width_;
  int64_t begin_;
  int word_[BLOCK] = {}, shift_[BLOCK] = {};
};

/// The planes of a form.
struct Planes {
  Plane low, high;

  explicit Planes(const BlockForm &form)
      : low(form.low_bits, 0), high(form.high_bits, PANEL * form.low_bits * BLOCK / 8) {}
};

}  // namespace

int64_t block_bytes(BlockKind kind, int64_t in_features, int64_t out_features) {
  return num_panels(out_features) * PANEL * form_of(kind).bytes(in_features);
}

void pack_blocks(const RawBlocks &raw, char *out, int threads) {
  const BlockForm &form = form_of(raw.kind);
  const int64_t size = PANEL * form.bytes(raw.in_features);
  const int low = (1 << form.low_bits) - 1;
  const Planes planes(form);
#pragma omp parallel for num_threads(threads)
  for (int64_t panel = 0; panel < num_panels(raw.out_features); ++panel) {
    char *to = out + panel * size;
    std::memset(to, 0, size);
    for (int j = 0; j < PANEL; ++j) {
      const int64_t feature = panel * PANEL + j;
      if (feature >= raw.out_features) break;
      const char *row = raw.data + feature * raw.row_bytes();
      for (int64_t b = 0; b < raw.in_features / BLOCK; ++b) {
        const Block block = read_block(raw.kind, row, b);
        char *at = to + PANEL * form.record_at(b);
        for (int i = 0; i < BLOCK; ++i) {
          planes.low.set(at, j, i, block.code[i] & low);
          if (form.high_bits) planes.high.set(at, j, i, block.code[i] >> form.low_bits);
        }
        const BlockScales scales(form, to, b);
        for (int h = 0; h < form.scales(); ++h) {
          if (!form.super) {
            if (form.floats)
              scales.whole()[j] = block.scale;
            else
              scales.half(h)[j] = block.scale_bits;
            if (form.minimum) scales.half_minimum(h)[j] = block.least_bits;
            continue;
          }
          scales.super()[j] = block.scale_bits, scales.steps(h)[j] = static_cast<int8_t>(block.steps[h]);
          if (form.minimum) scales.super_minimum()[j] = block.least_bits;
          if (form.minimum) scales.minimum_steps(h)[j] = static_cast<int8_t>(block.least_steps[h]);
        }
      }
    }
  }
}

void dequantize_blocks(const RawBlocks &raw, DType dtype, char *out, int threads) {
  with_type(dtype, [&](auto type) {
    using T = decltype(type);
    const Numbers numbers(raw.kind);
#pragma omp parallel for num_threads(threads)
    for (int64_t row = 0; row < raw.out_features; ++row)
      for (int64_t b = 0; b < raw.in_features / BLOCK; ++b) {
        const Block block = read_block(raw.kind, raw.data + row * raw.row_bytes(), b);
        numbers.write(form_of(raw.kind), block, reinterpret_cast<T *>(out) + row * raw.in_features + b * BLOCK);
      }
  });
}

void unpack_block_rows(const PackedWeight &weight, const int64_t *features, int64_t count, char *out, int threads) {
  with_type(weight.dtype, [&](auto type) {
    using T = decltype(type);
    const int64_t in = weight.in_features;
#pragma omp parallel for num_threads(threads) if (count * in >= PARALLEL_LINES)
    for (int64_t row = 0; row < count; ++row) {
      const BlockPanel &panel = weight.panels[features[row] / PANEL];
      const int j = static_cast<int>(features[row] % PANEL);
      const BlockKind kind = static_cast<BlockKind>(panel.kind);
      const BlockForm &form = form_of(kind);
      const Planes planes(form);
      const Numbers numbers(kind);
      char *from = weight.packed + panel.at;
      for (int64_t b = 0; b < in / BLOCK; ++b) {
        char *record = from + PANEL * form.record_at(b);
        Block block;
        for (int i = 0; i < BLOCK; ++i)
          block.code[i] = static_cast<uint8_t>(planes.low.get(record, j, i) | planes.high.get(record, j, i) << form.low_bits);
        const BlockScales scales(form, from, b);
        scales.read_feature(kind, j, block.scale, block.least, block.steps, block.least_steps);
        numbers.write(form, block, reinterpret_cast<T *>(out) + row * in + b * BLOCK);
      }
    }
  });
}

}  // namespace winnow::WINNOW_ISA
