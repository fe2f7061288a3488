"""Summary of a run: the table at its end, and the same as JSON."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TextIO

from rich.table import Table
from rich.text import Text

from winnow.batch.tally import Tally
from winnow.outputs import DraftRates, EngineStats
from winnow.values.units import format_bytes

if TYPE_CHECKING:
    from winnow.llm import LLM


@dataclass(frozen=True)
class Accuracy:
    """The mean score of a category's lines, 0..1."""

    category: str
    lines: int
    score: float


@dataclass(frozen=True)
class Summary:
    """A run in numbers.

    Requests, tokens and accuracy cover every line of the output; what was computed, how fast and in how much memory
    are of the last process alone, which answered `requests - resumed` lines. `seconds` do not count loading the model.
    """

    requests: int
    failed: int
    resumed: int
    prompt_tokens: int
    generated_tokens: int
    cut_off: int
    """Answers that ended at their `max_tokens`, or at the end of the context."""
    seconds: float
    computed_prompt_tokens: int
    computed_generated_tokens: int
    prompt_tokens_per_second: float
    generated_tokens_per_second: float
    kv_bytes_peak: int
    kv_bytes_budget: int
    preemptions: int
    swaps: int
    """Preemptions that copied KVs to host memory."""
    cached_tokens: int
    """Tokens of prompts that were found in the prefix cache."""
    recomputed_tokens: int
    """Computed again after the others."""
    eviction_rounds: int
    kv_bytes_freed: int
    replay_tokens: int
    replay_seconds: float
    replays_replaced: int
    """Requests for which a replay did not fit, so that a cheaper score judged."""
    draft_tokens: int
    """Tokens proposed."""
    accepted_tokens: int
    """Tokens of these that became part of answers."""
    draft_rates: tuple[DraftRates, ...]
    """What drafts brought, by number of sequences that decode."""
    phases: dict[str, float]
    """Seconds in prefill, decoding, scoring and rounds, and everything else, as far as eviction took part."""
    kv_bytes_kept: int
    """Bytes of the answers under a policy, at their ends."""
    kv_bytes_whole: int
    """Bytes of the same answers with the full cache."""
    payoff: str | None
    """Sentence on whether compressing paid; None: nothing was compressed."""
    accuracy: tuple[Accuracy, ...]

    @classmethod
    def of(cls, tally: Tally, resumed: int, seconds: float, stats: EngineStats) -> "Summary":
        """Sum up `tally`, of which `resumed` lines were there before; `stats` after `seconds` of computing."""
        rate = 1 / seconds if seconds > 0 else 0.0
        return cls(
            requests=tally.requests,
            failed=tally.failed,
            resumed=resumed,
            prompt_tokens=tally.prompt_tokens,
            generated_tokens=tally.generated_tokens,
            cut_off=tally.cut_off,
            seconds=seconds,
            computed_prompt_tokens=stats.prompt_tokens,
            computed_generated_tokens=stats.generated_tokens,
            prompt_tokens_per_second=stats.prompt_tokens * rate,
            generated_tokens_per_second=stats.generated_tokens * rate,
            kv_bytes_peak=stats.kv_bytes_peak,
            kv_bytes_budget=stats.kv_bytes_budget,
            preemptions=stats.num_preemptions,
            swaps=stats.num_swaps,
            cached_tokens=stats.cached_tokens,
            recomputed_tokens=stats.recomputed_tokens,
            eviction_rounds=stats.num_rounds,
            kv_bytes_freed=stats.kv_bytes_freed,
            replay_tokens=stats.replay_tokens,
            replay_seconds=stats.replay_seconds,
            replays_replaced=stats.num_replays_replaced,
            draft_tokens=stats.num_draft_tokens,
            accepted_tokens=stats.num_accepted_tokens,
            draft_rates=tuple(stats.draft_rates),
            phases=_phases(stats, seconds),
            kv_bytes_kept=stats.kv_bytes_kept,
            kv_bytes_whole=stats.kv_bytes_whole,
            payoff=_payoff(stats, seconds),
            accuracy=_accuracy(tally),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)

    def table(self) -> Table:
        """Return the fields for people."""
        table = Table(title="winnow run", show_header=False, title_justify="left")
        table.add_column()
        table.add_column(justify="right")
        for label, value in self._rows():
            table.add_row(label, value)
        if self.accuracy:
            table.add_section()
        for accuracy in self.accuracy:
            # A category is what the user says, also where it reads like rich's markup.
            name = Text(f"accuracy: {accuracy.category} ({accuracy.lines})")
            table.add_row(name, f"{accuracy.score:.1%}")
        return table

    def _rows(self) -> list[tuple[str, str]]:
        peak, budget = format_bytes(self.kv_bytes_peak), format_bytes(self.kv_bytes_budget)
        rows = [
            ("requests", f"{self.requests:,}"),
            ("failed", f"{self.failed:,}"),
            ("prompt tokens", f"{self.prompt_tokens:,}"),
        ]
        if self.cached_tokens:
            rows.append(("  of them in the prefix cache", f"{self.cached_tokens:,}"))
        rows.append(("generated tokens", f"{self.generated_tokens:,}"))
        if self.cut_off:
            rows.append(("  answers cut off at max_tokens", f"{self.cut_off:,}"))
        if self.resumed:
            rows.insert(1, ("from an earlier start", f"{self.resumed:,}"))
        if self.resumed < self.requests:
            rows += [
                ("wall time", f"{self.seconds:.1f} s"),
                ("prompt tokens/s", f"{self.prompt_tokens_per_second:,.0f}"),
                ("generated tokens/s", f"{self.generated_tokens_per_second:,.0f}"),
                ("peak KV memory", f"{peak} of {budget}"),
                (
                    "preemptions",
                    f"{self.preemptions:,}" + (f", {self.swaps:,} swapped" if self.swaps else ""),
                ),
            ]
            if self.recomputed_tokens:
                rows.append(("tokens computed again", f"{self.recomputed_tokens:,}"))
            if self.draft_rates or self.draft_tokens:
                rows.append(("drafts accepted", f"{self.accepted_tokens:,} of {self.draft_tokens:,}"))
                rows += [(f"  up to {each.most_running} running", str(each)) for each in self.draft_rates]
            rows += [(f"seconds: {phase}", f"{spent:,.1f} s") for phase, spent in self.phases.items()]
            if self.eviction_rounds:
                rows += [
                    ("eviction rounds", f"{self.eviction_rounds:,}"),
                    ("KV memory given back", format_bytes(self.kv_bytes_freed)),
                    (
                        "KVs at the answers' ends",
                        f"{format_bytes(self.kv_bytes_kept)}, whole {format_bytes(self.kv_bytes_whole)}",
                    ),
                ]
            if self.replay_tokens:
                replayed = f"{self.replay_tokens:,} tokens, {self.replay_seconds:,.1f} s"
                rows.append(("contexts repeated", replayed))
            if self.replays_replaced:
                rows.append(("replays that did not fit", f"{self.replays_replaced:,}, judged by a window"))
        return rows


