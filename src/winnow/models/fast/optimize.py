"""Optimization of a loaded model: fused layers where they compute the same, packed products elsewhere."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedModel

from winnow.errors import UnsupportedModelError
from winnow.models.bind.geometry import ModelGeometry
from winnow.models.bind.residuals import decoder_layers
from winnow.models.fast.int8_linear import Int8Weights
from winnow.models.fast.library_weights import LibraryWeights
from winnow.models.fast.packed_embedding import PackedEmbedding, embedding_scale
from winnow.models.fast.packed_linear import (
    MakeLinear,
    PackedLinear,
    join_linears,
    linear_maker,
    pack_linears,
    put_back,
)
from winnow.models.fast.quantize import quantize_model
from winnow.models.fast.shards import JoinedLinear
from winnow.models.load.memory import is_file_backed, release_pages, trim_heap
from winnow.native import native_kernels
from winnow.process.progress import report

if TYPE_CHECKING:
    from winnow.models.fast.fused.kernels import LayerKernels
    from winnow.models.fast.fused.probe import LayerCall
    from winnow.models.fast.packed.decoder import PackedDecoder


@dataclass(frozen=True)
class Optimized:
    """Result of `optimize_model`."""

    decoder: "PackedDecoder | None" = None
    """The model without transformers' code between its parts, where that gives the same logits: a step of few tokens is
    as long as its Python."""
    unfused: dict[int, str] = field(default_factory=dict)
    """Reasons for which layers, by their number, are still transformers' own."""


def optimize_model(
    model: PreTrainedModel,
    geometry: ModelGeometry,
    trained_len: int,
    *,
    native: bool = False,
    int8: Int8Weights | None = None,
    library: LibraryWeights | None = None,
) -> Optimized:
    """Replace what can be replaced, layer by layer, so that no more than one layer's weights exist twice.

    A replacement that does not reproduce transformers' own layer is dropped, and the layer stays as it is.

    Args:
        native: all products by Winnow's kernels; see `linear_maker`.
        int8: which weights are quantized to 8 bits, on a CPU; None: none.
        library: which are by a library, on a GPU; None: none.
    """
    layers = decoder_layers(model, geometry.num_layers)
    if layers and int8 is None and _passes_fit(model):
        return _fuse_for_gpu(model, geometry, layers, trained_len, library)
    if library is not None:
        library.quantize_model(model, geometry.num_layers)
        return Optimized()
    kernels = native_kernels() if model.device.type == "cpu" else None
    if kernels is None or not layers:
        if int8 is not None:
            quantize_model(model, geometry.num_layers, int8)
        return Optimized()
    # They load the kernels, which an installation may lack.
    from winnow.models.fast.fused.build import fuse_layer
    from winnow.models.fast.fused.kernels import LayerKernels
    from winnow.models.fast.fused.layer import FusedLayer, FusedNorm
    from winnow.models.fast.fused.parts import read_norm
    from winnow.models.fast.fused.probe import record_calls, selection_is_harmless
    from winnow.models.fast.packed.extract import extract_parts

    layer_kernels = LayerKernels(kernels)
    plain = linear_maker(layer_kernels, model.dtype, native=native or int8 is not None)
    narrow = plain if int8 is None else linear_maker(layer_kernels, model.dtype, int8=int8)
    shape = (geometry.num_query_heads, geometry.num_kv_heads, geometry.head_dim)
    calls = record_calls(model, layers, trained_len)
    unfused: dict[int, str] = {}
    for index, call in enumerate(calls):
        report("packing layers", index, len(calls))
        weights = [part.weight for part in layers[index].modules() if type(part) is nn.Linear]
        quantized = int8 is not None and int8.of_layer(index, len(layers))
        make_linear = narrow if quantized else plain
        fused: FusedLayer | str = "the model has layers of several kinds"
        if not (geometry.states or geometry.by_layer):
            fused = fuse_layer(layers[index], call, shape, layer_kernels, make_linear, int8=quantized)
        if isinstance(fused, FusedLayer):
            layers[index] = fused
        else:
            unfused[index] = fused
            _pack_layer(layers[index], call, layer_kernels, make_linear, int8=quantized)
        release_pages(weights)
    base = model.base_model
    norm = read_norm(getattr(base, "norm", None), model.get_input_embeddings().weight.shape[-1])
    last = layers[-1]
    if isinstance(last, FusedLayer):
        if norm is not None:
            base.norm = FusedNorm(norm, layer_kernels)
        last.last_layer_only_wanted = True
        last.last_layer_only_wanted = selection_is_harmless(model, trained_len)
    narrow_head = int8 is not None and not int8.wide_head
    _pack_head(model, layer_kernels, [narrow, plain] if narrow_head else [plain], trained_len)
    trim_heap()
    try:
        return Optimized(extract_parts(model, geometry.num_layers, trained_len), unfused)
    except UnsupportedModelError:
        return Optimized(unfused=unfused)


