// Products of few rows with coded keys and values in place in the pool: decoded in registers, a vector at a time.
#pragma once

#include "direct.h"

namespace winnow::WINNOW_ISA {

/// Groups of a vector, at most, that are decoded in registers.
constexpr int MAX_GROUPS = 8;

/// Whether `rows` are multiplied with vectors that are decoded in registers; else the vectors of a tile are decoded first,
/// which pays where more rows read them, and takes groups of any size.
bool decodes_in_registers(const CodedVectors &vectors, int rows, int dim);

/// As direct_products, of a tile of coded keys: [rows, TILE]. next: prefetched meanwhile. act: the format of
/// activations; those of 16 bits may be multiplied as integers (coded_words.h).
void coded_products(const CodedVectors &vectors, int64_t block_size, const CodedTile &tile, const CodedTile &next, int rows,
                    int dim, DType act, const float *queries, float *out);

/// As direct_sums, of a tile of coded values.
void coded_sums(const CodedVectors &vectors, int64_t block_size, const CodedTile &tile, const CodedTile &next, int rows,
                int dim, DType act, const float *weights, float *sums);

}  // namespace winnow::WINNOW_ISA
