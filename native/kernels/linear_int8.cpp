// Linear layers of int8 weights: rows become codes of 8 bits, products are sums of integers, and those become numbers again.
// Weights have a scale for each output feature, or (BLOCKS) one for each 32 inputs of a feature, as Q8_0 has.
//
// A packed weight is cut into panels as that of linear.cpp, with TOGETHER inputs of a feature side by side. A decode step reads
// half of what it reads of a weight of 16 bits. Sums over a group of inputs are of integers and exact; they become floats, and
// add up in the order of the groups. So results do not depend on the instruction set, nor on anything else: they are those of
// winnow.models.fast.int8_linear to the last bit.
#include <memory>

#include "../products.h"
#include "int8_rows.h"
#include "panel.h"
#include "tile_product.h"

namespace winnow::WINNOW_ISA {

namespace {

/// Whether L2 keeps a block of rows while it is multiplied with all panels, else a panel while it is with all rows.
#if defined(__AVX512F__)
constexpr bool ROWS_STAY = false;
#else
constexpr bool ROWS_STAY = true;
#endif
/// Codes of a block of rows in L2.
constexpr int64_t STAYING = 352 * 1024 / sizeof(Code);
/// Rows up to which every thread makes codes of all of them, rather than wait for the others.
constexpr int64_t EACH_BY_ITSELF = 2;

int64_t padded_inputs(int64_t in) { return (in + TOGETHER - 1) / TOGETHER * TOGETHER; }

int64_t panel_size(const PackedWeight &weight) { return PANEL * padded_inputs(weight.in_features); }

/// Most rows of a task.
int64_t most_rows(int64_t padded) {
  return ROWS_STAY ? std::clamp<int64_t>(STAYING / padded / MAX_ROWS * MAX_ROWS, 4 * MAX_ROWS, ROW_BLOCK) : ROW_BLOCK;
}

/// Multiplies rows with a group of a panel's inputs, and calls done as product_streaming does.
template <class Done>
void multiply_group(int rows, const Code *x, int stride, const WeightCode *b, int32_t *sums, int inputs, const char *ahead,
                    const char *end, Done done) {
  int first = 0;
#if defined(WINNOW_TILES)
  for (const int whole = rows_of_tiles<Code>(rows, inputs); first < whole;) {
    const int some = std::min(whole - first, 2 * TMM_ROWS);
    int32_t *to = sums + first * PANEL;
    const Code *from = x + first * stride;
    const int rest = tile_product(some, PANEL, inputs, from, stride, b, PANEL, to, PANEL, false);
    const int deep = inputs - rest;
    if (rest)
      product_streaming<MAX_VECTORS>(some, from + deep, stride, b + deep * PANEL, to, PANEL, rest, true, end, end,
                                     [](int, int) {});
    done(first, some);
    first += some;
  }
#endif
  if (first < rows)
    product_streaming<MAX_VECTORS>(rows - first, x + first * stride, stride, b, sums + first * PANEL, PANEL, inputs,
                                   false, ahead, end, [&](int row, int some) { done(first + row, some); });
}

/// Adds the sums of a group to those of the groups before it. of_block: scales of the panel's features in this group [PANEL].
template <bool BLOCKS>
inline void add_group(const int32_t *sums, const GroupScale &group, const float *of_block, bool first, float *to) {
#pragma GCC unroll 4
  for (int64_t j = 0; j < PANEL; j += WIDTH) {
    vf sum = rounded_product(__builtin_convertvector(load_vector<vi>(sums + j) - group.zero, vf), group.scale);
    if constexpr (BLOCKS) sum = rounded_product(sum, load(of_block + j));
    store(to + j, first ? sum : load(to + j) + sum);
  }
}

/// Sums of a row of a panel, which have the scales of blocks, or times the features' scales in `out`.
template <bool BLOCKS>
const float *scale_features(const float *sums, const PackedWeight &weight, int64_t feature, int64_t features, float *out) {
  if constexpr (BLOCKS) return sums;
  const float *scale = reinterpret_cast<const float *>(weight.scale) + feature;
  for (int64_t j = 0; j < features; j += WIDTH)
    store(out + j, rounded_product(load(sums + j), get(scale + j, static_cast<int>(std::min<int64_t>(WIDTH, features - j)))));
  return out;
}

/// As `multiply` of linear.cpp; features' scales are not in the sums yet.
template <class T, bool BLOCKS, int PANELS, class Finish>
void multiply(const PackedWeight &weight, const LinearRows &rows, int64_t apart, int threads, Finish finish) {
  constexpr int64_t SUMS = ROW_BLOCK * PANEL, GROUP_SIZE = GROUP<BLOCKS>;
  if (rows.rows == 0) return;
  const int64_t in = weight.in_features, out = weight.out_features, padded = padded_inputs(in), size = panel_size(weight);
  const int64_t blocks = (rows.rows + most_rows(padded) - 1) / most_rows(padded);
  const int64_t most = (rows.rows + blocks - 1) / blocks;
  const int64_t panels = num_panels(out) / PANELS, stride = padded + WIDTH;
  const WeightCode *packed = reinterpret_cast<const WeightCode *>(weight.packed);
  const T *given = reinterpret_cast<const T *>(rows.x);
  const bool streams = ROWS_STAY || blocks == 1, shared = rows.rows > EACH_BY_ITSELF;
  const std::unique_ptr<Code[]> shared_codes(shared ? new Code[rows.rows * stride] : nullptr);
  const int64_t groups = num_groups<BLOCKS>(in);
  const f16 *block_scales = reinterpret_cast<const f16 *>(weight.scale);
  const std::unique_ptr<GroupScale[]> shared_scales(shared ? new GroupScale[rows.rows * groups] : nullptr);
#pragma omp parallel num_threads(threads) if (rows.rows * in * out >= PARALLEL_FROM)
  {
    const std::unique_ptr<Code[]> own_codes(shared ? nullptr : new Code[rows.rows * stride]);
    const std::unique_ptr<GroupScale[]> own_scales(shared ? nullptr : new GroupScale[rows.rows * groups]);
    Code *codes = shared ? shared_codes.get() : own_codes.get();
    GroupScale *scales = shared ? shared_scales.get() : own_scales.get();
    const auto quantize = [&](int64_t r) {
      quantize_row<BLOCKS>(given + r * rows.x_stride, in, padded, codes + r * stride, scales + r * groups);
    };
    if (shared) {
#pragma omp for schedule(static)
      for (int64_t r = 0; r < rows.rows; ++r) quantize(r);
    } else {
      for (int64_t r = 0; r < rows.rows; ++r) quantize(r);
    }
    const TileRegisters<Code> registers(most);
    alignas(64) int32_t of_group[SUMS];
    alignas(64) float sums[PANELS * SUMS];
    alignas(64) float of_block[PANEL];
#pragma omp for schedule(static)
    for (int64_t task = 0; task < panels * blocks; ++task) {
      const int64_t panel = ROWS_STAY ? task % panels : task / blocks;
      const int64_t which = ROWS_STAY ? task / panels : task % blocks, first = which * most;
      const int64_t count = std::min(most, rows.rows - first);
      const Code *x = codes + first * stride;
      for (int64_t n = 0; n < PANELS; ++n) {
        const WeightCode *from = packed + (panel + n * apart) * size;
        const WeightCode *next_panel = packed + (n + 1 < PANELS ? panel + (n + 1) * apart : panel + 1) * size;
        for (int64_t i = 0; i < padded; i += GROUP_SIZE) {
          const int64_t inputs = std::min(GROUP_SIZE, padded - i), group = i / GROUP_SIZE;
          if constexpr (BLOCKS) {
            const f16 *scale = block_scales + ((panel + n * apart) * groups + group) * PANEL;
            for (int64_t j = 0; j < PANEL; j += WIDTH) store(of_block + j, load(scale + j));
          }
          const WeightCode *b = from + i * PANEL;
          const char *ahead = reinterpret_cast<const char *>(i + inputs < padded ? b + inputs * PANEL : next_panel);
          const char *end = ahead + inputs * PANEL;
          if (!streams) {  // the same piece of this task's next panel: each block of rows prefetches its share
            const char *piece = reinterpret_cast<const char *>(from + size + i * PANEL);
            const int64_t lines = (end - ahead) / 64;
            ahead = piece + lines * which / blocks * 64;
            end = piece + lines * (which + 1) / blocks * 64;
          }
          const bool last = n + 1 == PANELS && i + inputs == padded;
          multiply_group(count, x + i, stride, b, of_group, inputs, ahead, end, [&](int row, int some) {
            for (int r = row; r < row + some; ++r)
              add_group<BLOCKS>(of_group + r * PANEL, scales[(first + r) * groups + group], of_block, i == 0,
                                sums + n * SUMS + r * PANEL);
            if (last) finish(sums + row * PANEL, panel, first + row, some);
          });
        }
      }
    }
  }
}

int64_t packed_size_int8(int64_t in_features, int64_t out_features) {
  return num_panels(out_features) * PANEL * padded_inputs(in_features);
}

void pack_int8(const PackedWeight &weight, const char *dense, int threads) {
  const int64_t in = weight.in_features, out = weight.out_features, padded = padded_inputs(in), size = panel_size(weight);
  WeightCode *packed = reinterpret_cast<WeightCode *>(weight.packed);
  const int8_t *codes = reinterpret_cast<const int8_t *>(dense);
#pragma omp parallel for num_threads(threads)
  for (int64_t panel = 0; panel < num_panels(out); ++panel)
    for (int64_t i = 0; i < padded; ++i)
      for (int64_t j = 0; j < PANEL; ++j) {
        const int64_t feature = panel * PANEL + j;
        const int32_t code = feature < out && i < in ? codes[feature * in + i] : 0;
        packed[panel * size + (i / TOGETHER * PANEL + j) * TOGETHER + i % TOGETHER] =
            static_cast<WeightCode>(code + WEIGHT_ZERO);
      }
}

template <bool BLOCKS>
void unpack_rows(const PackedWeight &weight, const int64_t *features, int64_t count, char *out, int threads) {
  const int64_t in = weight.in_features, size = panel_size(weight), groups = num_groups<BLOCKS>(in);
  with_type(weight.dtype, [&](auto type) {
    using T = decltype(type);
    const WeightCode *packed = reinterpret_cast<const WeightCode *>(weight.packed);
#pragma omp parallel for num_threads(threads) if (count * in >= PARALLEL_LINES)
    for (int64_t row = 0; row < count; ++row) {
      const auto begin = [&](int64_t feature) { return packed + feature / PANEL * size + feature % PANEL * TOGETHER; };
      const int64_t feature = features[row];
      const WeightCode *from = begin(feature), *next = begin(features[std::min(row + 1, count - 1)]);
      const auto scale_at = [&](int64_t i) {
        if constexpr (BLOCKS) {
          const f16 *scales = reinterpret_cast<const f16 *>(weight.scale) + feature / PANEL * groups * PANEL + feature % PANEL;
          return to_float(scales[i / GROUP<BLOCKS> * PANEL]);
        }
        return reinterpret_cast<const float *>(weight.scale)[feature];
      };
      T *to = reinterpret_cast<T *>(out) + row * in;
      for (int64_t i = 0; i < in; i += WIDTH) {  // a block is a whole number of vectors
        vf part{};
        const int n = static_cast<int>(std::min<int64_t>(WIDTH, in - i));
        for (int j = 0; j < n; ++j) {
          const int64_t at = (i + j) / TOGETHER * TOGETHER * PANEL;
          if (j % TOGETHER == 0) __builtin_prefetch(next + at);  // each of them is a line of its own
          part[j] = static_cast<float>(from[at + (i + j) % TOGETHER] - WEIGHT_ZERO);
        }
        put(to + i, part * scale_at(i), n);
      }
    }
  });
}

template <bool BLOCKS>
void linear(const PackedWeight &weight, const LinearRows &rows, int threads) {
  with_type(weight.dtype, [&](auto type) {
    using T = decltype(type);
    const int64_t width = weight.out_features;
    const T *bias = reinterpret_cast<const T *>(rows.bias), *add = reinterpret_cast<const T *>(rows.add);
    T *out = reinterpret_cast<T *>(rows.out);
    multiply<T, BLOCKS, 1>(
        weight, rows, 0, threads, [=, &weight](const float *sums, int64_t panel, int64_t first, int64_t count) {
          const int64_t feature = panel * PANEL, features = std::min<int64_t>(PANEL, width - feature);
          alignas(64) float numbers[PANEL];
          for (int64_t r = 0; r < count; ++r) {
            const int64_t at = (first + r) * width + feature;
            const float *scaled = scale_features<BLOCKS>(sums + r * PANEL, weight, feature, features, numbers);
            finish_row(scaled, bias ? bias + feature : nullptr, add ? add + at : nullptr, out + at, features);
          }
        });
  });
}

template <bool BLOCKS>
void gated_linear(const PackedWeight &weight, const LinearRows &rows, Activation activation, int threads) {
  with_type(weight.dtype, [&](auto type) {
    using T = decltype(type);
    const int64_t size = weight.out_features / 2;
    const T *bias = reinterpret_cast<const T *>(rows.bias);
    T *out = reinterpret_cast<T *>(rows.out);
    multiply<T, BLOCKS, 2>(
        weight, rows, size / PANEL, threads, [=, &weight](const float *sums, int64_t panel, int64_t first, int64_t count) {
          const int64_t feature = panel * PANEL;
          const T *gate_bias = bias ? bias + feature : nullptr, *up_bias = bias ? bias + size + feature : nullptr;
          alignas(64) float gate[PANEL], up[PANEL];
          for (int64_t r = 0; r < count; ++r) {
            const float *gates = scale_features<BLOCKS>(sums + r * PANEL, weight, feature, PANEL, gate);
            const float *ups = scale_features<BLOCKS>(sums + (ROW_BLOCK + r) * PANEL, weight, size + feature, PANEL, up);
            finish_gated_row(gates, ups, gate_bias, up_bias, activation, out + (first + r) * size + feature);
          }
        });
  });
}

bool gates_int8(int64_t size) { return size % PANEL == 0; }

}  // namespace

extern const Int8Products int8_products;
constexpr Int8Products int8_products{
    {packed_size_int8, pack_int8, unpack_rows<false>, linear<false>, gates_int8, gated_linear<false>},
    {packed_size_int8, pack_int8, unpack_rows<true>, linear<true>, gates_int8, gated_linear<true>},
};

}  // namespace winnow::WINNOW_ISA
