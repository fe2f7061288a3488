"""What formats of stored KVs cost in quality: perplexity and tasks by codec, with the full cache and under eviction.

    python -m winnow_lab.real.codecs [--codecs 'auto;int8;int4;int4 wide=recent=64;k=int8,v=int4'] [--model DIR]
        [--windows 2048:20] [--prompts 8192:4] [--tasks ruler,kv-retrieval,gsm8k] [--categories A,...]
        [--tokens 2048,4096] [--samples 50] [--policies A,...] [--bytes 4,8,16,32 | --compressions 2,4]
        [--query seen,later] [--report] [--work DIR] [--name codecs] [-o docs/results]

A codec is a `kv_cache_dtype`, then what else is said: group=64, rotate=kv, wide=sinks=4,recent=64. The first one is
what the others are compared with. --windows: tokens of a window of WikiText-2, and how many windows; the first half is
given, the second decoded token by token. --prompts: the same, but the whole window is read as a prompt. Answers are
kept below --work, one folder for each codec: the same command resumes where it was killed, and --report computes
nothing and shows what is complete.

Under policies the same compression holds fewer bytes the narrower the codec. --bytes compares mixes at equal bytes:
each codec compresses by what is left to reach each number of times fewer bytes than the first codec's full cache holds.
NAME.md has the tables, and NAME.svg the curves.
"""

import argparse
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from winnow import LLM, RequestOutput, SamplingParams
from winnow.report.provenance import Machine, report_head, typed_command
from winnow_lab.evaluate.cell import AGNOSTIC, amounts_of, engine_needs, plan_cells
from winnow_lab.evaluate.journal import ResultJournal
from winnow_lab.evaluate.likelihood import Keeping, Pair
from winnow_lab.evaluate.perplexity import Perplexity, WindowScore, measure_perplexity
from winnow_lab.evaluate.plan import engine_identity
from winnow_lab.evaluate.wikitext import cut_windows, wikitext
from winnow_lab.papers.page import page, results_json
from winnow_lab.real import command
from winnow_lab.real.codec_rows import Codec, Measured, equal_compressions
from winnow_lab.real.codec_tables import shares_figure, tables
from winnow_lab.real.run import RealEvaluation
from winnow_lab.report.plots import can_draw, save_figure

CODECS = "auto;fp8_e4m3;int8;k=int8,v=int4;int4;int4 rotate=none;int4 wide=recent=64;int4-outlier rotate=none"
_LENGTH = 4096
"""Tokens of the sequence whose bytes are counted."""


def measure(
    codec: Codec,
    arguments: argparse.Namespace,
    windows: Sequence[tuple[int, int]],
    shares: Sequence[float],
    reference_bytes: float | None,
) -> Measured:
    """Measure a codec, or read from its journals what was measured before.

    Args:
        arguments: of `winnow_lab.real.command`.
        windows: tokens of a window of text, and how many.
        shares: times fewer bytes than `reference_bytes`, in place of compressions; none: the arguments' compressions.
        reference_bytes: of a token in the format that is compared with; None: in this one.
    """
    arguments = argparse.Namespace(**vars(arguments) | {"work": arguments.work / codec.folder})
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
            arguments.compressions = tuple(amount for _, amount in pairs)
        evaluation = RealEvaluation(arguments, llm, lambda rows, perplexities: None)
        evaluation.run()
        cells = plan_cells(
            arguments.policies, amounts_of(() if shares else arguments.compressions), (AGNOSTIC,)
        )
        keepings = {cell.label: Keeping.of(cell) for cell in cells}
        decoded = {tokens: _decoded(llm, arguments, tokens, count, keepings) for tokens, count in windows}
        read = {tokens: _read(llm, arguments, tokens, count) for tokens, count in arguments.prompts}
        return Measured(
            codec,
            token_bytes,
            {tokens: found for tokens, found in decoded.items() if found},
            evaluation.rows,
            {tokens: found for tokens, found in read.items() if found},
        )


