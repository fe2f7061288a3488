"""Summary of a run: the table at its end, and the same as JSON."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TextIO

from rich.table import Table
from rich.text import Text

from winnow.batch.records import Tally
from winnow.outputs import EngineStats
from winnow.values.units import format_bytes

if TYPE_CHECKING:
    from winnow.llm import LLM

_MOST_PROMPTS = 0.8
"""Share of a job's seconds, above which what prompts take leaves eviction nothing to gain."""
_FULL_MEMORY = 0.9
"""Share of the KV memory, a peak of which means that requests are likely to have waited for it."""
_SHARED = 0.2
"""Share of the prompts' tokens in the prefix cache from which on they are said to begin alike."""
# The fields of `EngineStats` that a summary repeats, by their names there.
_COUNTS = {
    "computed_prompt_tokens": "prompt_tokens",
    "computed_generated_tokens": "generated_tokens",
    "kv_bytes_peak": "kv_bytes_peak",
    "kv_bytes_budget": "kv_bytes_budget",
    "preemptions": "num_preemptions",
    "swaps": "num_swaps",
    "cached_tokens": "cached_tokens",
    "recomputed_tokens": "recomputed_tokens",
    "eviction_rounds": "num_rounds",
    "kv_bytes_freed": "kv_bytes_freed",
    "replay_tokens": "replay_tokens",
    "replay_seconds": "replay_seconds",
    "replays_replaced": "num_replays_replaced",
    "draft_tokens": "num_draft_tokens",
    "accepted_tokens": "num_accepted_tokens",
    "kv_bytes_kept": "kv_bytes_kept",
    "kv_bytes_whole": "kv_bytes_whole",
}


