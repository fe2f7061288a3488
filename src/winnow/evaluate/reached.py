"""The compression that a context reached: floors, rounding and short answers keep it from the one asked for."""

from winnow.eviction import SequenceEviction
from winnow.outputs import EvictionReport


def reached_compression(report: EvictionReport, eviction: SequenceEviction | None) -> float | None:
    """Tokens of the context per KV that was kept of them; None if the answer ended before they were cut.

    Once a round after the context's end has mixed them with the question's and the answer's, tokens of all per KV at
    the answer's end.

    Args:
        eviction: the policy with the numbers of the prompt; None where it never takes anything.
    """
    if eviction is None:
        return 1.0
    expected = _rounds_in_context(eviction)
    if report.rounds < expected:
        return None
    if report.rounds > expected:
        return report.compression
    after = report.num_tokens - eviction.context_len
    return eviction.context_len / (report.mean_kept - after)


def _rounds_in_context(eviction: SequenceEviction) -> int:
    """Rounds until the context is computed and cut."""
    computed = last_round = rounds = 0
    kvs = 0.0
    while computed < eviction.context_len:
        ahead = eviction.tokens_to_round(computed, last_round, kvs) or eviction.context_len
        computed, kvs = computed + ahead, kvs + ahead
        if eviction.round_due(computed, last_round, kvs):
            rounds, last_round, kvs = rounds + 1, computed, float(eviction.target)
    return rounds
