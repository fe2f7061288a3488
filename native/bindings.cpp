// The Python face of the kernels. Tensors come as addresses: 3 us a call, where DLPack would take 14 for six of them.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "decoder.h"
#include "team_wait.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace winnow;

namespace {

template <class T>
T *at(uintptr_t address) {
  return reinterpret_cast<T *>(address);
}

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

  nb::enum_<DType>(m, "DType").value("f32", DType::f32).value("bf16", DType::bf16).value("f16", DType::f16);

  nb::enum_<Activation>(m, "Activation")
      .value("silu", Activation::silu)
      .value("gelu_tanh", Activation::gelu_tanh);

  nb::class_<RmsNorm>(m, "RmsNorm")
      .def(
          "__init__",
          [](RmsNorm *self, uintptr_t weight, float eps, bool one_plus) {
            new (self) RmsNorm{at<char>(weight), eps, one_plus};
          },
          "weight"_a, "eps"_a, "one_plus"_a);

  nb::class_<PackedWeight>(m, "PackedWeight")
      .def(
          "__init__",
          [](PackedWeight *self, DType dtype, uintptr_t packed, int64_t in_features, int64_t out_features,
             uintptr_t panels) {
            new (self) PackedWeight{dtype, at<char>(packed), in_features, out_features, at<BlockPanel>(panels)};
          },
          "dtype"_a, "packed"_a, "in_features"_a, "out_features"_a, "panels"_a = 0);

  nb::enum_<BlockKind>(m, "BlockKind")
      .value("Q4_0", BlockKind::q4_0)
      .value("Q4_1", BlockKind::q4_1)
      .value("Q5_0", BlockKind::q5_0)
      .value("Q5_1", BlockKind::q5_1)
      .value("Q8_0", BlockKind::q8_0)
      .value("Q2_K", BlockKind::q2_k)
      .value("Q3_K", BlockKind::q3_k)
      .value("Q4_K", BlockKind::q4_k)
      .value("Q5_K", BlockKind::q5_k)
      .value("Q6_K", BlockKind::q6_k)
      .value("IQ4_NL", BlockKind::iq4_nl)
      .value("MXFP4", BlockKind::mxfp4);

  nb::class_<RawBlocks>(m, "RawBlocks")
      .def(
          "__init__",
          [](RawBlocks *self, BlockKind kind, uintptr_t data, int64_t in, int64_t out) {
            new (self) RawBlocks{kind, at<char>(data), in, out};
          },
          "kind"_a, "data"_a, "in_features"_a, "out_features"_a);

  nb::class_<DecoderWorkspace>(m, "DecoderWorkspace")
      .def(nb::init<>())
      .def_ro("num_sub_batches", &DecoderWorkspace::num_sub_batches);

  nb::class_<DecoderLayer>(m, "DecoderLayer")
      .def(
          "__init__",
          [](DecoderLayer *self, const PackedWeight &qkv, uintptr_t qkv_bias, const PackedWeight &output,
             uintptr_t output_bias, const PackedWeight &gate_up, uintptr_t gate_up_bias, const PackedWeight &down,
             uintptr_t down_bias, const RmsNorm &input_norm, const RmsNorm &query_norm, const RmsNorm &key_norm,
             const RmsNorm &post_norm, const RmsNorm &output_norm, const RmsNorm &down_norm, Activation activation,
             int64_t num_query_heads, int64_t num_kv_heads, int64_t head_dim) {
            new (self) DecoderLayer{{qkv, at<char>(qkv_bias)},
                                    {output, at<char>(output_bias)},
                                    {gate_up, at<char>(gate_up_bias)},
                                    {down, at<char>(down_bias)},
                                    input_norm,
                                    query_norm,
                                    key_norm,
                                    post_norm,
                                    output_norm,
                                    down_norm,
                                    activation,
                                    num_query_heads,
                                    num_kv_heads,
                                    head_dim};
          },
          nb::kw_only(), "qkv"_a, "qkv_bias"_a, "output"_a, "output_bias"_a, "gate_up"_a, "gate_up_bias"_a, "down"_a,
          "down_bias"_a, "input_norm"_a, "query_norm"_a, "key_norm"_a, "post_norm"_a, "output_norm"_a,
          "down_norm"_a, "activation"_a, "num_query_heads"_a, "num_kv_heads"_a, "head_dim"_a)
      .def_prop_ro("dtype", &DecoderLayer::dtype);

  nb::class_<Field>(m, "Field")
      .def(
          "__init__",
          [](Field *self, uintptr_t data, int64_t slot_bytes, int64_t block_bytes) {
            new (self) Field{at<char>(data), slot_bytes, block_bytes};
          },
          "data"_a, "slot_bytes"_a, "block_bytes"_a);

  nb::enum_<Format>(m, "Format")
      .value("float32", Format::f32)
      .value("bfloat16", Format::bf16)
      .value("float16", Format::f16)
      .value("fp8_e4m3", Format::fp8_e4m3)
      .value("int8", Format::int8)
      .value("int4", Format::int4)
      .value("int3", Format::int3)
      .value("int2", Format::int2);

