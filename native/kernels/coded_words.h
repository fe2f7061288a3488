// Products of few rows with coded keys and values in place in the pool, as those of 16-bit integers.
//
// Codes become 16 bits wide, twice as many in an instruction as floats, and the processor itself adds up products of two
// neighbours (VNNI joins them to the sum, too). Queries, and weights times the scales of their values, become 16-bit integers
// with a scale for each row: off by 2^-16 of the row's largest, far less than activations of 16 bits are rounded by.
#pragma once

#include "coded_direct.h"

namespace winnow::WINNOW_ISA {

/// Whether `rows` are multiplied with keys so, or with values.
bool keys_as_words(const CodedVectors &vectors, int rows, int dim);
bool values_as_words(const CodedVectors &vectors, int rows, int dim);

/// As coded_products and coded_sums, but for outliers.
void word_products(const CodedVectors &vectors, int64_t block_size, const CodedTile &tile, const CodedTile &next, int rows,
                   int dim, const float *queries, float *out);
void word_sums(const CodedVectors &vectors, int64_t block_size, const CodedTile &tile, const CodedTile &next, int rows,
               int dim, const float *weights, float *sums);

}  // namespace winnow::WINNOW_ISA
