"""`winnow run`: a file of prompts in, a file of answers out."""

import argparse
import json
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from winnow.cli.batch.driver import Driver
from winnow.cli.batch.journal import Checkpoint, read_checkpoint
from winnow.cli.batch.reader import InputFile
from winnow.cli.batch.tally import Tally
from winnow.cli.batch.writer import ResultWriter
from winnow.cli.engine import (
    add_engine_flags,
    add_sampling_flags,
    engine_options,
    open_llm,
    sampling_options,
)
from winnow.cli.errors import UsageError
from winnow.cli.meter import Meter
from winnow.cli.progress import add_progress_flag, open_progress
from winnow.cli.summary import Summary
from winnow.config import EngineConfig
from winnow.fingerprint import Fingerprint, fingerprint
from winnow.models.hub import model_directory
from winnow.outputs import EngineStats
from winnow.sampling import SamplingParams

DESCRIPTION = """\
Answer every line of PROMPTS.jsonl and write the answers, in the same order, to OUT.jsonl.

A line of the input is a JSON object in one of these forms; blank lines are skipped:
  {"prompt": "Once upon", "max_tokens": 40}             text, or a list of token ids
  {"messages": [{"role": "user", "content": "Hi"}]}     through the model's chat template
  {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Once upon"}}
                                                        OpenAI Batch; also /v1/chat/completions
Sampling parameters may stand in each line; the flags below serve lines that do not say.
With "reference" (and "category", "metric": exact, rouge-l, qa-f1 or match-all) in the lines, answers are scored.

Results reach the disk as they finish. A run that was interrupted, even killed, is resumed by
the same command: no finished line is computed again. OUT.jsonl.journal remembers whose output
it is; it may be deleted once the run is complete.

A line that cannot be run becomes an error record; the others are answered.
Exit code: 0 all answered, 1 some lines failed, 2 all failed or the command is unusable.
"""
EPILOG = """\
examples:
  winnow run prompts.jsonl -o answers.jsonl
  winnow run prompts.jsonl -o answers.jsonl --model path/to/model --kv-memory 2GiB --temperature 0
  winnow run prompts.jsonl -o answers.jsonl --overwrite --summary summary.json
"""
RESUME_HINT = "(finished answers are safe; run the same command again to resume)"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.usage = "winnow run PROMPTS.jsonl -o OUT.jsonl [options]"
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument("prompts", metavar="PROMPTS.jsonl", type=Path, help="one request per line")
    parser.add_argument(
        "-o", "--output", metavar="OUT.jsonl", type=Path, required=True, help="one answer per line"
    )
    parser.add_argument("--overwrite", action="store_true", help="start afresh and replace OUT.jsonl")
    parser.add_argument(
        "--summary", metavar="FILE.json", type=Path, help="write the closing table as JSON too"
    )
    add_progress_flag(parser)
    add_engine_flags(parser)
    add_sampling_flags(parser, "sampling, for lines that do not say")


@dataclass(frozen=True)
class _Plan:
    """A run that has been checked: everything typed is usable, and the output may be written."""

    prompts: InputFile
    output: Path
    options: dict[str, Any]
    """The engine's, as typed."""
    defaults: dict[str, Any]
    """Sampling parameters of lines that do not say, as typed."""
    identity: Fingerprint
    checkpoint: Checkpoint | None
    """What is done already; None starts afresh."""
    progress: str

    @property
    def is_done(self) -> bool:
        return self.checkpoint is not None and self.checkpoint.num_done >= self.prompts.num_requests


def execute(namespace: argparse.Namespace) -> int:
    """Answer, sum up, and return the exit code."""
    tally = Tally()
    plan = _check(namespace, tally)
    resumed = tally.requests
    try:
        seconds, stats = _repair(plan) if plan.is_done else _answer(plan, tally)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(RESUME_HINT) from None
    summary = Summary.of(tally, resumed, seconds, stats)
    Console().print(summary.table())
    if namespace.summary is not None:
        namespace.summary.write_text(json.dumps(summary.to_json(), indent=2) + "\n", encoding="utf-8")
    return _exit_code(tally, plan.output)