def _passes_fit(model: PreTrainedModel) -> bool:
    """Return whether Triton computes passes where the model is, without importing it for a CPU."""
    return model.device.type == "cuda" and find_spec("triton") is not None


def _fuse_for_gpu(
    model: PreTrainedModel,
    geometry: ModelGeometry,
    layers: nn.ModuleList,
    trained_len: int,
    library: LibraryWeights | None,
) -> Optimized:
    """Replace layers by fused ones where they compute the same, their products by cuBLAS's or a library's, joined."""
    from winnow.models.fast.fused.build import fuse_layer
    from winnow.models.fast.fused.layer import FusedLayer, FusedNorm
    from winnow.models.fast.fused.parts import read_norm
    from winnow.models.fast.fused.probe import record_calls
    from winnow.models.fast.fused.triton.passes import TritonPasses

    passes, unfused = TritonPasses(), {}
    shape = (geometry.num_query_heads, geometry.num_kv_heads, geometry.head_dim)
    several = bool(geometry.states or geometry.by_layer)
    for index, call in enumerate(() if several else record_calls(model, layers, trained_len)):
        narrow = library is not None and library.of_layer(index, len(layers))
        make_linear = library.join if library is not None and narrow else join_linears
        fused = fuse_layer(layers[index], call, shape, passes, make_linear, int8=narrow)
        if isinstance(fused, FusedLayer):
            layers[index] = fused
        else:
            unfused[index] = fused
    if library is not None:
        library.quantize_model(model, len(layers))
    if several:
        return Optimized(unfused=dict.fromkeys(range(len(layers)), "the model has layers of several kinds"))
    base = model.base_model
    norm = read_norm(getattr(base, "norm", None), model.get_input_embeddings().weight.shape[-1])
    if norm is not None and not unfused:
        base.norm = FusedNorm(norm, passes)
    return Optimized(unfused=unfused)


@torch.inference_mode()
def _pack_layer(
    layer: nn.Module, call: "LayerCall", kernels: "LayerKernels", make_linear: MakeLinear, *, int8: bool
) -> None:
    """Replace a layer's parts by fused and packed ones, or only by packed ones, unless it needs them as they were."""
    from winnow.models.fast.fused.build import fuse_parts
    from winnow.models.fast.fused.probe import INT8_TOLERANCE

    expected = call.run(layer)
    for fuses in (True, False):
        replaced = fuse_parts(layer, kernels, make_linear) if fuses else []
        replaced += pack_linears(layer, make_linear)
        try:
            if call.run(layer).difference(expected, INT8_TOLERANCE if int8 else None) is None:
                return
        except (AttributeError, RuntimeError, TypeError):  # it reads the weight by itself
            pass
        put_back(replaced)


def _pack_head(
    model: PreTrainedModel, kernels: "LayerKernels", makers: Sequence[MakeLinear], trained_len: int
) -> None:
    """Pack the output head by the first of the makers that does not leave a second copy of its weight in memory.

    A head that shares its weight with the embedding is packed where the embedding's rows can be read out of the packed
    weight, or where the weight is a view of its file: then they are read from there.
    """
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if isinstance(head, JoinedLinear):
        pack_linears(head, makers[0])
        return
    if type(head) is not nn.Linear:
        return
    tied = head.weight is embedding.weight
    for make_linear in makers:
        model.set_output_embeddings(make_linear([head]))
        if not tied or _share_rows(model, kernels, trained_len) or is_file_backed(head.weight):
            release_pages([head.weight])
            return
    model.set_output_embeddings(head)


def _share_rows(model: PreTrainedModel, kernels: "LayerKernels", trained_len: int) -> bool:
    """Let the embedding read its rows out of the packed head. Returns whether that leaves the model as it was.

    Rows of an int8 head are those of before but for their rounding.
    """
    from winnow.models.fast.fused.probe import INT8_TOLERANCE, close, trial_logits

    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if (
        not isinstance(head, PackedLinear)
        or not isinstance(embedding, nn.Embedding)
        or embedding.max_norm is not None
    ):
        return False
    expected = trial_logits(model, trained_len)
    model.set_input_embeddings(PackedEmbedding(head, kernels, embedding_scale(embedding)))
    try:
        found = trial_logits(model, trained_len)
        same = close(found, expected, INT8_TOLERANCE) if head.is_int8 else torch.equal(found, expected)
    except (AttributeError, RuntimeError, TypeError):  # it reads the embedding's weight by itself
        same = False
    if not same:
        model.set_input_embeddings(embedding)
    return same
