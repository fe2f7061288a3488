"""Optimization of a loaded model: fused layers where they compute the same, packed products elsewhere."""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedModel

from winnow.errors import UnsupportedModelError
from winnow.models.fast.packed_linear import (
    MakeLinear,
    PackedEmbedding,
    PackedLinear,
    embedding_scale,
    join_linears,
    linear_maker,
    pack_linears,
    put_back,
)
from winnow.models.fast.shards import JoinedLinear
from winnow.models.model.blocks import (
    BlockWeights,
    LibraryLayers,
    own_blocks,
    round_to_blocks,
    widen_for_good,
    widened,
)
from winnow.models.model.geometry import ModelGeometry, decoder_layers
from winnow.models.model.kinds import text_part
from winnow.models.model.memory import is_file_backed, release_pages, trim_heap
from winnow.process.native import native_kernels
from winnow.process.progress import report

if TYPE_CHECKING:
    from winnow.models.fast.fused.build import LayerCall
    from winnow.models.fast.fused.kernels import LayerKernels
    from winnow.models.fast.packed.decoder import PackedDecoder


_SEVERAL = "the model has layers of several kinds"


def optimize_model(
    model: PreTrainedModel,
    geometry: ModelGeometry,
    trained_len: int,
    *,
    blocks: BlockWeights | None = None,
    library: LibraryLayers | None = None,
) -> "tuple[PackedDecoder | None, dict[int, str]]":
    """Replace what can be replaced, layer by layer, so that no more than one layer's weights exist twice. A replacement
    that does not reproduce transformers' own layer is dropped, and the layer stays as it is.

    Args:
        blocks: which weights are in blocks, on a CPU; None: none.
        library: which are by a library, on a GPU; None: none.

    Returns:
        The model without transformers' code between its parts, where that gives the same logits: a step of few tokens
        is as long as its Python. And the reasons for which layers, by their number, are still transformers' own.
    """
    layers = decoder_layers(model, geometry.num_layers)
    if layers and blocks is None and _passes_fit(model):
        return None, _fuse_for_gpu(model, geometry, layers, trained_len, library)
    kernels = native_kernels() if model.device.type == "cpu" else None
    if kernels is None or not layers:
        widen_for_good(model)
        if blocks is not None:
            round_to_blocks(model, geometry.num_layers, blocks)
        return None, {}
    # They load the kernels, which an installation may lack.
    from winnow.models.fast.fused.build import (
        INTEGERS_TOLERANCE,
        ROUNDED_TOLERANCE,
        fuse_layer,
        record_calls,
        selection_is_harmless,
    )
    from winnow.models.fast.fused.kernels import LayerKernels
    from winnow.models.fast.fused.layer import FusedLayer, FusedNorm
    from winnow.models.fast.fused.parts import read_norm
    from winnow.models.fast.packed.extract import extract_parts

    layer_kernels = LayerKernels(kernels)
    plain = linear_maker(layer_kernels, model.dtype)
    narrow = plain if blocks is None else linear_maker(layer_kernels, model.dtype, blocks=blocks)
    off = ROUNDED_TOLERANCE if blocks is not None and blocks.kind is not None else None
    if blocks is not None and blocks.kind is None and model.dtype == torch.float32:
        off = INTEGERS_TOLERANCE
    hidden_size = model.get_input_embeddings().weight.shape[-1]
    if blocks is not None:
        _pack_kept_ends(model, layer_kernels, narrow, blocks)
    shape = (geometry.num_query_heads, geometry.num_kv_heads, geometry.head_dim)
    calls = record_calls(model, layers, trained_len)
    unfused: dict[int, str] = {}
    for index, call in enumerate(calls):
        report("packing layers", index, len(calls))
        layer = layers[index]
        linears = [part for part in layer.modules() if type(part) is nn.Linear]
        kept = [own.data for part in layer.modules() for own in getattr(part, "kept_blocks", {}).values()]
        weights = [*kept, *(part.weight for part in linears if own_blocks(part) is None)]
        make_linear = plain if blocks is None else narrow
        fused: FusedLayer | str = _SEVERAL
        if not (geometry.states or geometry.by_layer):
            with widened(layer):
                fused = fuse_layer(
                    layer, call, shape, layer_kernels, make_linear, tolerance=None if blocks is None else off
                )
        if isinstance(fused, FusedLayer):
            layers[index] = fused
        else:
            unfused[index] = fused
            with widened(layer):
                _pack_layer(
                    layer, call, layer_kernels, make_linear, tolerance=None if blocks is None else off
                )
        release_pages(weights)
    base = text_part(model)
    norm = read_norm(getattr(base, "norm", None), hidden_size)
    last = layers[-1]
    if isinstance(last, FusedLayer):
        if norm is not None:
            base.norm = FusedNorm(norm, layer_kernels)
        last.last_layer_only_wanted = True
        last.last_layer_only_wanted = selection_is_harmless(model, trained_len)
    _pack_head(model, layer_kernels, [plain] if blocks is None else [narrow, plain], trained_len)
    widen_for_good(model)
    trim_heap()
    try:
        return extract_parts(model, geometry.num_layers, trained_len), unfused
    except UnsupportedModelError:
        return None, unfused


