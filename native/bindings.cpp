// The Python face of the kernels. Tensors come as addresses: 3 us a call, where DLPack would take 14 for six of them.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "bindings.h"
#include "decoder.h"
#include "team_wait.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace winnow;

namespace {

/// Throws IndexError: a row that is asked for is not there.
void check_rows(const int64_t *rows, int64_t count, int64_t num_rows) {
  for (int64_t i = 0; i < count; ++i)
    if (rows[i] < 0 || rows[i] >= num_rows)
      throw std::out_of_range("a row must lie between 0 and " + std::to_string(num_rows - 1) + ", got " +
                              std::to_string(rows[i]));
}

Heads heads(uintptr_t address, int64_t token_stride, int64_t head_stride) {
  return {at<char>(address), token_stride, head_stride};
}

}  // namespace

NB_MODULE(_native, m) {
  // An engine that lives until the interpreter ends takes its views of tensors along; they own nothing.
  nb::set_leak_warnings(false);
  m.doc() = "CPU kernels of Winnow. All tensors are given by address; see src/winnow/native.py for the checked face.";
  bind_types(m);

  nb::class_<Kernels>(m, "Kernels")
      .def(
          "__init__",
          [](Kernels *self, const std::string &name, const std::string &block_name) {
            new (self) Kernels(kernels_for(name, block_name));
          },
          "instruction_set"_a, "block_instruction_set"_a = "")
      .def_prop_ro("matrix_units", [](const Kernels &self) { return self.plain.matrix_units; })
      .def("write",
           [](const Kernels &self, const Cache &cache, const Batch &batch, int64_t layer, DType dtype, uintptr_t k,
              int64_t k_token, int64_t k_head, uintptr_t v, int64_t v_token, int64_t v_head, int threads) {
             const Heads key_heads = heads(k, k_token, k_head), value_heads = heads(v, v_token, v_head);
             self.write(cache, batch, {layer, dtype, key_heads, value_heads, 0, batch.num_tokens()}, threads);
           },
           nb::call_guard<nb::gil_scoped_release>())
      .def("compact",
           [](const Kernels &self, const Pool &pool, uintptr_t source, uintptr_t target, int64_t n, int threads) {
             self.compact(pool, at<int64_t>(source), at<int64_t>(target), n, threads);
           },
           nb::call_guard<nb::gil_scoped_release>())
      .def("keep_best",
           [](const Kernels &self, const Pool &pool, uintptr_t block, uintptr_t length, uintptr_t kept, uintptr_t score,
              uintptr_t must_stay, int64_t rows, int64_t stride, int threads) {
             self.keep_best(pool, {at<int64_t>(block), at<int32_t>(length), at<int32_t>(kept), at<float>(score),
                                   at<bool>(must_stay), rows, stride},
                            threads);
           },
           nb::call_guard<nb::gil_scoped_release>())
      .def("attend",
           [](const Kernels &self, Workspace &work, const Cache &cache, const Batch &batch, int64_t layer, DType dtype,
              uintptr_t q, int64_t q_token, int64_t q_head, uintptr_t out, int64_t num_query_heads,
              const AttentionSpec &spec, int threads) {
             self.attend({spec, cache, batch, layer, dtype, heads(q, q_token, q_head), at<char>(out), num_query_heads,
                          threads},
                         work);
           },
           nb::call_guard<nb::gil_scoped_release>())
      .def("attend_selected",
           [](const Kernels &self, Workspace &work, const Cache &cache, const Batch &batch, int64_t layer, DType dtype,
              uintptr_t q, int64_t q_token, int64_t q_head, uintptr_t out, int64_t num_query_heads,
              const AttentionSpec &spec, const Selection &selection, int threads) {
             return attend_selected(self, {spec, cache, batch, layer, dtype, heads(q, q_token, q_head), at<char>(out),
                                           num_query_heads, threads}, selection, work);
           },
           nb::call_guard<nb::gil_scoped_release>(), "work"_a, "cache"_a, "batch"_a, nb::kw_only(), "layer"_a, "dtype"_a,
           "q"_a, "q_token"_a, "q_head"_a, "out"_a, "num_query_heads"_a, "spec"_a, "selection"_a, "threads"_a)
      .def("replay",
           [](const Kernels &self, Workspace &work, const Cache &cache, int64_t layer, int64_t slot, int64_t head,
              int64_t start, int64_t end, int64_t context_len, DType dtype, uintptr_t q, int64_t q_token, int64_t q_head,
              int64_t count, int64_t first, int64_t every, int64_t num_query_heads,
              const AttentionSpec &spec, int threads) {
             self.replay({spec, cache, layer, slot, head, start, end, context_len, dtype, heads(q, q_token, q_head),
                          count, first, every, num_query_heads, threads},
                         work);
           },
           nb::call_guard<nb::gil_scoped_release>(), "work"_a, "cache"_a, nb::kw_only(), "layer"_a, "slot"_a, "head"_a,
           "start"_a, "end"_a, "context_len"_a, "dtype"_a, "q"_a, "q_token"_a, "q_head"_a, "count"_a, "first"_a, "every"_a,
           "num_query_heads"_a, "spec"_a, "threads"_a)
      .def("leverage",
           [](const Kernels &self, const KeyRows &rows, float ridge, uintptr_t score, int threads) {
             self.leverage(rows, ridge, at<float>(score), threads);
           },
           nb::call_guard<nb::gil_scoped_release>())
      .def("key_difference",
           [](const Kernels &self, const KeyRows &rows, uintptr_t position, uintptr_t sum, uintptr_t counted,
              uintptr_t cos, uintptr_t sin, int64_t pairs, int64_t stride, int64_t first, bool interleaved,
              uintptr_t score, int threads) {
             const KeyRotation turn{at<float>(cos), at<float>(sin), pairs, stride, first, interleaved};
             const KeyDirections directions{at<float>(sum), at<int32_t>(counted), at<int32_t>(position), rows.stride,
                                            turn};
             self.key_difference(rows, directions, at<float>(score), threads);
           },
           nb::call_guard<nb::gil_scoped_release>(), "rows"_a, nb::kw_only(), "position"_a, "sum"_a, "counted"_a,
           "cos"_a, "sin"_a, "pairs"_a, "stride"_a, "first"_a, "interleaved"_a, "score"_a, "threads"_a)
      .def("smooth_rows",
           [](const Kernels &self, uintptr_t x, uintptr_t position, uintptr_t length, int64_t rows, int64_t stride,
              int64_t smoothing_size, bool smoothing_max, uintptr_t out, int threads) {
             const SmoothedRows smoothed{at<float>(x), at<int32_t>(position), at<int32_t>(length), rows, stride,
                                         smoothing_size, smoothing_max};
             self.smooth_rows(smoothed, at<float>(out), threads);
           },
           nb::call_guard<nb::gil_scoped_release>())
      .def("rms_norm",
           [](const Kernels &self, DType dtype, uintptr_t x, uintptr_t add, uintptr_t out, int64_t tokens, int64_t size,
              const RmsNorm &norm, int threads) {
             self.rms_norm({dtype, at<char>(x), at<char>(add), at<char>(out), tokens, size}, norm, threads);
           },
           nb::call_guard<nb::gil_scoped_release>())
      .def("add_normed",
           [](const Kernels &self, DType dtype, uintptr_t x, uintptr_t sum, int64_t tokens, int64_t size,
              const RmsNorm &norm, int threads) {
             self.add_normed({dtype, at<char>(x), at<char>(sum), tokens, size}, norm, threads);
           },
           nb::call_guard<nb::gil_scoped_release>())
      .def("rotate",
           [](const Kernels &self, DType dtype, uintptr_t heads, int64_t token_stride, int64_t tokens,
              int64_t num_query_heads, int64_t num_kv_heads, int64_t head_dim, uintptr_t cos, uintptr_t sin,
              int64_t rotary_dim, const RmsNorm &query_norm, const RmsNorm &key_norm, int threads) {
             self.rotate({dtype, at<char>(heads), token_stride, tokens, num_query_heads, num_kv_heads, head_dim,
                          at<char>(cos), at<char>(sin), rotary_dim},
                         query_norm, key_norm, threads);
           },
           nb::call_guard<nb::gil_scoped_release>())
      .def("gate",
           [](const Kernels &self, DType dtype, uintptr_t gate_up, uintptr_t out, int64_t tokens, int64_t size,
              Activation activation, int threads) {
             self.gate({dtype, at<char>(gate_up), at<char>(out), tokens, size}, activation, threads);
           },
           nb::call_guard<nb::gil_scoped_release>())
      .def("packed_size",
           [](const Kernels &self, int64_t in, int64_t out) { return self.plain.packed_size(in, out); })
      .def("block_bytes",
           [](const Kernels &self, BlockKind kind, int64_t in, int64_t out) { return self.blocks.bytes(kind, in, out); })
      .def("pack_blocks",
           [](const Kernels &self, const RawBlocks &raw, uintptr_t out, int threads) {
             self.blocks.pack(raw, at<char>(out), threads);
           },
           nb::call_guard<nb::gil_scoped_release>())
      .def("dequantize_blocks",
           [](const Kernels &self, const RawBlocks &raw, DType dtype, uintptr_t out, int threads) {
             self.blocks.dequantize(raw, dtype, at<char>(out), threads);
           },
           nb::call_guard<nb::gil_scoped_release>())
      .def("pack",
           [](const Kernels &self, const PackedWeight &weight, uintptr_t dense, int threads) {
             self.products(weight).pack(weight, at<char>(dense), threads);
           },
           nb::call_guard<nb::gil_scoped_release>())
      .def("unpack_rows",
           [](const Kernels &self, const PackedWeight &weight, uintptr_t features, int64_t count, uintptr_t out,
              int threads) {
             check_rows(at<int64_t>(features), count, weight.out_features);
             self.products(weight).unpack_rows(weight, at<int64_t>(features), count, at<char>(out), threads);
           },
           nb::call_guard<nb::gil_scoped_release>())
      .def("linear",
           [](const Kernels &self, const PackedWeight &weight, uintptr_t x, int64_t x_stride, uintptr_t bias,
              uintptr_t out, int64_t rows, int threads) {
             const LinearRows given{at<char>(x), x_stride, at<char>(bias), nullptr, at<char>(out), rows};
             self.products(weight).linear(weight, given, threads);
           },
           nb::call_guard<nb::gil_scoped_release>())
      .def("grouped_linear",
           [](const Kernels &self, const std::vector<const PackedWeight *> &weights, const std::vector<uintptr_t> &biases,
              uintptr_t x, uintptr_t out, const std::vector<int64_t> &counts, int threads) {
             grouped_linear(self, weights, biases, at<char>(x), at<char>(out), counts, threads);
           },
           nb::call_guard<nb::gil_scoped_release>())
      .def("pre_attention",
           [](const Kernels &self, DecoderWorkspace &work, const DecoderLayer &layer, uintptr_t x, int64_t tokens,
              uintptr_t cos, uintptr_t sin, int64_t rotary_dim, uintptr_t qkv, int threads) {
             pre_attention(self, layer, at<char>(x), tokens, {at<char>(cos), at<char>(sin), rotary_dim},
                              at<char>(qkv), work, threads);
           },
           nb::call_guard<nb::gil_scoped_release>())
      .def("post_attention",
           [](const Kernels &self, DecoderWorkspace &work, const DecoderLayer &layer, uintptr_t x, uintptr_t attended,
              int64_t tokens, int threads) {
             post_attention(self, layer, at<char>(x), at<char>(attended), tokens, work, threads);
           },
           nb::call_guard<nb::gil_scoped_release>())
      .def("decoder_layer",
           [](const Kernels &self, DecoderWorkspace &work, const DecoderLayer &layer, int64_t index, uintptr_t x,
              uintptr_t cos, uintptr_t sin, int64_t rotary_dim, const AttentionSpec &spec, const Cache &cache,
              const Batch &batch, Workspace &attention_work, FarLayers *far, const Selection *selection, int threads) {
             decoder_layer(self, layer, index, at<char>(x), {at<char>(cos), at<char>(sin), rotary_dim}, spec,
                           {cache, batch, attention_work, far, selection}, work, threads);
           },
           nb::call_guard<nb::gil_scoped_release>(), "work"_a, "layer"_a, "index"_a, "x"_a, "cos"_a, "sin"_a, "rotary_dim"_a,
           "spec"_a, "cache"_a, "batch"_a, "attention_work"_a, "far"_a.none(), "selection"_a.none(), "threads"_a)
      .def("decode",
           [](const Kernels &self, DecoderWorkspace &work, const Decoder &decoder, uintptr_t tokens, uintptr_t cos,
              uintptr_t sin, int64_t rotary_dim, const Cache &cache, const Batch &batch, Workspace &attention_work,
              FarLayers *far, const Selection *selection, int64_t num_wanted, uintptr_t wanted, uintptr_t logits, int threads) {
             check_rows(at<int64_t>(tokens), batch.num_tokens(), decoder.embedding.num_tokens);
             decode(self, decoder, at<int64_t>(tokens), {at<char>(cos), at<char>(sin), rotary_dim},
                    {cache, batch, attention_work, far, selection}, {num_wanted, at<int64_t>(wanted)}, at<char>(logits), work, threads);
           },
           nb::call_guard<nb::gil_scoped_release>(), "work"_a, "decoder"_a, "tokens"_a, "cos"_a, "sin"_a, "rotary_dim"_a,
           "cache"_a, "batch"_a, "attention_work"_a, "far"_a.none(), "selection"_a.none(), "num_wanted"_a, "wanted"_a, "logits"_a, "threads"_a)
      .def("conv_step",
           [](const Kernels &self, DType dtype, StateSlots state, SeqRows x, uintptr_t weight, uintptr_t bias, uintptr_t out,
              int64_t channels, int64_t length, int64_t taps, bool silu, int threads) {
             self.conv_step({dtype, state, x, at<char>(weight), at<char>(bias), at<char>(out), channels, length, taps, silu},
                            threads);
           },
           nb::call_guard<nb::gil_scoped_release>())
      .def("delta_step",
           [](const Kernels &self, DType dtype, StateSlots state, SeqRows query, SeqRows key, SeqRows value,
              uintptr_t log_decay, uintptr_t rate, uintptr_t out, int64_t key_heads, int64_t heads, int64_t key_size,
              int64_t value_size, int64_t decay_size, bool norm, int threads) {
             self.delta_step({dtype, state, query, key, value, at<float>(log_decay), at<float>(rate), at<char>(out),
                              key_heads, heads, key_size, value_size, decay_size, norm},
                             threads);
           },
           nb::call_guard<nb::gil_scoped_release>())
      .def("space_step",
           [](const Kernels &self, DType dtype, StateSlots state, SeqRows x, SeqRows b, SeqRows c, uintptr_t dt, uintptr_t a,
              uintptr_t d, uintptr_t out, int64_t heads, int64_t head_size, int64_t state_size, int64_t groups,
              int64_t a_size, int threads) {
             self.space_step({dtype, state, x, b, c, at<float>(dt), at<float>(a), at<float>(d), at<char>(out), heads,
                              head_size, state_size, groups, a_size},
                             threads);
           },
           nb::call_guard<nb::gil_scoped_release>())
      .def("greedy",
           [](const Kernels &self, DType dtype, uintptr_t logits, int64_t stride, int64_t count, int64_t size,
              uintptr_t tokens, int threads) {
             self.greedy({dtype, at<char>(logits), stride, count, size}, at<int64_t>(tokens), threads);
           },
           nb::call_guard<nb::gil_scoped_release>());

  nb::class_<TeamWait>(m, "TeamWait")
      .def(nb::init<>())
      .def("stop", &TeamWait::stop, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("is_short", &TeamWait::is_short);
  m.def("release_team", &release_team, nb::call_guard<nb::gil_scoped_release>());
  m.def("run_queue_delay_ns", &run_queue_delay_ns);

  m.def("instruction_sets", &instruction_sets,
        "Those that this processor runs, slowest first. One is an emulation, never the last.");
  m.def("block_instruction_sets", &block_instruction_sets, "The same for products of weights in blocks.");
  m.def("has_matrix_units", &has_matrix_units, "Whether the processor multiplies matrices of bf16 (AMX).");
}
