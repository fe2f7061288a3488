"""The directory of a packed model, and what the model is apart from its tensors, as JSON."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from winnow.errors import UnsupportedModelError
from winnow.models.model.backend_tokenizer import TokenizerNumbers
from winnow.models.model.blocks import BlockWeights
from winnow.models.model.geometry import ModelGeometry
from winnow.values.checks import check_choice, require

DESCRIPTION = "winnow.json"
"""All that is no tensor; written last, so that its presence says that the directory is whole."""
PACKED = "packed.safetensors"
"""Packed weights, each at an address that suits the kernels."""
OTHERS = "others.safetensors"
"""Norms and biases, and an embedding that the head does not share."""
FORMAT = 5
_DTYPES = ("float32", "bfloat16", "float16")
_ACTIVATIONS = ("silu", "gelu_tanh")
NORMS = ("input", "query", "key", "post", "output", "down")
"""Names of a layer's norms; `winnow.models.fast.fused.parts.LayerNorms` tells where they stand."""


@dataclass(frozen=True)
class NormNumbers:
    eps: float
    one_plus: bool  # rows are multiplied by 1 + weight


@dataclass(frozen=True)
class RotaryNumbers:
    frequencies: tuple[float, ...]  # pairs turn by position * frequency
    scale: float  # factor of cosines and sines


@dataclass(frozen=True)
class LayerNumbers:
    scale: float
    softcap: float | None
    activation: str
    norms: dict[str, NormNumbers]  # by place, one of `NORMS`; in the file each has a field of its own
    rotary: int = 0  # index of the model's rotation that it takes


