"""Formats of stored KVs by the text that names them, what each scored, and tables and the chart of it."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from winnow.errors import ConfigError
from winnow.values.units import format_bytes
from winnow_lab.evaluate.perplexity import Perplexity
from winnow_lab.real.rows import LABELS, Row, counts
from winnow_lab.report.plots import Axis, Line, Panel, line_chart
from winnow_lab.report.tables import TextTable

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def read_codecs(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(";") if name.strip())


@dataclass(frozen=True)
class Codec:
    name: str

    @property
    def options(self) -> dict[str, Any]:
        """The options of `LLM` that ask for it; raises ConfigError for what is not group=, rotate= or wide=."""
        dtype, *others = self.name.split()
        options: dict[str, Any] = {"kv_cache_dtype": dtype}
        for each in others:
            key, _, value = each.partition("=")
            if key not in ("group", "rotate", "wide"):
                raise ConfigError(f"--codecs: a codec has group=, rotate= and wide=, got {each!r}")
            options[f"kv_{key}"] = int(value) if key == "group" else value
        return options

    @property
    def folder(self) -> str:
        return "".join(c if c.isalnum() or c in "-_=" else "_" for c in self.name)


@dataclass(frozen=True)
class Measured:
    """What one codec scored.

    Attributes:
        token_bytes: bytes of blocks per token in all layers, of long sequences.
        perplexities: by tokens of a window, by forced decoding; the full cache first.
    """

    codec: Codec
    token_bytes: float
    perplexities: dict[int, list[Perplexity]]
    rows: list[Row]

    def full(self) -> dict[str, Row]:
        return {row.work: row for row in self.rows if row.query is None}

    def to_json(self) -> dict[str, Any]:
        return {
            "codec": self.codec.name,
            "token_bytes": self.token_bytes,
            "perplexity": {
                str(n): [each.to_json() for each in found] for n, found in self.perplexities.items()
            },
            "rows": [asdict(row) for row in self.rows],
        }


def equal_compressions(
    shares: Iterable[float], token_bytes: float, reference_bytes: float
) -> tuple[tuple[float, float], ...]:
    """What a codec compresses by to hold `1 / share` of the reference's bytes, beside each share.

    Shares that the codec's own bytes reach without eviction are left out.
    """
    pairs = ((share, round(share * token_bytes / reference_bytes, 2)) for share in shares)
    return tuple((share, amount) for share, amount in pairs if amount > 1.0)


def at_share(each: Measured, share: float, reference_bytes: float, method: str) -> dict[str, Row]:
    """Rows by work at one share of the bytes: the full cache's where the codec is narrow enough by itself."""
    amounts = dict(equal_compressions([share], each.token_bytes, reference_bytes))
    if share not in amounts:
        return each.full()
    return {row.work: row for row in each.rows if row.method == method and row.compression == amounts[share]}


PAPER = {"int8": "< 0.1 %", "int4": "0.3-1.0 %", "int4-outlier": "< 0.2 %", "int2": "2-5 %"}
"""Loss of perplexity in `kv-cache-memory.txt`, "KV Cache Quantization Impact" (Llama 3 70B)."""


def tables(found: Sequence[Measured], least: float, shares: Sequence[float] = ()) -> list[TextTable]:
    """Perplexity and categories by codec; every mix of compression and codec, by its bytes, or at equal ones.

    Args:
        found: the codec that the others are compared with comes first.
        least: what its full cache must score for a category to count.
        shares: times fewer bytes than its full cache, at which mixes are compared; none: all mixes in one table.
    """
    shown = [
        _perplexity_table(
            f"second half of windows of {tokens:,} tokens, full cache, decoded",
            [(each, each.perplexities[tokens][0]) for each in found if tokens in each.perplexities],
        )
        for tokens in found[0].perplexities
    ]
    works = _counted(found, least)
    if not works:
        return shown
    shown.append(_accuracy_table(found, works))
    if not shares:
        return [*shown, _mix_table(found, works)]
    for method in _methods(found):
        equal = EqualBytes(found, works, method, least)
        shown += [equal.table(shares), *map(equal.share_table, shares)]
    return shown


def shares_figure(found: Sequence[Measured], least: float, shares: Sequence[float], method: str) -> "Figure":
    """Score over times fewer bytes, a line for each codec: the mean, then each category."""
    works = _counted(found, least)
    parts = {"mean": works} | ({work: [work] for work in works} if len(works) > 1 else {})
    panels = [EqualBytes(found, each, method, least).panel(title, shares) for title, each in parts.items()]
    return line_chart(panels, f"{method}, bytes of KVs against the full cache in 16 bits", columns=3)


def _counted(found: Sequence[Measured], least: float) -> list[str]:
    return [work for work, row in found[0].full().items() if counts(row, least)]


def _methods(found: Sequence[Measured]) -> list[str]:
    return list(dict.fromkeys(row.method for each in found for row in each.rows if row.query is not None))


def _perplexity_table(title: str, found: Sequence[tuple[Measured, Perplexity]]) -> TextTable:
    lines = tuple((each.codec.name, _perplexity(each, value, *found[0])) for each, value in found)
    columns = ("bytes a token", "fewer", "perplexity", "change", "paper (70B)")
    return TextTable(f"Perplexity of the {title} ({len(found[0][1].scores)})", "codec", columns, lines)


