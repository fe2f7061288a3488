"""Interface between scheduler and computation, and what an engine knows of its model besides."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from winnow.cache import CacheLayout, CacheSize, CacheUpdate
from winnow.cache.accounting.ledger import Holdings
from winnow.cache.accounting.prefix_chain import PrefixKey
from winnow.cache.layout import IntArray
from winnow.engine.plan import NewSequence, PlannedEviction, StepPlan, StepResult
from winnow.errors import ConfigError
from winnow.eviction import UNKNOWN_MODEL, EvictionPolicy, ModelTraits
from winnow.prompt.chat import Tokenizer
from winnow.sampling import SamplingParams
from winnow.storage.prefix_format import PrefixFormat
from winnow.values.images import PromptImage


class VisionTower:
    """Tower that runs beside steps, and its outputs' `nbytes`. This one is there for models without any."""

    nbytes = 0

    def ready(self, images: Sequence[PromptImage], start: int, end: int) -> bool | str:
        """Begin pictures with tokens from `start` on. Return whether those of tokens start..end - 1 are computed; text:
        why one cannot be."""
        return True

    def wait(self) -> bool:
        """Wait a moment, or until a picture is computed. False: none is being computed."""
        return False


class Executor(Protocol):
    """Executor of step plans. It owns the KV memory, which follows the ledger by updates.

    Attributes:
        attention: the name of the backend that computes attention.
        overlaps: submitting a step before the previous one is collected saves time; on CPUs it does not.
        reuse_refusal: why KVs stand only where they were computed; None: elsewhere too (`PlannedSequence.placed`).
    """

    attention: str
    layout: CacheLayout
    size: CacheSize
    overlaps: bool

    @property
    def reuse_refusal(self) -> str | None: ...

    def with_seed(self, params: SamplingParams) -> SamplingParams:
        """Fill in parameters that a request leaves open, such as the seed. Called once, when it arrives."""

    def time_copies(self, clock: Callable[[], float]) -> tuple[int, float, float]:
        """Time copies of some blocks to the host tier and back. Returns bytes, and seconds each way."""

    def prepare(self, policy: EvictionPolicy) -> None:
        """Prepare to run a policy. Raises InvalidRequestError: the model does not allow it."""

    def apply(self, update: CacheUpdate) -> None:
        """Apply a ledger's update between steps: copy blocks, change tables, drop the state of closed slots. Raises
        HostTierError: copies to or from the host tier failed; all else is done."""

    @property
    def tower(self) -> VisionTower: ...

    def state_bytes(self, slot: int) -> int:
        """Return bytes of a running sequence's states beside its KVs, which are copied with it to the host tier."""

    def fork(self, slot: int, child: NewSequence) -> None:
        """Fork the sequence in a slot to `child`, between steps. The ledger's update has been applied."""

    def submit(self, plan: StepPlan) -> Any:
        """Start a step: apply the plan's update, compute its tokens, and sample. Returns a handle for `collect`. Steps
        are computed in the order in which they are submitted, and so is what other methods ask for between them."""

    def collect(self, handle: Any) -> StepResult:
        """Wait for a step and return its result. Steps are collected in order of submission; some may be skipped."""

    def plan_evictions(self, planned: Sequence[PlannedEviction]) -> IntArray:
        """Decide which KVs of sequences stay under their budgets; `compact` follows before anything else is computed.

        Not called for what the last step's result said already (`StepPlan.evictions`). Returns the KVs that each of
        their rows will keep, int32 [B, layers, heads].
        """

    def compact(self) -> None:
        """Move the KVs that stay to the front of their rows: writes only into the blocks that they then fill, which
        no other sequence and no prefix holds. What lies behind them is free.
        """

    def read_blocks(self, blocks: IntArray) -> NDArray[np.uint8]:
        """Copy blocks, int32 [n], to the host: uint8 [`CacheLayout.host_bytes`]."""

    def write_blocks(self, blocks: IntArray, data: NDArray[np.uint8]) -> None:
        """Fill blocks, which no sequence holds, with the result of `read_blocks` for as many blocks."""

    def read_states(self, key: PrefixKey) -> dict[str, NDArray[Any]]:
        """Return the states kept with the snapshot of a key, arrays by name; empty if there are none."""

    def write_states(self, key: PrefixKey, states: Mapping[str, NDArray[Any]]) -> None:
        """Keep states, as `read_states` returns them, under a key."""

    def grant(self, kind: int, blocks: range) -> tuple[int, str | None]:
        """Make sure that blocks of a kind, counted from its first, can be written: the last ones first. Returns from
        which of them on that holds, and why not of all; None: it does."""

    def kept_positions(self, slot: int) -> list[list[list[int]]]:
        """Return token positions whose KVs a slot holds, by layer and head, ascending; reads them from the device."""

    def kept_weights(self, slot: int) -> list[list[float]]:
        """Return the sum of e^bias of the KVs that each row of a slot holds, by layer and head."""

    def check_integrity(self, held: Holdings) -> None:
        """Assert that memory agrees with the ledger, all of whose updates have been applied. Slow."""

    def close(self) -> None:
        """Stop worker processes."""


def no_format() -> PrefixFormat:
    raise ConfigError("a simulated engine has no KVs that could be saved")


@dataclass(frozen=True)
class ServedModel:
    """Facts of a model that an engine needs beside its executor. Without a tokenizer answers have no text."""

    vocab_size: int
    max_model_len: int
    tokenizer: Tokenizer | None = None
    eos_token_ids: frozenset[int] = frozenset()
    traits: ModelTraits = UNKNOWN_MODEL
    prefix_format: Callable[[], PrefixFormat] = no_format
