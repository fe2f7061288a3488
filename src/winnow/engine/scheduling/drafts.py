"""Tokens proposed to follow those of decoding sequences: a step computes them too, and keeps those that are right."""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceType

import numpy as np

from winnow.cache import CacheLayout
from winnow.config.speculative import SpeculativeConfig
from winnow.engine.requests.request import Sequence
from winnow.errors import ConfigError


class Drafts:
    """Proposer of tokens by prompt lookup; answers are those without it, for only tokens sampled alike are kept.

    It proposes nothing where a rejected token would leave traces: in penalties and grammars, in what policies learn of
    decoded tokens, and for observers.

    Raises:
        ConfigError: the cache cannot take KVs back.

    Attributes:
        num_proposed, num_accepted: tokens so far.
    """

    def __init__(self, config: SpeculativeConfig | None, layout: CacheLayout) -> None:
        self._config = config
        self.num_proposed = self.num_accepted = 0
        if config is None:
            return
        for found, what in (
            (layout.state_bytes > 0, "layers that keep recurrent states cannot take tokens back"),
            (layout.wide.any, "kv_wide keeps the last KVs, rejected ones among them"),
            (layout.value_tier is not None, "value_tier moves values as they come"),
        ):
            if found:
                raise ConfigError(f"speculative_config is not served with this cache: {what}")

    def __bool__(self) -> bool:
        return self._config is not None

    def propose(self, decoding: Iterable[Sequence], most: int) -> dict[Sequence, list[int]]:
        """Return draft tokens of the sequences that have any, at most `most` in all."""
        if self._config is None:
            return {}
        proposed: dict[Sequence, list[int]] = {}
        for sequence in decoding:
            # The step samples one token more, and the answer's last one is never computed.
            left = min(sequence.request.max_tokens - sequence.num_output_tokens - 1, most)
            draft = look_up(sequence.token_ids, self._config, left) if may_draft(sequence) else []
            if draft:
                proposed[sequence] = draft
                most -= len(draft)
        return proposed

    def count(self, num_proposed: int, num_accepted: int) -> None:
        """Count what became of a proposal."""
        self.num_proposed += num_proposed
        self.num_accepted += num_accepted


def may_draft(sequence: Sequence) -> bool:
    """Return whether tokens that are computed and rejected leave no trace."""
    request, eviction = sequence.request, sequence.eviction
    if request.beams is not None or request.observer is not None or request.params.depends_on_answer:
        return False
    return eviction is None or not (
        eviction.policy.when.in_decode or eviction.policy.observes[True] or sequence.before_replay_round
    )


def look_up(token_ids: SequenceType[int], config: SpeculativeConfig, most: int) -> list[int]:
    """Return what followed the last tokens where most of them stood before: first, at most `most` tokens."""
    most = min(most, config.num_speculative_tokens)
    if most < 1:
        return []
    tokens = np.array(token_ids)
    ends, length = np.flatnonzero(tokens[:-1] == tokens[-1]), 1
    while len(ends) and length < config.prompt_lookup_max:
        longer = ends[ends >= length]
        longer = longer[tokens[longer - length] == tokens[-1 - length]]
        if not len(longer):
            break
        ends, length = longer, length + 1
    if not len(ends) or length < config.prompt_lookup_min:
        return []
    first = int(ends[0]) + 1
    found: list[int] = tokens[first : first + most].tolist()
    return found