  nb::class_<CodedVectors>(m, "CodedVectors")
      .def(
          "__init__",
          [](CodedVectors *self, Format format, const Field &code, int64_t group, const Field &scale, const Field &min,
             int64_t num_outliers, const Field &outlier, const Field &channel, int64_t rotation) {
            new (self) CodedVectors{format, code, group, scale, min, num_outliers, outlier, channel, rotation};
          },
          nb::kw_only(), "format"_a, "code"_a, "group"_a, "scale"_a, "min"_a, "num_outliers"_a, "outlier"_a, "channel"_a,
          "rotation"_a);

  nb::class_<Pool>(m, "Pool")
      .def(
          "__init__",
          [](Pool *self, std::vector<Field> fields, uintptr_t k, uintptr_t v, uintptr_t position, uintptr_t accumulators,
             int64_t num_slots, int64_t num_accumulators, int64_t block_size, int64_t block_stride, int64_t head_dim,
             DType dtype, const CodedVectors *keys, const CodedVectors *values, const Field *bias) {
            new (self) Pool{{block_size, block_stride, head_dim}, std::move(fields),       at<char>(k), at<char>(v),
                            at<int32_t>(position),                at<float>(accumulators), num_slots,   num_accumulators,
                            dtype,                                keys && values,
                            keys ? *keys : CodedVectors{},        values ? *values : CodedVectors{},
                            bias ? *bias : Field{}};
          },
          nb::kw_only(), "fields"_a, "k"_a, "v"_a, "position"_a, "accumulators"_a, "num_slots"_a, "num_accumulators"_a,
          "block_size"_a, "block_stride"_a, "head_dim"_a, "dtype"_a, "keys"_a.none() = nb::none(),
          "values"_a.none() = nb::none(), "bias"_a.none() = nb::none());

  nb::class_<WideWindow>(m, "WideWindow")
      .def(
          "__init__",
          [](WideWindow *self, int64_t first_layer, int64_t num_layers, int64_t num_heads, int64_t head_dim, int64_t sinks,
             int64_t recent, DType dtype, uintptr_t k, uintptr_t v, uintptr_t position) {
            new (self) WideWindow{first_layer, num_layers, num_heads,   head_dim,    sinks,
                                  recent,      dtype,      at<char>(k), at<char>(v), at<int32_t>(position)};
          },
          nb::kw_only(), "first_layer"_a, "num_layers"_a, "num_heads"_a, "head_dim"_a, "sinks"_a, "recent"_a, "dtype"_a,
          "k"_a, "v"_a, "position"_a);

  nb::class_<Cache, Pool>(m, "Cache")
      .def(
          "__init__",
          [](Cache *self, const Pool &pool, uintptr_t pages, uintptr_t page_table, uintptr_t lengths,
             int64_t num_layers, int64_t num_heads, int64_t table_heads, int64_t page_entries, int64_t pages_per_seq,
             std::vector<WideWindow> windows) {
            new (self) Cache{pool,       at<int32_t>(pages), at<int32_t>(page_table), at<int32_t>(lengths),
                             num_layers, num_heads,          table_heads,             page_entries,
                             pages_per_seq, std::move(windows)};
          },
          "pool"_a, nb::kw_only(), "pages"_a, "page_table"_a, "lengths"_a, "num_layers"_a, "num_heads"_a,
          "table_heads"_a, "page_entries"_a, "pages_per_seq"_a, "windows"_a);

  nb::enum_<Term>(m, "Term")
      .value("attention", Term::attention)
      .value("squared", Term::squared)
      .value("group_squared", Term::group_squared)
      .value("below_average", Term::below_average)
      .value("value_aware", Term::value_aware);
  nb::enum_<Group>(m, "Group").value("sum", Group::sum).value("mean", Group::mean).value("max", Group::max);

  nb::class_<AttentionObserver>(m, "AttentionObserver")
      .def(
          "__init__",
          [](AttentionObserver *self, std::vector<Term> terms, Group group, int64_t exclude_first, bool replace,
             int64_t smoothing_size, bool smoothing_max, bool smoothing_per_query_head, bool smoothing_skip_window) {
            new (self) AttentionObserver{std::move(terms), group,         exclude_first,
                                         replace,          smoothing_size, smoothing_max,
                                         smoothing_per_query_head,         smoothing_skip_window};
          },
          nb::kw_only(), "terms"_a, "group"_a, "exclude_first"_a, "replace"_a, "smoothing_size"_a, "smoothing_max"_a,
          "smoothing_per_query_head"_a, "smoothing_skip_window"_a);

  nb::class_<Batch>(m, "Batch")
      .def(
          "__init__",
          [](Batch *self, std::vector<int64_t> slots, std::vector<int64_t> counts, std::vector<int64_t> starts,
             uintptr_t position, int64_t num_tokens, std::vector<int64_t> observer, std::vector<int64_t> observe_from,
             std::vector<AttentionObserver> observers, std::vector<bool> temporary) {
            const int64_t *first = at<int64_t>(position);
            new (self) Batch{std::move(slots),        std::move(counts),
                             std::move(starts),       std::vector<int64_t>(first, first + num_tokens),
                             std::move(observer),     std::move(observe_from),
                             std::move(observers),    std::move(temporary)};
          },
          nb::kw_only(), "slots"_a, "counts"_a, "starts"_a, "position"_a, "num_tokens"_a, "observer"_a,
          "observe_from"_a, "observers"_a, "temporary"_a)
      .def_prop_ro("end", &Batch::end);

