"""`winnow tune`: the policy, compression and batch that keep the full cache's answers on one's own prompts."""

import argparse
import contextlib
import hashlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from winnow.batch.lines import DEFAULT_METRIC, BadLine, Job, parse_line
from winnow.batch.reader import read_lines
from winnow.cli.flags.engine import add_engine_flags, engine_options, model_path, open_llm
from winnow.cli.flags.options import add_flags, given
from winnow.cli.flags.paths import check_json_path, require_writable, write_json
from winnow.config import EngineConfig, option
from winnow.errors import UsageError
from winnow.report.provenance import typed_command
from winnow.values.checks import check_integer, check_number
from winnow_lab.report.console import console, print_tables

if TYPE_CHECKING:
    from winnow.llm import LLM
    from winnow_lab.plan.tuning.candidates import Candidate
    from winnow_lab.plan.tuning.measure import Trial, TunePrompt
    from winnow_lab.plan.tuning.search import Search

DESCRIPTION = """\
Find the policy, compression, batch and KV format that answer your prompts fastest (or with the fewest
bytes) while the answers agree with the full cache's as far as you ask. Many candidates run on a few
prompts, the better half of them on twice as many, and so on; the winner must keep its promise on
prompts that were held back. The journal lets a search that was stopped resume.
"""
EPILOG = """\
examples:
  winnow tune prompts.jsonl --agreement 0.98
  winnow tune prompts.jsonl --model DIR --kv-memory 256MiB --batches 16,64 --journal tune.jsonl
  winnow tune prompts.jsonl --objective bytes --presets kv-compress,snapkv --compressions 2,4,8,16
Lines are those of `winnow run`. Lines with a reference are compared by their metric instead: what counts is
the score, relative to the full cache's.
"""
CHOSEN = ("eviction", "compression", "kv_budget", "max_num_seqs", "num_accumulators", "enable_prefix_caching")
"""Options of the engine that the search sets."""


@dataclass(frozen=True)
class TuneOptions:
    """Search space and objective; lists take commas."""

    agreement: float = option(0.98, "mean agreement with the full cache's answers to keep")
    agree: str = option(
        "tokens",
        "exact: answers are the same or not; tokens: the part of an answer up to its first other token",
        choices=("exact", "tokens"),
    )
    objective: str = option(
        "throughput", "throughput, or bytes: most KVs in use", choices=("throughput", "bytes")
    )
    presets: str | None = option(None, "policies to try; left out: ten that need no files of their own")
    compressions: str = option("2,4,8", "tokens per KV kept")
    batches: str = option("64", "most sequences at the same time (max_num_seqs)")
    kv_dtypes: str = option("auto", "formats of stored KVs, where the engine has a choice (kv_cache_dtype)")
    max_tokens: int = option(64, "of answers whose lines do not say")
    first: int = option(4, "prompts of the first rung; each has twice as many")
    held_back: float = option(0.34, "part of the prompts that choose nothing and test the winner")
    split_seed: int = option(0, "of which prompts are held back")


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.usage = "winnow tune PROMPTS.jsonl [options]"
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument("prompts", metavar="PROMPTS", type=Path, help="lines as for winnow run")
    parser.add_argument("--journal", metavar="FILE", type=Path, help="what was measured, to resume from")
    parser.add_argument("--overwrite", action="store_true", help="start the journal afresh")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all trials as JSON too")
    parser.add_argument("--plot", metavar="STEM", type=Path, help="draw the Pareto front as STEM.svg")
    add_flags(parser, TuneOptions, "the search")
    add_engine_flags(parser, skip=CHOSEN)


def execute(namespace: argparse.Namespace) -> int:
    """Search, show, and return the exit code: 1 where nothing keeps the agreement."""
    asked = TuneOptions(**given(namespace, TuneOptions))
    options = engine_options(namespace)
    if options.get("engine") == "padded":
        raise UsageError("winnow tune needs engine=paged: the padded engine evicts nothing")
    search = _search(asked)
    check_json_path(namespace.json)
    for name in ("journal", "plot"):
        path = getattr(namespace, name)
        if path is not None:
            require_writable(path, f"--{name} {path}")
    prompts = read_prompts(namespace.prompts, asked.max_tokens)
    from winnow_lab.plan.tuning.search import Tuner
    from winnow_lab.plan.tuning.tune_tables import command, pareto_figure, tune_table, verdict

    tried = _candidates(asked)
    with contextlib.ExitStack() as stack:
        journal = _journal(namespace, asked, options, stack)

        def record(trial: "Trial") -> None:
            print(f"{trial.stage}: {trial.candidate}: {_brief(trial)}", file=sys.stderr)
            if journal is not None:
                journal.append([trial])

        found = () if journal is None else tuple(journal.found)
        tuned = Tuner(search, _opener(options, tried), record, found).tune(tried, prompts)
    print_tables(console(), [tune_table(tuned)], dense=True)
    engine = [word for name in options for word in _flag(name, options[name])]
    line = command(tuned, str(namespace.prompts), engine)
    for text in [*verdict(tuned), *([line] if line is not None else [])]:
        print(text)
    if namespace.plot is not None:
        from winnow_lab.report.plots import save_figure

        save_figure(pareto_figure(tuned), namespace.plot)
    write_json(
        namespace.json,
        {
            "command": typed_command(),
            "best": None if tuned.best is None else tuned.best.to_json(),
            "held_back": None if tuned.check is None else tuned.check.to_json(),
            "checked": tuned.checked,
            "run": line,
            "trials": [trial.to_json() for trial in tuned.trials],
        },
    )
    return 0 if tuned.best is not None else 1


