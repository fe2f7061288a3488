"""The loop between the input, the engine and the output."""

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from winnow.batch.lines import BadLine, Job, parse_line
from winnow.batch.reader import RawLine, Shard
from winnow.batch.records import Record, Tally, answer_record, encode, error_record, request_id
from winnow.batch.writer import OrderedWriter
from winnow.engine.requests.new_request import NewRequest
from winnow.errors import WinnowError
from winnow.openai.answers import AnswerReader
from winnow.openai.errors import ApiError, failed
from winnow.outputs import RequestOutput

if TYPE_CHECKING:
    from winnow.engine_client import EngineClient

MAX_EARLY = 4096
"""Number of results that may wait in memory for an earlier line before no more lines are read."""


_ENDS_THE_RUN = (OSError, MemoryError)
"""Errors that are no line's fault but the machine's."""


class _StepError(Exception):
    def __init__(self, reason: Exception) -> None:
        super().__init__(str(reason))
        self.reason = reason


@dataclass
class Driver:
    """Answers every line that the writer does not hold yet.

    Attributes:
        defaults: sampling parameters of lines that do not say.
        model: its name in OpenAI's objects.
        seed: of lines without one.
        max_in_flight: most requests in the engine at a time.
        shard: lines outside of it are left to other runs.
        context_field: see `parse_line`.
    """

    engine: "EngineClient"
    defaults: Mapping[str, Any]
    writer: OrderedWriter
    tally: Tally
    model: str
    seed: int
    max_in_flight: int
    reader: AnswerReader = field(default_factory=AnswerReader)
    shard: Shard = field(default_factory=Shard)
    context_field: str | None = None
    _in_flight: dict[str, Job] = field(default_factory=dict, init=False)

    def run(self, lines: Iterable[RawLine | None], on_step: Callable[[], None]) -> None:
        """Read, answer and write until no line is left; `on_step` is called after each step of the engine.

        None among the lines says that the next is not there yet; what is in flight is computed meanwhile.
        """
        jobs = self._open_jobs(lines)
        more = True
        while more or self._in_flight:
            more = more and self._fill(jobs)
            if not self._in_flight:
                continue
            try:
                self._step()
            except _StepError as error:
                self._single_out(error.reason, on_step)
            on_step()

    def _step(self) -> None:
        try:
            outputs = self.engine.step()
        except _ENDS_THE_RUN:
            raise
        except Exception as error:
            raise _StepError(error) from error
        for output in outputs:
            if output.finished:
                job = self._in_flight.pop(output.request_id)
                answered = answered_line(job, output, self.model, int(time.time()), self.reader)
                self._finish(job.index, answered)

    def _single_out(self, error: Exception, on_step: Callable[[], None]) -> None:
        """Answer the requests in flight one by one after a step that failed with `error`, to find whose fault it is.
        Raises `error` if all of several fail alone too: then it is the engine's."""
        jobs, failed = list(self._in_flight.values()), dict[int, ApiError]()
        self._drop_all()
        for job in jobs:
            self._submit(job)
            try:
                while self._in_flight:
                    self._step()
                    on_step()
            except _StepError as own:
                self._drop_all()
                failed[job.index] = ApiError.wrap(own.reason)
        if 1 < len(jobs) == len(failed):
            raise error
        for job in jobs:
            if job.index in failed:
                self._finish(job.index, failed_line(job, failed[job.index]))

    def _drop_all(self) -> None:
        for name in self._in_flight:
            self.engine.abort(name)
        self._in_flight.clear()

    def _open_jobs(self, lines: Iterable[RawLine | None]) -> Iterator[Job | BadLine | None]:
        for raw in lines:
            if raw is None:
                yield None
            elif self.shard.holds(raw.index) and not self.writer.holds(self.shard.place(raw.index)):
                yield parse_line(raw, self.defaults, accounts=True, context_field=self.context_field)

    def _fill(self, jobs: Iterator[Job | BadLine | None]) -> bool:
        """Submit lines until the engine has enough to choose from; return False if none is left."""
        while len(self._in_flight) < self.max_in_flight and self.writer.num_early < MAX_EARLY:
            try:
                line = next(jobs)
            except StopIteration:
                return False
            if line is None:
                break
            if isinstance(line, BadLine):
                self._finish(line.index, failed_line(line, line.error))
                continue
            self._submit(line)
        return True

    def _submit(self, job: Job) -> None:
        name = request_id(job)
        try:
            self.engine.submit_all([line_request(self.engine, self.reader, job, self.seed, name)])
        except _ENDS_THE_RUN:
            raise
        except Exception as error:
            if not isinstance(error, WinnowError):
                self.engine.abort(name)  # a refusal leaves nothing behind, a fault might
            self._finish(job.index, failed_line(job, ApiError.wrap(error)))
        else:
            self._in_flight[name] = job

    def _finish(self, index: int, record: tuple[Record, bytes]) -> None:
        self.writer.put(self.shard.place(index), record[1])
        self.tally.add(record[0])


def line_request(engine: "EngineClient", reader: AnswerReader, job: Job, seed: int, name: str) -> NewRequest:
    """Return the request of a line, of id `name`; `seed` is that of the run. Raises as `LLM.generate`."""
    asked, params = job.asked, job.asked.params
    if params.seed is None:
        params = replace(params, seed=line_seed(seed, job.index))
    if asked.messages is not None:
        prompt = engine.tokenize_chat(asked.messages, asked.template, job.tenant)
        params = reader.bind(params, prompt.text, asked.template.tools, asked.calls)
    else:
        prompt = engine.tokenize(asked.prompts[0])
    options = {"priority": asked.priority, "tenant": job.tenant, "session": asked.session}
    return engine.new_request(prompt, params, name, final_only=True, **options)


def answered_line(
    job: Job, output: RequestOutput, model: str, created: int, reader: AnswerReader
) -> tuple[Record, bytes]:
    """Return the record of a finished request, and its bytes; that of a failure, if it failed."""
    try:
        if output.error is not None:
            raise failed(output.error)
        record = answer_record(job, output, model, created, reader)
        return record, encode(record)
    except Exception as error:
        return failed_line(job, ApiError.wrap(error))


def failed_line(line: Job | BadLine, error: ApiError) -> tuple[Record, bytes]:
    """Return the record of a line that failed, and its bytes; without what it brought, if that is at fault."""
    try:
        record = error_record(line, error)
        return record, encode(record)
    except Exception:
        record = error_record(replace(line, carried={}), error)
        return record, encode(record)


def line_seed(seed: int, index: int) -> int:
    """Return the seed of a line that brings none: its own, and the same however often the run was interrupted."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{index}".encode()).digest()[:7])


def served_name(model: str | Path | None) -> str:
    return "winnow-demo" if model is None else Path(model).resolve().name
