"""Signals of tokens, layers and queries for some budgets and scores, kept for sequences whose policy asks."""

from collections.abc import Callable
from collections.abc import Sequence as SequenceType
from functools import cached_property
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from winnow.attention import Spans
from winnow.cache.slot_states import SlotState
from winnow.engine.plan import StepPlan
from winnow.errors import UnsupportedModelError
from winnow.eviction import EvictionPolicy, KeyDirections, RotationTable
from winnow.eviction.positions import Rotation
from winnow.eviction.predictor import PredictorSource, TokenScorer
from winnow.eviction.probes import Probe, Watched
from winnow.eviction.references import probes_of
from winnow.executor.key_directions import DirectionStates
from winnow.executor.occupants import Occupants
from winnow.models import LoadedModel
from winnow.models.bind.outputs import output_projections, projection_weights


class EngineSignals(SlotState):
    """See `winnow.eviction.Signals`.

    Attributes:
        probes: what policies watch, by class.
        directions: sums of the directions of keys.
    """

    name = "signals"

    def __init__(
        self, max_num_seqs: int, model: LoadedModel, locate: Callable[[], Path], occupants: Occupants
    ) -> None:
        """Create the signals; `locate` returns the path of the model, beside which its predictor lies."""
        num_layers, device = model.geometry.num_layers, model.device
        self.ranks = model.ranks
        self.probes: dict[type[Probe], Probe] = {}
        self.directions = DirectionStates(device)
        self._model = model
        self._locate = locate
        self._predictors: dict[PredictorSource, TokenScorer] = {}
        self._occupants = occupants
        self._watched: set[int] = set()  # slots whose policies ask for kinds of tokens, or for similarity
        self._sums = torch.zeros((max_num_seqs, num_layers), dtype=torch.float32, device=device)
        self._counts = torch.zeros(max_num_seqs, dtype=torch.float32, device=device)
        self.device = device
        self._products: dict[int, Tensor] = {}

    def note(self, plan: StepPlan) -> Tensor | None:
        """Start a step. Returns the mask of the batch's tokens that count for similarity, bool [T]; None: none do."""
        watched: set[int] = set()
        for entry in plan.entries:
            occupant = self._occupants[entry.slot]
            eviction = occupant.eviction
            if eviction is None or entry.replay is not None:
                continue
            budget = eviction.policy.budget
            if budget.needs_kinds or budget.needs_similarity:
                self._watched.add(entry.slot)
            if budget.needs_similarity and entry.start < occupant.prompt_len:
                watched.add(entry.slot)
                if entry.start == 0:
                    self._sums[entry.slot] = self._counts[entry.slot] = 0.0
        if not watched:
            return None
        counts = [entry.slot in watched for entry in plan.entries for _ in range(entry.count)]
        return torch.tensor(counts, device=self.device)

    def add_similarity(self, layer: int, spans: Spans, counts: Tensor, before: Tensor, after: Tensor) -> None:
        """Add a batch's cosines. counts [T]; before and after attention [T, hidden_size]."""
        cosine = F.cosine_similarity(before.float(), after.float(), dim=-1).masked_fill(~counts, 0.0)
        self._sums[:, layer].index_add_(0, spans.token_slots, cosine)
        if layer == 0:
            self._counts.index_add_(0, spans.token_slots, counts.float())

    def nbytes(self, slot: int) -> int:
        return self._sums[slot].nbytes + self._counts[slot].nbytes

    def fork(self, slot: int, to: int) -> None:
        if slot in self._watched:
            self._watched.add(to)
            self._sums[to], self._counts[to] = self._sums[slot], self._counts[slot]

    def save(self, slot: int, positions: tuple[int, int] | None = None) -> tuple[bool, Tensor, Tensor]:
        """Return whether the sequence is watched, and its sums, float32 [layers], and their number, float32 []."""
        sums, count = (each[slot].to("cpu", copy=True) for each in (self._sums, self._counts))
        return slot in self._watched, sums, count

    def load(self, slot: int, saved: tuple[bool, Tensor, Tensor]) -> None:
        is_watched, self._sums[slot], self._counts[slot] = saved
        if is_watched:
            self._watched.add(slot)

    def close(self, slot: int) -> None:
        self._watched.discard(slot)

    def similarity(self, slots: SequenceType[int]) -> Tensor:
        index = list(slots)
        return self._sums[index] / self._counts[index, None].clamp_min(1)

    def kinds(self, slots: SequenceType[int]) -> Tensor:
        rows = [
            self._model.token_kinds[torch.tensor(self._occupants[slot].token_ids, device="cpu")]
            for slot in slots
        ]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(self.device)

    def prepare(self, policy: EvictionPolicy) -> list[Probe]:
        """Open what a policy needs, such as a predictor. Returns its probes that are new.

        Raises:
            UnsupportedModelError: the model does not allow it.
        """
        needs, new = policy.score.needs, list[Probe]()
        if needs.rotation or needs.moments_from is not None:
            self._rotation  # noqa: B018  # known, or refused
        if needs.output:
            self._projections  # noqa: B018  # found, or refused
        if needs.predictor is not None and needs.predictor not in self._predictors:
            like = torch.empty(0, dtype=self._model.dtype, device=self.device)
            opened = needs.predictor.open(self._locate, self._model.key_probe, like)
            self._predictors[needs.predictor] = opened
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
                position = entry.start - entry.position_offset
                tokens = slice(first, end)
                seen = Watched(entry.slot, eviction, tokens, entry.start, position, entry.replay)
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

    def mean_turn(self, layer: int, first: Tensor, count: int) -> Tensor:
        return self._rotation.mean_turn(layer, first, count, self._model.geometry.shape(layer)[2])

    def output_weights(self, layer: int) -> Tensor:
        query_heads, _, head_dim = self._model.geometry.shape(layer)
        width = query_heads * head_dim
        like = torch.empty(0, dtype=self._model.dtype, device=self.device)
        weights = projection_weights(self._projections[layer], width, like)
        return weights.unflatten(0, (query_heads, head_dim))

    def output_products(self, layer: int) -> Tensor:
        """Return W W^T of each query head's output weights W, float32 [Hq, d, d], so that |v W|^2 = v (W W^T) v^T.

        They are kept, since each step of a replay asks.
        """
        if layer not in self._products:
            weights = self.output_weights(layer).float()
            self._products[layer] = weights @ weights.mT
        return self._products[layer]

    def predictor(self, source: PredictorSource) -> TokenScorer:
        """Return a predictor that `prepare` opened."""
        return self._predictors[source]

    @property
    def _rotation(self) -> Rotation:
        rotation = self._model.rotation
        if rotation is None:
            raise UnsupportedModelError(
                f"how {type(self._model.model).__name__} rotates keys is not known, so they cannot be turned back"
            )
        return rotation

    @cached_property
    def _projections(self) -> list[nn.Module]:
        geometry = self._model.geometry
        shapes = map(geometry.shape, range(geometry.num_layers))
        return output_projections(self._model.model, [heads * size for heads, _, size in shapes])
