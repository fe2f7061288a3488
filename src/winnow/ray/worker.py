"""An engine that takes lines one by one and answers each as soon as it is finished."""

import asyncio
import queue
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from winnow.batch.driver import Driver, served_name
from winnow.batch.reader import RawLine
from winnow.batch.stream import OrderedWriter
from winnow.batch.tally import Tally
from winnow.config import EngineConfig
from winnow.llm import LLM
from winnow.openai.answers import AnswerReader

_Future = asyncio.Future[bytes]


@dataclass(frozen=True)
class _Asked:
    """A line and who waits for its record."""

    raw: RawLine
    loop: asyncio.AbstractEventLoop
    future: _Future


class LineWorker:
    """Server of lines of a file from an engine of its own, which a thread runs.

    Args:
        options: of the engine, as `LLM` takes them.
        defaults: sampling parameters of lines that do not say, before what the model's makers recommend.
    """

    def __init__(self, options: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        config = EngineConfig.from_options(dict(options))
        llm = LLM(**options)
        self._desk = _Desk()
        self._driver = Driver(
            llm,
            {**llm.sampling_defaults, **defaults},
            self._desk,
            Tally(),
            model=served_name(config.model.model),
            seed=config.model.seed,
            max_in_flight=2 * config.scheduler.max_num_seqs,
            reader=AnswerReader.of(llm.tokenizer),
        )
        threading.Thread(target=self._run, name="winnow-lines", daemon=True).start()

    async def wait_started(self) -> None:
        """Return once the model is loaded: calls of an actor begin when it is made."""

    async def answer(self, raw: RawLine) -> bytes:
        """Return the record of a line as a line of JSON.

        Raises:
            Exception: the engine failed, and answers no line any more.
        """
        loop = asyncio.get_running_loop()
        future: _Future = loop.create_future()
        self._desk.ask(_Asked(raw, loop, future))
        return await future

    def _run(self) -> None:
        try:
            self._driver.run(self._desk.lines(), lambda: None)
        except BaseException as error:
            self._desk.fail(error)


class _Desk(OrderedWriter):
    """Desk at which callers leave lines, and the driver finds them and leaves their records.

    Lines get places of their own here, since one line may be asked for twice: by a call that was lost, and again.
    """

    def __init__(self) -> None:
        super().__init__()
        self._inbox: queue.SimpleQueue[_Asked] = queue.SimpleQueue()
        self._asked: dict[int, list[_Asked]] = {}
        """Callers by index of the line; the driver's thread alone uses it."""
        self._failure: BaseException | None = None

    def ask(self, asked: _Asked) -> None:
        """Take a line; any thread may call it."""
        self._inbox.put(asked)
        if self._failure is not None:
            self.fail(self._failure)

    def lines(self) -> Iterator[RawLine | None]:
        """Yield lines without end; None while none is there and others are being answered."""
        while True:
            try:
                asked = self._inbox.get(block=not self._asked)
            except queue.Empty:
                yield None
                continue
            twins = self._asked.setdefault(asked.raw.index, [])
            twins.append(asked)
            if len(twins) == 1:
                yield asked.raw

    def holds(self, index: int) -> bool:
        """Return False: every line that is asked for wants an answer."""
        return False

    def put(self, index: int, line: bytes) -> None:
        """Hand a record to all who asked for it."""
        for asked in self._asked.pop(index):
            _resolve(asked, lambda future: future.set_result(line))

    def fail(self, error: BaseException) -> None:
        """End every call, those that are to come too, with `error`."""
        self._failure = error
        left = [asked for twins in self._asked.values() for asked in twins]
        self._asked.clear()
        while not self._inbox.empty():
            left.append(self._inbox.get())
        for asked in left:
            _resolve(asked, lambda future: future.set_exception(RuntimeError(f"the engine failed: {error}")))

    def _write(self, index: int) -> None:
        raise AssertionError("put hands every record on")

    def close(self) -> None:
        """Release nothing: no file is open."""


def _resolve(asked: _Asked, settle: Any) -> None:
    """Settle a future on its own loop, unless it was cancelled."""
    asked.loop.call_soon_threadsafe(lambda: None if asked.future.done() else settle(asked.future))