def read_prompts(path: Path, max_tokens: int) -> "list[TunePrompt]":
    """Return the prompts of a file.

    Raises:
        UsageError: it cannot be read, a line cannot be run, or there are fewer than two.
    """
    from winnow_lab.plan.tuning.measure import TunePrompt

    prompts = []
    try:
        for raw in read_lines(path):
            job = parse_line(raw, {"max_tokens": max_tokens}, accounts=True)
            if isinstance(job, BadLine):
                raise UsageError(f"{path}, line {job.number}: {job.error}")
            prompts.append(_prompt(job, TunePrompt))
    except OSError as error:
        raise UsageError(f"cannot read the prompts {path}: {error.strerror}") from error
    if len(prompts) < 2:
        raise UsageError(
            f"{path} must hold at least 2 prompts, one to choose by and one to test, got {len(prompts)}"
        )
    return prompts


def _prompt(job: Job, make: "type[TunePrompt]") -> "TunePrompt":
    reference = job.carried.get("reference")
    return make(
        job.prompt,
        None if job.messages is None else tuple(dict(message) for message in job.messages),
        job.params,
        () if reference is None else (str(reference),),
        str(job.carried.get("metric", DEFAULT_METRIC)),
    )


def _search(asked: TuneOptions) -> "Search":
    from winnow_lab.plan.tuning.search import Search

    check_number("agreement", asked.agreement, 0.0, 1.0)
    check_number("held_back", asked.held_back, 0.0, 0.9)
    for name in ("max_tokens", "first"):
        check_integer(name, getattr(asked, name), 1)
    return Search(
        asked.agreement,
        asked.agree,
        asked.objective,
        asked.first,
        held_back=asked.held_back,
        seed=asked.split_seed,
    )


def _candidates(asked: TuneOptions) -> "list[Candidate]":
    from winnow_lab.plan.tuning import candidates as known

    def numbers(name: str, read: type[float] | type[int]) -> list[Any]:
        try:
            return [read(text) for text in getattr(asked, name).split(",")]
        except ValueError:
            raise UsageError(
                f"{name} must be numbers with commas between, got {getattr(asked, name)!r}"
            ) from None

    batches = numbers("batches", int)
    for size in batches:
        check_integer("batches", size, 1, 65536)
    return known.candidates(
        known.PRESETS if asked.presets is None else [name.strip() for name in asked.presets.split(",")],
        numbers("compressions", float),
        batches,
        [name.strip() for name in asked.kv_dtypes.split(",")],
    )


def _opener(options: dict[str, Any], tried: "Sequence[Candidate]") -> Any:
    """Open engines that can run every candidate, without a prefix cache: prompts come again with each."""
    from winnow.eviction import find_preset

    most = max(find_preset(each.eviction).policy.score.num_accumulators for each in tried)

    def open_engine(own: Mapping[str, Any]) -> "LLM":
        shared = {"num_accumulators": max(most, 1), "enable_prefix_caching": False}
        return open_llm(options | shared | dict(own))

    return open_engine


def _journal(
    namespace: argparse.Namespace, asked: TuneOptions, options: dict[str, Any], stack: contextlib.ExitStack
) -> Any:
    if namespace.journal is None:
        return None
    from winnow.report.fingerprint import fingerprint
    from winnow_lab.plan.tuning.measure import Trial
    from winnow_lab.study.journal import ResultJournal

    digest = hashlib.sha256(namespace.prompts.read_bytes()).hexdigest()
    settings = EngineConfig.from_options(options).settings()
    # What else the search tries does not change what it has measured.
    searched = {name: getattr(asked, name) for name in ("agree", "max_tokens", "held_back", "split_seed")}
    owner = fingerprint(digest, model_path(options), settings | searched)
    return stack.enter_context(
        ResultJournal(namespace.journal, owner, Trial.from_json, overwrite=namespace.overwrite)
    )


def _brief(trial: "Trial") -> str:
    if trial.error is not None:
        return trial.error
    return f"agreement {trial.mean:.3f}, {trial.rate:.1f} tokens/s"


def _flag(name: str, value: Any) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        return [flag if value else f"--no-{name.replace('_', '-')}"]
    return [flag, "none" if value is None else str(value)]
