"""`winnow tune`: the policy, compression and batch that keep the full cache's answers on one's own prompts."""

import argparse
import hashlib
import math
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from winnow.batch.lines import DEFAULT_METRIC, BadLine, parse_line
from winnow.batch.reader import read_lines
from winnow.cli.flags.engine import model_path, open_llm
from winnow.cli.flags.paths import check_json_path, require_writable, write_json
from winnow.config import EngineConfig
from winnow.errors import UsageError
from winnow.report.provenance import typed_command
from winnow.values.checks import check_number
from winnow_lab.report.tables import console, print_tables
from winnow_lab.study import EngineFlags, flag
from winnow_lab.study.options import add_options, flag_of, options_of

if TYPE_CHECKING:
    from winnow.llm import LLM
    from winnow_lab.plan.tuning.measure import Trial, TunePrompt
    from winnow_lab.study.journal import ResultJournal

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
Lines are those of `winnow run`. Lines with a reference are compared by their metric instead: what counts is
the score, relative to the full cache's.
"""


@dataclass(frozen=True)
class TuneOptions(EngineFlags):
    prompts: Path = flag(text="lines as for winnow run", positional=True)
    agreement: float = flag(0.98, "mean agreement with the full cache's answers to keep", least=0)
    agree: str = flag(
        "tokens",
        "exact: answers are the same or not; tokens: the part of an answer up to its first other token",
        choices=("exact", "tokens"),
    )
    objective: str = flag("throughput", "bytes: most KVs in use", choices=("throughput", "bytes"))
    presets: tuple[str, ...] = flag((), "policies to try (default: ten that need no files of their own)")
    compressions: tuple[float, ...] = flag((2.0, 4.0, 8.0), "tokens per KV kept", least=1)
    batches: tuple[int, ...] = flag((64,), "most sequences at the same time (max_num_seqs)", least=1)
    kv_dtypes: tuple[str, ...] = flag(("auto",), "formats of stored KVs (kv_cache_dtype)")
    max_tokens: int = flag(64, "of answers whose lines do not say", least=1)
    first: int = flag(4, "prompts of the first rung; each has twice as many", least=1)
    held_back: float = flag(0.34, "part of the prompts that choose nothing and test the winner", least=0)
    split_seed: int = flag(0, "of which prompts are held back")
    journal: Path | None = flag(None, "what was measured, to resume from")
    overwrite: bool = flag(False, "start the journal afresh")
    json: Path | None = flag(None, "write all trials as JSON too")
    plot: Path | None = flag(None, "stem of a picture of the Pareto front")
    CHOSEN: ClassVar[tuple[str, ...]] = (
        *("eviction", "compression", "kv_budget", "max_num_seqs", "num_accumulators"),
        "enable_prefix_caching",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("agreement", self.agreement, 0.0, 1.0)
        check_number("held_back", self.held_back, 0.0, 0.9)
        if str(self.engine.get("engine")).startswith("padded"):
            raise UsageError("winnow tune needs engine=paged: the padded engine evicts nothing")
        check_json_path(self.json)
        for name in ("journal", "plot"):
            if (path := getattr(self, name)) is not None:
                require_writable(path, f"--{name} {path}")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "winnow tune PROMPTS.jsonl [options]"
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    add_options(parser, TuneOptions)


def execute(namespace: argparse.Namespace) -> int:
    """Search, show, and return the exit code: 1 where nothing keeps the agreement."""
    asked = options_of(TuneOptions, namespace)
    prompts = read_prompts(asked.prompts, asked.max_tokens)
    from winnow.eviction import find_preset
    from winnow_lab.plan.tuning.measure import PRESETS, candidates, prompts_for
    from winnow_lab.plan.tuning.search import Search, Tuner
    from winnow_lab.plan.tuning.tune_tables import command, pareto_figure, tune_table, verdict

    tried = candidates(asked.presets or PRESETS, asked.compressions, asked.batches, asked.kv_dtypes)
    most = max(find_preset(each.eviction).policy.score.num_accumulators for each in tried)
    # One engine runs every candidate, without a prefix cache: prompts come again with each.
    shared = {"num_accumulators": max(most, 1), "enable_prefix_caching": False}
    search = Search(
        asked.agreement,
        asked.agree,
        asked.objective,
        asked.first,
        held_back=asked.held_back,
        seed=asked.split_seed,
    )
    held, needed = len(search.split(prompts)[1]), prompts_for(1.0, asked.agreement)
    if needed is not None:
        enough = math.ceil(needed / max(asked.held_back, held / len(prompts)))
        said = f"it takes {needed:,}, {enough:,} in all, to show an agreement of {asked.agreement:g}"
        print(
            f"winnow: {held} of {len(prompts)} prompts are held back: {said} where every answer agrees",
            file=sys.stderr,
        )
    with ExitStack() as stack:
        journal = None if asked.journal is None else stack.enter_context(_journal(asked, asked.journal))

        def open_engine(own: Mapping[str, Any]) -> "LLM":
            return open_llm({**asked.engine, **shared, **own})

        def record(trial: "Trial") -> None:
            brief = trial.error or f"agreement {trial.mean:.3f}, {trial.rate:.1f} tokens/s"
            print(f"{trial.stage}: {trial.candidate}: {brief}", file=sys.stderr)
            if journal is not None:
                journal.append([trial])

        found = () if journal is None else tuple(journal.found)
        tuned = Tuner(search, open_engine, record, found).tune(tried, prompts)
    print_tables(console(), [tune_table(tuned)], dense=True)
    line = command(
        tuned, str(asked.prompts), [word for each in asked.engine.items() for word in _flag(*each)]
    )
    for text in filter(None, [*verdict(tuned), line]):
        print(text)
    if asked.plot is not None:
        from winnow_lab.report.plots import save_figure

        save_figure(pareto_figure(tuned), asked.plot)
    report = {
        "command": typed_command(),
        "best": None if tuned.best is None else tuned.best.to_json(),
        "held_back": None if tuned.check is None else tuned.check.to_json(),
        "checked": tuned.checked,
        "run": line,
        "trials": [trial.to_json() for trial in tuned.trials],
    }
    write_json(asked.json, report)
    return 0 if tuned.best is not None else 1


def read_prompts(path: Path, max_tokens: int) -> "list[TunePrompt]":
    """Raises UsageError: the file cannot be read, a line cannot be run, or there are fewer than two prompts."""
    from winnow_lab.plan.tuning.measure import TunePrompt

    prompts = []
    try:
        for raw in read_lines(path):
            job = parse_line(raw, {"max_tokens": max_tokens}, accounts=True)
            if isinstance(job, BadLine):
                raise UsageError(f"{path}, line {job.number}: {job.error}")
            messages = None if job.asked.messages is None else tuple(map(dict, job.asked.messages))
            reference = job.carried.get("reference")
            references = () if reference is None else (str(reference),)
            metric = str(job.carried.get("metric", DEFAULT_METRIC))
            prompts.append(TunePrompt(job.asked.prompt, messages, job.asked.params, references, metric))
    except OSError as error:
        raise UsageError(f"cannot read the prompts {path}: {error.strerror}") from error
    if len(prompts) < 2:
        raise UsageError(
            f"{path} must hold at least 2 prompts, one to choose by and one to test, got {len(prompts)}"
        )
    return prompts


def _journal(asked: TuneOptions, path: Path) -> "ResultJournal[Trial]":
    from winnow.report.fingerprint import fingerprint
    from winnow_lab.plan.tuning.measure import Trial
    from winnow_lab.study.journal import ResultJournal

    digest = hashlib.sha256(asked.prompts.read_bytes()).hexdigest()
    settings = EngineConfig.from_options(asked.engine).settings()
    # What else the search tries does not change what it has measured.
    searched = {name: getattr(asked, name) for name in ("agree", "max_tokens", "held_back", "split_seed")}
    owner = fingerprint(digest, model_path(asked.engine), settings | searched)
    return ResultJournal(path, owner, Trial.from_json, overwrite=asked.overwrite)


def _flag(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [flag_of(name if value else f"no_{name}")]
    return [flag_of(name), "none" if value is None else str(value)]