def _decoded(
    llm: LLM, arguments: argparse.Namespace, tokens: int, count: int, keepings: dict[str, Keeping]
) -> list[Perplexity]:
    """Perplexity by forced decoding, from the journal as far as it goes; none where that shall be all and is not."""
    pairs, journal = _windows_and_journal(llm, arguments, tokens, count, "")
    with journal:
        if arguments.report and len(journal.found) < len(pairs) * len(keepings):
            return []
        return measure_perplexity(
            llm, pairs, keepings, known=journal.found, on_score=lambda score: journal.append([score])
        )


def _read(llm: LLM, arguments: argparse.Namespace, tokens: int, count: int) -> Perplexity | None:
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
    llm: LLM, arguments: argparse.Namespace, tokens: int, count: int, kind: str
) -> tuple[list[Pair], ResultJournal[WindowScore]]:
    pairs = cut_windows(llm.tokenizer, wikitext(None), tokens, tokens // 2, count)
    digest = hashlib.sha256(json.dumps([vars(pair) for pair in pairs]).encode()).hexdigest()
    identity = engine_identity(llm, digest, {"task": "perplexity"})
    path = arguments.work / f"perplexity-{tokens}-{count}{kind}.jsonl"
    return pairs, ResultJournal(path, identity, WindowScore.from_json, answers_alone=True)


def write_results(output: Path, name: str, arguments: argparse.Namespace, found: Sequence[Measured]) -> None:
    """The numbers, the page, and with --bytes the curves."""
    shares, least = arguments.bytes, arguments.counts_from
    head = report_head(typed_command(), Machine.here("cpu")) | {"model": Path(arguments.model).name}
    output.mkdir(parents=True, exist_ok=True)
    values = head | {"codecs": [each.to_json() for each in found]}
    (output / f"{name}.json").write_text(results_json(values, ("codecs",)), encoding="utf-8")
    figures = []
    if shares and arguments.policies and found[0].rows and can_draw():
        figures = [save_figure(shares_figure(found, least, shares, arguments.policies[0]), output / name)]
    facts = [f"Model {head['model']}, {arguments.dtype}, {arguments.samples} prompts a category."]
    note = (
        "Change: mean over windows ± its standard error, against the first codec on the same windows. Scores: mean "
        f"over prompts ± standard error; a category counts where the first codec's full cache has {least:g} or more.\n"
    )
    text = page("Formats of stored KVs", [head], facts, note, tables(found, least, shares), figures)
    (output / f"{name}.md").write_text(text, encoding="utf-8")


def _windows(text: str) -> tuple[tuple[int, int], ...]:
    """Read "2048:20,8192:4" as tokens and counts."""
    pairs = [part.partition(":") for part in filter(None, text.split(","))]
    return tuple((int(tokens), int(count)) for tokens, _, count in pairs)


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(
        prog="python -m winnow_lab.real.codecs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Other flags are those of python -m winnow_lab.real.",
    )
    parser.add_argument("--codecs", default=CODECS, help="(default: %(default)s)")
    parser.add_argument("--windows", type=_windows, default=((2048, 20),), help="(default: 2048:20)")
    parser.add_argument("--prompts", type=_windows, default=(), help="(default: none)")
    parser.add_argument("--max-num-seqs", type=int, default=8)
    parser.add_argument(
        "--bytes",
        type=lambda text: tuple(float(each) for each in text.split(",")),
        default=(),
        help="times fewer than the first codec's full cache holds (default: --compressions as they are)",
    )
    parser.add_argument("--name", default="codecs", help="of the files (default: %(default)s)")
    own, rest = parser.parse_known_args()
    defaults = ["--policies", "", "--tasks", "", "--work", "runs/codecs"]
    arguments = command.parse([*defaults, *rest])
    arguments.max_num_seqs, arguments.bytes, arguments.prompts = own.max_num_seqs, own.bytes, own.prompts
    found: list[Measured] = []
    for name in filter(None, own.codecs.split(";")):
        reference = found[0].token_bytes if found else None
        each = measure(Codec(name.strip()), arguments, own.windows, own.bytes, reference)
        if not found or each.rows or each.perplexities or each.passes:
            found.append(each)
        write_results(arguments.output, own.name, arguments, found)


if __name__ == "__main__":
    main()
