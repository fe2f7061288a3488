"""`winnow run`: a file of prompts in, a file of answers out."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.text import Text

from winnow.batch.driver import MAX_EARLY, Driver, served_name
from winnow.batch.journal import SHARD, Checkpoint, journal_path, read_checkpoint
from winnow.batch.reader import InputFile, Shard, read_lines
from winnow.batch.records import Tally
from winnow.batch.writer import OrderedWriter, OutputError, ResultWriter, StreamWriter
from winnow.cli.flags import engine
from winnow.cli.flags.paths import STANDARD, require_distinct, require_writable, write_text
from winnow.cli.prompt import open_prompts
from winnow.cli.screen.progress import Meter, add_progress_flag, open_progress
from winnow.cli.screen.summary import Forecast, Summary
from winnow.cli.screen.terminal import resume_hint, show, silence
from winnow.config import EngineConfig
from winnow.errors import UsageError
from winnow.models.load.hub import locate_adapter, locate_model
from winnow.openai.answers import AnswerReader
from winnow.outputs import EngineStats
from winnow.report.fingerprint import INPUT_BYTES, Fingerprint, fingerprint
from winnow.report.journal import draft_path
from winnow.sampling import SamplingParams
from winnow.values.json_values import dump_json, json_value

DESCRIPTION = """\
Answer every line of PROMPTS.jsonl and write the answers, in the same order, to OUT.jsonl.

