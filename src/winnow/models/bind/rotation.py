"""A model's rotary embedding, learnt by watching what it does to keys, so that stored keys can be turned back."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from winnow.attention import AttentionSpec
from winnow.eviction.signals import RotationTable


@dataclass(frozen=True)
class LayerRotation:
    """Rotation of pairs of 2 * len(frequencies) of a key's dimensions by position * frequency."""

    frequencies: Tensor  # float32 [pairs]
    interleaved: bool  # pairs are neighbours (GPT-J, Cohere); False: halves of the rotated part (Llama, NeoX)
    first: int = 0  # the first rotated dimension: 0, but for keys that begin with a latent (MLA)

    def turn(self, keys: Tensor, difference: Tensor) -> Tensor:
        angle = difference.to(torch.float32)[..., None] * self.frequencies.to(keys.device)
        return self._turned(keys, angle.cos(), angle.sin())

    def table(self, positions: int) -> RotationTable:
        pairs = len(self.frequencies)
        position = torch.arange(positions, dtype=torch.float32, device=self.frequencies.device)
        angle = torch.nn.functional.pad(position[:, None] * self.frequencies, (0, -pairs % 16))
        return RotationTable(angle.cos(), angle.sin(), pairs, self.first, self.interleaved)

    def _turned(self, keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        pairs = len(self.frequencies)
        before, part, rest = keys.tensor_split((self.first, self.first + 2 * pairs), dim=-1)
        if self.interleaved:
            a, b = part[..., 0::2], part[..., 1::2]
            turned = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
        else:
            a, b = part[..., :pairs], part[..., pairs:]
            turned = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
        return torch.cat([before, turned, rest], dim=-1)


@dataclass(frozen=True)
class ModelRotation:
    layers: tuple[LayerRotation, ...]
    tables: dict[int, RotationTable] = field(default_factory=dict)

    def turn(self, layer: int, keys: Tensor, difference: Tensor) -> Tensor:
        """Return keys of one layer, float32 [..., d], rotated at p, as they would be at p + difference, [...]."""
        return self.layers[layer].turn(keys, difference)

    def table(self, layer: int, positions: int) -> RotationTable:
        """See `LayerRotation.table`; made anew only for more positions, once for all layers that rotate alike."""
        rotation = self.layers[layer]
        known = self.tables.get(id(rotation))
        if known is None or len(known.cos) < positions:
            known = self.tables[id(rotation)] = rotation.table(max(2 * positions, 1024))
        return known


class _KeyProbe:
    """Stand-in for a step that writes down the keys. It adds nothing to hidden states, so only rotation moves keys."""

    def __init__(self) -> None:
        self.keys: dict[int, Tensor] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        self.keys[layer] = k.float()
        return torch.zeros_like(q)


def find_rotation(model: Any, num_layers: int) -> ModelRotation | None:
    """Return how the model rotates keys, or None if it does something that turning pairs cannot reproduce. Frequencies
    are the model's own buffers; which of them a layer uses, and how it pairs dimensions, is tried out on one token at
    three positions."""
    positions = (0, 3, 50)
    keys = [_keys_at(model, position) for position in positions]
    if not all(layer in keys[0] for layer in range(num_layers)):
        return None  # attention that shows no keys
    candidates = [
        LayerRotation(torch.empty(0, dtype=torch.float32, device="cpu"), False)
    ]  # no position at all
    sizes = {key.shape[-1] for key in keys[0].values()}
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq") and "original" not in name:
            frequencies = buffer.float().flatten()
            for first in sorted({0} | {size - 2 * len(frequencies) for size in sizes}):
                candidates += [LayerRotation(frequencies, pairing, first) for pairing in (False, True)]
    found = []
    for layer in range(num_layers):
        of_layer = [k[layer] for k in keys]
        fitting = [c for c in candidates if _explains(c, positions, of_layer)]
        if not fitting:
            return None
        found.append(fitting[0])
    return ModelRotation(tuple(found))


@torch.inference_mode()
def _keys_at(model: Any, position: int) -> dict[int, Tensor]:
    probe = _KeyProbe()
    token = torch.zeros((1, 1), dtype=torch.int64, device=model.device)
    options = {"use_cache": False, "logits_to_keep": token[0], "winnow_step": probe}
    model(input_ids=token, position_ids=token + position, **options)
    return probe.keys


def _explains(rotation: LayerRotation, positions: tuple[int, ...], keys: list[Tensor]) -> bool:
    """Return whether turning the key of the first position gives those of the others."""
    first = keys[0]
    if rotation.first < 0 or rotation.first + 2 * len(rotation.frequencies) > first.shape[-1]:
        return False
    # float16 and bfloat16 round keys; a wrong pairing or frequency is off by as much as the key is long.
    tolerance = 0.02 * float(first.norm(dim=-1).max())
    for position, key in zip(positions[1:], keys[1:], strict=True):
        difference = torch.full(first.shape[:-1], position - positions[0], device=first.device)
        if float((rotation.turn(first, difference) - key).abs().max()) > tolerance:
            return False
    return True
