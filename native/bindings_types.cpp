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
      .def("__init__", &make<RmsNorm, Address, float, bool>, "weight"_a, "eps"_a, "one_plus"_a);

  nb::class_<PackedWeight>(m, "PackedWeight")
      .def("__init__", &make<PackedWeight, DType, Address, int64_t, int64_t, Address>, "dtype"_a, "packed"_a, "in_features"_a,
           "out_features"_a, "panels"_a = 0);

  nb::enum_<BlockKind>(m, "BlockKind")
      .value("Q4_0", BlockKind::q4_0).value("Q4_1", BlockKind::q4_1).value("Q5_0", BlockKind::q5_0)
      .value("Q5_1", BlockKind::q5_1).value("Q8_0", BlockKind::q8_0).value("Q2_K", BlockKind::q2_k)
      .value("Q3_K", BlockKind::q3_k).value("Q4_K", BlockKind::q4_k).value("Q5_K", BlockKind::q5_k)
      .value("Q6_K", BlockKind::q6_k).value("IQ4_NL", BlockKind::iq4_nl).value("MXFP4", BlockKind::mxfp4)
      .value("F8_E4M3", BlockKind::f8_e4m3).value("IQ4_XS", BlockKind::iq4_xs);

  nb::class_<RawBlocks>(m, "RawBlocks")
      .def("__init__", &make<RawBlocks, BlockKind, Address, int64_t, int64_t>, "kind"_a, "data"_a, "in_features"_a,
           "out_features"_a);

  nb::class_<DecoderWorkspace>(m, "DecoderWorkspace")
      .def(nb::init<>())
      .def_ro("num_sub_batches", &DecoderWorkspace::num_sub_batches);

  using Weight = const PackedWeight &;
  using Norm = const RmsNorm &;
  nb::class_<DecoderLayer>(m, "DecoderLayer")
      .def("__init__",
           &make<DecoderLayer, Weight, Address, Weight, Address, Weight, Address, Weight, Address, Norm, Norm, Norm, Norm, Norm,
                 Norm, Activation, int64_t, int64_t, int64_t>,
           nb::kw_only(), "qkv"_a, "qkv_bias"_a, "output"_a, "output_bias"_a, "gate_up"_a, "gate_up_bias"_a, "down"_a,
           "down_bias"_a, "input_norm"_a, "query_norm"_a, "key_norm"_a, "post_norm"_a, "output_norm"_a,
           "down_norm"_a, "activation"_a, "num_query_heads"_a, "num_kv_heads"_a, "head_dim"_a)
      .def_prop_ro("dtype", &DecoderLayer::dtype);

  nb::class_<Field>(m, "Field")
      .def("__init__", &make<Field, Address, int64_t, int64_t>, "data"_a, "slot_bytes"_a, "block_bytes"_a);

  nb::enum_<Format>(m, "Format")
      .value("float32", Format::f32).value("bfloat16", Format::bf16).value("float16", Format::f16)
      .value("fp8_e4m3", Format::fp8_e4m3).value("int8", Format::int8).value("int4", Format::int4)
      .value("int3", Format::int3).value("int2", Format::int2);

  using Part = const Field &;
  nb::class_<CodedVectors>(m, "CodedVectors")
      .def("__init__", &make<CodedVectors, Format, Part, int64_t, Part, Part, int64_t, Part, Part, int64_t>, nb::kw_only(),
           "format"_a, "code"_a, "group"_a, "scale"_a, "min"_a, "num_outliers"_a, "outlier"_a, "channel"_a, "rotation"_a);

  nb::class_<Pool>(m, "Pool")
      .def(
          "__init__",
          [](Pool *self, std::vector<Field> fields, Address k, Address v, Address position, Address accumulators,
             int64_t num_slots, int64_t num_accumulators, int64_t block_size, int64_t block_stride, int64_t head_dim,
             DType dtype, const CodedVectors *keys, const CodedVectors *values, const Field *bias) {
            new (self) Pool{{block_size, block_stride, head_dim}, std::move(fields), k, v, position, accumulators,
                            num_slots, num_accumulators, dtype, keys && values, keys ? *keys : CodedVectors{},
                            values ? *values : CodedVectors{}, bias ? *bias : Field{}};
          },
          nb::kw_only(), "fields"_a, "k"_a, "v"_a, "position"_a, "accumulators"_a, "num_slots"_a, "num_accumulators"_a,
          "block_size"_a, "block_stride"_a, "head_dim"_a, "dtype"_a, "keys"_a.none() = nb::none(),
          "values"_a.none() = nb::none(), "bias"_a.none() = nb::none());

  nb::class_<WideWindow>(m, "WideWindow")
      .def("__init__",
           &make<WideWindow, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, DType, Address, Address, Address>,
           nb::kw_only(), "first_layer"_a, "num_layers"_a, "num_heads"_a, "head_dim"_a, "sinks"_a, "recent"_a, "dtype"_a,
           "k"_a, "v"_a, "position"_a);

  nb::class_<Cache, Pool>(m, "Cache")
      .def("__init__",
           &make<Cache, const Pool &, Address, Address, Address, int64_t, int64_t, int64_t, int64_t, int64_t,
                 std::vector<WideWindow>>,
           "pool"_a, nb::kw_only(), "pages"_a, "page_table"_a, "lengths"_a, "num_layers"_a, "num_heads"_a,
           "table_heads"_a, "page_entries"_a, "pages_per_seq"_a, "windows"_a);

  nb::enum_<Term>(m, "Term")
      .value("attention", Term::attention).value("squared", Term::squared)
      .value("below_average", Term::below_average);
  nb::enum_<Group>(m, "Group").value("sum", Group::sum).value("mean", Group::mean).value("max", Group::max);

  nb::class_<AttentionObserver>(m, "AttentionObserver")
      .def("__init__", &make<AttentionObserver, std::vector<Term>, Group, int64_t, bool, int64_t, bool, bool, bool>,
           nb::kw_only(), "terms"_a, "group"_a, "exclude_first"_a, "replace"_a, "smoothing_size"_a, "smoothing_max"_a,
           "smoothing_per_query_head"_a, "smoothing_skip_window"_a);

  using Numbers = std::vector<int64_t>;
  nb::class_<Batch>(m, "Batch")
      .def(
          "__init__",
          [](Batch *self, Numbers slots, Numbers counts, Numbers starts, Address position, int64_t num_tokens, Numbers observer,
             Numbers observe_from, std::vector<AttentionObserver> observers, std::vector<bool> temporary) {
            const int64_t *first = position;
            new (self) Batch{std::move(slots), std::move(counts), std::move(starts), Numbers(first, first + num_tokens),
                             std::move(observer), std::move(observe_from), std::move(observers), std::move(temporary)};
          },
          nb::kw_only(), "slots"_a, "counts"_a, "starts"_a, "position"_a, "num_tokens"_a, "observer"_a,
          "observe_from"_a, "observers"_a, "temporary"_a)
      .def_prop_ro("end", &Batch::end);

  nb::class_<AttentionSpec>(m, "AttentionSpec")
      .def("__init__", &make<AttentionSpec, float, int64_t, float, Address, Address, bool>, nb::kw_only(), "scale"_a,
           "window"_a, "softcap"_a, "sinks"_a, "slopes"_a, "chunked"_a);

  nb::class_<Selection>(m, "Selection")
      .def("__init__", &make<Selection, int64_t, bool, Numbers>, nb::kw_only(), "most"_a, "renormalize"_a, "select_from"_a);

  nb::class_<ValuesRead>(m, "ValuesRead")
      .def_ro("head_queries", &ValuesRead::head_queries)
      .def_ro("selected", &ValuesRead::selected)
      .def_ro("rows", &ValuesRead::rows)
      .def_ro("in_full", &ValuesRead::in_full);

  nb::class_<FarLayers>(m, "FarLayers")
      .def("__init__", &make<FarLayers, const Cache &, int64_t>, nb::kw_only(), "cache"_a, "first"_a)
      .def("take_counts", &FarLayers::take_counts);

  nb::class_<StackedLayer>(m, "StackedLayer")
      .def("__init__", &make<StackedLayer, const DecoderLayer &, const AttentionSpec &, int64_t>, "layer"_a, "spec"_a,
           "index"_a);

  nb::class_<Decoder>(m, "Decoder")
      .def("__init__", &make<Decoder, Address, Weight, int64_t, std::vector<StackedLayer>, bool, Norm, Weight, Address>,
           nb::kw_only(), "embedding"_a, "embedding_rows"_a, "num_tokens"_a, "layers"_a, "selects"_a, "norm"_a, "head"_a,
           "head_bias"_a)
      .def_prop_ro("dtype", &Decoder::dtype);

  nb::class_<KeyRows>(m, "KeyRows")
      .def(
          "__init__",
          [](KeyRows *self, const Pool &pool, Address slot, Address length, int64_t rows, int64_t stride) {
            new (self) KeyRows{pool, pool.dtype, pool.k, slot, length, rows, stride, pool.coded, pool.keys};
          },
          nb::kw_only(), "pool"_a, "slot"_a, "length"_a, "rows"_a, "stride"_a);

  nb::class_<StateSlots>(m, "StateSlots")
      .def("__init__", &make<StateSlots, Address, int64_t, Address, int64_t>, "base"_a, "stride"_a, "slots"_a, "seqs"_a);

  nb::class_<SeqRows>(m, "SeqRows").def("__init__", &make<SeqRows, Address, int64_t>, "base"_a, "stride"_a);

  nb::class_<Workspace>(m, "Workspace").def(nb::init<>());
}
}  // namespace winnow
