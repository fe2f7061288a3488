"""Learned predictors of scores, one per layer and KV head, and their file format."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from winnow.config import PREDICTOR
from winnow.errors import UnsupportedModelError

FORMAT = "winnow kv scores 1"


@dataclass(frozen=True)
class PredictorSource:
    """The predictor that a scorer uses.

    Attributes:
        path: its file; None: the one beside the model.
    """

    path: str | None = None


@dataclass(frozen=True)
class Predictor:
    """score = offset + slope . x + outer . silu(inner x + inner_bias), with x the features of a KV (`features`).

    L layers, H KV heads, F = 2 d + 2 features and M hidden units, all float32; M may be 0.

    Attributes:
        offset: [L, H].
        slope: [L, H, F].
        inner: [L, H, F, M].
        inner_bias: [L, H, M].
        outer: [L, H, M].
        probe: [L, H, d], keys that identify the model (`winnow.models.rotation.probe_keys`).
        notes: further contents of the file, such as the quality on held-out texts.
    """

    offset: Tensor
    slope: Tensor
    inner: Tensor
    inner_bias: Tensor
    outer: Tensor
    probe: Tensor
    notes: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def predict(self, layer: int, keys: Tensor, values: Tensor) -> Tensor:
        """Predict the scores of KVs of a layer, float32 [B, H, N].

        Args:
            keys: before their rotation, float32 [B, H, N, d].
            values: float32 [B, H, N, d].
        """
        x = features(keys, values)
        found = (x @ self.slope[layer, ..., None])[..., 0] + self.offset[layer, :, None]
        if self.outer.shape[-1]:
            hidden = torch.nn.functional.silu(x @ self.inner[layer] + self.inner_bias[layer, :, None])
            found += (hidden @ self.outer[layer, ..., None])[..., 0]
        return found

    def to(self, device: torch.device) -> "Predictor":
        return Predictor(**{name: tensor.to(device) for name, tensor in self._tensors()}, notes=self.notes)

    def save(self, path: Path) -> None:
        """Write it as safetensors.

        Raises:
            OSError: the file cannot be written.
        """
        named = {name: tensor.contiguous().cpu() for name, tensor in self._tensors()}
        # safetensors' own writer creates files that only their owner may read.
        path.write_bytes(save(named, {"format": FORMAT, "notes": json.dumps(dict(self.notes))}))

    @classmethod
    def load(cls, path: Path) -> "Predictor":
        """Read a file that `save` wrote.

        Raises:
            UnsupportedModelError: the file cannot be read, or is not a predictor.
        """
        names = [each.name for each in fields(cls) if each.name != "notes"]
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("format") != FORMAT:
                    raise UnsupportedModelError(f"fitted scores: {path} was not written by `winnow fit`")
                tensors = {name: file.get_tensor(name) for name in names}
                found = cls(**tensors, notes=json.loads(metadata["notes"]))
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            if isinstance(error, UnsupportedModelError):
                raise
            raise UnsupportedModelError(f"fitted scores: cannot read {path}: {error}") from None
        found._check_shapes(path)
        return found

    def _tensors(self) -> list[tuple[str, Tensor]]:
        return [(each.name, getattr(self, each.name)) for each in fields(self) if each.name != "notes"]

    def _check_shapes(self, path: Path) -> None:
        rows, hidden = self.offset.shape, self.outer.shape[-1:]
        wide = (2 * self.probe.shape[-1] + 2,)
        expected = {
            "slope": rows + wide,
            "inner": rows + wide + hidden,
            "inner_bias": rows + hidden,
            "outer": rows + hidden,
            "probe": rows + self.probe.shape[-1:],
        }
        for name, tensor in self._tensors():
            shape = expected.get(name, rows)
            if tensor.shape != shape or tensor.dtype != torch.float32 or not tensor.isfinite().all():
                raise UnsupportedModelError(
                    f"fitted scores: {path} is damaged: {name} must be finite float32 {tuple(shape)}, "
                    f"got {tensor.dtype} {tuple(tensor.shape)}"
                )


def features(keys: Tensor, values: Tensor) -> Tensor:
    """The features of KVs, [..., 2 d + 2]: key, value, and the logarithms of their norms."""
    norms = [each.norm(dim=-1, keepdim=True).clamp_min(_LEAST_NORM).log() for each in (keys, values)]
    return torch.cat([keys, values, *norms], dim=-1)


def predictor_path(model: Path) -> Path:
    """The default path of a model's predictor: in its directory, or beside its GGUF file."""
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


_LEAST_NORM = 1e-12
# Above the differences between weight and activation formats of one model, below those between models.
_SAME_MODEL = 0.2
