"""The numbers of a model that memory and time depend on: from a configuration, a GGUF file, or a row of presets."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from winnow.errors import ConfigError, UnsupportedModelError, known_names

if TYPE_CHECKING:
    from winnow.cache.recurrent import StateShape

DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one weight, by dtype of the model."""


@dataclass(frozen=True)
class ModelShape:
    """A decoder.

    Attributes:
        num_layers: those that attend; `depth` all of them, None: the same.
        num_kv_heads, head_dim: the largest of any layer; `shapes` are those of each, where they differ.
        num_params: weights in all; `active_params` those that one token multiplies with, fewer in a mixture of experts;
            `lookup_params` those of an embedding that only looks rows up.
        vocab_size: tokens of the vocabulary; logits of a step are as wide.
        dtype: that the configuration names, of weights and of KVs.
        windows: sliding window of each layer; None: it attends to everything.
        latent: as `ModelGeometry` has it.
        states: that layers keep of a sequence beside KVs, as of a model in bfloat16.
        file_bytes: of the weights as they lie on disk; None: they are not there.
    """

    name: str
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    num_params: int
    active_params: int
    lookup_params: int = 0
    max_model_len: int | None = None
    dtype: str = "bfloat16"
    windows: tuple[int | None, ...] = ()
    file_bytes: int | None = None
    depth: int | None = None
    shapes: tuple[tuple[int, int], ...] = ()
    latent: bool = False
    states: tuple["StateShape", ...] = ()

    @property
    def rows(self) -> int:
        """Rows of a sequence: one per layer and KV head."""
        return sum(heads for heads, _ in self.shapes) or self.num_layers * self.num_kv_heads

    @property
    def stored_bytes(self) -> int:
        """Bytes of the weights as they lie on disk, or would."""
        return self.file_bytes or self.num_params * DTYPE_BYTES[self.dtype]

    def state_bytes(self, dtype: str) -> int:
        """Bytes of a sequence's states, where activations have that dtype."""
        own = ("bfloat16", dtype)
        return sum(replace(each, dtype=each.dtype.replace(*own)).nbytes for each in self.states)

    def kv_elements(self, num_tokens: int = 1) -> int:
        """Elements of the keys and values of a number of tokens."""
        return (1 if self.latent else 2) * self.rows * self.head_dim * num_tokens

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"states": len(self.states)}


@dataclass(frozen=True)
class _LlamaRow:
    """A preset: the numbers of config.json that the published model has."""

    layers: int
    hidden: int
    query_heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    context: int
    tied: bool = False
    gated: bool = True

    def shape(self, name: str) -> ModelShape:
        """Weights are embeddings, projections, MLPs of three matrices (two if not gated), norms."""
        attention = self.hidden * self.head_dim * (2 * self.query_heads + 2 * self.kv_heads)
        mlp = (3 if self.gated else 2) * self.hidden * self.intermediate
        embedding = self.vocab * self.hidden
        active = embedding + self.layers * (attention + mlp + 2 * self.hidden) + self.hidden
        lookup = 0 if self.tied else embedding
        heads = self.query_heads, self.kv_heads, self.head_dim
        params = active + lookup, active, lookup
        return ModelShape(name, self.layers, *heads, self.hidden, self.vocab, *params, self.context)


_PRESETS: Mapping[str, _LlamaRow] = {
    "llama-2-7b": _LlamaRow(32, 4096, 32, 32, 128, 11008, 32000, 4096),
    "llama-2-13b": _LlamaRow(40, 5120, 40, 40, 128, 13824, 32000, 4096),
    "llama-2-70b": _LlamaRow(80, 8192, 64, 8, 128, 28672, 32000, 4096),
    "llama-3-8b": _LlamaRow(32, 4096, 32, 8, 128, 14336, 128256, 8192),
    "llama-3.1-8b": _LlamaRow(32, 4096, 32, 8, 128, 14336, 128256, 131072),
    "llama-3-70b": _LlamaRow(80, 8192, 64, 8, 128, 28672, 128256, 8192),
    "llama-3.1-70b": _LlamaRow(80, 8192, 64, 8, 128, 28672, 128256, 131072),
    "llama-3.1-405b": _LlamaRow(126, 16384, 128, 8, 128, 53248, 128256, 131072),
    "llama-3.2-1b": _LlamaRow(16, 2048, 32, 8, 64, 8192, 128256, 131072, tied=True),
    "mistral-7b": _LlamaRow(32, 4096, 32, 8, 128, 14336, 32000, 32768),
    "vicuna-7b": _LlamaRow(32, 4096, 32, 32, 128, 11008, 32000, 4096),
    "opt-6.7b": _LlamaRow(32, 4096, 32, 32, 128, 16384, 50272, 2048, tied=True, gated=False),
    "smollm2-135m": _LlamaRow(30, 576, 9, 3, 64, 1536, 49152, 8192, tied=True),
}
MODELS: Mapping[str, ModelShape] = {name: row.shape(name) for name, row in _PRESETS.items()} | {
    # What the paper guesses, and no more: its weights are 800 GB.
    "gpt-4-class": ModelShape(
        "gpt-4-class", 120, 128, 16, 128, 16384, 100_000, 400_000_000_000, 400_000_000_000
    )
}
"""Models by name: those of the papers, and a few that people ask about."""


