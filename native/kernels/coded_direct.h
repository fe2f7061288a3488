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
/// activations; those of 16 bits may be multiplied as integers.
void coded_products(const CodedVectors &vectors, int64_t block_size, const CodedTile &tile, const CodedTile &next, int rows,
                    int dim, DType act, const float *queries, float *out);

/// As direct_sums, of a tile of coded values.
void coded_sums(const CodedVectors &vectors, int64_t block_size, const CodedTile &tile, const CodedTile &next, int rows,
                int dim, DType act, const float *weights, float *sums);

// As products of 16-bit integers (coded_words.cpp): codes become 16 bits wide, twice as many in an instruction as floats, and the
// processor itself adds up products of two neighbours (VNNI joins them to the sum, too). Queries, and weights times the scales
// of their values, become 16-bit integers with a scale for each row: off by 2^-16 of the row's largest, far less than
// activations of 16 bits are rounded by.

/// Whether `rows` are multiplied with keys so, or with values.
bool keys_as_words(const CodedVectors &vectors, int rows, int dim);
bool values_as_words(const CodedVectors &vectors, int rows, int dim);

/// As coded_products and coded_sums, but for outliers.
void word_products(const CodedVectors &vectors, int64_t block_size, const CodedTile &tile, const CodedTile &next, int rows,
                   int dim, const float *queries, float *out);
void word_sums(const CodedVectors &vectors, int64_t block_size, const CodedTile &tile, const CodedTile &next, int rows,
               int dim, const float *weights, float *sums);

}  // namespace winnow::WINNOW_ISA
