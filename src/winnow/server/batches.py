"""Batches: `winnow run` behind HTTP. Its lines, its records, its journal; so no line is lost or answered twice.

A batch is a task on the event loop. Reading and writing files happens on one thread of their own.
"""

import asyncio
import hashlib
import json
import logging
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from tempfile import TemporaryFile
from typing import Any, TypeVar

from winnow.batch.driver import MAX_EARLY, answered_line, failed_line, line_seed
from winnow.batch.journal import journal_path, read_checkpoint
from winnow.batch.lines import BadLine, Job, parse_line
from winnow.batch.reader import InputFile, RawLine, read_lines
from winnow.batch.records import Tally
from winnow.batch.writer import ResultWriter
from winnow.engine.requests.new_request import NewRequest
from winnow.errors import WinnowError, describe_error
from winnow.openai.errors import FAILED, SHUTTING_DOWN, UNHEALTHY, ApiError
from winnow.openai.request import Endpoint
from winnow.outputs import RequestOutput
from winnow.report.fingerprint import INPUT_BYTES
from winnow.report.journal import whole_lines
from winnow.server.forms import check_body
from winnow.server.service import Service
from winnow.server.store import ENDED, Record, Store

T = TypeVar("T")

log = logging.getLogger("winnow.server")

MAX_LINES = 50_000
MAX_TRIES = 3
"""Number of times that a line is tried whose step failed, which may be another request's fault."""
_DAY = 86_400


class _Stopped(Exception):  # noqa: N818 (no error: another process resumes the batch)
    """The server ends, and the batch is left as it is."""


