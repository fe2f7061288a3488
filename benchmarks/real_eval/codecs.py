"""What formats of stored KVs cost in quality: perplexity and tasks by codec, with the full cache and under eviction.

    python -m benchmarks.real_eval.codecs [--codecs 'auto;int8;int4;int4 wide=recent=64;k=int8,v=int4'] [--model DIR]
        [--windows 2048:20,8192:4] [--tasks ruler,kv-retrieval,gsm8k] [--categories A,...] [--tokens 2048,4096]
        [--samples 50] [--policies A,...] [--compressions 2,4] [--query seen,later] [--work DIR] [-o docs/results]

A codec is a `kv_cache_dtype`, then what else is said: group=64, rotate=kv, wide=sinks=4,recent=64. The first one is
what the others are compared with. --windows: tokens of a window of WikiText-2, of which the first half is given, and
how many windows. Answers are kept below --work, one folder for each codec: the same command goes on where it was
killed. Under policies the same compression holds fewer bytes the narrower the codec, so that mixes can be compared at
equal bytes: codecs.md has every mix with its bytes a token.
"""

import argparse
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.papers.page import page, results_json
from benchmarks.real_eval import command
from benchmarks.real_eval.rows import Row, counts
from benchmarks.real_eval.run import RealEvaluation
from benchmarks.real_eval.work import LABELS
from winnow import LLM
from winnow.errors import ConfigError
from winnow.evaluate.cell import AGNOSTIC, plan_cells
from winnow.evaluate.cell import num_accumulators as needed_accumulators
from winnow.evaluate.journal import ResultJournal
from winnow.evaluate.likelihood import Keeping
from winnow.evaluate.perplexity import Perplexity, WindowScore, measure_perplexity
from winnow.evaluate.plan import engine_identity
from winnow.evaluate.wikitext import cut_windows, wikitext
from winnow.report.provenance import Machine, report_head, typed_command
from winnow.report.tables import TextTable

CODECS = "auto;fp8_e4m3;int8;k=int8,v=int4;int4;int4 rotate=none;int4 wide=recent=64;int4-outlier rotate=none"
PAPER = {"int8": "< 0.1 %", "int4": "0.3-1.0 %", "int4-outlier": "< 0.2 %", "int2": "2-5 %"}
"""Loss of perplexity in `kv-cache-memory.txt`, "KV Cache Quantization Impact" (Llama 3 70B)."""


@dataclass(frozen=True)
class Codec:
    """One codec of the tables, by the text that named it."""

    name: str

    @property
    def options(self) -> dict[str, Any]:
        """The options of `LLM` that ask for it.

        Raises:
            ConfigError: the text is none that stands above.
        """
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
        """A name for files."""
        return "".join(c if c.isalnum() or c in "-_=" else "_" for c in self.name)


@dataclass(frozen=True)
class Measured:
    """What one codec scored."""

    codec: Codec
    token_bytes: float
    """Bytes of blocks per token in all layers, of long sequences."""
    perplexities: dict[int, list[Perplexity]]
    """By tokens of a window; the full cache first."""
    rows: list[Row]

    def to_json(self) -> dict[str, Any]:
        """Every number."""
        return {
            "codec": self.codec.name,
            "token_bytes": self.token_bytes,
            "perplexity": {
                str(n): [each.to_json() for each in found] for n, found in self.perplexities.items()
            },
            "rows": [asdict(row) for row in self.rows],
        }


