"""Learned predictors of scores, and their file format."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from winnow.config import PREDICTOR
from winnow.errors import UnsupportedModelError

FORMAT = "winnow kv scores 2"
_OLDER = ("winnow kv scores 1",)
_LEAST_NORM = 1e-12
# Above the differences between weight and activation formats of one model, below those between models.
_SAME_MODEL = 0.2


class TokenScorer(Protocol):
    """Scorer of KVs while their tokens are computed."""

    def predict(self, layer: int, inputs: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Return the scores of a layer's KVs of n tokens, float32 [n, H], at least 0.

        Args:
            inputs: of the layer's attention, [n, hidden_size].
            keys, values: [n, H, d]; keys rotated or not.
        """


@dataclass(frozen=True)
class PredictorSource:
    """The predictor that a scorer uses.

    Attributes:
        path: its file; None: the one beside the model.
    """

    path: str | None = None

    def open(self, locate: Callable[[], Path], probe: Tensor, like: Tensor) -> TokenScorer:
        """Load it for a model.

        Args:
            locate: finds the model's directory or file.
            probe: keys that identify the model, [L, H, d].
            like: a tensor of the activations' dtype and device.

        Raises:
            UnsupportedModelError: the file is missing or damaged, or was fitted to another model.
        """
        return FusedPredictor(load_predictor(self, locate(), probe), like)


@dataclass(frozen=True)
class Predictor:
    """log score = offset + slope . x + outer . silu(inner x + inner_bias), x the features of a token (`features`).

    A layer has M hidden units, which its H heads share; x has D numbers. All tensors are float32; M may be 0.

    Attributes:
        offset: [L, H].
        slope: [L, D, H].
        inner: [L, D, M].
        inner_bias: [L, M].
        outer: [L, M, H].
        probe: [L, H, d], keys that identify the model (`winnow.models.bind.rotation.probe_keys`).
        notes: further contents of the file, such as the quality on held-out texts.
    """

    offset: Tensor
    slope: Tensor
    inner: Tensor
    inner_bias: Tensor
    outer: Tensor
    probe: Tensor
    notes: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def logs(self, layer: int, x: Tensor) -> Tensor:
        """Return the logarithms of the scores of tokens with the features x, float32 [n, D]: float32 [n, H]."""
        found = torch.addmm(self.offset[layer], x, self.slope[layer])
        hidden = torch.nn.functional.silu(torch.addmm(self.inner_bias[layer], x, self.inner[layer]))
        return found.addmm_(hidden, self.outer[layer])

    def save(self, path: Path) -> None:
        """Write it as safetensors, weights in bfloat16.

        Raises:
            OSError: the file cannot be written.
        """
        named = {name: tensor.to(_stored(name)).contiguous().cpu() for name, tensor in self._tensors()}
        # safetensors' own writer creates files that only their owner may read.
        path.write_bytes(save(named, {"format": FORMAT, "notes": json.dumps(dict(self.notes))}))

    @classmethod
    def load(cls, path: Path) -> "Predictor":
        """Read a file that `save` wrote.

        Raises:
            UnsupportedModelError: the file cannot be read, or is not a predictor of this format.
        """
        names = [each.name for each in fields(cls) if each.name != "notes"]
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                _check_format(path, metadata.get("format"))
                tensors = {name: file.get_tensor(name) for name in names}
                notes = json.loads(metadata["notes"])
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            if isinstance(error, UnsupportedModelError):
                raise
            raise UnsupportedModelError(f"fitted scores: cannot read {path}: {error}") from None
        _check_shapes(path, tensors)
        return cls(**{name: tensor.float() for name, tensor in tensors.items()}, notes=notes)

    def _tensors(self) -> list[tuple[str, Tensor]]:
        return [(each.name, getattr(self, each.name)) for each in fields(self) if each.name != "notes"]


