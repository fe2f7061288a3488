"""Reader: from a packed model's directory to a model ready to run."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer
from torch import Tensor, nn

from winnow.attention import AttentionSpec
from winnow.config import ModelConfig
from winnow.errors import ConfigError, UnsupportedModelError
from winnow.models.fast.fused.kernels import LayerKernels, PackedWeight
from winnow.models.fast.fused.layer import FusedLayer, FusedNorm
from winnow.models.fast.fused.parts import Activation, LayerNorms, NormWeight
from winnow.models.fast.packed.decoder import PackedDecoder, RotaryEmbedding
from winnow.models.fast.packed.description import OTHERS, PACKED, Description, LayerNumbers, NormNumbers
from winnow.models.fast.packed_linear import PackedEmbedding, PackedLinear, ScaledEmbedding
from winnow.models.load.directory import sampling_defaults
from winnow.models.load.loaded import LoadedModel
from winnow.models.model.backend_tokenizer import BACKEND, BackendTokenizer
from winnow.models.model.blocks import BlockWeights
from winnow.models.model.context import ContextLimit
from winnow.models.model.damage import first_line
from winnow.models.model.tokens import end_tokens, load_tokenizer
from winnow.process.native import Kernels
from winnow.values.checks import require


def load_packed(
    path: Path, config: ModelConfig, kernels: Kernels, *, source: Path | None = None
) -> LoadedModel:
    """Load as `winnow.models.load.loader.load_model` does, from a directory that `winnow pack` wrote. `source` is the
    model that it stands for, for the user; None: it stands for itself."""
    description = Description.read(path)
    _check_options(path, description, config)
    reason = "as the model was packed" if source is None else "the model's own limit"
    limit = ContextLimit(description.trained_len, reason)
    wanted = config.max_model_len
    trained_len = limit.take(wanted)
    decoder = _Reader(path, description, LayerKernels(kernels)).decoder()
    tokenizer = _tokenizer(path, description)
    return LoadedModel(
        model=decoder,
        tokenizer=tokenizer,
        vocab_size=description.vocab_size,
        max_model_len=wanted or trained_len,
        eos_token_ids=end_tokens(description.eos_token_ids, tokenizer, description.vocab_size),
        geometry=description.geometry,
        trained_len=trained_len,
        sampling_defaults=sampling_defaults(source or path, config.generation_config),
        blocks=description.blocks,
    )


def _tokenizer(path: Path, description: Description) -> Any:
    load: Any = partial(load_tokenizer, path, description.tokenizer_class)
    if description.tokenizer is None or not (path / BACKEND).is_file():
        return load()
    try:
        return BackendTokenizer(Tokenizer.from_file(str(path / BACKEND)), description.tokenizer, load)
    except Exception as error:  # tokenizers raises plain `Exception`
        raise UnsupportedModelError(f"model: cannot read {path / BACKEND}: {first_line(error)}") from None


def _check_options(path: Path, description: Description, config: ModelConfig) -> None:
    dtype = description.dtype
    require(config.dtype in ("auto", dtype), "dtype", f"{dtype}, in which {path} is packed", config.dtype)
    blocks = BlockWeights.of(config)
    if blocks is not None and blocks != description.blocks:
        packed = "weight_dtype auto" if description.blocks is None else f"{description.blocks}"
        raise ConfigError(f"weight_dtype must be that in which {path} is packed, {packed}, got {blocks}")
    require(config.device in ("auto", "cpu"), "device", f"cpu, for which {path} is packed", config.device)
    plain, what = config.load_format == "auto", f"auto for {path}, which is packed"
    require(plain, "load_format", what, config.load_format)
    if not config.optimize:
        raise ConfigError(f"optimize must be on for {path}, which is packed")


class DecoderReader(ABC):
    """Reader that makes a decoder of a description, and of tensors by their names in a packed model."""

    _packed: Mapping[str, Tensor]
    _others: Mapping[str, Tensor]
    embeds_blocks: bool
    """Where the embedding does not share the head's rows, its own are in blocks."""

    def __init__(self, path: Path, description: Description, kernels: LayerKernels) -> None:
        self._path, self._description, self._kernels = path, description, kernels
        self._dtype: torch.dtype = getattr(torch, description.dtype)

    def decoder(self) -> PackedDecoder:
        description = self._description
        head = self._linear("head", description.hidden_size, description.vocab_size)
        if description.tied:
            embedding: nn.Module = PackedEmbedding(head.packed, self._kernels, description.embedding_scale)
        elif self.embeds_blocks:
            weight = self._weight("embedding", description.hidden_size, description.vocab_size)
            embedding = PackedEmbedding(weight, self._kernels, description.embedding_scale)
        else:
            rows = self._tensor("embedding", (description.vocab_size, description.hidden_size))
            scale = description.embedding_scale
            embedding = nn.Embedding.from_pretrained(rows) if scale is None else ScaledEmbedding(rows, scale)
        layers = [self._layer(index, numbers) for index, numbers in enumerate(description.layers)]
        layers[-1].last_layer_only_wanted = description.last_layer_only_wanted
        rotaries = [
            RotaryEmbedding(torch.tensor(rotary.frequencies, device="cpu"), rotary.scale, self._dtype)
            for rotary in description.rotaries
        ]
        norm = FusedNorm(self._norm("norm", description.hidden_size, description.norm), self._kernels)
        kinds = [layer.rotary for layer in description.layers]
        return PackedDecoder(embedding, rotaries, kinds, layers, norm, head).eval()

    def _layer(self, index: int, numbers: LayerNumbers) -> FusedLayer:
        description, name = self._description, f"layers.{index}"
        geometry, hidden = description.geometry, description.hidden_size
        query_heads, kv_heads, head_dim = geometry.num_query_heads, geometry.num_kv_heads, geometry.head_dim
        products: dict[str, nn.Module] = {
            "qkv": self._linear(f"{name}.qkv", hidden, (query_heads + 2 * kv_heads) * head_dim),
            "output": self._linear(f"{name}.output", query_heads * head_dim, hidden),
            "gate_up": self._linear(f"{name}.gate_up", hidden, 2 * description.inner_size),
            "down": self._linear(f"{name}.down", description.inner_size, hidden),
        }
        norms = {
            place: self._norm(f"{name}.{place}_norm", head_dim if place in ("query", "key") else hidden, norm)
            for place, norm in numbers.norms.items()
        }
        spec = AttentionSpec(numbers.scale, geometry.windows[index], numbers.softcap)
        shape, activation = (query_heads, kv_heads, head_dim), Activation[numbers.activation]
        return FusedLayer(index, LayerNorms(**norms), activation, products, spec, shape, self._kernels)

    def _linear(self, name: str, in_features: int, out_features: int) -> PackedLinear:
        weight = self._weight(name, in_features, out_features)
        bias_name = f"{name}.bias"
        bias = self._tensor(bias_name, (out_features,)) if bias_name in self._others else None
        return PackedLinear(weight, bias, self._kernels)

    @abstractmethod
    def _weight(self, name: str, in_features: int, out_features: int) -> PackedWeight: ...

    def _norm(self, name: str, size: int, numbers: NormNumbers) -> NormWeight:
        return NormWeight(self._tensor(name, (size,)), numbers.eps, one_plus=numbers.one_plus)

    def _tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        dtype = self._dtype if dtype is None else dtype
        tensor = self._packed.get(name, self._others.get(name))
        if tensor is None:
            raise UnsupportedModelError(f"model: {self._path} lacks the tensor {name}")
        if tensor.shape != shape or tensor.dtype != dtype:
            raise UnsupportedModelError(
                f"model: {name} in {self._path} must be {dtype} of shape {shape}, "
                f"is {tensor.dtype} of {tuple(tensor.shape)}"
            )
        return tensor