def _check(namespace: argparse.Namespace, tally: Tally) -> _Plan:
    """Check everything that can be checked without an engine; what is done already is counted in `tally`."""
    options, defaults = engine_options(namespace), sampling_options(namespace)
    _check_paths(namespace)
    prompts = InputFile.scan(namespace.prompts)
    identity = _identity(prompts, options, defaults)
    checkpoint = None if namespace.overwrite else read_checkpoint(namespace.output, identity, tally.add)
    return _Plan(prompts, namespace.output, options, defaults, identity, checkpoint, namespace.progress)


def _repair(plan: _Plan) -> tuple[float, EngineStats]:
    """Move what a kill left in the journal to the output, which opening a writer does; as `_answer`, without engine."""
    ResultWriter(plan.output, plan.identity, plan.checkpoint).close()
    return 0.0, EngineStats()


def _answer(plan: _Plan, tally: Tally) -> tuple[float, EngineStats]:
    """Answer what is missing; seconds spent with the model loaded, and the engine's counters."""
    config = EngineConfig.from_options(plan.options)
    with ExitStack() as stack:
        # The model first: nothing is overwritten for an engine that cannot start.
        llm = stack.enter_context(open_llm(plan.options))
        writer = stack.enter_context(ResultWriter(plan.output, plan.identity, plan.checkpoint))
        progress = stack.enter_context(open_progress(plan.progress, sys.stderr))
        meter = Meter()

        def show() -> None:
            if progress.due():
                total = plan.prompts.num_requests
                progress.show(meter.snapshot(tally.requests, total, tally.failed, llm.stats()))

        driver = Driver(
            llm,
            # What is typed comes before what the model's makers recommend.
            {**llm.sampling_defaults, **plan.defaults},
            writer,
            tally,
            model=Path(config.model.model).resolve().name
            if config.model.model is not None
            else "winnow-demo",
            seed=config.model.seed,
            # Twice what can run, so that whatever ends is replaced at once.
            max_in_flight=2 * config.scheduler.max_num_seqs,
        )
        show()
        driver.run(plan.prompts.path, show)
        return meter.elapsed, llm.stats()


def _check_paths(namespace: argparse.Namespace) -> None:
    """Refuse paths that would be found unusable only after the work.

    Raises:
        UsageError: names the path.
    """
    output: Path = namespace.output
    if output.exists() and not output.is_file():
        raise UsageError(f"OUT.jsonl must be a regular file, so that a run can be resumed; {output} is not")
    if output.exists() and namespace.prompts.exists() and output.samefile(namespace.prompts):
        raise UsageError(f"OUT.jsonl must not be PROMPTS.jsonl: both are {output}")
    if namespace.summary is not None:
        try:
            namespace.summary.parent.mkdir(parents=True, exist_ok=True)
            namespace.summary.touch()
        except OSError as error:
            raise UsageError(f"cannot write --summary {namespace.summary}: {error.strerror}") from error


def _identity(prompts: InputFile, options: dict[str, Any], defaults: dict[str, Any]) -> Fingerprint:
    """What must not change between the starts of a run: every option with its value, typed or not."""
    config = EngineConfig.from_options(options)
    settings = {**asdict(config.model), **asdict(config.cache), **asdict(config.scheduler)}
    # Where the model lies does not matter, what it is does; and a default that is typed out changes nothing.
    del settings["model"]
    # The seed of lines that bring none is the engine's.
    sampling = asdict(SamplingParams.from_mapping(defaults))
    del sampling["seed"]
    return fingerprint(prompts.sha256, model_directory(config.model), settings | sampling)


def _exit_code(tally: Tally, output: Path) -> int:
    if not tally.failed:
        return 0
    where = f"see the error records in {output}"
    if tally.failed == tally.requests:
        print(f"winnow: error: every line failed; {where}", file=sys.stderr)
        return 2
    print(f"winnow: {tally.failed} of {tally.requests} lines failed; {where}", file=sys.stderr)
    return 1