class Batches:
    """Runner of the batches of a store, those first that a former process has left."""

    def __init__(self, service: Service, store: Store) -> None:
        self._service = service
        self.store = store
        self._disk = ThreadPoolExecutor(1, "winnow-batches")
        # As many lines as a batch of the engine holds, over all batches: what ends is replaced at once.
        self._room = asyncio.Semaphore(service.llm.config.scheduler.max_num_seqs)
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def resume(self) -> None:
        """Resume what a former process has left."""
        for record in self.store.unfinished_batches():
            self._start(record)

    async def create(self, body: Record, tenant: str | None) -> Record:
        """Begin a batch. Raises ApiError: a field is wrong, or there is no such file."""
        check_body("/v1/batches", body)
        source = body["input_file_id"]
        self.store.get(source, "file", tenant)
        now = int(time.time())
        record: Record = {
            "id": f"batch_{uuid.uuid4().hex}",
            "object": "batch",
            "endpoint": body["endpoint"],
            "errors": None,
            "input_file_id": source,
            "completion_window": "24h",
            "status": "validating",
            "output_file_id": None,
            "error_file_id": None,
            "created_at": now,
            "expires_at": now + _DAY,
            **dict.fromkeys(_TIMES),
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
            "metadata": body.get("metadata"),
            "tenant": tenant,
        }
        await self._on_disk(lambda: self.store.keep_input(record["id"], source))
        await self._update(record)
        self._start(record)
        return record

    async def cancel(self, name: str, tenant: str | None) -> Record:
        """End a batch; lines not yet answered become errors. Raises ApiError: there is none, or it has ended."""
        record = self.store.get(name, "batch", tenant)
        if record["status"] in ENDED:
            raise ApiError("invalid_request", f"the batch is {record['status']}, and cannot be cancelled")
        if record["status"] != "finalizing":
            await self._update(record, status="cancelling", cancelling_at=int(time.time()))
        return record

    async def stop(self) -> None:
        """Leave every batch as it is."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._disk.shutdown()
        self.store.close()

    def _start(self, record: Record) -> None:
        name = record["id"]
        task = asyncio.create_task(self._run(record))
        self._tasks[name] = task
        task.add_done_callback(lambda _: self._tasks.pop(name, None))

    async def _run(self, record: Record) -> None:
        try:
            prompts = await self._validate(record)
            if prompts is not None:
                await self._answer(record, prompts)
                await self._finalize(record)
        except (_Stopped, asyncio.CancelledError):
            log.info("batch %s is left as it is; it resumes when the server is started again", record["id"])
        except Exception as error:
            log.error("batch %s has failed: %s", record["id"], describe_error(error), exc_info=error)
            found: Record = {}
            with suppress(Exception):  # a disk that is full may have no room for copies either
                found = await self._on_disk(lambda: self._sort_results(record))
                found["request_counts"]["total"] = record["request_counts"]["total"]
            with suppress(Exception):
                fault = _error("server_error", "the server failed; its log says why")
                await self._fail(record, [fault], found)
                await self._on_disk(lambda: self._drop_results(record))

    async def _validate(self, record: Record) -> InputFile | None:
        """Look at the input as a whole. None: it cannot be run, and the batch says why."""
        prompts = await self._on_disk(lambda: InputFile.scan(self.store.input(record)))
        faults, count = [], prompts.num_requests
        for name, first, second in prompts.repeated[:100]:
            fault = f"lines {first} and {second} have the custom_id {name!r:.200}"
            faults.append(_error("duplicate_custom_id", fault, second))
        if count == 0:
            faults.append(_error("empty_file", "the file has no lines"))
        if count > MAX_LINES:
            fault = f"a batch has at most {MAX_LINES} lines, got {count}"
            faults.append(_error("too_many_lines", fault))
        if faults:
            await self._fail(record, faults)
            return None
        changes: Record = {"request_counts": {**record["request_counts"], "total": count}}
        if record["status"] == "validating":
            changes |= {"status": "in_progress", "in_progress_at": int(time.time())}
        await self._update(record, **changes)
        return prompts

    async def _answer(self, record: Record, prompts: InputFile) -> None:
        output, tally = self.store.content(record["id"]), Tally()
        identity = {"input": prompts.sha256, INPUT_BYTES: prompts.num_bytes}

        def open_writer() -> ResultWriter:
            checkpoint = read_checkpoint(output, identity, tally.add, prompts)
            return ResultWriter(output, identity, checkpoint)

        writer = await self._on_disk(open_writer)
        pending: set[asyncio.Task[None]] = set()
        try:
            lines = read_lines(prompts.path)
            while (raw := await self._on_disk(lambda: _next_open(lines, writer))) is not None:
                pending = {each for each in pending if not each.done() or _raise(each)}
                await self._room.acquire()  # nothing may fail between this and the task that gives it back
                task = asyncio.create_task(self._line(record, raw, writer, tally))
                task.add_done_callback(lambda _: self._room.release())
                pending.add(task)
                while writer.num_early >= MAX_EARLY and pending:
                    await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                    pending = {each for each in pending if not each.done() or _raise(each)}
            await asyncio.gather(*pending)
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
            await asyncio.shield(self._on_disk(writer.close))

    async def _line(self, record: Record, raw: RawLine, writer: ResultWriter, tally: Tally) -> None:
        answer, line = await self._record_of(record, raw)
        await asyncio.shield(self._on_disk(lambda: writer.put(raw.index, line)))
        tally.add(answer)
        completed = tally.requests - tally.failed
        counts = {"completed": completed, "failed": tally.failed}
        record["request_counts"] = record["request_counts"] | counts

    async def _record_of(self, record: Record, raw: RawLine) -> tuple[Record, bytes]:
        service = self._service
        line = parse_line(raw, service.llm.conversation_defaults)
        endpoint = Endpoint(record["endpoint"])
        if line.endpoint is not endpoint:
            fault = ApiError("invalid_url", f"url must be the batch's endpoint, {endpoint.value}")
            if line.endpoint is None and isinstance(line, BadLine):
                fault = line.error
            line = BadLine(raw.index, raw.number, endpoint, fault, line.carried)
        if isinstance(line, BadLine):
            return failed_line(line, line.error)
        try:
            model = service.check_model(line.asked.model)
            output = await self._answered(record, line)
        except WinnowError as error:
            return failed_line(line, ApiError.wrap(error))
        return answered_line(line, output, model, int(time.time()), service.reader)

    async def _answered(self, record: Record, job: Job) -> RequestOutput:
        """Return the output of a line. Raises WinnowError: it cannot be served, or its step failed too often."""
        service, params = self._service, job.asked.params
        if params.seed is None:
            params = replace(params, seed=line_seed(service.llm.config.model.seed, job.index))
        asked = replace(job.asked, params=params, priority=-1)
        for attempt in range(MAX_TRIES):
            if record["status"] == "cancelling":
                raise ApiError("batch_cancelled", "the batch was cancelled before this line was answered")
            try:
                name = f"{record['id']}-{job.number}"
                requests = await service.new_requests(asked, record["tenant"], name, deltas=False)
                return await self._output(requests)
            except ApiError as error:
                if service.engine.failure is not None or error.code in (SHUTTING_DOWN, UNHEALTHY):
                    raise _Stopped from None
                if error.code != FAILED or attempt + 1 == MAX_TRIES:
                    raise
        raise AssertionError("the last attempt raises")

    async def _output(self, requests: Sequence[NewRequest]) -> RequestOutput:
        engine = self._service.engine
        stream = await engine.submit(requests, background=True)
        try:
            async for output in stream:
                return output
        finally:
            engine.abandon(stream)
        raise AssertionError("a stream ends with an output or an error")

    async def _finalize(self, record: Record) -> None:
        """Sort the results into the output and the errors, and end the batch. May be repeated after a kill."""
        cancelled = record["status"] == "cancelling"
        if not cancelled:
            await self._update(record, status="finalizing", finalizing_at=int(time.time()))
        found = await self._on_disk(lambda: self._sort_results(record))
        end = "cancelled" if cancelled else "completed"
        await self._update(record, **found, status=end, **{f"{end}_at": int(time.time())})
        await self._on_disk(lambda: self._drop_results(record))

    def _drop_results(self, record: Record) -> None:
        output = self.store.content(record["id"])
        for path in (output, journal_path(output), output.with_suffix(".input")):
            path.unlink(missing_ok=True)

    def _sort_results(self, record: Record) -> Record:
        names: Record = {"output_file_id": None, "error_file_id": None}
        output = self.store.content(record["id"])
        counts = {"output": 0, "error": 0}
        with TemporaryFile(dir=output.parent) as answers, TemporaryFile(dir=output.parent) as errors:
            with output.open("rb") as file:
                for line in whole_lines(file):
                    failed = json.loads(line)["error"] is not None
                    (errors if failed else answers).write(line)
                    counts["error" if failed else "output"] += 1
            for kind, content in (("output", answers), ("error", errors)):
                if counts[kind]:
                    content.seek(0)
                    digest = hashlib.sha256(f"{record['id']}/{kind}".encode()).hexdigest()
                    name = f"file-{digest[:32]}"  # the same when this is repeated
                    self.store.add_file(
                        content, f"{record['id']}_{kind}.jsonl", "batch_output", record["tenant"], name
                    )
                    names[f"{kind}_file_id"] = name
        total = counts["output"] + counts["error"]
        names["request_counts"] = {"total": total, "completed": counts["output"], "failed": counts["error"]}
        return names

    async def _fail(self, record: Record, faults: list[Record], found: Record | None = None) -> None:
        errors, now = {"object": "list", "data": faults}, int(time.time())
        await self._update(record, **(found or {}), status="failed", failed_at=now, errors=errors)

    async def _update(self, record: Record, **changes: Any) -> None:
        record.update(changes)
        await self._on_disk(lambda: self.store.save(record))

    async def _on_disk(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._disk, work)


_TIMES = tuple(f"{state}_at" for state in ("in_progress", "finalizing", *ENDED, "cancelling"))


def _error(code: str, message: str, line: int | None = None) -> Record:
    return {"code": code, "message": message, "param": None, "line": line}


def _next_open(lines: Iterator[RawLine], writer: ResultWriter) -> RawLine | None:
    return next((raw for raw in lines if not writer.holds(raw.index)), None)


def _raise(task: "asyncio.Task[None]") -> bool:
    """Raise what a task raised; False, since it has ended."""
    task.result()
    return False
