"""WHO begins with KVs that another has computed, and who must have its blocks for itself."""

from winnow.cache import Ledger
from winnow.cache.prefix_index import PrefixChain, PrefixKey
from winnow.engine.request import Sequence


class PrefixSharing:
    """Which sequences take part in the ledger's prefix index, and with how many tokens.

    KVs are shared as they were computed. A policy's sequence takes them up to its first round, or up to the first query
    that adds to accumulators, and has copies of its own before either. Samples of one prompt under a policy share among
    themselves alone.

    Args:
        enabled: False: no sequence takes part.
    """

    def __init__(self, ledger: Ledger, enabled: bool) -> None:
        self._ledger = ledger
        self._enabled = enabled

    def find(self, sequence: Sequence) -> list[PrefixKey]:
        """The keys of the blocks with which a waiting sequence may begin."""
        request, eviction = sequence.request, sequence.eviction
        if not self._enabled or (eviction is not None and len(request.sequences) > 1):
            return []
        if sequence.prefix is None:
            sequence.prefix = PrefixChain(request.tenant or "", self._ledger.layout.block_size)
        sequence.prefix.extend(sequence.token_ids)
        if request.wants_prompt_logprobs:
            return []
        most = sequence.num_tokens - 1  # logits come from the last one
        if sequence.forks:
            most = min(most, request.fork_at - 1)
        if eviction is not None:
            most = min(most, eviction.num_shareable)
        return self._ledger.prefixes.match(sequence.prefix, most)

    def adopt(self, sequence: Sequence, keys: list[PrefixKey], count: int) -> None:
        """Let a sequence begin with a known prefix: it has just got its slot, and computes `count` tokens next."""
        request, index = sequence.request, self._ledger.prefixes
        self._ledger.adopt(sequence.kv.running_slot, keys)
        if sequence.eviction is None:
            self._ledger.drop_unseen([sequence.kv.running_slot])
        if request.metrics.first_scheduled_time is None and sequence.prefix is not None:
            request.num_cached_tokens = sequence.kv.num_computed
            index.num_asked_tokens += sequence.prompt_len
            index.num_hit_tokens += sequence.kv.num_computed
        if keys and _observes(sequence, sequence.kv.num_computed, count):
            owns = self._ledger.own_or_forget(sequence.kv.running_slot)
            assert owns, "there is room for all of its blocks"

    def remember(self, sequence: Sequence, start: int, end: int) -> None:
        """Let later requests find the blocks that tokens start..end - 1 of a sequence have filled."""
        size, chain, eviction = self._ledger.layout.block_size, sequence.prefix, sequence.eviction
        if chain is None or start // size == end // size:
            return
        num_computed = end
        if eviction is not None:
            if sequence.kv.last_round or _observes(sequence, start, end - start):
                return
            end = min(end, eviction.num_shareable)
        chain.extend(sequence.token_ids)
        for index in range(start // size, end // size):
            self._ledger.remember(sequence.kv.running_slot, index, *chain.links[index], num_computed)

    def is_about_to_change(self, sequence: Sequence, most: int) -> bool:
        """Whether a replay or queries of the next tokens, at most so many, may add to accumulators of shared blocks."""
        eviction = sequence.eviction
        if not sequence.may_share_outside or eviction is None:
            return False
        changes = sequence.before_replay_round or eviction.may_observe(sequence.kv.num_computed, most)
        return changes and self._ledger.is_shared(sequence.kv.running_slot)


def _observes(sequence: Sequence, start: int, count: int) -> bool:
    """Whether the queries of `count` tokens, from token `start` on, add to accumulators."""
    return sequence.eviction is not None and sequence.eviction.observe(start, start + count)[0] is not None
