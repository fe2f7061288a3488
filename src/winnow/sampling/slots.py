"""Slots of the sampler, what each needs in a step, and the batch of a step: the host side."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntFlag, auto
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from winnow.sampling.params import SamplingParams
from winnow.sampling.randomness import uniform
from winnow.sampling.rows import row_blocks


class Feature(IntFlag):
    """Need of a row beyond an argmax."""

    BIAS = auto()
    MIN_TOKENS = auto()
    PENALTIES = auto()
    RANDOM = auto()
    MIN_P = auto()
    TOP_K = auto()
    TOP_P = auto()
    LOGPROBS = auto()
    FORCED = auto()
    GRAMMAR = auto()


class Columns(NamedTuple):
    """Columns that the device must know of each row; float64 [rows] each."""

    row: Tensor  # of the logits
    counts_row: Tensor  # of the penalty tables
    uniform: Tensor  # in [0, 1)
    forced: Tensor  # the token of a row that may not choose
    repetition: Tensor  # this and all that follow are settled when the sequence arrives
    frequency: Tensor
    presence: Tensor
    temperature: Tensor
    log_min_p: Tensor
    top_k: Tensor
    top_p: Tensor


NUM_COLUMNS = len(Columns._fields)
_FIRST_SETTING = Columns._fields.index("repetition")
_TOP_K = Columns._fields.index("top_k")


class Block(NamedTuple):
    """Rows that need the same and fit into memory together."""

    features: Feature
    first: int  # column
    end: int
    first_edit: int
    end_edit: int
    largest_k: int  # the most of their `top_k`
    top: int  # and of their `logprobs`


@dataclass(frozen=True)
class SamplingBatch:
    """One step's rows, sorted by need, so that none pays for what only others need. `packed` is all that the device
    must know, in one array: the `Columns`, [11, B], then the edits, [3, E]: row within its block, token, and what to
    add to its logit."""

    order: NDArray[np.int64]  # [B], the row of the batch that comes i-th
    blocks: list[Block]  # in that order
    packed: NDArray[np.float64]
    top: NDArray[np.int64]  # [B], how many logprobs each row wants, in the order of the batch


class SlotTable:
    def __init__(self, max_num_seqs: int, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self._occupied = np.zeros(max_num_seqs, dtype=bool)
        self._features = np.zeros(max_num_seqs, dtype=np.int64)
        self._settings = np.zeros((NUM_COLUMNS - _FIRST_SETTING, max_num_seqs))
        self._counts_row = np.zeros(max_num_seqs, dtype=np.int64)
        self._key = np.zeros(max_num_seqs, dtype=np.uint64)
        self._position = np.zeros(max_num_seqs, dtype=np.int64)
        self._min_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self._top = np.zeros(max_num_seqs, dtype=np.int64)
        self._bias: dict[int, dict[int, float]] = {}
        self._bad: dict[int, list[tuple[int, ...]]] = {}
        self._last: dict[int, deque[int]] = {}
        self._ends: dict[int, frozenset[int]] = {}
        self._num_forced = np.zeros(max_num_seqs, dtype=np.int64)
        self._forced: dict[int, tuple[int, ...]] = {}

    def is_free(self, slot: int) -> bool:
        return not self._occupied[slot]

    def are_used(self, slots: NDArray[np.int64]) -> bool:
        return bool(self._occupied[slots].all())

    def positions(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many tokens each of these answers holds."""
        found: NDArray[np.int64] = self._position[slots]
        return found

    def need_nothing(self, slots: NDArray[np.int64], positions: NDArray[np.int64]) -> bool:
        """Return whether an argmax suffices for the token at each of the positions in the answers of slots."""
        if not self._features[slots].any() and not (positions < self._num_forced[slots]).any():
            return True  # most steps of greedy requests, without a look at what each feature asks
        return not self._needs(slots, positions).any()

    def counts_row(self, slot: int) -> int | None:
        return int(self._counts_row[slot]) if self._features[slot] & Feature.PENALTIES else None

    def add(
        self,
        slot: int,
        params: SamplingParams,
        key: int,
        position: int,
        counts_row: int | None,
        forced: tuple[int, ...] = (),
        answer: Sequence[int] = (),
    ) -> None:
        """Let a sequence into a free slot.

        Args:
            key: of its random stream.
            position: how many tokens its answer holds.
            counts_row: its row of the penalty tables, where it has a penalty.
            forced: the tokens that its answer begins with.
        """
        self._bad[slot] = params.bad_tokens
        self._last[slot] = deque(answer, max((len(word) for word in self._bad[slot]), default=1) - 1)
        self._bias[slot] = dict(params.logit_bias or {})
        # An ignored end of sequence ends nothing, so `min_tokens` has no reason to forbid it.
        ends = frozenset() if params.ignore_eos else self.eos_token_ids
        self._ends[slot] = ends.union(params.stop_token_ids)
        top_k = params.top_k if 0 < params.top_k < self.vocab_size else 0
        self._settings[:, slot] = (
            params.repetition_penalty,
            params.frequency_penalty,
            params.presence_penalty,
            params.temperature,
            np.log(params.min_p) if params.min_p else -np.inf,
            top_k,
            params.top_p,
        )
        self._key[slot] = key
        self._position[slot] = position
        self._counts_row[slot] = counts_row or 0
        self._min_tokens[slot] = params.min_tokens
        self._forced[slot] = forced
        self._num_forced[slot] = len(forced)
        self._top[slot] = min(params.logprobs or 0, self.vocab_size)
        random = not params.is_greedy  # filters keep the most probable token, so a greedy row needs none
        needs = {
            Feature.BIAS: bool(self._bias[slot] or self._bad[slot]),
            Feature.MIN_TOKENS: params.min_tokens > 0 and bool(self._ends[slot]),
            Feature.PENALTIES: counts_row is not None,
            Feature.RANDOM: random,
            Feature.MIN_P: random and params.min_p > 0,
            Feature.TOP_K: random and top_k > 0,
            Feature.TOP_P: random and params.top_p < 1,
            Feature.LOGPROBS: params.logprobs is not None,
            Feature.GRAMMAR: params.structured_outputs is not None,
        }
        self._features[slot] = sum(feature for feature, needed in needs.items() if needed)
        self._occupied[slot] = True

    def remove(self, slot: int) -> None:
        del self._bias[slot], self._ends[slot], self._forced[slot], self._bad[slot], self._last[slot]
        self._occupied[slot] = False

    def has_bad_words(self, slot: int) -> bool:
        return bool(self._bad.get(slot))

    def take(self, slot: int, token: int) -> None:
        """Remember a token that an answer got, for the words that it must not hold."""
        self._last[slot].append(token)

    def advance(self, slots: NDArray[np.int64], counts: NDArray[np.int64] | int = 1) -> None:
        self._position[slots] += counts

    def batch(self, slots: NDArray[np.int64], positions: NDArray[np.int64]) -> SamplingBatch:
        """Sort the rows by need, cut them into blocks and pack what the device must know. Each row chooses the token at
        a position of its slot's answer."""
        features = self._needs(slots, positions)
        order = np.argsort(features, kind="stable")
        sorted_slots, features, places = slots[order], features[order], positions[order]
        draws = uniform(self._key[sorted_slots], places)
        settings = self._settings[:, sorted_slots]
        answers = [self._forced[slot] for slot in sorted_slots.tolist()]
        forced = [own[at] if at < len(own) else 0 for own, at in zip(answers, places.tolist(), strict=True)]
        columns = np.concatenate([[order, self._counts_row[sorted_slots], draws, forced], settings])

        blocks: list[Block] = []
        edits: list[tuple[int, int, float]] = []
        kinds, starts = np.unique(features, return_index=True)
        bounds = [*starts.tolist(), len(slots)]
        for kind, start, stop in zip(kinds.tolist(), bounds, bounds[1:], strict=False):
            for first, end in row_blocks(stop - start, self.vocab_size):
                members = slice(start + first, start + end)
                first_edit = len(edits)
                if kind & (Feature.BIAS | Feature.MIN_TOKENS):
                    self._add_edits(edits, Feature(kind), sorted_slots[members].tolist())
                most = int(columns[_TOP_K, members].max()), int(self._top[sorted_slots[members]].max())
                ends = members.start, members.stop, first_edit, len(edits)
                blocks.append(Block(Feature(kind), *ends, *most))
        flat_edits = np.array(edits, dtype=np.float64).reshape(-1, 3).T
        packed = np.concatenate([columns.ravel(), flat_edits.ravel()])
        return SamplingBatch(order, blocks, packed, self._top[slots])

    def _needs(self, slots: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        features = self._features[slots]
        features[positions >= self._min_tokens[slots]] &= ~Feature.MIN_TOKENS
        forced = positions < self._num_forced[slots]
        features[forced] = features[forced] & (Feature.PENALTIES | Feature.LOGPROBS) | Feature.FORCED
        return features

    def _add_edits(self, edits: list[tuple[int, int, float]], kind: Feature, slots: list[int]) -> None:
        """Append what must be added to which logit: a bias, or -inf for what may not yet end the answer."""
        for row, slot in enumerate(slots):
            edits.extend((row, token, bias) for token, bias in self._bias[slot].items())
            last = list(self._last[slot])
            for *before, token in self._bad[slot]:
                if not before or last[-len(before) :] == before:
                    edits.append((row, token, -np.inf))
            if Feature.MIN_TOKENS in kind:
                edits.extend((row, token, -np.inf) for token in self._ends[slot])
