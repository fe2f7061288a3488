// The types that kernels take, in Python. Tensors come as addresses.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "decoder.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace winnow {
void bind_types(nb::module_ &m) {
  nb::enum_<DType>(m, "DType").value("f32", DType::f32).value("bf16", DType::bf16).value("f16", DType::f16);

  nb::enum_<Activation>(m, "Activation")
      .value("silu", Activation::silu).value("gelu_tanh", Activation::gelu_tanh);

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
      .value("Q4_0", BlockKind::q4_0).value("Q4_1", BlockKind::q4_1).value("Q5_0", BlockKind::q5_0)
      .value("Q5_1", BlockKind::q5_1).value("Q8_0", BlockKind::q8_0).value("Q2_K", BlockKind::q2_k)
      .value("Q3_K", BlockKind::q3_k).value("Q4_K", BlockKind::q4_k).value("Q5_K", BlockKind::q5_k)
      .value("Q6_K", BlockKind::q6_k).value("IQ4_NL", BlockKind::iq4_nl).value("MXFP4", BlockKind::mxfp4)
      .value("F8_E4M3", BlockKind::f8_e4m3);

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
      .value("float32", Format::f32).value("bfloat16", Format::bf16).value("float16", Format::f16)
      .value("fp8_e4m3", Format::fp8_e4m3).value("int8", Format::int8).value("int4", Format::int4)
      .value("int3", Format::int3).value("int2", Format::int2);

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
      .value("attention", Term::attention).value("squared", Term::squared)
      .value("below_average", Term::below_average);
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
}
}  // namespace winnow