@dataclass(frozen=True)
class Summary:
    """A run in numbers.

    Attributes:
        tally: of every line of the output.
        resumed: how many of the lines were there before.
        seconds: in which the last process answered the others, loading the model not counted.
    """

    tally: Tally
    resumed: int
    seconds: float
    stats: EngineStats

    def to_json(self) -> dict[str, Any]:
        """Return the numbers by name; `accuracy` is the mean score, 0..1, of each category's lines."""
        tally, stats, rate = self.tally, self.stats, self._rate
        return {
            "policies": dict(tally.policies),
            "requests": tally.requests,
            "failed": tally.failed,
            "resumed": self.resumed,
            "prompt_tokens": tally.prompt_tokens,
            "generated_tokens": tally.generated_tokens,
            "cut_off": tally.cut_off,
            "seconds": self.seconds,
            "prompt_tokens_per_second": stats.prompt_tokens * rate,
            "generated_tokens_per_second": stats.generated_tokens * rate,
            **{name: getattr(stats, field) for name, field in _COUNTS.items()},
            "draft_rates": [asdict(each) for each in stats.draft_rates],
            "phases": self.phases,
            "agreement": asdict(stats.agreement),
            "payoff": self.payoff,
            "accuracy": [
                {"category": category, "lines": lines, "score": score}
                for category, lines, score in self._accuracy()
            ],
        }

    @property
    def _rate(self) -> float:
        return 1 / self.seconds if self.seconds > 0 else 0.0

    def table(self) -> Table:
        table = Table(title="winnow run", show_header=False, title_justify="left")
        table.add_column()
        table.add_column(justify="right")
        for label, value in self._rows():
            table.add_row(label, value)
        accuracy = self._accuracy()
        if accuracy:
            table.add_section()
        for category, lines, score in accuracy:
            # A category is what the user says, also where it reads like rich's markup.
            table.add_row(Text(f"accuracy: {category} ({lines})"), f"{score:.1%}")
        return table

    def _rows(self) -> list[tuple[str, str]]:
        tally, stats = self.tally, self.stats
        rows = [("requests", f"{tally.requests:,}")]
        if self.resumed:
            rows.append(("from an earlier start", f"{self.resumed:,}"))
        rows += [("failed", f"{tally.failed:,}"), ("prompt tokens", f"{tally.prompt_tokens:,}")]
        if stats.cached_tokens:
            rows.append(("  of them in the prefix cache", f"{stats.cached_tokens:,}"))
        rows.append(("generated tokens", f"{tally.generated_tokens:,}"))
        answers = tally.policies.total()
        rows += [
            ("policy", name if count == answers else f"{name}: {count:,} of {answers:,} answers")
            for name, count in tally.policies.most_common()
        ]
        if tally.cut_off:
            rows.append(("  answers cut off at max_tokens", f"{tally.cut_off:,}"))
        if self.resumed < tally.requests:
            rows += self._computed()
        return rows

    def _computed(self) -> Iterator[tuple[str, str]]:
        stats, swaps = self.stats, f", {self.stats.num_swaps:,} swapped" if self.stats.num_swaps else ""
        yield "wall time", f"{self.seconds:.1f} s"
        yield "prompt tokens/s", f"{stats.prompt_tokens * self._rate:,.0f}"
        yield "generated tokens/s", f"{stats.generated_tokens * self._rate:,.0f}"
        peak, budget = format_bytes(stats.kv_bytes_peak), format_bytes(stats.kv_bytes_budget)
        yield "peak KV memory", f"{peak} of {budget}"
        yield "preemptions", f"{stats.num_preemptions:,}{swaps}"
        if stats.recomputed_tokens:
            yield "tokens computed again", f"{stats.recomputed_tokens:,}"
        if stats.draft_rates or stats.num_draft_tokens:
            yield "drafts accepted", f"{stats.num_accepted_tokens:,} of {stats.num_draft_tokens:,}"
            yield from ((f"  up to {each.most_running} running", str(each)) for each in stats.draft_rates)
        yield from ((f"seconds: {phase}", f"{spent:,.1f} s") for phase, spent in self.phases.items())
        if stats.num_rounds:
            kept, whole = format_bytes(stats.kv_bytes_kept), format_bytes(stats.kv_bytes_whole)
            yield "eviction rounds", f"{stats.num_rounds:,}"
            yield "KV memory given back", format_bytes(stats.kv_bytes_freed)
            yield "KVs at the answers' ends", f"{kept}, whole {whole}"
        if (record := stats.agreement).checked:
            others = ", ".join(each.removeprefix("line-") for each in record.lines)
            yield "checked answers equal to the full cache's", f"{record.equal:,} of {record.checked:,}"
            yield "  tokens that it writes there too", f"{record.agreed / record.tokens:.0%}"
            yield from [("  others", f"lines {others}")] if others else []
        elif record.waiting:
            yield "answers compared with the full cache's", "none: it would take too long (--check 1)"
        if stats.replay_tokens:
            yield "contexts repeated", f"{stats.replay_tokens:,} tokens, {stats.replay_seconds:,.1f} s"
        if stats.num_replays_replaced:
            yield "replays that did not fit", f"{stats.num_replays_replaced:,}, judged by a window"

    @property
    def phases(self) -> dict[str, float]:
        """Seconds by what they were spent on; empty where nothing is known of them."""
        stats = self.stats
        if not stats.prefill_seconds:
            return {}
        judged = {"replays": stats.replay_seconds, "rounds of eviction": stats.elapsed.get("evict", 0.0)}
        phases = {
            "prompts": stats.prefill_seconds,
            **(judged if stats.num_rounds or stats.replay_tokens else {}),
            "decoding": stats.decode_seconds,
        }
        return phases | {"the rest": max(self.seconds - sum(phases.values()), 0.0)}

    @property
    def limit(self) -> str | None:
        """That eviction gains next to nothing, where decoding is a small part of the job; None: it is not."""
        once = self.stats.prefill_seconds - self.stats.recompute_seconds
        share = once / self.seconds if self.seconds else 0.0
        if share < _MOST_PROMPTS:
            return None
        return f"prompts are {share:.0%} of this job: eviction cannot make it faster".replace("%", " %")

    @property
    def payoff(self) -> str | None:
        """Whether compressing paid, or may pay: it saves waits for memory, and costs replays and rounds; None: nothing
        is to be said."""
        stats = self.stats
        if not stats.num_starts and stats.kv_bytes_peak >= _FULL_MEMORY * stats.kv_bytes_budget > 0:
            return (
                self.limit
                or "KV memory was full: --compression auto lets more requests run beside each other where that pays"
            )
        if not stats.num_rounds:
            return self.limit
        cost = stats.replay_seconds + stats.elapsed.get("evict", 0.0)
        replayed = f"the replay cost {stats.replay_seconds:,.0f} s"
        spent = replayed if stats.replay_tokens else f"rounds cost {cost:,.1f} s"
        if stats.cached_tokens > _SHARED * self.tally.prompt_tokens:
            spent += (
                "; prompts begin alike: what they share takes no room twice, and compressed copies share nothing, so "
                "that --compression auto keeps them whole"
            )
        if not stats.num_short_starts:
            return (
                f"KV memory was never short: {spent} and compression saved no wait; "
                f"the full cache is expected to take {max(self.seconds - cost, 0.0):,.0f} s (--eviction full)"
            )
        outlook = "" if stats.outlook is None else f" ({stats.outlook})"
        return (
            f"KV memory was short for {stats.num_short_starts:,} of {stats.num_starts:,} requests "
            f"under the policy{outlook}; {spent}{f'; {self.limit}' if self.limit else ''}"
        )

    def _accuracy(self) -> list[tuple[str, int, float]]:
        """Return the mean scores by category in alphabetical order, then over all lines if there are several."""
        scores = dict(sorted(self.tally.scores.items()))
        if len(scores) > 1:
            scores["all"] = [score for category in scores.values() for score in category]
        return [(category, len(each), sum(each) / len(each)) for category, each in scores.items()]


class Forecast:
    """One line, as soon as the first requests have started, on whether compressing them may pay; None: no line."""

    def __init__(self, file: TextIO | None) -> None:
        self._file = file

    def say(self, llm: "LLM") -> None:
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
