"""Writer: from a loaded model to a packed one."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

from winnow.models.fast.fused.kernels import PackedWeight
from winnow.models.fast.fused.layer import FusedLayer
from winnow.models.fast.fused.parts import NormWeight
from winnow.models.fast.packed.decoder import PackedDecoder
from winnow.models.fast.packed.description import (
    FORMAT,
    OTHERS,
    PACKED,
    Description,
    LayerNumbers,
    NormNumbers,
    RotaryNumbers,
)
from winnow.models.fast.packed.extract import extract_parts
from winnow.models.fast.packed_linear import PackedLinear, ScaledEmbedding
from winnow.models.load.loaded import LoadedModel
from winnow.models.model.backend_tokenizer import TokenizerNumbers
from winnow.models.model.tokens import tokenizer_class
from winnow.process.digest import BESIDE_WEIGHTS, BY_TOKENIZER

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
