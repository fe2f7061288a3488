"""Who computes a step. The scheduler sees only this."""

from collections.abc import Sequence
from typing import Protocol

from winnow.cache import BlockCopies, CacheManager
from winnow.engine.plan import StepPlan, StepResult
from winnow.eviction import EvictionPolicy, EvictionTarget
from winnow.sampling import SamplingParams


class Executor(Protocol):
    """Computes plans over a cache whose accounting the scheduler shares."""

    @property
    def cache(self) -> CacheManager:
        """The accounting of the cache that plans are made against."""

    def settle(self, params: SamplingParams) -> SamplingParams:
        """Decide what the parameters leave open, such as the seed: once, when a request arrives."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute the planned tokens and sample where the plan says so."""

    def prepare(self, policy: EvictionPolicy) -> None:
        """Get ready to run a policy.

        Raises:
            InvalidRequestError: the model does not allow it.
        """

    def copy(self, copies: BlockCopies) -> None:
        """Copy blocks at once."""

    def evict(self, members: Sequence[EvictionTarget]) -> list[int]:
        """Shrink sequences to their budgets at once. Returns the blocks that each gave back."""

    def kept_positions(self, slot: int) -> list[list[list[int]]]:
        """Token positions whose KVs a slot holds, ascending, by layer and head. Reads them back from the device."""

    def release(self, slot: int) -> None:
        """Forget what is kept for a slot besides its KVs; called when its sequence ends or is preempted."""