def find_model(model: str | Path) -> ModelShape:
    """The shape of a preset, a directory with config.json, a config.json, or a GGUF file. Nothing is fetched."""
    path = Path(model)
    if str(model).lower() in MODELS and not path.exists():
        return MODELS[str(model).lower()]
    if path.is_dir() and (path / "config.json").is_file():
        size = sum(each.stat().st_size for each in path.glob("*.safetensors"))
        return replace(_of_config(path / "config.json"), file_bytes=size or None)
    if path.is_file():
        if path.suffix == ".json":
            return _of_config(path)
        from winnow.models.load.gguf.file import GgufFile

        values = GgufFile.open(path).config_values()
        return replace(shape_of_config(values, path.name), file_bytes=path.stat().st_size)
    raise ConfigError(
        "model must be a directory with config.json, a config.json, a GGUF file or a preset, "
        f"got {str(model)!r}; {known_names(str(model), MODELS)}"
    )


def _of_config(path: Path) -> ModelShape:
    from winnow.models.model.damage import read_object

    return shape_of_config(read_object(path), path.parent.name or path.name)


def shape_of_config(values: Mapping[str, Any], name: str) -> ModelShape:
    """The shape that a configuration describes; its weights are counted on a model without memory."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from winnow.models.bind.geometry_probe import predict_geometry

    kind = values.get("model_type")
    if not isinstance(kind, str):
        raise UnsupportedModelError(f"model: {name}: config.json names no model_type")
    rest = {key: value for key, value in values.items() if key not in ("model_type", "quantization_config")}
    try:
        config = AutoConfig.for_model(kind, **rest)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False, dtype=torch.bfloat16)
    except Exception as error:  # configurations are strangers' files, and each class fails in its own way
        raise UnsupportedModelError(
            f"model: {name}: {kind!r} is not a causal model that transformers can build from this config.json: "
            f"{' '.join(str(error).split()):.200}"
        ) from error
    text = config.get_text_config()
    num_params = sum(parameter.numel() for parameter in model.parameters())  # shared ones once
    embedding = model.get_input_embeddings().weight
    tied = model.get_output_embeddings() is None or model.get_output_embeddings().weight is embedding
    lookup = 0 if tied else embedding.numel()
    # As the engine takes it on a GPU where the configuration names none.
    dtype = str(values.get("dtype") or values.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    active = _active(model, text, num_params) - lookup
    geometry = predict_geometry(model)
    heads = geometry.num_query_heads, geometry.num_kv_heads, geometry.head_dim
    return ModelShape(
        name,
        geometry.num_layers,
        *heads,
        *(text.hidden_size, text.vocab_size),
        *(num_params, active, lookup),
        getattr(text, "max_position_embeddings", None),
        dtype if dtype in DTYPE_BYTES else "float32",
        geometry.windows if any(geometry.windows) else (),
        depth=text.num_hidden_layers,
        shapes=tuple(shape[1:] for shape in geometry.by_layer),
        latent=geometry.latent,
        states=geometry.states,
    )


def _active(model: Any, text: Any, num_params: int) -> int:
    """Return weights that one token multiplies with: of a mixture, those of the experts that it is sent to."""
    named = (getattr(text, name, None) for name in ("num_local_experts", "num_experts", "n_routed_experts"))
    experts, chosen = next(filter(None, named), None), getattr(text, "num_experts_per_tok", None)
    if not experts or not chosen:
        return num_params
    routed = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    return num_params - routed + routed * chosen // experts