class FusedPredictor:
    """A predictor that multiplies the inputs of attention by all of its weights at once, in the activations' dtype."""

    def __init__(self, predictor: Predictor, like: Tensor) -> None:
        heads = predictor.offset.shape[1]
        weight = torch.cat([predictor.slope, predictor.inner], dim=-1)  # [L, D, H + M]
        offset = torch.cat([predictor.offset, predictor.inner_bias], dim=-1)
        self._inputs = weight[:, : -2 * heads].to(like.device, like.dtype)
        self._norms = weight[:, -2 * heads :].to(like.device)
        self._offset, self._outer = offset.to(like.device), predictor.outer.to(like.device)

    def predict(self, layer: int, inputs: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """See `TokenScorer`."""
        found = torch.addmm(self._offset[layer], log_norms(keys, values), self._norms[layer])
        found += inputs @ self._inputs[layer]
        heads = keys.shape[1]
        units = torch.nn.functional.silu(found[:, heads:])
        logs = torch.addmm(found[:, :heads], units, self._outer[layer])
        # Clamping keeps exp within float32; only the order counts.
        return logs.clamp_(-_MOST, _MOST).exp_()


def features(inputs: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Return what is known of n tokens in a layer, float32 [n, hidden_size + 2 H].

    The inputs of its attention, [n, hidden_size], and the logarithms of the norms of keys and values, [n, H, d], which
    are no linear functions of them.
    """
    return torch.cat([inputs.float(), log_norms(keys, values)], dim=-1)


def log_norms(keys: Tensor, values: Tensor) -> Tensor:
    """Return the logarithms of the norms of keys and values, [n, H, d]: float32 [n, 2 H]."""
    norms = [torch.linalg.vector_norm(each, dim=-1, dtype=torch.float32) for each in (keys, values)]
    return torch.cat(norms, dim=-1).clamp_min_(_LEAST_NORM).log_()


def predictor_path(model: Path) -> Path:
    """Return the default path of a model's predictor: in its directory, or beside its GGUF file."""
    return model / PREDICTOR if model.is_dir() else model.with_suffix(".kv-scores.safetensors")


def require_predictor(source: PredictorSource, model: Path) -> Path:
    """Return the path of the predictor of a scorer.

    Raises:
        UnsupportedModelError: there is no such file; says which command makes it.
    """
    path = predictor_path(model) if source.path is None else Path(source.path)
    if not path.is_file():
        raise UnsupportedModelError(
            f"fitted scores: there is no file {path}: `winnow fit {model}` makes one for this model"
        )
    return path


def load_predictor(source: PredictorSource, model: Path, probe: Tensor) -> Predictor:
    """Load the predictor of a scorer for a model whose probe is `probe`, [L, H, d].

    Raises:
        UnsupportedModelError: the file is missing or damaged, or was fitted to another model.
    """
    path = require_predictor(source, model)
    found = Predictor.load(path)
    if found.probe.shape != probe.shape:
        layers, heads, dim = found.probe.shape
        raise UnsupportedModelError(
            f"fitted scores: {path} was fitted to a model of {layers} layers with {heads} KV heads of {dim}, and "
            f"{model} has {' x '.join(map(str, probe.shape))}: `winnow fit {model}` makes one for it"
        )
    difference = float((found.probe - probe.cpu()).norm() / probe.norm().clamp_min(_LEAST_NORM))
    if not difference < _SAME_MODEL:
        raise UnsupportedModelError(
            f"fitted scores: {path} was fitted to another model than {model}: their keys differ by "
            f"{difference:.2g} of their norm ({_SAME_MODEL} is allowed): `winnow fit {model}` makes one for it"
        )
    return found


def _stored(name: str) -> torch.dtype:
    return torch.bfloat16 if name in ("slope", "inner", "outer") else torch.float32


def _check_format(path: Path, found: str | None) -> None:
    if found in _OLDER:
        raise UnsupportedModelError(
            f"fitted scores: {path} has the format {found!r} of an earlier Winnow, and this one reads {FORMAT!r}: "
            "make it anew with `winnow fit`"
        )
    if found != FORMAT:
        raise UnsupportedModelError(f"fitted scores: {path} was not written by `winnow fit`")


def _check_shapes(path: Path, tensors: Mapping[str, Tensor]) -> None:
    (layers, heads), width = tensors["probe"].shape[:2], tensors["slope"].shape[1:2]
    units = tensors["outer"].shape[1:2]
    expected = {
        "offset": (layers, heads),
        "slope": (layers, *width, heads),
        "inner": (layers, *width, *units),
        "inner_bias": (layers, *units),
        "outer": (layers, *units, heads),
        "probe": (layers, heads, *tensors["probe"].shape[2:3]),
    }
    for name, tensor in tensors.items():
        shape, dtype = expected[name], _stored(name)
        if tensor.shape != shape or tensor.dtype != dtype or not tensor.isfinite().all():
            raise UnsupportedModelError(
                f"fitted scores: {path} is damaged: {name} must be finite {dtype} {shape}, got {tensor.dtype} "
                f"{tuple(tensor.shape)}"
            )


_MOST = 80.0
