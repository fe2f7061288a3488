#include "decoder.h"

#include <cstring>

namespace winnow {

namespace {

/// Tokens, at most, that pass through a part of the layer together: what lies between its products stays in the caches, and a
/// prefill step needs no more memory for it than this for each thread.
constexpr int64_t TOKENS_AT_ONCE = 576;
/// Tokens for each thread from which on it takes its own through all of a part: nobody waits for the others between two
/// products, and every thread reads all weights. With fewer of them threads share the features of each product.
constexpr int64_t TOKENS_OF_ONE = 192;

/// Calls f with some of the tokens after others: the first, how many, and the memory and the threads for them.
template <class F>
void for_tokens(int64_t tokens, DecoderWorkspace &work, int threads, F f) {
  const auto pass = [&f](int64_t first, int64_t last, DecoderWorkspace &memory, int by) {
    for (int64_t passes = (last - first + TOKENS_AT_ONCE - 1) / TOKENS_AT_ONCE; passes > 0; --passes) {
      const int64_t n = (last - first + passes - 1) / passes;
      f(first, n, memory, by);
      first += n;
    }
  };
  if (threads == 1 || tokens < threads * TOKENS_OF_ONE) {
    pass(0, tokens, work, threads);
    return;
  }
  if (static_cast<int>(work.of_threads.size()) < threads) work.of_threads.resize(threads);
#pragma omp parallel for num_threads(threads) schedule(static, 1)
  for (int thread = 0; thread < threads; ++thread)
    pass(tokens * thread / threads, tokens * (thread + 1) / threads, work.of_threads[thread], 1);
}

void multiply(const Kernels &kernels, const Linear &linear, const char *x, char *out, const char *add, int64_t rows,
              int threads) {
  kernels.linear(linear.weight, {x, linear.weight.in_features, linear.bias, add, out, rows}, threads);
}

/// Room for rows of a layer's number format.
char *rows_of(Buffer &buffer, const DecoderLayer &layer, int64_t tokens, int64_t size) {
  return buffer.get<char>(tokens * size * bytes_of(layer.dtype()));
}

/// Rows [tokens, hidden_size] -> gated [tokens, inner], what the last product reads.
void gate_up(const Kernels &kernels, const DecoderLayer &layer, const char *x, int64_t tokens, char *gated,
             DecoderWorkspace &work, int threads) {
  const PackedWeight &weight = layer.gate_up.weight;
  const int64_t inner = layer.down.weight.in_features;
  if (kernels.gates(inner)) {
    kernels.gated_linear(weight, {x, weight.in_features, layer.gate_up.bias, nullptr, gated, tokens}, layer.activation,
                         threads);
    return;
  }
  char *both = rows_of(work.gate_up, layer, tokens, 2 * inner);
  multiply(kernels, layer.gate_up, x, both, nullptr, tokens, threads);
  kernels.gate({layer.dtype(), both, gated, tokens, inner}, layer.activation, threads);
}

}  // namespace

void before_attention(const Kernels &kernels, const DecoderLayer &layer, const char *x, int64_t tokens,
                      const Rotation &rotation, char *qkv, DecoderWorkspace &all_work, int all_threads) {
  const int64_t size = layer.hidden_size(), width = layer.qkv.weight.out_features;
  const int64_t element = bytes_of(layer.dtype());
  for_tokens(tokens, all_work, all_threads, [&](int64_t first, int64_t n, DecoderWorkspace &work, int threads) {
    const char *in = x + first * size * element;
    char *heads = qkv + first * width * element, *normed = rows_of(work.normed, layer, n, size);
    const int64_t turned = first * rotation.rotary_dim * element;
    // Without anything to add the norm only reads its rows.
    kernels.rms_norm({layer.dtype(), const_cast<char *>(in), nullptr, normed, n, size}, layer.input_norm, threads);
    multiply(kernels, layer.qkv, normed, heads, nullptr, n, threads);
    kernels.rotate({layer.dtype(), heads, width, n, layer.num_query_heads, layer.num_kv_heads, layer.head_dim,
                    rotation.cos + turned, rotation.sin + turned, rotation.rotary_dim},
                   layer.query_norm, layer.key_norm, threads);
  });
}

void after_attention(const Kernels &kernels, const DecoderLayer &layer, char *x, const char *attended, int64_t tokens,
                     DecoderWorkspace &all_work, int all_threads) {
  const int64_t size = layer.hidden_size(), inner = layer.down.weight.in_features;
  const int64_t read = layer.output.weight.in_features, element = bytes_of(layer.dtype());
  for_tokens(tokens, all_work, all_threads, [&](int64_t first, int64_t n, DecoderWorkspace &work, int threads) {
    char *stream = x + first * size * element, *projected = rows_of(work.projected, layer, n, size);
    char *normed = rows_of(work.normed, layer, n, size), *gated = rows_of(work.gated, layer, n, inner);
    multiply(kernels, layer.output, attended + first * read * element, projected, nullptr, n, threads);
    kernels.rms_norm({layer.dtype(), stream, projected, normed, n, size}, layer.post_norm, threads);
    gate_up(kernels, layer, normed, n, gated, work, threads);
    multiply(kernels, layer.down, gated, stream, stream, n, threads);
  });
}

namespace {

/// A layer up to what its tokens read: [tokens, num_query_heads * head_dim].
const char *attend(const Kernels &kernels, const DecoderLayer &layer, int64_t index, const char *x,
                   const Rotation &rotation, const AttentionSpec &spec, const PagedStep &step, DecoderWorkspace &work,
                   int threads) {
  const int64_t tokens = step.batch.num_tokens(), width = layer.qkv.weight.out_features;
  const int64_t head = layer.head_dim, head_bytes = head * bytes_of(layer.dtype());
  char *qkv = rows_of(work.qkv, layer, tokens, width);
  char *attended = rows_of(work.attended, layer, tokens, layer.output.weight.in_features);
  before_attention(kernels, layer, x, tokens, rotation, qkv, work, threads);
  const Heads q{qkv, width, head};
  const Heads k{qkv + layer.num_query_heads * head_bytes, width, head};
  const Heads v{k.data + layer.num_kv_heads * head_bytes, width, head};
  kernels.write(step.cache, step.batch, index, k, v, threads);
  kernels.attend({spec, step.cache, step.batch, index, q, attended, layer.num_query_heads, threads}, step.work);
  return attended;
}

/// Some rows of x, each of so many bytes, one after the other.
void select(const char *x, int64_t row_bytes, const Wanted &wanted, char *out) {
  for (int64_t i = 0; i < wanted.count; ++i)
    std::memcpy(out + i * row_bytes, x + wanted.tokens[i] * row_bytes, row_bytes);
}

}  // namespace

void decoder_layer(const Kernels &kernels, const DecoderLayer &layer, int64_t index, char *x, const Rotation &rotation,
                   const AttentionSpec &spec, const PagedStep &step, DecoderWorkspace &work, int threads) {
  const char *attended = attend(kernels, layer, index, x, rotation, spec, step, work, threads);
  after_attention(kernels, layer, x, attended, step.batch.num_tokens(), work, threads);
}

void decoder_stack(const Kernels &kernels, const DecoderStack &stack, char *x, const Rotation &rotation,
                   const PagedStep &step, const Wanted &wanted, DecoderWorkspace &work, int threads) {
  for (const auto &[layer, spec, index] : stack.layers) {
    if (wanted.all() || index != stack.layers.back().index) {
      decoder_layer(kernels, layer, index, x, rotation, spec, step, work, threads);
      continue;
    }
    const char *attended = attend(kernels, layer, index, x, rotation, spec, step, work, threads);
    const int64_t read = layer.output.weight.in_features, element = bytes_of(layer.dtype());
    char *read_by_wanted = rows_of(work.wanted, layer, wanted.count, read);
    select(attended, read * element, wanted, read_by_wanted);
    select(x, layer.hidden_size() * element, wanted, wanted.out);
    after_attention(kernels, layer, wanted.out, read_by_wanted, wanted.count, work, threads);
  }
}

}  // namespace winnow
