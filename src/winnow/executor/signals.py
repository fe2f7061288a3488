"""What policies see besides keys, values and accumulators: probes, rotations and directions of keys."""

from collections.abc import Sequence as SequenceType

from torch import Tensor

from winnow.engine.plan import StepPlan
from winnow.errors import UnsupportedModelError
from winnow.eviction import EvictionPolicy, KeyDirections, RotationTable
from winnow.eviction.probes import Probe, Watched, probes_of
from winnow.executor.key_directions import DirectionStates
from winnow.executor.occupants import Occupants
from winnow.models import LoadedModel
from winnow.models.bind.rotation import ModelRotation


class EngineSignals:
    """See `winnow.eviction.Signals`.

    Attributes:
        probes: what policies watch, by class.
        directions: sums of the directions of keys.
    """

    def __init__(self, model: LoadedModel, occupants: Occupants) -> None:
        self.device = model.device
        self.ranks = model.ranks
        self.probes: dict[type[Probe], Probe] = {}
        self.directions = DirectionStates(self.device)
        self._model = model
        self._occupants = occupants

    def prepare(self, policy: EvictionPolicy) -> list[Probe]:
        """Check that the model has what a policy needs. Returns its probes that are new.

        Raises:
            UnsupportedModelError: the model does not allow it.
        """
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

    def shape(self, layer: int) -> tuple[int, int, int]:
        return self._model.geometry.shape(layer)

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

    def rotation_table(self, layer: int, positions: int) -> RotationTable:
        return self._rotation.table(layer, positions)

    def key_directions(
        self, layers: SequenceType[int], slots: SequenceType[int], shape: tuple[int, int]
    ) -> KeyDirections:
        return self.directions.of(layers, slots, shape)

    def keep_key_directions(
        self, layers: SequenceType[int], slots: SequenceType[int], directions: KeyDirections
    ) -> None:
        self.directions.keep(layers, slots, directions)

    def turn(self, layer: int, keys: Tensor, difference: Tensor) -> Tensor:
        return self._rotation.turn(layer, keys, difference)

    @property
    def _rotation(self) -> ModelRotation:
        rotation = self._model.rotation
        if rotation is None:
            raise UnsupportedModelError(
                f"how {type(self._model.model).__name__} rotates keys is not known, so they cannot be turned back"
            )
        return rotation
