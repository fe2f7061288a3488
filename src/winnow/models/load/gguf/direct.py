"""A decoder of a GGUF file's own blocks, by its header alone: transformers takes seconds to import.

Only what is named here is read so. Any other file, or one with a key or a tensor more, goes by transformers' code,
which also tells what is wrong with it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from winnow.config import ModelConfig
from winnow.models.fast.fused.kernels import LayerKernels, PackedWeight
from winnow.models.fast.packed.description import (
    FORMAT,
    Description,
    LayerNumbers,
    NormNumbers,
    RotaryNumbers,
)
from winnow.models.load.directory import sampling_defaults
from winnow.models.load.gguf.file import GgufFile
from winnow.models.load.gguf.header import GgufHeader
from winnow.models.load.gguf.tokenizer import read_backend
from winnow.models.load.loaded import LoadedModel
from winnow.models.load.packed.read import DecoderReader
from winnow.models.model.backend_tokenizer import BackendTokenizer
from winnow.models.model.blocks import RAW, Blocks, BlockWeights
from winnow.models.model.context import ContextLimit
from winnow.models.model.geometry import ModelGeometry
from winnow.models.model.tokens import end_tokens
from winnow.process.native import Kernels
from winnow.process.progress import report


@dataclass(frozen=True)
class _Kind:
    """What llama.cpp's name of an architecture stands for beside Llama's layers."""

    turns: bool = False  # rows of queries and keys lie in the order in which llama.cpp turns pairs of them
    biases: tuple[str, ...] = ()
    head_norms: bool = False


_KINDS = {
    "llama": _Kind(turns=True),
    "qwen2": _Kind(biases=("attn_q", "attn_k", "attn_v")),
    "qwen3": _Kind(head_norms=True),
}
_NUMBERS = (
    *("block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count"),
    *("attention.head_count_kv", "attention.layer_norm_rms_epsilon", "rope.freq_base"),
)
_SAID_TWICE = ("vocab_size", "rope.dimension_count", "attention.key_length", "attention.value_length")
_PRODUCTS = {
    "qkv": ("attn_q", "attn_k", "attn_v"), "output": ("attn_output",),
    "gate_up": ("ffn_gate", "ffn_up"), "down": ("ffn_down",),
}  # fmt: skip
_NORMS = {"input": "attn_norm", "post": "ffn_norm", "query": "attn_q_norm", "key": "attn_k_norm"}


def load_directly(path: Path, config: ModelConfig, kernels: Kernels) -> LoadedModel | None:
    """Return the model of a file whose blocks linear layers keep; None: it is none of those that are read so. Raises
    ConfigError: `max_model_len` beyond what the model can do."""
    file = GgufFile.open(path)
    found = _describe(file.header, config.dtype, LayerKernels(kernels))
    backend = None if found is None else read_backend(file.header.values)
    if found is None or backend is None:
        return None
    limit = ContextLimit(found.trained_len, "the model's max_position_embeddings")
    trained_len = limit.take(config.max_model_len)
    tokenizer: Any = BackendTokenizer(*backend, lambda: GgufFile.open(path).tokenizer())
    return LoadedModel(
        model=_Reader(file.header, found, LayerKernels(kernels)).decoder(),
        tokenizer=tokenizer,
        vocab_size=found.vocab_size,
        max_model_len=config.max_model_len or trained_len,
        eos_token_ids=end_tokens(file.end_tokens(), tokenizer, found.vocab_size),
        geometry=found.geometry,
        trained_len=trained_len,
        sampling_defaults=sampling_defaults(path, config.generation_config),
        blocks=found.blocks,
    )


def _describe(header: GgufHeader, dtype: str, kernels: LayerKernels) -> Description | None:
    kind, begin = _KINDS.get(header.architecture), f"{header.architecture}."
    said = {key.removeprefix(begin): each for key, each in header.values.items() if key.startswith(begin)}
    tokens = header.values.get("tokenizer.ggml.tokens", ())
    if kind is None or not {*_NUMBERS} <= {*said} <= {*_NUMBERS, *_SAID_TWICE}:
        return None
    layers, context, hidden, inner, heads, kv_heads, eps, base = (said[name] for name in _NUMBERS)
    if not all(type(each) is int and each > 0 for each in (layers, context, hidden, inner, heads, kv_heads)):
        return None
    size = said.get("attention.key_length", hidden // heads)
    same = {"vocab_size": len(tokens), **dict.fromkeys(_SAID_TWICE[1:], size)}
    shapes = _shapes(kind, layers, hidden, inner, (heads * size, kv_heads * size), size)
    own = {tensor.name: tensor for tensor in header.tensors}
    tied = "output.weight" not in own
    shapes |= {name: (len(tokens), hidden) for name in ("token_embd.weight", "output.weight")[: 2 - tied]}
    if any(said.get(name, number) != number for name, number in same.items()) or own.keys() != shapes.keys():
        return None
    for name, tensor in own.items():
        kind_name = tensor.kind.name
        if tensor.shape != shapes[name] or (kind_name not in RAW if tensor.shape[1:] else kind_name != "F32"):
            return None
    frequencies = 1.0 / base ** (torch.arange(0, size, 2, device="cpu").float() / size)
    norm, places = NormNumbers(eps, False), tuple(_NORMS)[: 4 if kind.head_norms else 2]
    layer = LayerNumbers(size**-0.5, None, "silu", dict.fromkeys(places, norm))
    try:
        return Description(
            format=FORMAT, packed_from=header.path.name, dtype=dtype, panel=kernels.panel_shape(getattr(torch, dtype)),
            geometry=ModelGeometry(layers, heads, kv_heads, size, (None,) * layers), vocab_size=len(tokens),
            hidden_size=hidden, inner_size=inner, trained_len=context, eos_token_ids=(), tokenizer_class=None,
            rotaries=(RotaryNumbers(tuple(frequencies.tolist()), 1.0),), tied=tied, last_layer_only_wanted=True,
            norm=norm, layers=(layer,) * layers, blocks=BlockWeights(), block_panel=kernels.block_panel,
        )  # fmt: skip
    except ValueError:
        return None


def _shapes(
    kind: _Kind, layers: int, hidden: int, inner: int, attended: tuple[int, int], size: int
) -> dict[str, tuple[int, ...]]:
    """Return the tensors of all layers and the last norm, by name."""
    queries, keys = attended
    of_layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,), "ffn_norm": (hidden,), "attn_output": (hidden, queries), "attn_q": (queries, hidden),
        "attn_k": (keys, hidden), "attn_v": (keys, hidden), "ffn_gate": (inner, hidden), "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner), **({"attn_q_norm": (size,), "attn_k_norm": (size,)} if kind.head_norms else {}),
    }  # fmt: skip
    named = {f"{name}.weight": shape for name, shape in of_layer.items()}
    named |= {f"{name}.bias": of_layer[name][:1] for name in kind.biases}
    found = {f"blk.{index}.{name}": shape for index in range(layers) for name, shape in named.items()}
    return found | {"output_norm.weight": (hidden,)}


class _Reader(DecoderReader):
    def __init__(self, header: GgufHeader, description: Description, kernels: LayerKernels) -> None:
        super().__init__(header.path, description, kernels)
        self._packed, self.embeds_blocks = {}, True
        self._header, self._tensors = header, {tensor.name: tensor for tensor in header.tensors}
        self._kind, self._read = _KINDS[header.architecture], 0
        others = {"norm": self._numbers("output_norm.weight")}
        for index in range(len(description.layers)):
            begin, name = f"blk.{index}.", f"layers.{index}"
            norms = {f"{name}.{place}_norm": f"{begin}{own}.weight" for place, own in _NORMS.items()}
            others |= {place: self._numbers(own) for place, own in norms.items() if own in self._tensors}
            if self._kind.biases:
                biases = [self._numbers(f"{begin}{own}.bias") for own in self._kind.biases]
                others |= {f"{name}.qkv.bias": torch.cat(biases)}
        self._others = others

    def _numbers(self, name: str) -> Tensor:
        return torch.from_numpy(np.array(self._header.array(self._tensors[name]))).to(self._dtype)

    def _weight(self, name: str, in_features: int, out_features: int) -> PackedWeight:
        head = "output.weight" if "output.weight" in self._tensors else "token_embd.weight"
        parts = [head if name == "head" else "token_embd.weight"]
        if name not in ("head", "embedding"):
            _, index, product = name.split(".")
            parts = [f"blk.{index}.{own}.weight" for own in _PRODUCTS[product]]
        report("reading weights", self._read, sum(each.nbytes for each in self._header.tensors), "B")
        self._read += sum(self._tensors[part].nbytes for part in parts)
        return self._kernels.pack_blocks([self._blocks(part) for part in parts], self._dtype)

    def _blocks(self, name: str) -> Blocks:
        tensor, geometry = self._tensors[name], self._description.geometry
        rows = torch.from_numpy(self._header.array(tensor))
        heads = {"attn_q": geometry.num_query_heads, "attn_k": geometry.num_kv_heads}
        count = heads.get(name.split(".")[-2])
        if self._kind.turns and count is not None:
            rows = rows.view(count, -1, 2, rows.shape[-1]).transpose(1, 2).reshape(rows.shape)
        return Blocks(tensor.kind.name, rows)
