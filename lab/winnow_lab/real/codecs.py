"""What formats of stored KVs cost in quality: perplexity and tasks by codec, with the full cache and under eviction.

    python -m winnow_lab.real.codecs --codecs 'auto;int8;int4 wide=recent=64' --windows 2048:8 --name codecs

A codec is a `kv_cache_dtype`, then what else is said: group=64, rotate=kv, wide=sinks=4,recent=64. The first one is
what the others are compared with. --windows: tokens of a window of WikiText-2, and how many windows; the first half is
given, the second decoded token by token. --prompts: the same, but the whole window is read as a prompt. Answers are
kept below --work, one folder for each codec: the same command resumes where it was killed, and --report computes
nothing and shows what is complete.

Under policies the same compression holds fewer bytes the narrower the codec. --bytes compares mixes at equal bytes:
each codec compresses by what is left to reach each number of times fewer bytes than the first codec's full cache holds.
NAME.md has the tables, and NAME.svg the curves.
"""

import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from winnow import LLM, RequestOutput, SamplingParams
from winnow_lab.evaluate.cell import AGNOSTIC, amounts_of, engine_needs, plan_cells
from winnow_lab.evaluate.likelihood import Keeping, Pair
from winnow_lab.evaluate.perplexity import Perplexity, WindowScore, measure_perplexity
from winnow_lab.evaluate.plan import engine_identity
from winnow_lab.evaluate.wikitext import cut_windows, wikitext
from winnow_lab.real.codec_rows import Codec, Measured, equal_compressions, read_codecs
from winnow_lab.real.codec_tables import shares_figure, tables
from winnow_lab.real.command import RealOptions
from winnow_lab.real.run import RealEvaluation
from winnow_lab.real.work import KNOWN_TASKS
from winnow_lab.study import Result, flag, read_pairs, run_study
from winnow_lab.study.journal import ResultJournal

CODECS = (
    *("auto", "fp8_e4m3", "int8", "k=int8,v=int4", "int4", "int4 rotate=none", "int4 wide=recent=64"),
    "int4-outlier rotate=none",
)
_LENGTH = 4096
"""Tokens of the sequence whose bytes are counted."""


@dataclass(frozen=True)
class Options(RealOptions):
    """Codecs, texts, and bytes at which mixes are compared."""

    codecs: tuple[str, ...] = flag(CODECS, "semicolons between", parse=read_codecs)
    windows: tuple[tuple[int, int], ...] = flag(((2048, 20),), "TOKENS:NUMBER,... decoded", parse=read_pairs)  # type: ignore[assignment]
    prompts: tuple[tuple[int, int], ...] = flag((), "the same, read as prompts", parse=read_pairs)
    max_num_seqs: int = flag(8, least=1)
    bytes: tuple[float, ...] = flag((), "times fewer than the first codec's full cache holds")
    policies: tuple[str, ...] = flag(())
    tasks: tuple[str, ...] = flag((), choices=KNOWN_TASKS)
    work: Path = flag(Path("runs/codecs"), "folder of journals")
    name: str = flag("codecs", "of the files in --output")


def measure(codec: Codec, asked: Options, reference_bytes: float | None) -> Measured:
    """Measure a codec, or read from its journals what was measured before.

    Args:
        reference_bytes: of a token in the format that is compared with; None: in this one.
    """
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
        read = {tokens: _read(llm, arguments, tokens, count) for tokens, count in arguments.prompts}
        return Measured(
            codec,
            token_bytes,
            {tokens: found for tokens, found in decoded.items() if found},
            evaluation.rows,
            {tokens: found for tokens, found in read.items() if found},
        )


def _decoded(
    llm: LLM, arguments: Options, tokens: int, count: int, keepings: dict[str, Keeping]
) -> list[Perplexity]:
    """Perplexity by forced decoding, from the journal as far as it goes; none where that shall be all and is not."""
    pairs, journal = _windows_and_journal(llm, arguments, tokens, count, "")
    with journal:
        if arguments.report and len(journal.found) < len(pairs) * len(keepings):
            return []
        return measure_perplexity(
            llm, pairs, keepings, known=journal.found, on_score=lambda score: journal.append([score])
        )


def _read(llm: LLM, arguments: Options, tokens: int, count: int) -> Perplexity | None:
    """The full cache's perplexity where the whole window is a prompt.

    Its chunks read what is stored, as decoding does, at a fifth of the time where windows are long.
    """
    pairs, journal = _windows_and_journal(llm, arguments, tokens, count, "-read")
    with journal:
        known = {score.window: score for score in journal.found}
        for place, pair in enumerate(pairs):
            if place not in known and not arguments.report:
                params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
                [output] = llm.generate([[*pair.context, *pair.continuation]], params)
                output.raise_for_error()
                known[place] = _window_score(llm, place, pair, output)
                journal.append([known[place]])
    complete = len(known) == len(pairs)
    return Perplexity("full cache", tuple(known[place] for place in range(len(pairs)))) if complete else None


def _window_score(llm: LLM, place: int, pair: Pair, output: RequestOutput) -> WindowScore:
    start, length = len(pair.context), len(pair.context) + len(pair.continuation)
    found = zip(output.prompt_token_ids[start:], (output.prompt_logprobs or [])[start:], strict=True)
    nats = -sum(logprobs[token].logprob for token, logprobs in found if logprobs is not None)
    return WindowScore("full cache", place, nats, length - start, float(length), llm.kv_bytes(length), 0)


def _windows_and_journal(
    llm: LLM, arguments: Options, tokens: int, count: int, kind: str
) -> tuple[list[Pair], ResultJournal[WindowScore]]:
    pairs = cut_windows(llm.tokenizer, wikitext(None), tokens, tokens // 2, count)
    digest = hashlib.sha256(json.dumps([vars(pair) for pair in pairs]).encode()).hexdigest()
    identity = engine_identity(llm, digest, {"task": "perplexity"})
    path = arguments.work / f"perplexity-{tokens}-{count}{kind}.jsonl"
    return pairs, ResultJournal(path, identity, WindowScore.from_json, answers_alone=True)


def study(options: Options) -> Iterator[Result]:
    """Every codec, after each of which everything is written anew."""
    found: list[Measured] = []
    for name in options.codecs:
        reference = found[0].token_bytes if found else None
        each = measure(Codec(name), options, reference)
        if not found or each.rows or each.perplexities or each.passes:
            found.append(each)
        yield result(options, found)


def result(options: Options, found: Sequence[Measured]) -> Result:
    """The numbers, the words, and with --bytes the curves."""
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
