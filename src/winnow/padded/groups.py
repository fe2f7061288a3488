"""Which waiting queries are prefilled together: those of similar length, so that little is padding (4.2)."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

from winnow.engine.request import Sequence


@dataclass(frozen=True)
class Grouping:
    """How groups are formed.

    Attributes:
        size: most queries of a group.
        padding: most padding in it, as a part of its positions.
        positions: most positions of a group of several, padding included.
        lookahead: how many waiting queries are looked at. The oldest of them is always in the group, so nobody waits
            for company.
    """

    size: int
    padding: float
    positions: int
    lookahead: int

    def choose(self, waiting: Iterable[Sequence], fits: Callable[[int, int], bool]) -> list[Sequence]:
        """The next group, out of at least one query in the order in which they are served.

        Args:
            fits: whether there is memory for so many rows and columns beyond one row.
        """
        oldest, *rest = islice(waiting, max(self.lookahead, 1))
        if (
            oldest.request.wants_prompt_logprobs
        ):  # the logits of all its positions are kept: alone, it is enough
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