def measure(codec: Codec, arguments: argparse.Namespace, windows: Sequence[tuple[int, int]]) -> Measured:
    """Measure a codec, or read from its journals what was measured before."""
    arguments = argparse.Namespace(**vars(arguments) | {"work": arguments.work / codec.folder})
    arguments.work.mkdir(parents=True, exist_ok=True)
    cells = plan_cells(arguments.policies, arguments.compressions, (AGNOSTIC,))
    with LLM(
        arguments.model,
        dtype=arguments.dtype,
        kv_memory=arguments.kv_memory,
        threads=arguments.threads,
        kv_floor=1,
        num_accumulators=needed_accumulators(cells),
        max_num_seqs=arguments.max_num_seqs,
        **codec.options,
    ) as llm:
        evaluation = RealEvaluation(arguments, llm, lambda rows, perplexities: None)
        evaluation.run()
        perplexities = {}
        for tokens, count in windows:
            pairs = cut_windows(llm.tokenizer, wikitext(None), tokens, tokens // 2, count)
            digest = hashlib.sha256(json.dumps([vars(pair) for pair in pairs]).encode()).hexdigest()
            identity = engine_identity(llm, digest, {"task": "perplexity"})
            path = arguments.work / f"perplexity-{tokens}-{count}.jsonl"
            with ResultJournal(path, identity, WindowScore.from_json, answers_alone=True) as journal:
                perplexities[tokens] = measure_perplexity(
                    llm,
                    pairs,
                    {cell.label: Keeping.of(cell) for cell in cells},
                    known=journal.found,
                    on_score=lambda score, journal=journal: journal.append([score]),  # type: ignore[misc]
                )
        length = 4096
        return Measured(codec, llm.kv_bytes(length) / length, perplexities, evaluation.rows)


def tables(found: Sequence[Measured], least: float) -> list[TextTable]:
    """Perplexity by codec, categories by codec, and every mix of compression and codec by its bytes."""
    shown = [_perplexity_table(found, tokens) for tokens in found[0].perplexities]
    counted = [row.work for row in found[0].rows if row.query is None and counts(row, least)]
    if counted:
        shown += [_accuracy_table(found, counted), _mix_table(found, counted)]
    return shown


def _perplexity_table(found: Sequence[Measured], tokens: int) -> TextTable:
    reference = found[0].perplexities[tokens][0]
    lines = tuple((each.codec.name, _perplexity(each, tokens, reference)) for each in found)
    title = f"Perplexity of the second half of windows of {tokens:,} tokens, full cache"
    return TextTable(title, "codec", ("bytes a token", "perplexity", "change", "paper (70B)"), lines)


def _accuracy_table(found: Sequence[Measured], works: Sequence[str]) -> TextTable:
    full = [{row.work: row for row in each.rows if row.query is None} for each in found]
    lines = tuple((work, tuple(_score(rows.get(work)) for rows in full)) for work in works)
    columns = tuple(each.codec.name for each in found)
    return TextTable("Accuracy with the full cache", "category", columns, lines).upright()


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


def _perplexity(each: Measured, tokens: int, reference: Perplexity) -> tuple[str, ...]:
    full = each.perplexities[tokens][0]
    change = full.over(reference)
    percent = (
        "" if change is None else f"{100 * (change.ratio - 1):+.2f} ± {100 * (change.error or 0.0):.2f} %"
    )
    paper = PAPER.get(each.codec.options["kv_cache_dtype"], "")
    return f"{each.token_bytes:,.0f}", f"{full.value or math.nan:.3f}", percent, paper


def _score(row: Row | None) -> str:
    return "" if row is None or row.score is None else f"{row.score:.2f} ± {row.error or 0.0:.2f}"


def _windows(text: str) -> tuple[tuple[int, int], ...]:
    """ "2048:20,8192:4" as tokens and counts."""
    pairs = [part.partition(":") for part in filter(None, text.split(","))]
    return tuple((int(tokens), int(count)) for tokens, _, count in pairs)


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.real_eval.codecs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Other flags are those of python -m benchmarks.real_eval.",
    )
    parser.add_argument("--codecs", default=CODECS, help="(default: %(default)s)")
    parser.add_argument("--windows", type=_windows, default=((2048, 20),), help="(default: 2048:20)")
    parser.add_argument("--max-num-seqs", type=int, default=8)
    own, rest = parser.parse_known_args()
    defaults = ["--policies", "", "--tasks", "", "--work", "runs/codecs"]
    arguments = command.parse([*defaults, *rest])
    arguments.max_num_seqs = own.max_num_seqs
    found: list[Measured] = []
    for name in filter(None, own.codecs.split(";")):
        found.append(measure(Codec(name.strip()), arguments, own.windows))
        head = report_head(typed_command(), Machine.here("cpu")) | {"model": Path(arguments.model).name}
        shown = tables(found, arguments.counts_from)
        values = head | {"codecs": [each.to_json() for each in found]}
        arguments.output.mkdir(parents=True, exist_ok=True)
        (arguments.output / "codecs.json").write_text(results_json(values, ("codecs",)), encoding="utf-8")
        facts = [f"Model {head['model']}, {arguments.dtype}."]
        note = (
            "Change: mean over windows ± its standard error, against the first codec on the same windows.\n"
        )
        text = page("Formats of stored KVs", [head], facts, note, shown, [])
        (arguments.output / "codecs.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
