"""Choosing waiting queries to prefill together: those of similar length, which need little padding (4.2)."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

from winnow.engine.requests.request import Sequence


@dataclass(frozen=True)
class Grouping:
    """Limits of a group. The first waiting query is always in it, so that no query waits for others.

    Attributes:
        size: maximum number of queries.
        padding: maximum padding, as a fraction of the group's positions.
        positions: maximum positions of a group of several queries, padding included.
        lookahead: number of waiting queries that are considered.
    """

    size: int
    padding: float
    positions: int
    lookahead: int

    def choose(self, waiting: Iterable[Sequence], fits: Callable[[int, int], bool]) -> list[Sequence]:
        """Return the next group, given at least one waiting query, in serving order.

        Args:
            fits: whether there is memory for (rows, columns) of a group of several.
        """
        oldest, *rest = islice(waiting, max(self.lookahead, 1))
        if oldest.request.wants_prompt_logprobs:  # the logits of all its positions are kept, so it goes alone
            return [oldest]
        others = [
            sequence
            for sequence in rest
            if sequence.request.priority == oldest.request.priority
            and not sequence.request.wants_prompt_logprobs
        ]
        others.sort(key=lambda sequence: abs(sequence.num_tokens - oldest.num_tokens))
        group, total, longest = [oldest], oldest.num_tokens, oldest.num_tokens
        for sequence in others:
            if len(group) == self.size:
                break
            width, tokens = max(longest, sequence.num_tokens), total + sequence.num_tokens
            area = width * (len(group) + 1)
            if (
                area - tokens > self.padding * area
                or area > self.positions
                or not fits(len(group) + 1, width)
            ):
                continue
            group.append(sequence)
            total, longest = tokens, width
        return group
