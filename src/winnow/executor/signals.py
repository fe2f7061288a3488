"""What policies see besides keys, values and accumulators: probes, rotations and sums of directions of keys."""

from collections.abc import Mapping, Sequence as SequenceType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from winnow.cache.slot_states import SlotState
from winnow.engine.plan import StepPlan
from winnow.errors import UnsupportedModelError
from winnow.eviction import EvictionPolicy, KeyDirections, RotationTable
from winnow.eviction.probes import Probe, Watched, probes_of
from winnow.eviction.text_units import TextMarks, Unit
from winnow.executor.occupants import Occupants
from winnow.models import LoadedModel
from winnow.models.bind.rotation import ModelRotation
from winnow.sampling.token_table import TokenTable

_Sums = dict[int, KeyDirections]
"""By layer: of one sequence, without the dimension of sequences."""


class DirectionStates(SlotState):
    """The sums by slot: 4 bytes for each element of a key, layer and head. A round adds the keys since the round
    before, all of which are still there."""

    name = "directions"
    of_prefix = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sequences: dict[int, _Sums] = {}

    def of(
        self, layers: SequenceType[int], slots: SequenceType[int], shape: tuple[int, int]
    ) -> KeyDirections:
        """Return copies; zeros, of `shape` (H, d), where nothing is counted."""
        zeros = torch.zeros(shape, dtype=torch.float32, device=self._device)
        none = KeyDirections(zeros, torch.zeros((), dtype=torch.int32, device=self._device))
        sequences = [self._sequences.get(slot, {}) for slot in slots]
        sums = torch.stack([each.get(layer, none).sums for layer in layers for each in sequences])
        counted = torch.stack([each.get(layers[0], none).counted for each in sequences])
        return KeyDirections(sums.unflatten(0, (len(layers), len(slots))), counted)

    def keep(self, layers: SequenceType[int], slots: SequenceType[int], directions: KeyDirections) -> None:
        for slot, sums, counted in zip(slots, directions.sums.unbind(1), directions.counted, strict=True):
            known = self._sequences.setdefault(slot, {})
            known |= {layer: KeyDirections(each, counted) for layer, each in zip(layers, sums, strict=True)}

    def nbytes(self, slot: int) -> int:
        return sum(part.nbytes for each in self._sequences.get(slot, {}).values() for part in each)

    def fork(self, slot: int, to: int) -> None:
        if slot in self._sequences:
            self._sequences[to] = dict(self._sequences[slot])  # rounds replace tensors, and change none

    def save(self, slot: int, positions: tuple[int, int] | None = None) -> _Sums | None:
        # Blocks of a prefix that no round has changed hold all of its keys: nothing is counted yet.
        if positions is not None or slot not in self._sequences:
            return None
        return _copied(self._sequences[slot], torch.device("cpu"))

    def load(self, slot: int, saved: _Sums) -> None:
        self._sequences[slot] = _copied(saved, self._device)

    def close(self, slot: int) -> None:
        self._sequences.pop(slot, None)

    def to_arrays(self, saved: _Sums) -> dict[str, NDArray[Any]]:
        """Return "N.sums", [1, H, 1, d] like all vectors of a file, and "N.counted", [1], of each layer N."""
        sums = {f"{layer}.sums": each.sums[None, :, None].numpy() for layer, each in saved.items()}
        return sums | {f"{layer}.counted": each.counted[None].numpy() for layer, each in saved.items()}

    def from_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> _Sums | None:
        found = {name: torch.from_numpy(array)[0] for name, array in arrays.items()}
        layers = {int(name.partition(".")[0]) for name in arrays}
        return {x: KeyDirections(found[f"{x}.sums"][:, 0], found[f"{x}.counted"]) for x in layers} or None


def _copied(saved: _Sums, device: torch.device) -> _Sums:
    copies = {layer: [part.to(device, copy=True) for part in each] for layer, each in saved.items()}
    return {layer: KeyDirections(*parts) for layer, parts in copies.items()}


class EngineSignals:
    """See `winnow.eviction.Signals`."""

    def __init__(self, model: LoadedModel, occupants: Occupants) -> None:
        self.device = model.device
        self.ranks = model.ranks
        self.probes: dict[type[Probe], Probe] = {}
        self.directions = DirectionStates(self.device)
        self.key_directions, self.keep_key_directions = self.directions.of, self.directions.keep
        self.model = model
        self._occupants = occupants
        tokens = None if model.tokenizer is None else TokenTable(model.tokenizer)
        self._marks = TextMarks(str if tokens is None else tokens.text_of, model.vocab_size)

    def prepare(self, policy: EvictionPolicy) -> list[Probe]:
        """Check that the model has what a policy needs. Returns its probes that are new. Raises UnsupportedModelError:
        the model does not allow it."""
        new = list[Probe]()
        if policy.score.needs.rotation:
            self._rotation  # noqa: B018  # known, or refused
        for kind in probes_of(policy):
            if kind not in self.probes:
                self.probes[kind] = kind(self)
                new.append(self.probes[kind])
        return new

    def probe(self, kind: type[Probe]) -> Probe:
        return self.probes[kind]

    def token_ids(self, slot: int) -> SequenceType[int]:
        return self._occupants[slot].token_ids

    def watch(self, plan: StepPlan) -> tuple[tuple[Probe, Watched], ...]:
        """Start a step. Returns which of its tokens probes are shown."""
        found, first = list[tuple[Probe, Watched]](), 0
        for entry in plan.entries:
            eviction, end = self._occupants[entry.slot].eviction, first + entry.count
            for kind in () if eviction is None else probes_of(eviction.policy):
                assert eviction is not None, "it has a policy"
                tokens = slice(first, end)
                seen = Watched(entry.slot, eviction, tokens, entry.start, entry.replay)
                if (some := self.probes[kind].watch(seen)) is not None:
                    found.append((self.probes[kind], some))
            first = end
        return tuple(found)

    def text_units(self, slots: SequenceType[int], unit: Unit, positions: int) -> Tensor:
        found = np.zeros((len(slots), positions), dtype=np.int64)
        for row, slot in zip(found, slots, strict=True):
            units = getattr(self._marks.units(self._occupants[slot].token_ids[:positions]), unit)
            row[: len(units)] = units
        return torch.from_numpy(found).to(self.device)

    def rotation_table(self, layer: int, positions: int) -> RotationTable:
        return self._rotation.table(layer, positions)

    def turn(self, layer: int, keys: Tensor, difference: Tensor) -> Tensor:
        return self._rotation.turn(layer, keys, difference)

    @property
    def _rotation(self) -> ModelRotation:
        if (rotation := self.model.rotation) is None:
            name = type(self.model.model).__name__
            reason = f"how {name} rotates keys is not known, so they cannot be turned back"
            raise UnsupportedModelError(reason)
        return rotation
