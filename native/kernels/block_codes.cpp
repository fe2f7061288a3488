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
      out.scale_bits = half_at(raw);
      for (int i = 0; i < BLOCK; ++i) out.code[i] = raw[2 + i];
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
      for (int i = 0; i < BLOCK; ++i) out.code[i] = j % 2 ? code[i] >> 4 : code[i] & 15;
      if (kind == BlockKind::q5_k)
        for (int i = 0; i < BLOCK; ++i) out.code[i] |= (raw[16 + i] >> j & 1) << 4;
      break;
    }
    case BlockKind::q6_k:
      out.scale_bits = half_at(raw + 208);
      for (int h = 0; h < 2; ++h) out.steps[h] = static_cast<int8_t>(raw[192 + 2 * j + h]);
      for (int i = 0; i < BLOCK; ++i) {
        const uint8_t low = raw[64 * part + 32 * (j % 2) + i];
        out.code[i] = (j % 4 < 2 ? low & 15 : low >> 4) | (raw[128 + 32 * part + i] >> shift & 3) << 4;
      }
      break;
    case BlockKind::mxfp4: {  // 2^(e - 128), which bf16 holds but for the two smallest: its exponent is one of 8 bits
      const uint8_t e = raw[0];
      out.scale_bits = {static_cast<uint16_t>(e > 1 ? (e - 1) << 7 : 0x20 << e)}, nibbles(raw + 1, out.code);
      out.scale = to_float(bf16{out.scale_bits.bits});
      return out;
    }
  }
  out.scale = to_float(out.scale_bits);
  out.least = form.super ? to_float(out.least_bits) : -to_float(out.least_bits);
  return out;
}

/// Numbers of a block.
void to_numbers(BlockKind kind, const Block &block, float *out) {
  const BlockForm &form = form_of(kind);
  const int low = (1 << form.low_bits) - 1;
  float scale[2], least[2];
  for (int h = 0; h < 2; ++h) {
    const int which = form.halves ? h : 0;
    scale[h] = block.scale * static_cast<float>(block.steps[which]);
    least[h] = form.minimum ? block.least * static_cast<float>(block.least_steps[which]) : 0.0f;
  }
  for (int i = 0; i < BLOCK; ++i) {
    const int code = block.code[i], number = low_number(kind, code & low) + high_number(kind, code >> form.low_bits);
    const float product = scale[i / 16] * static_cast<float>(number);
    out[i] = form.minimum ? product - least[i / 16] : product;
  }
}

/// Sets or reads the code of a record: `width` bits of the word of a feature and an input.
struct Place {
  uint16_t *word;
  int shift;
};

Place place_of(char *planes, int width, int feature, int input) {
  const int pair = input / 2, fields = 16 / width, vector = feature / WIDTH, lane = feature % WIDTH * 2 + input % 2;
  uint16_t *words = reinterpret_cast<uint16_t *>(planes);
  if (width == 8) {  // a byte each, those of a pair's first inputs before those of its second
    const int byte = ((vector * 16 + pair) * 2 + input % 2) * WIDTH + feature % WIDTH;
    return {words + byte / 2, byte % 2 * 8};
  }
  return {words + (vector * width + pair / fields) * 2 * WIDTH + lane, pair % fields * width};
}

}  // namespace

int64_t block_bytes(BlockKind kind, int64_t in_features, int64_t out_features) {
  return num_panels(out_features) * PANEL * form_of(kind).bytes(in_features);
}

void pack_blocks(const RawBlocks &raw, char *out, int threads) {
  const BlockForm &form = form_of(raw.kind);
  const int64_t size = PANEL * form.bytes(raw.in_features);
  const int low = (1 << form.low_bits) - 1;
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
        char *record = to + PANEL * form.record_at(b), *high = record + PANEL * form.low_bits * BLOCK / 8;
        for (int i = 0; i < BLOCK; ++i) {
          const Place place = place_of(record, form.low_bits, j, i);
          *place.word |= static_cast<uint16_t>((block.code[i] & low) << place.shift);
          if (!form.high_bits) continue;
          const Place above = place_of(high, form.high_bits, j, i);
          *above.word |= static_cast<uint16_t>(block.code[i] >> form.low_bits << above.shift);
        }
        const BlockScales scales(form, to, b);
        for (int h = 0; h < form.scales(); ++h) {
          if (!form.super) {
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
#pragma omp parallel for num_threads(threads)
    for (int64_t row = 0; row < raw.out_features; ++row)
      for (int64_t b = 0; b < raw.in_features / BLOCK; ++b) {
        alignas(64) float numbers[BLOCK];
        to_numbers(raw.kind, read_block(raw.kind, raw.data + row * raw.row_bytes(), b), numbers);
        T *to = reinterpret_cast<T *>(out) + row * raw.in_features + b * BLOCK;
        for (int64_t i = 0; i < BLOCK; i += WIDTH) store(to + i, load(numbers + i));
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
      char *from = weight.packed + panel.at;
      for (int64_t b = 0; b < in / BLOCK; ++b) {
        char *record = from + PANEL * form.record_at(b), *high = record + PANEL * form.low_bits * BLOCK / 8;
        const BlockScales scales(form, from, b);
        Block block;
        for (int i = 0; i < BLOCK; ++i) {
          const Place place = place_of(record, form.low_bits, j, i);
          block.code[i] = static_cast<uint8_t>(*place.word >> place.shift & ((1 << form.low_bits) - 1));
          if (!form.high_bits) continue;
          const Place above = place_of(high, form.high_bits, j, i);
          block.code[i] |= (*above.word >> above.shift & ((1 << form.high_bits) - 1)) << form.low_bits;
        }
        scales.read_feature(kind, j, block.scale, block.least, block.steps, block.least_steps);
        alignas(64) float numbers[BLOCK];
        to_numbers(kind, block, numbers);
        T *to = reinterpret_cast<T *>(out) + row * in + b * BLOCK;
        for (int64_t i = 0; i < BLOCK; i += WIDTH) store(to + i, load(numbers + i));
      }
    }
  });
}

}  // namespace winnow::WINNOW_ISA
