// The Python face of the kernels. Tensors come as addresses: 3 us a call, where DLPack would take 14 for six of them.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <type_traits>

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

/// What Python gives for a parameter of a kernel.
template <class T>
using Given = std::conditional_t<std::is_pointer_v<T>, Address, T>;

/// A kernel that takes these arguments as the fields of one struct, then others.
template <class... Fields, class Call, class... Others>
auto of_fields(void (*Kernels::*kernel)(const Call &, Others...)) {
  return [kernel](const Kernels &self, Fields... fields, Given<Others>... others) {
    (self.*kernel)({fields...}, others...);
  };
}

/// While a kernel runs, other threads may run Python.
const auto NO_GIL = nb::call_guard<nb::gil_scoped_release>();

}  // namespace

NB_MODULE(_native, m) {
  // An engine that lives until the interpreter ends takes its views of tensors along; they own nothing.
  nb::set_leak_warnings(false);
  m.doc() = "CPU kernels of Winnow. All tensors are given by address; see src/winnow/process/native.py for the checked face.";
  bind_types(m);

  nb::class_<Kernels>(m, "Kernels")
      .def(
          "__init__",
          [](Kernels *self, const std::string &name, const std::string &block_name) {
            new (self) Kernels(kernels_for(name, block_name));
          },
          "instruction_set"_a, "block_instruction_set"_a = "")
      .def("write",
           [](const Kernels &self, const Cache &cache, const Batch &batch, int64_t layer, DType dtype, Address k,
              int64_t k_token, int64_t k_head, Address v, int64_t v_token, int64_t v_head, int threads) {
             const Heads key_heads = Heads{k, k_token, k_head}, value_heads = Heads{v, v_token, v_head};
             self.write(cache, batch, {layer, dtype, key_heads, value_heads, 0, batch.num_tokens()}, threads);
           },
           NO_GIL)
      .def("compact", of_fields<const Pool &>(&Kernels::compact), NO_GIL)
      .def("keep_best",
           [](const Kernels &self, const Pool &pool, Address block, Address length, Address kept, Address score,
              Address must_stay, int64_t rows, int64_t stride, int threads) {
             self.keep_best(pool, {block, length, kept, score, must_stay, rows, stride}, threads);
           },
           NO_GIL)
      .def("attend",
           [](const Kernels &self, Workspace &work, const Cache &cache, const Batch &batch, int64_t layer, DType dtype,
              Address q, int64_t q_token, int64_t q_head, Address out, int64_t num_query_heads, const AttentionSpec &spec,
              int threads) {
             self.attend({spec, cache, batch, layer, dtype, Heads{q, q_token, q_head}, out, num_query_heads, threads},
                work);
           },
           NO_GIL)
      .def("attend_selected",
           [](const Kernels &self, Workspace &work, const Cache &cache, const Batch &batch, int64_t layer, DType dtype,
              Address q, int64_t q_token, int64_t q_head, Address out, int64_t num_query_heads, const AttentionSpec &spec,
              const Selection &selection, int threads) {
             return attend_selected(self, {spec, cache, batch, layer, dtype, Heads{q, q_token, q_head}, out,
                num_query_heads, threads}, selection, work);
           },
           NO_GIL, "work"_a, "cache"_a, "batch"_a, nb::kw_only(), "layer"_a, "dtype"_a, "q"_a, "q_token"_a, "q_head"_a,
           "out"_a, "num_query_heads"_a, "spec"_a, "selection"_a, "threads"_a)
      .def("replay",
           [](const Kernels &self, Workspace &work, const Cache &cache, int64_t layer, int64_t slot, int64_t head,
              int64_t start, int64_t end, int64_t context_len, DType dtype, Address q, int64_t q_token, int64_t q_head,
              int64_t count, int64_t first, int64_t every, int64_t num_query_heads, const AttentionSpec &spec,
              int threads) {
             self.replay({spec, cache, layer, slot, head, start, end, context_len, dtype, Heads{q, q_token, q_head},
                count, first, every, num_query_heads, threads}, work);
           },
           NO_GIL, "work"_a, "cache"_a, nb::kw_only(), "layer"_a, "slot"_a, "head"_a, "start"_a, "end"_a, "context_len"_a,
           "dtype"_a, "q"_a, "q_token"_a, "q_head"_a, "count"_a, "first"_a, "every"_a, "num_query_heads"_a, "spec"_a,
           "threads"_a)
      .def("leverage", of_fields<const KeyRows &>(&Kernels::leverage), NO_GIL)
      .def("key_difference",
           [](const Kernels &self, const KeyRows &rows, Address position, Address sum, Address counted, Address cos,
              Address sin, int64_t pairs, int64_t stride, int64_t first, bool interleaved, Address score, int threads) {
             const KeyRotation turn{cos, sin, pairs, stride, first, interleaved};
             const KeyDirections directions{sum, counted, position, rows.stride, turn};
             self.key_difference(rows, directions, score, threads);
           },
           NO_GIL, "rows"_a, nb::kw_only(), "position"_a, "sum"_a, "counted"_a, "cos"_a, "sin"_a, "pairs"_a, "stride"_a,
           "first"_a, "interleaved"_a, "score"_a, "threads"_a)
      .def("smooth_rows", of_fields<Address, Address, Address, int64_t, int64_t, int64_t, bool>(&Kernels::smooth_rows),
           NO_GIL)
      .def("rms_norm", of_fields<DType, Address, Address, Address, int64_t, int64_t>(&Kernels::rms_norm), NO_GIL)
      .def("add_normed", of_fields<DType, Address, Address, int64_t, int64_t>(&Kernels::add_normed), NO_GIL)
      .def("rotate",
           of_fields<DType, Address, int64_t, int64_t, int64_t, int64_t, int64_t, Address, Address, int64_t>(
               &Kernels::rotate), NO_GIL)
      .def("gate", of_fields<DType, Address, Address, int64_t, int64_t>(&Kernels::gate), NO_GIL)
      .def("packed_size",
           [](const Kernels &self, int64_t in, int64_t out) { return self.plain.packed_size(in,
              out); }) .def("block_bytes", [](const Kernels &self, BlockKind kind, int64_t in,
              int64_t out) { return self.blocks.bytes(kind, in, out); }) .def("pack_blocks", [](const Kernels &self,
              const RawBlocks &raw, Address out, int threads) {
             self.blocks.pack(raw, out, threads);
           },
           NO_GIL)
      .def("dequantize_blocks",
           [](const Kernels &self, const RawBlocks &raw, DType dtype, Address out, int threads) {
             self.blocks.dequantize(raw, dtype, out, threads);
           },
           NO_GIL)
      .def("pack",
           [](const Kernels &self, const PackedWeight &weight, Address dense, int threads) {
             self.products(weight).pack(weight, dense, threads);
           },
           NO_GIL)
      .def("unpack_rows",
           [](const Kernels &self, const PackedWeight &weight, Address features, int64_t count, Address out,
              int threads) {
             check_rows(features, count, weight.out_features);
             self.products(weight).unpack_rows(weight, features, count, out, threads);
           },
           NO_GIL)
      .def("linear",
           [](const Kernels &self, const PackedWeight &weight, Address x, int64_t x_stride, Address bias, Address out,
              int64_t rows, int threads) {
             const LinearRows given{x, x_stride, bias, nullptr, out, rows};
             self.products(weight).linear(weight, given, threads);
           },
           NO_GIL)
      .def("grouped_linear",
           [](const Kernels &self, const std::vector<const PackedWeight *> &weights, const std::vector<uintptr_t> &biases,
              Address x, Address out, const std::vector<int64_t> &counts, int threads) {
             grouped_linear(self, weights, biases, x, out, counts, threads);
           },
           NO_GIL)
      .def("pre_attention",
           [](const Kernels &self, DecoderWorkspace &work, const DecoderLayer &layer, Address x, int64_t tokens,
              Address cos, Address sin, int64_t rotary_dim, Address qkv, int threads) {
             pre_attention(self, layer, x, tokens, {cos, sin, rotary_dim}, qkv, work, threads);
           },
           NO_GIL)
      .def("post_attention",
           [](const Kernels &self, DecoderWorkspace &work, const DecoderLayer &layer, Address x, Address attended,
              int64_t tokens, int threads) {
             post_attention(self, layer, x, attended, tokens, work, threads);
           },
           NO_GIL)
      .def("decoder_layer",
           [](const Kernels &self, DecoderWorkspace &work, const DecoderLayer &layer, int64_t index, Address x,
              Address cos, Address sin, int64_t rotary_dim, const AttentionSpec &spec, const Cache &cache,
              const Batch &batch, Workspace &attention_work, FarLayers *far, const Selection *selection, int threads) {
             decoder_layer(self, layer, index, x, {cos, sin, rotary_dim}, spec, {cache, batch, attention_work, far,
                selection}, work, threads);
           },
           NO_GIL, "work"_a, "layer"_a, "index"_a, "x"_a, "cos"_a, "sin"_a, "rotary_dim"_a, "spec"_a, "cache"_a,
           "batch"_a, "attention_work"_a, "far"_a.none(), "selection"_a.none(), "threads"_a)
      .def("decode",
           [](const Kernels &self, DecoderWorkspace &work, const Decoder &decoder, Address tokens, Address cos,
              Address sin, int64_t rotary_dim, const Cache &cache, const Batch &batch, Workspace &attention_work,
              FarLayers *far, const Selection *selection, int64_t num_wanted, Address wanted, Address logits,
              int threads) {
             check_rows(tokens, batch.num_tokens(), decoder.embedding.num_tokens);
             decode(self, decoder, tokens, {cos, sin, rotary_dim}, {cache, batch, attention_work, far, selection},
                {num_wanted, wanted}, logits, work, threads);
           },
           NO_GIL, "work"_a, "decoder"_a, "tokens"_a, "cos"_a, "sin"_a, "rotary_dim"_a, "cache"_a, "batch"_a,
           "attention_work"_a, "far"_a.none(), "selection"_a.none(), "num_wanted"_a, "wanted"_a, "logits"_a, "threads"_a)
      .def("conv_step",
           of_fields<DType, StateSlots, SeqRows, Address, Address, Address, int64_t, int64_t, int64_t, bool>(
               &Kernels::conv_step), NO_GIL)
      .def("delta_step",
           of_fields<DType, StateSlots, SeqRows, SeqRows, SeqRows, Address, Address, Address, int64_t, int64_t, int64_t,
                     int64_t, int64_t, bool>(&Kernels::delta_step), NO_GIL)
      .def("space_step",
           of_fields<DType, StateSlots, SeqRows, SeqRows, SeqRows, Address, Address, Address, Address, int64_t, int64_t,
                     int64_t, int64_t, int64_t>(&Kernels::space_step), NO_GIL)
      .def("greedy", of_fields<DType, Address, int64_t, int64_t, int64_t>(&Kernels::greedy), NO_GIL);

  nb::class_<TeamWait>(m, "TeamWait")
      .def(nb::init<>())
      .def("stop", &TeamWait::stop, NO_GIL)
      .def_prop_ro("is_short", &TeamWait::is_short);
  m.def("release_team", &release_team, NO_GIL);
  m.def("run_queue_delay_ns", &run_queue_delay_ns);

  m.def("instruction_sets", &instruction_sets,
        "Those that this processor runs, slowest first. One is an emulation, never the last.");
  m.def("block_instruction_sets", &block_instruction_sets, "The same for products of weights in blocks.");
}
