"""Writer: from a loaded model to a packed one."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from winnow.errors import UnsupportedModelError
from winnow.models.bind.geometry import decoder_layers
from winnow.models.fast.fused.build import trial_logits
from winnow.models.fast.fused.kernels import PackedWeight
from winnow.models.fast.fused.layer import FusedLayer, FusedNorm
from winnow.models.fast.fused.parts import NormWeight
from winnow.models.fast.packed.decoder import PackedDecoder, RotaryEmbedding
from winnow.models.fast.packed.description import (
    FORMAT,
    OTHERS,
    PACKED,
    Description,
    LayerNumbers,
    NormNumbers,
    RotaryNumbers,
)
from winnow.models.fast.packed_linear import PackedEmbedding, PackedLinear, ScaledEmbedding, embedding_scale
from winnow.models.load.backend_tokenizer import TokenizerNumbers
from winnow.models.load.kinds import text_part
from winnow.models.load.loaded import LoadedModel
from winnow.models.load.tokens import tokenizer_class
from winnow.process.digest import BESIDE_WEIGHTS, BY_TOKENIZER


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


# A cache line: weights begin at a multiple of it.
_ALIGNMENT = 64
_COPIED = (*BESIDE_WEIGHTS, "LICENSE*", "NOTICE*")


def write_packed(
    loaded: LoadedModel,
    source: Path,
    out: Path,
    *,
    decoder: PackedDecoder | None = None,
    tokenizer: Path | None = None,
) -> None:
    """Write a model that was loaded from `source`, with its tokenizer's files, into a new or empty directory `out`.
    Raises UnsupportedModelError: the model computes something that packing would lose; nothing is written.

    Args:
        decoder: the model's parts, if they were extracted already.
        tokenizer: directory of the tokenizer that takes the place of the model's own.
    """
    decoder = decoder or extract_parts(loaded.model, loaded.geometry.num_layers, loaded.trained_len)
    description = describe(decoder, loaded, source.resolve().name)
    out.mkdir(parents=True, exist_ok=True)
    if source.is_file():
        _write_apart(loaded, out)
    for folder in (source,) if tokenizer is None else (source, tokenizer):
        for path in sorted({path for pattern in _COPIED for path in folder.glob(pattern)}):
            of_tokenizer = tokenizer is not None and any(path.match(pattern) for pattern in BY_TOKENIZER)
            wanted = path.is_file() and not path.name.endswith(".index.json")
            if wanted and of_tokenizer == (folder == tokenizer):
                copy = out / path.relative_to(folder)
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, copy)
    _save_aligned(packed_tensors(decoder), out / PACKED)
    save_file({name: tensor.contiguous() for name, tensor in other_tensors(decoder)}, out / OTHERS)
    numbers = TokenizerNumbers.write(loaded.tokenizer, out)
    replace(description, tokenizer=numbers).write(out)


def _write_apart(loaded: LoadedModel, out: Path) -> None:
    """Write what a GGUF file holds beside weights, as a directory has it."""
    model: Any = loaded.model
    config = model.config.to_dict()
    config.pop("quantization_config", None)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if loaded.tokenizer is not None:
        loaded.tokenizer.save_pretrained(out)


def describe(decoder: PackedDecoder, loaded: LoadedModel, name: str) -> Description:
    layers: list[Any] = list(decoder.layers)
    rotaries: list[Any] = list(decoder.rotaries)
    return Description(
        format=FORMAT,
        packed_from=name,
        dtype=str(loaded.dtype).removeprefix("torch."),
        panel=decoder.head.kernels.panel_shape(loaded.dtype),
        geometry=loaded.geometry,
        vocab_size=loaded.vocab_size,
        hidden_size=decoder.head.in_features,
        inner_size=layers[0].down.in_features,
        trained_len=loaded.trained_len,
        eos_token_ids=tuple(sorted(loaded.eos_token_ids)),
        tokenizer_class=tokenizer_class(loaded.tokenizer),
        rotaries=tuple(RotaryNumbers(tuple(x.inv_freq.tolist()), x.scale) for x in rotaries),
        tied=getattr(decoder.embedding, "table", None) is decoder.head.packed,
        last_layer_only_wanted=layers[-1].last_layer_only_wanted,
        norm=_numbers(decoder.norm.norm),
        layers=tuple(map(_layer_numbers, layers, decoder.layer_rotaries)),
        blocks=loaded.blocks,
        block_panel=None if loaded.blocks is None else decoder.head.kernels.block_panel,
        embedding_scale=getattr(decoder.embedding, "scale", None),
    )


def packed_tensors(decoder: PackedDecoder) -> Iterator[tuple[str, Tensor]]:
    for name, weight in weights(decoder):
        yield name, weight.packed


def other_tensors(decoder: PackedDecoder) -> Iterator[tuple[str, Tensor]]:
    yield "norm", decoder.norm.norm.weight
    if isinstance(decoder.embedding, nn.Embedding | ScaledEmbedding):
        yield "embedding", decoder.embedding.weight
    for index, layer in enumerate(decoder.layers):
        for place, norm in vars(layer.norms).items():
            if norm is not None:
                yield f"layers.{index}.{place}_norm", norm.weight
    for name, product in products(decoder):
        if product.bias is not None:
            yield f"{name}.bias", product.bias
    for name, weight in weights(decoder):
        if weight.panels is not None:
            yield f"{name}.panels", weight.panels


def weights(decoder: PackedDecoder) -> Iterator[tuple[str, PackedWeight]]:
    """Yield the packed weights by name, that of an embedding which the head does not share among them."""
    for name, product in products(decoder):
        yield name, product.packed
    table = getattr(decoder.embedding, "table", None)
    if table is not None and table is not decoder.head.packed:
        yield "embedding", table


def products(decoder: PackedDecoder) -> Iterator[tuple[str, PackedLinear]]:
    yield "head", decoder.head
    for index, layer in enumerate(decoder.layers):
        for name in ("qkv", "output", "gate_up", "down"):
            yield f"layers.{index}.{name}", getattr(layer, name)


def _save_aligned(tensors: Iterator[tuple[str, Tensor]], path: Path) -> None:
    """Write tensors whose sizes are multiples of `_ALIGNMENT` so that each lies at a multiple of it in the file."""
    named = dict(tensors)
    save_file(named, path, {"padding": ""})
    with path.open("rb") as file:
        begin = 8 + int.from_bytes(file.read(8), "little")
    if begin % _ALIGNMENT:
        save_file(named, path, {"padding": " " * (-begin % _ALIGNMENT)})


def _layer_numbers(layer: FusedLayer, rotary: int) -> LayerNumbers:
    norms = {place: _numbers(norm) for place, norm in vars(layer.norms).items() if norm is not None}
    return LayerNumbers(layer.spec.scale, layer.spec.softcap, layer.activation.name, norms, rotary)


def _numbers(norm: NormWeight) -> NormNumbers:
    return NormNumbers(norm.eps, norm.one_plus)