_FULL_MEMORY = 0.9
"""Share of the KV memory, a peak of which means that requests are likely to have waited for it."""


def _phases(stats: EngineStats, seconds: float) -> dict[str, float]:
    """Return seconds by what they were spent on, where contexts were judged; empty where nothing was."""
    if not (stats.num_rounds or stats.replay_tokens):
        return {}
    phases = {
        "prefill": stats.prefill_seconds,
        "replays": stats.replay_seconds,
        "rounds of eviction": stats.elapsed["evict"],
        "decoding": stats.decode_seconds,
    }
    return phases | {"the rest": max(seconds - sum(phases.values()), 0.0)}


class Forecast:
    """One line, as soon as the first requests have started, on whether compressing them may pay.

    Args:
        file: where it is written; None: nowhere.
    """

    def __init__(self, file: TextIO | None) -> None:
        self._file = file

    def say(self, llm: "LLM") -> None:
        """Write the line if there is something to say, once."""
        if self._file is None or llm.config.eviction.compression is None:
            return
        stats = llm.stats()
        if not stats.num_starts:
            return
        if stats.outlook is not None:
            print(f"winnow: {stats.outlook}", file=self._file)
        elif llm.config.eviction.compression != "auto" and not stats.num_short_starts:
            print(
                "winnow: the requests so far fit into the KV memory whole, so that compressing saves no wait "
                "(--compression auto compresses only where it does)",
                file=self._file,
            )
        self._file = None


def _payoff(stats: EngineStats, seconds: float) -> str | None:
    """Return whether compressing paid, or may pay: it saves waits for memory, and costs replays and rounds."""
    if not stats.num_starts and stats.kv_bytes_peak >= _FULL_MEMORY * stats.kv_bytes_budget > 0:
        return (
            "KV memory was full: --compression auto lets more requests run beside each other where that pays"
        )
    if not stats.num_rounds:
        return None
    cost = stats.replay_seconds + stats.elapsed.get("evict", 0.0)
    spent = (
        f"the replay cost {stats.replay_seconds:,.0f} s"
        if stats.replay_tokens
        else f"rounds cost {cost:,.1f} s"
    )
    if not stats.num_short_starts:
        return (
            f"KV memory was never short: {spent} and compression saved no wait; "
            f"the full cache is expected to take {max(seconds - cost, 0.0):,.0f} s (--eviction full)"
        )
    said = f"KV memory was short for {stats.num_short_starts:,} of {stats.num_starts:,} requests"
    return f"{said} ({stats.outlook}); {spent}" if stats.outlook is not None else f"{said}; {spent}"


def _accuracy(tally: Tally) -> tuple[Accuracy, ...]:
    """Return the accuracy by category in alphabetical order, then over all lines if there are several categories."""
    scores = dict(sorted(tally.scores.items()))
    if len(scores) > 1:
        scores["all"] = [score for category in scores.values() for score in category]
    return tuple(
        Accuracy(category, len(values), sum(values) / len(values)) for category, values in scores.items()
    )