class _Reader(DecoderReader):
    def __init__(self, path: Path, description: Description, kernels: LayerKernels) -> None:
        super().__init__(path, description, kernels)
        panels: list[tuple[object, object]] = [(kernels.panel_shape(self._dtype), description.panel)]
        if description.block_panel is not None:
            panels.append((kernels.block_panel, description.block_panel))
        for panel, packed in panels:
            if panel != packed:
                raise UnsupportedModelError(
                    f"model: {path} is packed for a processor with panels of {packed}, and this one's are {panel}; "
                    f"pack {description.packed_from} again here"
                )
        self._packed, self._others = self._open(PACKED), self._open(OTHERS)
        self.embeds_blocks = "embedding.panels" in self._others

    def _weight(self, name: str, in_features: int, out_features: int) -> PackedWeight:
        kernels = self._kernels
        if f"{name}.panels" not in self._others:
            packed = self._tensor(name, (kernels.packed_size(in_features, out_features),))
            return PackedWeight(packed, in_features, out_features)
        panel = kernels.block_panel
        panels = self._tensor(f"{name}.panels", (-(-out_features // panel), 2), torch.int64)
        ends = [at + kernels.panel_bytes(kind, in_features) for at, kind in panels.tolist()]
        packed = self._tensor(name, (ends[-1],), torch.uint8)
        if panels[:, 0].tolist() != [0, *ends[:-1]]:
            others = self._path / OTHERS
            raise UnsupportedModelError(f"model: {others}: panels of {name} do not follow one another")
        return PackedWeight(packed, in_features, out_features, self._dtype, panels)

    def _open(self, file: str) -> dict[str, Tensor]:
        """Return views of a mapped file: nothing is read yet."""
        try:
            with safe_open(self._path / file, framework="pt") as tensors:
                return {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise UnsupportedModelError(f"model: cannot read {self._path / file}: {error}") from None