  nb::class_<AttentionSpec>(m, "AttentionSpec")
      .def(
          "__init__",
          [](AttentionSpec *self, float scale, int64_t window, float softcap, uintptr_t sinks, uintptr_t slopes, bool chunked) {
            new (self) AttentionSpec{scale, window, softcap, at<float>(sinks), at<float>(slopes), chunked};
          },
          nb::kw_only(), "scale"_a, "window"_a, "softcap"_a, "sinks"_a, "slopes"_a, "chunked"_a);

  nb::class_<Selection>(m, "Selection")
      .def(
          "__init__",
          [](Selection *self, int64_t most, bool renormalize, std::vector<int64_t> from) {
            new (self) Selection{most, renormalize, std::move(from)};
          },
          nb::kw_only(), "most"_a, "renormalize"_a, "select_from"_a);

  nb::class_<ValuesRead>(m, "ValuesRead")
      .def_ro("head_queries", &ValuesRead::head_queries)
      .def_ro("selected", &ValuesRead::selected)
      .def_ro("rows", &ValuesRead::rows)
      .def_ro("in_full", &ValuesRead::in_full);

  nb::class_<FarLayers>(m, "FarLayers")
      .def(
          "__init__",
          [](FarLayers *self, const Cache &cache, int64_t first) { new (self) FarLayers{cache, first}; },
          nb::kw_only(), "cache"_a, "first"_a)
      .def("take_counts", &FarLayers::take_counts);

  nb::class_<StackedLayer>(m, "StackedLayer")
      .def(
          "__init__",
          [](StackedLayer *self, const DecoderLayer &layer, const AttentionSpec &spec, int64_t index) {
            new (self) StackedLayer{layer, spec, index};
          },
          "layer"_a, "spec"_a, "index"_a);

  nb::class_<Decoder>(m, "Decoder")
      .def(
          "__init__",
          [](Decoder *self, uintptr_t embedding, const PackedWeight &rows, int64_t num_tokens,
             std::vector<StackedLayer> layers, bool selects, const RmsNorm &norm, const PackedWeight &head,
             uintptr_t head_bias) {
            new (self) Decoder{{at<char>(embedding), rows, num_tokens}, std::move(layers), selects, norm,
                               {head, at<char>(head_bias)}};
          },
          nb::kw_only(), "embedding"_a, "embedding_rows"_a, "num_tokens"_a, "layers"_a, "selects"_a, "norm"_a, "head"_a, "head_bias"_a)
      .def_prop_ro("dtype", &Decoder::dtype);

  nb::class_<KeyRows>(m, "KeyRows")
      .def(
          "__init__",
          [](KeyRows *self, const Pool &pool, uintptr_t slot, uintptr_t length, int64_t rows, int64_t stride) {
            new (self) KeyRows{pool, pool.dtype, pool.k, at<int64_t>(slot), at<int32_t>(length), rows, stride,
                               pool.coded, pool.keys};
          },
          nb::kw_only(), "pool"_a, "slot"_a, "length"_a, "rows"_a, "stride"_a);

  nb::class_<StateSlots>(m, "StateSlots")
      .def(
          "__init__",
          [](StateSlots *self, uintptr_t base, int64_t stride, uintptr_t slots, int64_t seqs) {
            new (self) StateSlots{at<char>(base), stride, at<int64_t>(slots), seqs};
          },
          "base"_a, "stride"_a, "slots"_a, "seqs"_a);

  nb::class_<SeqRows>(m, "SeqRows")
      .def("__init__",
           [](SeqRows *self, uintptr_t base, int64_t stride) { new (self) SeqRows{at<char>(base), stride}; }, "base"_a,
           "stride"_a);

  nb::class_<Workspace>(m, "Workspace").def(nb::init<>());

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
              int64_t count, int64_t first, int64_t every, int64_t num_query_heads, uintptr_t query_logs,
              uintptr_t key_logs, const AttentionSpec &spec, int threads) {
             self.replay({spec, cache, layer, slot, head, start, end, context_len, dtype, heads(q, q_token, q_head),
                          count, first, every, num_query_heads, at<float>(query_logs), at<float>(key_logs), threads},
                         work);
           },
           nb::call_guard<nb::gil_scoped_release>(), "work"_a, "cache"_a, nb::kw_only(), "layer"_a, "slot"_a, "head"_a,
           "start"_a, "end"_a, "context_len"_a, "dtype"_a, "q"_a, "q_token"_a, "q_head"_a, "count"_a, "first"_a, "every"_a,
           "num_query_heads"_a, "query_logs"_a, "key_logs"_a, "spec"_a, "threads"_a)
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
