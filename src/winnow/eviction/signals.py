"""Signals that scorers and budgets use besides keys, values and accumulators."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from winnow.attention import AttentionSpec
from winnow.eviction.text_units import Unit
from winnow.process.ranks import Ranks


@dataclass(frozen=True)
class Needs:
    """Signals that a scorer uses; the engine collects nothing else."""

    probes: tuple[type[Any], ...] = ()
    """Classes of what is kept of the context's queries, keys and values (`winnow.eviction.Probe`)."""
    rotation: bool = False
    """The rotation of keys."""
    sentences: bool = False
    """Where sentences and words of the text begin. Without a tokenizer each sentence is as long as any may be."""


class KeyDirections(NamedTuple):
    """Sums of the directions (keys over their norms) of the keys of L layers, before rotation.

    Attributes:
        sums: float32 [L, B, H, d].
        counted: int32 [B], tokens of each sequence whose keys are added.
    """

    sums: Tensor
    counted: Tensor


class RotationTable(NamedTuple):
    """The rotation of one layer's keys at the positions 0 to P - 1.

    Attributes:
        cos, sin: float32 [P, stride], of each pair of dimensions, padded by zeros to a multiple of 16.
        pairs: number of pairs, which begin at dimension `first`.
        interleaved: pairs are neighbours; False: dimensions `pairs` apart.
    """

    cos: Tensor
    sin: Tensor
    pairs: int
    first: int = 0
    interleaved: bool = False


class ReferenceQueries(NamedTuple):
    """Queries of one sequence in one layer, to which a policy fits what it keeps.

    Attributes:
        q: [n, Hq, d], rotated at their positions.
        position: int64 [n].
    """

    q: Tensor
    position: Tensor
    spec: AttentionSpec


class Signals(Protocol):
    """Information about tokens, layers and queries for budgets and scorers."""

    @property
    def ranks(self) -> Ranks:
        """The ranks whose heads share a budget."""

    @property
    def device(self) -> torch.device:
        """The device on which the model computes."""

    @property
    def model(self) -> Any:
        """The `LoadedModel`: its modules, which a probe may hook, and its tokenizer."""

    def token_ids(self, slot: int) -> Sequence[int]:
        """Return a sequence's tokens, those of the prompt that are still to be computed too."""

    def probe(self, kind: type[Any]) -> Any:
        """Return the probe of a class that a policy named."""

    def text_units(self, slots: Sequence[int], unit: Unit, positions: int) -> Tensor:
        """Return the number of the sentence or word of each position below `positions`, int64 [B, positions]."""

    def turn(self, layer: int, keys: Tensor, difference: Tensor) -> Tensor:
        """Rotate keys, float32 [..., d], by `difference` positions, [...]."""

    def rotation_table(self, layer: int, positions: int) -> RotationTable:
        """Return the rotation at positions below `positions` or more."""

    def key_directions(
        self, layers: Sequence[int], slots: Sequence[int], shape: tuple[int, int]
    ) -> KeyDirections:
        """Return a copy of what was kept of each sequence; zeros, of `shape` (H, d), where nothing was."""

    def keep_key_directions(
        self, layers: Sequence[int], slots: Sequence[int], directions: KeyDirections
    ) -> None:
        """Keep the sums of sequences. Later changes of the tensors are not allowed."""
