"""Parts of an optimized model of transformers, taken out of it: embedding, fused layers, norm, head."""

from typing import Any

import torch
from torch import Tensor, nn

from winnow.errors import UnsupportedModelError
from winnow.models.fast.fused.build import trial_logits
from winnow.models.fast.fused.layer import FusedLayer, FusedNorm
from winnow.models.fast.packed.decoder import PackedDecoder, RotaryEmbedding
from winnow.models.fast.packed_linear import PackedEmbedding, PackedLinear, ScaledEmbedding, embedding_scale
from winnow.models.model.geometry import decoder_layers
from winnow.models.model.kinds import text_part


@torch.inference_mode()
def extract_parts(model: Any, num_layers: int, trained_len: int) -> PackedDecoder:
    """Return a decoder of the parts of an optimized model of transformers, which are shared; the code between them is
    not. Raises UnsupportedModelError: the model is more than these parts."""
    class_name, dtype = type(model).__name__, model.dtype

    def need(holds: bool, what: str) -> None:
        if not holds:
            raise UnsupportedModelError(f"{class_name} cannot be packed: {what}")

    layers: list[Any] = list(decoder_layers(model, num_layers))
    need(bool(layers), "its layers cannot be identified")
    for index, layer in enumerate(layers):
        fused = isinstance(layer, FusedLayer) and layer.is_native
        need(fused, f"layer {index} has no fused form on this processor in {dtype}")
        spec = layer.spec
        plain = spec.sinks is None and spec.slopes is None and not spec.chunked
        need(plain, f"layer {index} has attention sinks, slopes or chunks")
    base = text_part(model)
    norm: Any = getattr(base, "norm", None)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    need(isinstance(norm, FusedNorm), "its last norm has no fused form")
    need(isinstance(head, PackedLinear), "its head is not packed")
    plain = isinstance(embedding, nn.Embedding) and embedding.max_norm is None
    need(plain or isinstance(embedding, PackedEmbedding), "its embedding is more than a table")
    scale = embedding_scale(embedding)
    if plain and scale is not None:
        embedding = ScaledEmbedding(embedding.weight, scale)
    kinds = _rotation_kinds(model, num_layers)
    places = sorted(set(kinds))
    rotaries = [_rotary(getattr(base, "rotary_emb", None), kind, dtype) for kind in places]
    need(None not in rotaries, "its rotary embedding is of a kind of its own")
    known = [each for each in rotaries if each is not None]
    decoder = PackedDecoder(embedding, known, [places.index(kind) for kind in kinds], layers, norm, head)
    expected = trial_logits(model, trained_len)
    found = trial_logits(decoder, trained_len, model.config.get_text_config().vocab_size)
    need(torch.equal(found, expected), "its forward does more than its embedding, layers, norm and head")
    return decoder


def _rotation_kinds(model: Any, num_layers: int) -> list[str]:
    """Return for each layer the beginning of its rotation's names: nothing, where all layers share one."""
    if isinstance(getattr(getattr(text_part(model), "rotary_emb", None), "inv_freq", None), Tensor):
        return [""] * num_layers
    kinds = getattr(model.config.get_text_config(), "layer_types", None)
    return [f"{kind}_" for kind in kinds or [""] * num_layers]


def _rotary(rotary: Any, kind: str, dtype: torch.dtype) -> RotaryEmbedding | None:
    frequencies = getattr(rotary, f"{kind}inv_freq", None)
    scale = getattr(rotary, f"{kind}attention_scaling", None)
    if not isinstance(frequencies, Tensor) or frequencies.ndim != 1 or not isinstance(scale, float | int):
        return None
    return RotaryEmbedding(frequencies.float(), float(scale), dtype)
