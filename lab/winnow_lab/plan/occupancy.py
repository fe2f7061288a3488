"""Bytes of KVs under a policy, from the engine's own accounting: the layout of its cache and its bounds on blocks."""

from dataclasses import dataclass, replace

from winnow.cache import CacheLayout, CacheSize
from winnow.config import EvictionConfig
from winnow.eviction import Instruction, SequenceEviction, replay_passes, resolve_policy


@dataclass(frozen=True)
class Request:
    prompt_tokens: int
    new_tokens: int

    @property
    def computed(self) -> int:
        """Tokens that get KVs: the last one of an answer is never computed."""
        return self.prompt_tokens + max(self.new_tokens - 1, 0)


@dataclass(frozen=True)
class Held:
    """Blocks of one sequence, as admission counts them: most at any time, and most from the end of its prompt on."""

    peak: int
    decoding: int

    def at_least(self, num_blocks: int) -> "Held":
        return Held(max(self.peak, num_blocks), max(self.decoding, num_blocks))

    def of_batch(self, batch: int) -> int:
        """Return blocks for `batch` such sequences: one takes in its prompt while the others decode."""
        return self.peak + (batch - 1) * self.decoding if batch else 0

    def largest_batch(self, num_blocks: int) -> int:
        """Return the most sequences whose `of_batch` fits."""
        if num_blocks < self.peak:
            return 0
        return 1 + (num_blocks - self.peak) // max(self.decoding, 1)


def bind_policy(
    config: EvictionConfig, request: Request, context: int | None = None
) -> SequenceEviction | None:
    """Return the policy that a configuration names, bound to a prompt as admission binds it; None: nothing is evicted.

    Args:
        context: the model's longest sequence, which limits replay passes; None: prompt and answer, and half as much.
    """
    resolved = resolve_policy(config)
    eviction = resolved.for_prompt(request.prompt_tokens, request.computed)
    if eviction is None or eviction.policy.score.replay is None or eviction.context_len <= eviction.target:
        return eviction
    passes = replay_passes(
        eviction.policy.score.replay,
        [0] * eviction.context_len,
        Instruction(),
        eviction.policy.keep.sinks,
        context or 2 * request.computed,
    )
    return replace(eviction, passes=passes)


def num_accumulators(config: EvictionConfig) -> int:
    if config.num_accumulators is not None:
        return config.num_accumulators
    return max(resolve_policy(config).policy.score.num_accumulators, 1)


def has_bias(config: EvictionConfig) -> bool:
    """Return whether KVs of an engine opened with this configuration have a bias, whatever its `kv_bias` says."""
    return resolve_policy(config).policy.compact is not None


def held_blocks(layout: CacheLayout, eviction: SequenceEviction | None, request: Request) -> Held:
    """Return upper bounds on a sequence's blocks, which admission and preemption go by.

    They are exact for policies whose rows keep alike and for the full cache; where rows compete, real rounds may keep a
    part of a block less in each row.
    """
    if eviction is None:
        decoding = replace(layout, chunk=1) if request.new_tokens > 1 else layout
        return Held(layout.blocks_seen(request.computed), decoding.blocks_seen(request.computed))
    peak = eviction.peak_blocks(layout, request.computed)
    if request.computed <= eviction.context_len and not eviction.policy.when.after_prefill:
        return Held(peak, peak)
    return Held(peak, min(eviction.decode_blocks(layout, max(request.computed, eviction.context_len)), peak))


def cache_bytes(layout: CacheLayout, num_blocks: int, max_num_seqs: int, max_model_len: int) -> int:
    """Return all memory of a cache with a number of blocks, tables included: the `kv_memory` that provides them."""
    return CacheSize.of_blocks(layout, num_blocks, max_num_seqs, max_model_len).nbytes(layout)