def _perplexity(each: Measured, value: Perplexity, first: Measured, reference: Perplexity) -> tuple[str, ...]:
    change, percent = value.over(reference), ""
    if change is not None and each is not first:
        error = "" if change.error is None else f" ± {100 * change.error:.2f}"
        percent = f"{100 * (change.ratio - 1):+.2f}{error} %"
    paper = PAPER.get(each.codec.options["kv_cache_dtype"], "")
    times = f"{first.token_bytes / each.token_bytes:.2f}x"
    return f"{each.token_bytes:,.0f}", times, f"{value.value or math.nan:.3f}", percent, paper


def _accuracy_table(found: Sequence[Measured], works: Sequence[str]) -> TextTable:
    found = [each for each in found if each.rows]
    full = [each.full() for each in found]
    lines = [(work, tuple(_score(rows.get(work)) for rows in full)) for work in works]
    lines.append(("mean", tuple(_mean_text([rows.get(work) for work in works]) for rows in full)))
    columns = tuple(each.codec.name for each in found)
    return TextTable(
        "Accuracy with the full cache", "category", columns, tuple(lines), across="codec"
    ).upright()


def _mix_table(found: Sequence[Measured], works: Sequence[str]) -> TextTable:
    lines = []
    for each in found:
        for mix in dict.fromkeys((row.method, row.query, row.compression) for row in each.rows):
            method, query, compression = mix
            rows = [row for row in each.rows if (row.method, row.query, row.compression) == mix]
            known = [row.score for row in rows if row.work in works and row.score is not None]
            if known:
                name = f"{each.codec.name}, {method}" + (
                    f" {compression:g}x, {LABELS[query]}" if query else ""
                )
                nbytes = each.token_bytes / (compression or 1.0)
                times, score = found[0].token_bytes / nbytes, f"{fmean(known):.3f} of {len(known)}"
                lines.append((nbytes, (name, (f"{nbytes:,.0f}", f"{times:.1f}x", score))))
    lines.sort(key=lambda line: line[0])
    columns = ("bytes a token", "fewer", "mean score")
    return TextTable("Compression and bits by bytes", "mix", columns, tuple(entry for _, entry in lines))


@dataclass(frozen=True)
class EqualBytes:
    """Codecs under one policy at equal bytes. Below `least` a codec's full cache stands in for policies."""

    found: Sequence[Measured]
    works: Sequence[str]
    method: str
    least: float

    def table(self, shares: Sequence[float]) -> TextTable:
        lines = []
        for each in self.found:
            alone = _mean_text([each.full().get(work) for work in self.works])
            means = (_mean_text(self._rows(each, share), self._asked(each, share)) for share in shares)
            lines.append(" | ".join((each.codec.name, f"{self._alone(each):.2f}x", alone, *means)))
        head = " | ".join(("codec | alone | full cache", *(f"{share:g}x fewer bytes" for share in shares)))
        title = f"Equal bytes: mean score over {len(self.works)} categories, {self.method}, question later"
        return TextTable.read(title, head, lines)

    def share_table(self, share: float) -> TextTable:
        rows = [self._rows(each, share) for each in self.found]
        lines = [(work, tuple(_score(each[place]) for each in rows)) for place, work in enumerate(self.works)]
        held = [[row.kv_bytes for row in each if row is not None and row.kv_bytes] for each in rows]
        memory = tuple(format_bytes(fmean(each)) if each else "" for each in held)
        lines.append(("KV memory of an answer", memory))
        columns = tuple(f"{each.codec.name} {self._asked(each, share)}".strip() for each in self.found)
        return TextTable(f"{share:g}x fewer bytes, {self.method}", "category", columns, tuple(lines))

    def panel(self, title: str, shares: Sequence[float]) -> Panel:
        lines = []
        for each in self.found:
            alone = self._alone(each)
            points = [(alone, _mean([each.full().get(work) for work in self.works]))]
            points += [(share, _mean(self._rows(each, share))) for share in shares if share > alone]
            known = {x: y for x, y in points if y is not None}
            if known:
                lines.append(Line(each.codec.name, list(known), list(known.values())))
        return Panel(title, Axis("times fewer bytes", "log2"), Axis("score", low=0.0, high=1.05), lines)

    def _alone(self, each: Measured) -> float:
        """How many times fewer bytes a codec holds by itself."""
        return self.found[0].token_bytes / each.token_bytes

    def _asked(self, each: Measured, share: float) -> str:
        amount = share / self._alone(each)
        return f"at {amount:.1f}x" if amount > 1.0 else ""

    def _rows(self, each: Measured, share: float) -> list[Row | None]:
        rows, full = at_share(each, share, self.found[0].token_bytes, self.method), each.full()
        lost = {work: row for work, row in full.items() if not counts(row, self.least)}
        return [rows.get(work) or lost.get(work) for work in self.works]


def _mean(rows: Sequence[Row | None]) -> float | None:
    """None where a work is missing: means over different works cannot be compared."""
    scores = [None if row is None else row.score for row in rows]
    return fmean(score for score in scores if score is not None) if scores and None not in scores else None


def _mean_text(rows: Sequence[Row | None], note: str = "") -> str:
    mean = _mean(rows)
    if mean is None:
        return ""
    errors = [row.error or 0.0 for row in rows if row is not None]
    error = math.sqrt(sum(each * each for each in errors)) / len(errors)
    return f"{mean:.3f} ± {error:.3f}{f' ({note})' if note else ''}"


def _score(row: Row | None) -> str:
    return "" if row is None or row.score is None else f"{row.score:.2f} ± {row.error or 0.0:.2f}"
