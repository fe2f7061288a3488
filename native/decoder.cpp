#include "decoder.h"

namespace winnow {

namespace {

void multiply(const Kernels &kernels, const Linear &linear, const char *x, char *out, const char *add, int64_t rows,
              int threads) {
  kernels.linear(linear.weight, {x, linear.weight.in_features, linear.bias, add, out, rows}, threads);
}

/// Room for rows of a layer's number format.
char *rows_of(Buffer &buffer, const DecoderLayer &layer, int64_t tokens, int64_t size) {
  return buffer.get<char>(tokens * size * bytes_of(layer.dtype()));
}

}  // namespace

void before_attention(const Kernels &kernels, const DecoderLayer &layer, const char *x, int64_t tokens,
                      const Rotation &rotation, char *qkv, DecoderWorkspace &work, int threads) {
  const int64_t size = layer.hidden_size();
  char *normed = rows_of(work.normed, layer, tokens, size);
  // Without anything to add the norm only reads its rows.
  kernels.rms_norm({layer.dtype(), const_cast<char *>(x), nullptr, normed, tokens, size}, layer.input_norm, threads);
  multiply(kernels, layer.qkv, normed, qkv, nullptr, tokens, threads);
  kernels.rotate({layer.dtype(), qkv, layer.qkv.weight.out_features, tokens, layer.num_query_heads, layer.num_kv_heads,
                  layer.head_dim, rotation.cos, rotation.sin, rotation.rotary_dim},
                 layer.query_norm, layer.key_norm, threads);
}

void after_attention(const Kernels &kernels, const DecoderLayer &layer, const char *residual, const char *attended,
                     int64_t tokens, char *out, DecoderWorkspace &work, int threads) {
  const int64_t size = layer.hidden_size(), inner = layer.down.weight.in_features;
  char *normed = rows_of(work.normed, layer, tokens, size);
  char *gate_up = rows_of(work.gate_up, layer, tokens, 2 * inner), *gated = rows_of(work.gated, layer, tokens, inner);
  // `out` is the residual stream from here on: the layer's input may belong to somebody else.
  multiply(kernels, layer.output, attended, out, nullptr, tokens, threads);
  kernels.rms_norm({layer.dtype(), out, residual, normed, tokens, size}, layer.post_norm, threads);
  multiply(kernels, layer.gate_up, normed, gate_up, nullptr, tokens, threads);
  kernels.gate({layer.dtype(), gate_up, gated, tokens, inner}, layer.activation, threads);
  multiply(kernels, layer.down, gated, out, out, tokens, threads);
}

}  // namespace winnow