def _passes_fit(model: PreTrainedModel) -> bool:
    """Return whether Triton computes passes where the model is, without importing it for a CPU."""
    return model.device.type == "cuda" and find_spec("triton") is not None


def _fuse_for_gpu(
    model: PreTrainedModel,
    geometry: ModelGeometry,
    layers: nn.ModuleList,
    trained_len: int,
    library: LibraryLayers | None,
) -> dict[int, str]:
    """Replace layers by fused ones where they compute the same, their products by cuBLAS's or a library's, joined."""
    from winnow.models.fast.fused.build import ROUNDED_TOLERANCE, fuse_layer, record_calls
    from winnow.models.fast.fused.layer import FusedLayer, FusedNorm
    from winnow.models.fast.fused.parts import read_norm
    from winnow.models.fast.fused.triton_passes import TritonPasses

    passes, unfused = TritonPasses(), {}
    shape = (geometry.num_query_heads, geometry.num_kv_heads, geometry.head_dim)
    several = bool(geometry.states or geometry.by_layer)
    calls = [] if several and library is None else record_calls(model, layers, trained_len)
    for index, call in enumerate(calls):
        make_linear = join_linears if library is None else library.join
        with widened(layers[index]):
            fused: FusedLayer | str = _SEVERAL
            if not several:
                fused = fuse_layer(
                    layers[index],
                    call,
                    shape,
                    passes,
                    make_linear,
                    tolerance=None if library is None else ROUNDED_TOLERANCE,
                )
            if isinstance(fused, FusedLayer):
                layers[index] = fused
                continue
            unfused[index] = fused
            if library is not None:
                _pack_layer(layers[index], call, None, make_linear, tolerance=ROUNDED_TOLERANCE)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    own = type(head) is nn.Linear and head.weight is not embedding.weight
    if library is not None and own:
        model.set_output_embeddings(library.join([head]))
    widen_for_good(model)
    if several:
        return dict.fromkeys(range(len(layers)), _SEVERAL)
    base = text_part(model)
    norm = read_norm(getattr(base, "norm", None), model.get_input_embeddings().weight.shape[-1])
    if norm is not None and not unfused:
        base.norm = FusedNorm(norm, passes)
    return unfused


@torch.inference_mode()
def _pack_layer(
    layer: nn.Module,
    call: "LayerCall",
    kernels: "LayerKernels | None",
    make: MakeLinear,
    *,
    tolerance: float | None,
) -> None:
    """Replace a layer's parts by fused and packed ones, or only by packed ones, unless it needs them as they were.
    Without kernels there are no fused parts, and experts stay."""
    from winnow.models.fast.fused.build import fuse_parts

    expected = call.run(layer)
    for fuses in (True, False):
        replaced = fuse_parts(layer, kernels, make) if fuses and kernels is not None else []
        replaced += pack_linears(layer, make, experts=kernels is not None)
        try:
            if call.run(layer).difference(expected, tolerance) is None:
                return
        except (AttributeError, RuntimeError, TypeError):  # it reads the weight by itself
            pass
        put_back(replaced)


def _pack_kept_ends(
    model: PreTrainedModel, kernels: "LayerKernels", make_linear: MakeLinear, blocks: BlockWeights
) -> None:
    """Pack embedding and head that were read in blocks, which both share if they were one."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    of_head, rows = own_blocks(head), own_blocks(embedding)
    packed = None
    if of_head is not None:
        model.set_output_embeddings(make_linear([head]))
        packed = model.get_output_embeddings().packed
    if rows is not None:
        if packed is None or rows is not of_head or blocks.kind is not None:
            packed = kernels.pack_blocks([rows], embedding.weight.dtype)
        model.set_input_embeddings(PackedEmbedding(packed, kernels, embedding_scale(embedding)))
    release_pages(own.data for own in (of_head, rows) if own is not None)


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
    tied = getattr(embedding, "weight", None) is head.weight  # one in blocks, packed already, has no weight
    for make_linear in makers:
        model.set_output_embeddings(make_linear([head]))
        if not tied or _share_rows(model, kernels, trained_len) or is_file_backed(head.weight):
            release_pages([head.weight])
            return
    model.set_output_embeddings(head)


def _share_rows(model: PreTrainedModel, kernels: "LayerKernels", trained_len: int) -> bool:
    """Let the embedding read its rows out of the packed head. Returns whether that leaves the model as it was, but for
    the rounding of a head in blocks."""
    from winnow.models.fast.fused.build import ROUNDED_TOLERANCE, close, trial_logits

    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    table = isinstance(embedding, nn.Embedding) and embedding.max_norm is None
    if not isinstance(head, PackedLinear) or not table:
        return False
    expected = trial_logits(model, trained_len)
    model.set_input_embeddings(PackedEmbedding(head.packed, kernels, embedding_scale(embedding)))
    try:
        found = trial_logits(model, trained_len)
        same = close(found, expected, ROUNDED_TOLERANCE) if head.in_blocks else torch.equal(found, expected)
    except (AttributeError, RuntimeError, TypeError):  # it reads the embedding's weight by itself
        same = False
    if not same:
        model.set_input_embeddings(embedding)
    return same