A line of the input is a JSON object in one of these forms; blank lines are skipped:
  {"prompt": "Once upon", "max_tokens": 40}             text, or a list of token ids
  {"messages": [{"role": "user", "content": "Hi"}]}     through the model's chat template
  {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Once upon"}}
                                                        OpenAI Batch; also /v1/chat/completions
Sampling parameters may stand in each line; the flags below serve lines that do not say.
So may "tenant", a name of --tenants or another, on whose account the line runs, and "priority", an
integer: the greater is served first (in an OpenAI body the smaller, as in vLLM).
With "reference" (and "category", "metric": exact, rouge-l, qa-f1 or match-all) in the lines, answers are scored;
with "return_kept": true it holds the KVs kept by layer and head.

Lines that begin alike are answered one after another (--scheduling-policy prefix), so that a text that they
share is computed once; results reach the disk as they finish. A run that was interrupted, even killed, is resumed by
the same command: no finished line is computed again. OUT.jsonl.journal remembers whose output
it is; it may be deleted once the run is complete.

Several machines share a file by --shard 1/4, 2/4, ..., each with an output of its own; `winnow merge`
joins the outputs. Every line has the seed, and in float32 the answer, that it has without shards; in
bfloat16 near ties may turn out otherwise in other batches, unless --batch-invariant is set.

Lines may be added to PROMPTS.jsonl: the same command continues with them. - and pipes are read to
their end first. With -o - answers go to standard output, the closing table and progress to
standard error, and nothing can be resumed.

A line that cannot be run becomes an error record; the others are answered.
Exit code: 0 all answered, 1 some lines failed, 2 all failed or the command is unusable.
"""
EPILOG = """\
examples:
  winnow run prompts.jsonl -o answers.jsonl
  winnow run prompts.jsonl -o answers.jsonl --model path/to/model --kv-memory 2GiB --temperature 0
  winnow run prompts.jsonl -o answers.jsonl --overwrite --summary summary.json
  zcat prompts.jsonl.gz | winnow run - -o - | jq .text
"""
MAX_REPEATED = 5
"""Most warnings about lines with the same custom_id."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "winnow run PROMPTS.jsonl -o OUT.jsonl [options]"
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument(
        "prompts", metavar="PROMPTS.jsonl", type=Path, help="one request per line; - reads standard input"
    )
    text = "one answer per line; - for standard output"
    parser.add_argument("-o", "--output", metavar="OUT.jsonl", type=Path, required=True, help=text)
    parser.add_argument("--overwrite", action="store_true", help="start afresh and replace OUT.jsonl")
    text = "answer every COUNT-th line alone, from line NUMBER on"
    parser.add_argument("--shard", metavar="NUMBER/COUNT", default="1/1", help=text)
    text = "of lines: a document to put before the prompt, and to compress without it"
    parser.add_argument("--context-field", metavar="NAME", help=text)
    text = "write the closing table as JSON too"
    parser.add_argument("--summary", metavar="FILE.json", type=Path, help=text)
    add_progress_flag(parser)
    engine.add_engine_flags(parser)
    engine.add_sampling_flags(parser, "sampling, for lines that do not say")


@dataclass(frozen=True)
class _Plan:
    """A run that has been checked: everything typed is usable, and the output may be written."""

    prompts: InputFile
    shard: Shard
    output: Path | None
    """None: standard output."""
    options: dict[str, Any]
    """The engine's, as typed."""
    defaults: dict[str, Any]
    """Sampling parameters of lines that do not say, as typed."""
    identity: Fingerprint
    checkpoint: Checkpoint | None
    """State of what is done already; None starts afresh."""
    progress: str
    context_field: str | None = None

    @property
    def num_requests(self) -> int:
        return self.shard.num_lines(self.prompts.num_requests)

    @property
    def is_done(self) -> bool:
        return self.checkpoint is not None and self.checkpoint.num_done >= self.num_requests

    def open_writer(self) -> OrderedWriter:
        if self.output is None:
            return StreamWriter(sys.stdout.buffer)
        return ResultWriter(self.output, self.identity, self.checkpoint)


def execute(namespace: argparse.Namespace) -> int:
    options, defaults = engine.engine_options(namespace), engine.sampling_options(namespace)
    options.setdefault("scheduling_policy", "prefix")  # what lines share is computed once
    _check_paths(namespace, options)
    tally = Tally()
    with open_prompts(namespace.prompts) as path:
        plan = _check(namespace, InputFile.scan(path), options, defaults, tally)
        resumed = tally.requests
        try:
            seconds, stats = _answer(plan, tally)
        except BrokenPipeError:
            silence(sys.stdout)
            answered = f"{tally.requests} of {plan.num_requests} answers"
            print(f"winnow: error: the reader of standard output left after {answered}", file=sys.stderr)
            return 1
    summary = Summary(tally, resumed, seconds, stats)
    if namespace.summary is not None:
        text = dump_json(summary.to_json(), indent=2) + "\n"
        write_text(namespace.summary, text, f"--summary {namespace.summary}")
    show(summary.table(), stderr=plan.output is None)
    if summary.payoff is not None:
        show(Text(summary.payoff), stderr=plan.output is None)
    return _exit_code(tally, plan.output)


def _check(
    namespace: argparse.Namespace,
    prompts: InputFile,
    options: dict[str, Any],
    defaults: dict[str, Any],
    tally: Tally,
) -> _Plan:
    """Check everything that can be checked without an engine; what is done already is counted in `tally`."""
    repeated, more = prompts.repeated[:MAX_REPEATED], len(prompts.repeated) - MAX_REPEATED
    said = [f"lines {first} and {last} have the same custom_id {name!r}" for name, first, last in repeated]
    for line in (*said, *([f"so have {more} more lines and earlier ones"] if more > 0 else [])):
        print(f"winnow: warning: {line}", file=sys.stderr)
    identity = _identity(prompts, options, defaults)
    if namespace.context_field is not None:
        identity |= {"context_field": namespace.context_field}
    shard = Shard.parse(namespace.shard)
    if shard != Shard():
        identity |= {SHARD: str(shard)}
    output = None if str(namespace.output) == STANDARD else namespace.output
    checkpoint = None
    if output is not None and not namespace.overwrite:
        checkpoint = read_checkpoint(output, identity, tally.add, prompts)
        if checkpoint.notes:
            notes = f"under other options, which change no answer: {'; '.join(checkpoint.notes)}"
            print(f"winnow: resuming {output} {notes}", file=sys.stderr)
    shown = namespace.progress, namespace.context_field
    return _Plan(prompts, shard, output, options, defaults, identity, checkpoint, *shown)


@contextmanager
def _resumable(output: Path | None) -> Iterator[None]:
    """Add to Ctrl-C, and to the error of an output that takes no more, how to resume."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(*[resume_hint()] * (output is not None)) from None
    except OutputError as error:
        raise UsageError(f"{error} {resume_hint()}") from error


def _answer(plan: _Plan, tally: Tally) -> tuple[float, EngineStats]:
    """Answer what is missing; seconds spent with the model loaded, and the engine's counters."""
    if plan.is_done:
        with plan.open_writer():  # which moves what a kill left in the journal to the output
            return 0.0, EngineStats()
    with ExitStack() as stack:
        # The model first: nothing is overwritten for an engine that cannot start.
        llm = stack.enter_context(engine.open_llm(plan.options, quiet=plan.progress == "off"))
        forecast = Forecast(sys.stderr if plan.progress != "off" else None)
        if plan.progress != "off":
            print(engine.memory_line(llm), file=sys.stderr)
        # What is typed comes before what the model's makers recommend.
        defaults = {**llm.conversation_defaults, **plan.defaults}
        note = engine.sampling_note(llm, plan.defaults, SamplingParams.from_mapping(defaults))
        if note is not None and _leaves_sampling_out(plan.prompts.path):
            print(note, file=sys.stderr)
        stack.enter_context(_resumable(plan.output))
        writer = stack.enter_context(plan.open_writer())
        progress = stack.enter_context(open_progress(plan.progress, sys.stderr))
        meter = Meter(done=tally.requests)

        def show_progress() -> None:
            forecast.say(llm)
            if progress.due():
                progress.show(meter.snapshot(tally.requests, plan.num_requests, tally.failed, llm.stats()))

        show_progress()
        config = EngineConfig.from_options(plan.options)
        # Twice what can run, so that whatever ends is replaced at once; what is sorted has to be there.
        sorts = config.scheduler.scheduling_policy == "prefix"
        driver = Driver(
            llm,
            defaults,
            writer,
            tally,
            model=served_name(config.model.model),
            seed=config.model.seed,
            max_in_flight=min((16 if sorts else 2) * config.scheduler.max_num_seqs, MAX_EARLY),
            reader=AnswerReader.of(llm.tokenizer),
            shard=plan.shard,
            context_field=plan.context_field,
        )
        driver.run(read_lines(plan.prompts.path), show_progress)
        seconds, stats = meter.elapsed, llm.stats()
        return seconds, replace(stats, agreement=llm.check_answers())


def _leaves_sampling_out(path: Path) -> bool:
    with path.open("rb") as lines:
        return any(b'"temperature"' not in line for line in lines if line.strip())


def _check_paths(namespace: argparse.Namespace, options: dict[str, Any]) -> None:
    output: Path = namespace.output
    written = []
    if str(output) == STANDARD:
        if sys.stdout is None:
            raise UsageError("cannot write answers to standard output: it is closed")
    else:
        if output.exists() and not output.is_file():
            raise UsageError(
                f"OUT.jsonl must be a regular file, so that a run can be resumed; {output} is not "
                "(-o - writes to standard output)"
            )
        journal = journal_path(output)
        written = [("OUT.jsonl", output), ("the journal", journal), ("the journal", draft_path(journal))]
    if namespace.summary is not None:
        written.append(("--summary", namespace.summary))
    require_distinct(written, [("PROMPTS.jsonl", namespace.prompts), *engine.model_files(options)])
    if str(output) != STANDARD:
        require_writable(output, str(output))
    if namespace.summary is not None:
        require_writable(namespace.summary, f"--summary {namespace.summary}")


def _identity(prompts: InputFile, options: dict[str, Any], defaults: dict[str, Any]) -> Fingerprint:
    """Return the options that a resumed run must share with the one it resumes: all of the engine's, and the sampling
    parameters that were typed. The model sets the others, and its files are compared too."""
    config = EngineConfig.from_options(options)
    settings = config.settings()
    # Where the model lies does not matter, what it is does; and a default that is typed out changes nothing.
    del settings["model"]
    sampling = json_value(SamplingParams.from_mapping(defaults))
    typed = {"temperature": None} | {name: sampling[name] for name in defaults}
    assert not typed.keys() & settings.keys(), "one would hide the other"
    model = config.model
    found = fingerprint(prompts.sha256, locate_model(model), settings | typed, locate_adapter(model))
    return found | {INPUT_BYTES: prompts.num_bytes}


def _exit_code(tally: Tally, output: Path | None) -> int:
    if not tally.failed:
        return 0
    where = f"the first, {tally.first_error}; see the error records in {'the output' if output is None else output}"
    if tally.failed == tally.requests:
        print(f"winnow: error: every line failed; {where}", file=sys.stderr)
        return 2
    print(f"winnow: {tally.failed} of {tally.requests} lines failed; {where}", file=sys.stderr)
    return 1