@dataclass(frozen=True)
class Description:
    """Description of a model: embedding - layers - norm - head."""

    format: int
    packed_from: str
    """Name of the directory that it was packed from."""
    dtype: str
    panel: tuple[int, int]
    """Rows of a panel, and how many elements of a row lie together: what the processor's kernels read."""
    geometry: ModelGeometry
    vocab_size: int
    hidden_size: int
    inner_size: int
    """Between gate, up and down."""
    trained_len: int
    eos_token_ids: tuple[int, ...]
    tokenizer_class: str | None
    """The tokenizer's, where transformers exports it."""
    rotaries: tuple[RotaryNumbers, ...]
    tied: bool
    """The embedding's rows are the head's."""
    last_layer_only_wanted: bool
    norm: NormNumbers
    layers: tuple[LayerNumbers, ...]
    blocks: BlockWeights | None = None
    block_panel: int | None = None
    """Rows of a panel of weights in blocks."""
    embedding_scale: float | None = None
    """Factor of the embedding's rows; None: they stay as they are."""
    tokenizer: TokenizerNumbers | None = None
    """Numbers of the tokenizer's backend, where that does for texts; None: only the tokenizer's own files are there."""

    def __post_init__(self) -> None:
        # The kernels trust these numbers; sizes are also checked against the tensors.
        pair = len(self.panel) == 2 and all(map(_is_count, self.panel))
        require(pair, "panel", "two whole numbers above 0", self.panel)
        both = _is_count(self.block_panel) if self.blocks is not None else self.block_panel is None
        require(both, "block_panel", "a whole number above 0 where blocks are", self.block_panel)
        geometry, together = self.geometry, self.panel[1]
        counts = asdict(geometry)
        counts |= {n: getattr(self, n) for n in ("vocab_size", "hidden_size", "inner_size", "trained_len")}
        del counts["windows"]
        for name in ("states", "by_layer", "latent", "chunked"):
            others = counts.pop(name)
            require(not others, name, "none in a packed model", others)
        for name, count in counts.items():
            require(_is_count(count), name, "a whole number above 0", count)
        check_choice("dtype", self.dtype, _DTYPES)
        shared = geometry.num_query_heads % geometry.num_kv_heads == 0
        require(shared, "num_query_heads", f"a multiple of {geometry.num_kv_heads}", geometry.num_query_heads)
        for name in ("hidden_size", "inner_size"):
            require(counts[name] % together == 0, name, f"a multiple of {together}", counts[name])
        windows = all(window is None or _is_count(window) for window in geometry.windows)
        of_all = len(geometry.windows) == geometry.num_layers
        entries = f"{geometry.num_layers} of whole numbers above 0 or null"
        require(windows and of_all, "windows", entries, geometry.windows)
        require(len(self.layers) == geometry.num_layers, "layers", f"{geometry.num_layers}", len(self.layers))
        norms = [self.norm, *(norm for layer in self.layers for norm in layer.norms.values())]
        numbers = {
            "rotation_scale": [rotary.scale for rotary in self.rotaries],
            "frequencies": [each for rotary in self.rotaries for each in rotary.frequencies],
            "embedding_scale": [] if self.embedding_scale is None else [self.embedding_scale],
            "scale": [layer.scale for layer in self.layers],
            "softcap": [layer.softcap for layer in self.layers if layer.softcap is not None],
            "eps": [norm.eps for norm in norms],
        }
        for name, values in numbers.items():
            for value in values:
                require(type(value) in (int, float), name, "a number", value)
        most, kinds = geometry.head_dim // 2, len(self.rotaries)
        for count in (len(rotary.frequencies) for rotary in self.rotaries):
            require(count <= most, "frequencies", f"at most {most}", count)
        for layer in self.layers:
            check_choice("activation", layer.activation, _ACTIVATIONS)
            require(layer.rotary in range(kinds), "rotary", f"below {kinds}", layer.rotary)
        for token in self.eos_token_ids:
            require(token in range(self.vocab_size), "eos_token_ids", f"below {self.vocab_size}", token)

    def write(self, directory: Path) -> None:
        partial, values = directory / f"{DESCRIPTION}.partial", asdict(self)
        for layer in values["layers"]:
            norms = layer.pop("norms")
            layer |= {f"{place}_norm": norms.get(place) for place in NORMS}
        partial.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
        partial.replace(directory / DESCRIPTION)

    @classmethod
    def read(cls, directory: Path) -> "Description":
        """Read it from a directory. Raises UnsupportedModelError: the file cannot be understood."""
        file = directory / DESCRIPTION
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
            if values["format"] != FORMAT:
                raise UnsupportedModelError(
                    f"model: {file} is of format {values['format']!r}, and this version reads {FORMAT}; "
                    "pack the model again"
                )
            return cls(**values | _parts(values))
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise UnsupportedModelError(f"model: {file} does not describe a packed model: {error}") from None


def is_packed(directory: Path) -> bool:
    return (directory / DESCRIPTION).is_file()


def _is_count(value: object) -> bool:
    return type(value) is int and value > 0


def _parts(values: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that are more than JSON's own types."""
    blocks, tokenizer = values.get("blocks"), values.get("tokenizer")
    if tokenizer is not None:
        tokenizer = TokenizerNumbers(**tokenizer | {"special_ids": tuple(tokenizer["special_ids"])})
    geometry = values["geometry"] | {"states": (), "by_layer": ()}
    return {
        **{name: tuple(values[name]) for name in ("panel", "eos_token_ids")},
        "blocks": None if blocks is None else BlockWeights(**blocks),
        "tokenizer": tokenizer,
        "geometry": ModelGeometry(**geometry | {"windows": tuple(geometry["windows"])}),
        "rotaries": tuple(RotaryNumbers(tuple(x["frequencies"]), x["scale"]) for x in values["rotaries"]),
        "norm": NormNumbers(**values["norm"]),
        "layers": tuple(map(_layer, values["layers"])),
    }


def _layer(values: dict[str, Any]) -> LayerNumbers:
    values = {"output_norm": None, "down_norm": None} | values  # which older descriptions lack
    found = {place: values.pop(f"{place}_norm") for place in NORMS}
    norms = {place: NormNumbers(**norm) for place, norm in found.items() if norm is not None}
    for place in ("input", "post"):
        require(place in norms, f"{place}_norm", "in every layer", None)
    return LayerNumbers(**values, norms=norms)
