"""Beams of one request, which lose their KVs together."""

from winnow.engine.requests.request import Sequence


def group(sequence: Sequence) -> list[Sequence]:
    """Return the sequences that lose their KVs together: a beam and those beside it, or one alone."""
    request = sequence.request
    if request.beams is None:
        return [sequence]
    return [request.sequences[index] for index in sorted(request.beams.logprobs)]


def share_prefix(sequence: Sequence) -> Sequence:
    """Prepare beams that lost their KVs to compute their common prefix once. Returns the beam that computes it.

    A sequence that is no beam does it for itself.
    """
    request = sequence.request
    if request.beams is None:
        return sequence
    request.beams.forget_candidates()
    leader, *others = group(sequence)
    leader.forks = others
    if others:
        columns = zip(*(s.token_ids for s in (leader, *others)), strict=True)
        request.shared_tokens = next(i for i, column in enumerate(columns) if len(set(column)) > 1)
    return leader
