#include "decoder.h"

#include <algorithm>
#include <cstring>

namespace winnow {

namespace {

/// Most tokens that are computed together between two products: their intermediate results fit the caches, and bound the memory
/// that a prefill step needs for each thread.
constexpr int64_t TOKENS_AT_ONCE = 576;
/// Fewest tokens per thread for which each thread computes tokens of its own: no barrier between two products, but every thread
/// reads all weights. With fewer tokens, threads share the features of each product.
constexpr int64_t TOKENS_OF_ONE = 192;
/// Cost of a multiplication in attention relative to one in a layer's products.
constexpr double ATTENTION_TO_PRODUCTS = 1.4;

/// Consecutive tokens of a call: the first, how many, and the memory and the threads for them.
struct TokenRange {
  int64_t first, tokens;
  DecoderWorkspace &work;
  int threads;
};

/// Calls f with ranges of the tokens, one after the other or, where there are many, in several threads.
template <class F>
void for_token_ranges(int64_t tokens, DecoderWorkspace &work, int threads, F f) {
  const auto pass = [&f](int64_t first, int64_t last, DecoderWorkspace &memory, int by) {
    for (int64_t passes = (last - first + TOKENS_AT_ONCE - 1) / TOKENS_AT_ONCE; passes > 0; --passes) {
      const int64_t n = (last - first + passes - 1) / passes;
      f(TokenRange{first, n, memory, by});
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
  kernels.products(linear.weight).linear(linear.weight, {x, linear.weight.in_features, linear.bias, add, out, rows}, threads);
}

/// Groups for each thread from which on these are as good as even parts.
constexpr int64_t GROUPS_OF_THREAD = 4;

/// Memory for rows of a layer's dtype.
char *rows_of(Buffer &buffer, const DecoderLayer &layer, int64_t tokens, int64_t size) {
  return buffer.get<char>(tokens * size * bytes_of(layer.dtype()));
}

/// Rows [tokens, hidden_size] -> gated [tokens, inner], what the last product reads.
void gate_up(const Kernels &kernels, const DecoderLayer &layer, const char *x, int64_t tokens, char *gated,
             DecoderWorkspace &work, int threads) {
  const PackedWeight &weight = layer.gate_up.weight;
  const int64_t inner = layer.down.weight.in_features;
  const Products &products = kernels.products(weight);
  if (products.gates(inner)) {
    products.gated_linear(weight, {x, weight.in_features, layer.gate_up.bias, nullptr, gated, tokens}, layer.activation,
                         threads);
    return;
  }
  char *both = rows_of(work.gate_up, layer, tokens, 2 * inner);
  multiply(kernels, layer.gate_up, x, both, nullptr, tokens, threads);
  kernels.gate({layer.dtype(), both, gated, tokens, inner}, layer.activation, threads);
}

/// Norm, queries, keys and values, rotation: a range's rows of x to its rows of qkv.
void pre_attention(const Kernels &kernels, const DecoderLayer &layer, const char *x, const Rotation &rotation, char *qkv,
                   const TokenRange &range) {
  const auto &[first, tokens, work, threads] = range;
  const int64_t size = layer.hidden_size(), width = layer.qkv.weight.out_features;
  const int64_t element = bytes_of(layer.dtype()), turned = first * rotation.rotary_dim * element;
  const char *in = x + first * size * element;
  char *heads = qkv + first * width * element, *normed = rows_of(work.normed, layer, tokens, size);
  // Without `add` the norm only reads its rows.
  kernels.rms_norm({layer.dtype(), const_cast<char *>(in), nullptr, normed, tokens, size}, layer.input_norm, threads);
  multiply(kernels, layer.qkv, normed, heads, nullptr, tokens, threads);
  kernels.rotate({layer.dtype(), heads, width, tokens, layer.num_query_heads, layer.num_kv_heads, layer.head_dim,
                  rotation.cos + turned, rotation.sin + turned, rotation.rotary_dim},
                 layer.query_norm, layer.key_norm, threads);
}

/// Output projection and feed-forward part: a range's rows of x and `attended` to the layer's output, in x.
void post_attention(const Kernels &kernels, const DecoderLayer &layer, char *x, const char *attended,
                    const TokenRange &range) {
  const auto &[first, tokens, work, threads] = range;
  const int64_t size = layer.hidden_size(), inner = layer.down.weight.in_features;
  const int64_t read = layer.output.weight.in_features, element = bytes_of(layer.dtype());
  char *stream = x + first * size * element, *projected = rows_of(work.projected, layer, tokens, size);
  char *normed = rows_of(work.normed, layer, tokens, size), *gated = rows_of(work.gated, layer, tokens, inner);
  const AddedRows added{layer.dtype(), projected, stream, tokens, size};
  multiply(kernels, layer.output, attended + first * read * element, projected, nullptr, tokens, threads);
  if (layer.output_norm.weight) kernels.add_normed(added, layer.output_norm, threads);
  const char *add = layer.output_norm.weight ? nullptr : projected;
  kernels.rms_norm({layer.dtype(), stream, add, normed, tokens, size}, layer.post_norm, threads);
  gate_up(kernels, layer, normed, tokens, gated, work, threads);
  if (!layer.down_norm.weight) return multiply(kernels, layer.down, gated, stream, stream, tokens, threads);
  multiply(kernels, layer.down, gated, projected, nullptr, tokens, threads);
  kernels.add_normed(added, layer.down_norm, threads);
}

/// Memory for the queries, keys and values of a layer.
char *qkv_of(const DecoderLayer &layer, int64_t tokens, DecoderWorkspace &work) {
  return rows_of(work.qkv, layer, tokens, layer.qkv.weight.out_features);
}

/// Heads from the n-th on of queries, keys and values side by side.
Heads heads_of(const DecoderLayer &layer, char *qkv, int64_t n) {
  return {qkv + n * layer.head_dim * bytes_of(layer.dtype()), layer.qkv.weight.out_features, layer.head_dim};
}

/// `pre_attention`, and store the range's keys and values in the cache's index-th layer.
void pre_attention_and_store(const Kernels &kernels, const DecoderLayer &layer, int64_t index, const char *x,
                             const Rotation &rotation, char *qkv, const PagedStep &step, const TokenRange &range) {
  pre_attention(kernels, layer, x, rotation, qkv, range);
  const Heads k = heads_of(layer, qkv, layer.num_query_heads);
  const Heads v = heads_of(layer, qkv, layer.num_query_heads + layer.num_kv_heads);
  kernels.write(step.cache_of(index), step.batch, {index, layer.dtype(), k, v, range.first, range.first + range.tokens}, range.threads);
}

/// Attention of a layer's tokens, [tokens, num_query_heads * head_dim]; their keys and values are in the cache.
///
/// read: [tokens], whether a row is read; null: all are.
const char *attend(const Kernels &kernels, const DecoderLayer &layer, int64_t index, char *qkv, const AttentionSpec &spec,
                   const PagedStep &step, const std::vector<bool> *read, DecoderWorkspace &work, int threads) {
  char *attended = rows_of(work.attended, layer, step.batch.num_tokens(), layer.output.weight.in_features);
  const Heads q = heads_of(layer, qkv, 0);
  const Attend call{spec,     step.cache_of(index),  step.batch, index, layer.dtype(), q,
                    attended, layer.num_query_heads, threads,    read};
  if (step.is_far(index))
    step.far->count(attend_selected(kernels, call, *step.selection, step.work));
  else
    kernels.attend(call, step.work);
  return attended;
}

/// Copy some rows of x, of row_bytes each, one after the other.
void select(const char *x, int64_t row_bytes, const int64_t *rows, int64_t count, char *out) {
  for (int64_t i = 0; i < count; ++i) std::memcpy(out + i * row_bytes, x + rows[i] * row_bytes, row_bytes);
}

/// Embed a range's tokens as its rows of x.
void look_up(const Kernels &kernels, const Embedding &embedding, const int64_t *ids, char *x, int64_t row_bytes,
             const TokenRange &range) {
  char *out = x + range.first * row_bytes;
  if (embedding.table)
    select(embedding.table, row_bytes, ids + range.first, range.tokens, out);
  else
    kernels.products(embedding.packed).unpack_rows(embedding.packed, ids + range.first, range.tokens, out, range.threads);
}

/// A copy of the wanted rows of x, of row_bytes each.
char *take(const char *x, int64_t row_bytes, const Wanted &wanted, Buffer &buffer) {
  char *taken = buffer.get<char>(wanted.count * row_bytes);
  select(x, row_bytes, wanted.tokens, wanted.count, taken);
  return taken;
}

/// From the embedding up to the last layer's attention: x [tokens, hidden_size] becomes that layer's input. Returns the
/// attention, [tokens, num_query_heads * head_dim].
///
/// read: tokens whose attention is read; null: all.
const char *run_layers(const Kernels &kernels, const Decoder &decoder, const int64_t *ids, char *x,
                       const RotationTable &table, const PagedStep &step, const Wanted *read, DecoderWorkspace &work,
                       int threads) {
  const int64_t tokens = step.batch.num_tokens();
  const StackedLayer &lowest = decoder.layers.front(), &highest = decoder.layers.back();
  const int64_t element = bytes_of(lowest.layer.dtype()), row = lowest.layer.hidden_size() * element;
  const int64_t turned = table.rotary_dim * element;
  char *cos = rows_of(work.cos, lowest.layer, tokens, table.rotary_dim);
  char *sin = rows_of(work.sin, lowest.layer, tokens, table.rotary_dim);
  const Rotation rotation{cos, sin, table.rotary_dim};
  char *qkv = qkv_of(lowest.layer, tokens, work);
  for_token_ranges(tokens, work, threads, [&](const TokenRange &range) {
    const int64_t *position = step.batch.position.data() + range.first;
    select(table.cos, turned, position, range.tokens, cos + range.first * turned);
    select(table.sin, turned, position, range.tokens, sin + range.first * turned);
    look_up(kernels, decoder.embedding, ids, x, row, range);
    pre_attention_and_store(kernels, lowest.layer, lowest.index, x, rotation, qkv, step, range);
  });
  for (size_t i = 0; i + 1 < decoder.layers.size(); ++i) {
    const StackedLayer &now = decoder.layers[i], &next = decoder.layers[i + 1];
    const char *attended = attend(kernels, now.layer, now.index, qkv, now.spec, step, nullptr, work, threads);
    // Between the attention of two layers tokens are independent: no barrier is needed.
    qkv = qkv_of(next.layer, tokens, work);
    for_token_ranges(tokens, work, threads, [&](const TokenRange &range) {
      post_attention(kernels, now.layer, x, attended, range);
      pre_attention_and_store(kernels, next.layer, next.index, x, rotation, qkv, step, range);
    });
  }
  std::vector<bool> is_read(read ? tokens : 0);
  for (int64_t i = 0; read && i < read->count; ++i) is_read[read->tokens[i]] = true;
  return attend(kernels, highest.layer, highest.index, qkv, highest.spec, step, read ? &is_read : nullptr, work, threads);
}

}  // namespace

void grouped_linear(const Kernels &kernels, const std::vector<const PackedWeight *> &weights,
                    const std::vector<uintptr_t> &biases, const char *x, char *out, const std::vector<int64_t> &counts,
                    int threads) {
  struct Group {
    const PackedWeight *weight;
    LinearRows rows;
  };
  std::vector<Group> groups;
  for (size_t i = 0; i < counts.size(); ++i) {
    if (!counts[i]) continue;
    const PackedWeight &weight = *weights[i];
    const int64_t in = weight.in_features;
    groups.push_back({&weight, {x, in, reinterpret_cast<const char *>(biases[i]), nullptr, out, counts[i]}});
    x += counts[i] * in * bytes_of(weight.dtype);
    out += counts[i] * weight.out_features * bytes_of(weight.dtype);
  }
  const auto product = [&](const Group &group, int threads) {
    kernels.products(*group.weight).linear(*group.weight, group.rows, threads);
  };
  const auto count = static_cast<int64_t>(groups.size());
  if (threads == 1 || count < GROUPS_OF_THREAD * threads) {
    for (const Group &group : groups) product(group, threads);
    return;
  }
  // The largest first, so that no thread begins one when the others end.
  std::sort(groups.begin(), groups.end(), [](const Group &a, const Group &b) { return a.rows.rows > b.rows.rows; });
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
  for (int64_t i = 0; i < count; ++i) product(groups[i], 1);
}

void FarLayers::count(const ValuesRead &read) {
  head_queries += read.head_queries, selected += read.selected, rows += read.rows, in_full += read.in_full;
}

ValuesRead FarLayers::take_counts() {
  return {head_queries.exchange(0), selected.exchange(0), rows.exchange(0), in_full.exchange(0)};
}

void pre_attention(const Kernels &kernels, const DecoderLayer &layer, const char *x, int64_t tokens,
                   const Rotation &rotation, char *qkv, DecoderWorkspace &work, int threads) {
  for_token_ranges(tokens, work, threads,
                   [&](const TokenRange &range) { pre_attention(kernels, layer, x, rotation, qkv, range); });
}

void post_attention(const Kernels &kernels, const DecoderLayer &layer, char *x, const char *attended, int64_t tokens,
                    DecoderWorkspace &work, int threads) {
  for_token_ranges(tokens, work, threads,
                   [&](const TokenRange &range) { post_attention(kernels, layer, x, attended, range); });
}

void decoder_layer(const Kernels &kernels, const DecoderLayer &layer, int64_t index, char *x, const Rotation &rotation,
                   const AttentionSpec &spec, const PagedStep &step, DecoderWorkspace &work, int threads) {
  const int64_t tokens = step.batch.num_tokens();
  char *qkv = qkv_of(layer, tokens, work);
  for_token_ranges(tokens, work, threads, [&](const TokenRange &range) {
    pre_attention_and_store(kernels, layer, index, x, rotation, qkv, step, range);
  });
  const char *attended = attend(kernels, layer, index, qkv, spec, step, nullptr, work, threads);
  post_attention(kernels, layer, x, attended, tokens, work, threads);
}

namespace {

/// Some sequences of a batch, in its order, as a batch of their own.
struct SubBatch {
  Batch batch;
  std::vector<int64_t> sequences;  // [B of the sub-batch]: their numbers in the whole batch
  std::vector<int64_t> tokens;  // [T of the sub-batch]: theirs, too
};

/// What a sequence's tokens cost, in multiplications.
struct TokenCost {
  double alone;   // independent of other tokens
  double per_kv;  // for every KV that it sees, in one row
};

/// Largest ratio of the costliest sub-batch to the mean. Threads that synchronise in every layer lose about as much.
constexpr double MAX_IMBALANCE = 1.03;

double cost_of(const Batch &batch, const Cache &cache, int64_t seq, const TokenCost &cost) {
  const int64_t count = batch.counts[seq];
  double kvs = 0;  // that a token in the middle sees, in all rows
  for (int64_t layer = 0; layer < cache.num_layers; ++layer)
    for (int64_t head = 0; head < cache.num_heads; ++head)
      kvs += static_cast<double>(Row(cache, batch.slots[seq], layer, head).length) - static_cast<double>(count) / 2;
  return static_cast<double>(count) * (cost.alone + cost.per_kv * kvs);
}

void add_sequence(const Batch &batch, int64_t seq, SubBatch &sub_batch) {
  Batch &own = sub_batch.batch;
  const int64_t first = batch.starts[seq], end = first + batch.counts[seq];
  own.add(batch, seq, own.num_tokens());
  own.position.insert(own.position.end(), batch.position.begin() + first, batch.position.begin() + end);
  sub_batch.sequences.push_back(seq);
  for (int64_t token = first; token < end; ++token) sub_batch.tokens.push_back(token);
}

/// Sub-batches of about the same cost, one for each thread; none where the sequences cannot be distributed evenly.
std::vector<SubBatch> partition_batch(const Batch &batch, const Cache &cache, const TokenCost &cost, int threads) {
  std::vector<std::pair<double, int64_t>> sequences;  // (what it costs, which)
  double all = 0;
  for (int64_t seq = 0; seq < batch.num_seqs(); ++seq) {
    sequences.emplace_back(cost_of(batch, cache, seq, cost), seq);
    all += sequences.back().first;
  }
  // The costliest first, each to the least loaded thread.
  std::stable_sort(sequences.begin(), sequences.end(), [](const auto &a, const auto &b) { return a.first > b.first; });
  std::vector<double> load(threads);
  std::vector<int> whose(sequences.size());
  for (const auto &[own, seq] : sequences) {
    const auto least = std::min_element(load.begin(), load.end());
    *least += own;
    whose[seq] = static_cast<int>(least - load.begin());
  }
  if (*std::max_element(load.begin(), load.end()) * threads > all * MAX_IMBALANCE) return {};
  std::vector<SubBatch> sub_batches(threads);
  for (SubBatch &sub_batch : sub_batches) sub_batch.batch.observers = batch.observers;
  for (int64_t seq = 0; seq < batch.num_seqs(); ++seq) add_sequence(batch, seq, sub_batches[whose[seq]]);
  return sub_batches;
}

/// The last layer's output for the wanted tokens, [count, hidden_size].
char *hidden_states(const Kernels &kernels, const Decoder &decoder, const int64_t *ids, const RotationTable &table,
                    const PagedStep &step, const Wanted &wanted, DecoderWorkspace &work, int threads) {
  const int64_t tokens = step.batch.num_tokens();
  const DecoderLayer &last = decoder.layers.back().layer;
  const int64_t element = bytes_of(last.dtype()), row = last.hidden_size() * element;
  const bool selects = decoder.selects && !wanted.all();
  char *x = rows_of(work.stream, last, tokens, last.hidden_size());
  const char *attended = run_layers(kernels, decoder, ids, x, table, step, selects ? &wanted : nullptr, work, threads);
  if (selects) {
    attended = take(attended, last.output.weight.in_features * element, wanted, work.wanted_attended);
    x = take(x, row, wanted, work.wanted);
  }
  post_attention(kernels, last, x, attended, selects ? wanted.count : tokens, work, threads);
  return selects || wanted.all() ? x : take(x, row, wanted, work.wanted);
}

/// The same, by threads that compute sub-batches of their own through all layers: without barriers, and a core reads what it
/// wrote itself.
char *hidden_states_by_sub_batch(const Kernels &kernels, const Decoder &decoder, const int64_t *ids,
                                 const RotationTable &table, const PagedStep &step, const Wanted &wanted,
                                 const std::vector<SubBatch> &sub_batches, DecoderWorkspace &work) {
  const int64_t tokens = step.batch.num_tokens(), count = wanted.all() ? tokens : wanted.count;
  const DecoderLayer &last = decoder.layers.back().layer;
  const int64_t size = last.hidden_size() * bytes_of(last.dtype());
  const int threads = static_cast<int>(sub_batches.size());
  char *hidden = rows_of(work.wanted, last, count, last.hidden_size());
  std::vector<std::pair<int, int64_t>> place(tokens);  // of every token: its sub-batch, and its number there
  for (int thread = 0; thread < threads; ++thread)
    for (size_t i = 0; i < sub_batches[thread].tokens.size(); ++i) place[sub_batches[thread].tokens[i]] = {thread, i};
  if (static_cast<int>(work.of_threads.size()) < threads) work.of_threads.resize(threads);
#pragma omp parallel for num_threads(threads) schedule(static, 1)
  for (int thread = 0; thread < threads; ++thread) {
    const SubBatch &sub_batch = sub_batches[thread];
    DecoderWorkspace &own = work.of_threads[thread];
    std::vector<int64_t> own_ids, own_wanted, own_rows;
    for (const int64_t token : sub_batch.tokens) own_ids.push_back(ids[token]);
    for (int64_t i = 0; i < count; ++i) {
      const auto [whose, which] = place[wanted.all() ? i : wanted.tokens[i]];
      if (whose == thread) own_wanted.push_back(which), own_rows.push_back(i);
    }
    const Wanted wants{wanted.all() ? -1 : static_cast<int64_t>(own_wanted.size()), own_wanted.data()};
    Selection selection;
    if (step.selection) {
      selection = {step.selection->most, step.selection->renormalize, {}};
      for (const int64_t seq : sub_batch.sequences) selection.from.push_back(step.selection->from[seq]);
    }
    const PagedStep own_step{step.cache, sub_batch.batch, own.attention, step.far, &selection};
    const char *x = hidden_states(kernels, decoder, own_ids.data(), table, own_step, wants, own, 1);
    for (size_t i = 0; i < own_rows.size(); ++i) std::memcpy(hidden + own_rows[i] * size, x + i * size, size);
  }
  return hidden;
}

/// The cost of a token in all layers.
TokenCost token_cost(const Decoder &decoder) {
  TokenCost cost{};
  for (const StackedLayer &stacked : decoder.layers) {
    const DecoderLayer &layer = stacked.layer;
    for (const Linear *linear : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down})
      cost.alone += static_cast<double>(linear->weight.in_features) * static_cast<double>(linear->weight.out_features);
  }
  const DecoderLayer &layer = decoder.layers.front().layer;
  const double group = static_cast<double>(layer.num_query_heads) / static_cast<double>(layer.num_kv_heads);
  cost.per_kv = ATTENTION_TO_PRODUCTS * 2 * group * static_cast<double>(layer.head_dim);
  return cost;
}

}  // namespace

void decode(const Kernels &kernels, const Decoder &decoder, const int64_t *ids, const RotationTable &table,
            const PagedStep &step, const Wanted &wanted, char *logits, DecoderWorkspace &work, int threads) {
  const int64_t tokens = step.batch.num_tokens(), count = wanted.all() ? tokens : wanted.count;
  const DecoderLayer &last = decoder.layers.back().layer;
  std::vector<SubBatch> sub_batches;
  if (threads > 1 && tokens >= threads * TOKENS_OF_ONE)
    sub_batches = partition_batch(step.batch, step.cache, token_cost(decoder), threads);
  work.num_sub_batches = static_cast<int64_t>(sub_batches.size());
  char *hidden = sub_batches.empty()
                     ? hidden_states(kernels, decoder, ids, table, step, wanted, work, threads)
                     : hidden_states_by_sub_batch(kernels, decoder, ids, table, step, wanted, sub_batches, work);
  char *normed = rows_of(work.normed, last, count, last.hidden_size());
  kernels.rms_norm({last.dtype(), hidden, nullptr, normed, count, last.hidden_size()}, decoder.norm, threads);
  multiply(kernels, decoder.head, normed, logits, nullptr, count, threads);
}

}  // namespace winnow
