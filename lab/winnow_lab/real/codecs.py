"""What formats of stored KVs cost in quality: perplexity and tasks by codec, with the full cache and under eviction.

    python -m winnow_lab.real.codecs --codecs 'auto;int8;int4 wide=recent=64' --windows 2048:8 --name codecs

A codec is a `kv_cache_dtype`, then what else is said: group=64, rotate=kv, wide=sinks=4,recent=64. The first one is
what the others are compared with. --windows: tokens of a window of WikiText-2, and how many windows; the first half is
given, the second decoded token by token. Answers are kept below --work, one folder for each codec: the same command
resumes where it was killed, and --report computes nothing and shows what is complete.

Under policies the same compression holds fewer bytes the narrower the codec. --bytes compares mixes at equal bytes:
each codec compresses by what is left to reach each number of times fewer bytes than the first codec's full cache holds.
NAME.md has the tables, and NAME.svg the curves.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from winnow import LLM
from winnow_lab.evaluate.cell import AGNOSTIC, amounts_of, engine_needs, plan_cells
from winnow_lab.evaluate.likelihood import Keeping
from winnow_lab.evaluate.perplexity import Perplexity, resumed_perplexity, window_journal
from winnow_lab.evaluate.wikitext import cut_windows, wikitext
from winnow_lab.real.codec_tables import (
    Codec,
    Measured,
    equal_compressions,
    read_codecs,
    shares_figure,
    tables,
)
from winnow_lab.real.command import RealEvaluation, RealOptions
from winnow_lab.real.rows import KNOWN_TASKS
from winnow_lab.study import Result, flag, read_pairs, run_study

CODECS = (
    *("auto", "fp8_e4m3", "int8", "k=int8,v=int4", "int4", "int4 rotate=none"),
    *("int4 wide=recent=64", "int4-outlier rotate=none"),
)
_LENGTH = 4096
"""Tokens of the sequence whose bytes are counted."""


@dataclass(frozen=True)
class Options(RealOptions):
    codecs: tuple[str, ...] = flag(CODECS, "semicolons between", parse=read_codecs)
    windows: tuple[tuple[int, int], ...] = flag(((2048, 20),), "TOKENS:NUMBER,... decoded", parse=read_pairs)  # type: ignore[assignment]
    max_num_seqs: int = flag(8, least=1)
    bytes: tuple[float, ...] = flag((), "times fewer than the first codec's full cache holds")
    policies: tuple[str, ...] = flag(())
    tasks: tuple[str, ...] = flag((), choices=KNOWN_TASKS)
    work: Path = flag(Path("runs/codecs"), "folder of journals")


def measure(codec: Codec, asked: Options, reference_bytes: float | None) -> Measured:
    """Measure a codec, or read its journals. `reference_bytes`: of a token in the first codec; None: this is it."""
    arguments, shares = replace(asked, work=asked.work / codec.folder), asked.bytes
    arguments.work.mkdir(parents=True, exist_ok=True)
    with LLM(
        arguments.model,
        dtype=arguments.dtype,
        kv_memory=arguments.kv_memory,
        threads=arguments.threads,
        kv_floor=1,
        **engine_needs(plan_cells(arguments.policies, amounts_of([2.0]), (AGNOSTIC,))),
        max_num_seqs=arguments.max_num_seqs,
        **codec.options,
    ) as llm:
        token_bytes = llm.kv_bytes(_LENGTH) / _LENGTH
        if shares:
            pairs = equal_compressions(shares, token_bytes, reference_bytes or token_bytes)
            arguments = replace(arguments, compressions=tuple(amount for _, amount in pairs))
        evaluation = RealEvaluation(arguments, llm)
        for _ in evaluation.run():
            pass
        cells = plan_cells(
            arguments.policies, amounts_of(() if shares else arguments.compressions), (AGNOSTIC,)
        )
        keepings = {cell.label: Keeping.of(cell) for cell in cells}
        decoded = {
            tokens: _decoded(llm, arguments, tokens, count, keepings) for tokens, count in arguments.windows
        }
        return Measured(
            codec, token_bytes, {tokens: found for tokens, found in decoded.items() if found}, evaluation.rows
        )


def _decoded(
    llm: LLM, arguments: Options, tokens: int, count: int, keepings: dict[str, Keeping]
) -> list[Perplexity]:
    """Perplexity by forced decoding, from the journal as far as it goes; none where that shall be all and is not."""
    windows = cut_windows(llm.tokenizer, wikitext(None), tokens, tokens // 2, count)
    path = arguments.work / f"perplexity-{tokens}-{count}.jsonl"
    if arguments.report:
        with window_journal(llm, windows, path) as journal:
            if len(journal.found) < len(windows) * len(keepings):
                return []
    return resumed_perplexity(llm, windows, keepings, path)


def study(options: Options) -> Iterator[Result]:
    found: list[Measured] = []
    for name in options.codecs:
        reference = found[0].token_bytes if found else None
        each = measure(Codec(name), options, reference)
        if not found or each.rows or each.perplexities:
            found.append(each)
        yield result(options, found)


def result(options: Options, found: Sequence[Measured]) -> Result:
    shares, least, model = options.bytes, options.counts_from, Path(options.model).name
    drawn = shares and options.policies and found[0].rows
    figure = partial(shares_figure, found, least, shares, next(iter(options.policies), ""))
    facts = [f"Model {model}, {options.dtype}, {options.samples} prompts a category."]
    note = (
        "Change: mean over windows ± its standard error, against the first codec on the same windows. Scores: mean "
        f"over prompts ± standard error; a category counts where the first codec's full cache has {least:g} or more.\n"
    )
    numbers = {"model": model, "codecs": [each.to_json() for each in found]}
    shown, figures = tables(found, least, shares), {"": figure} if drawn else {}
    return Result("Formats of stored KVs", shown, facts, note, numbers, ("codecs",), figures)


if __name__ == "__main__":
    sys.exit(run_study(Options, study))
