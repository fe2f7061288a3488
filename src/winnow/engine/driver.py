"""The one owner of an engine: a thread that runs it. `LLM`, server and batches put actions into its queue and wait.

The thread starts with the first action and computes steps as long as anybody waits for outputs. It is never
interrupted: Ctrl-C ends the waiting of the main thread, and what that waited for. Nothing here survives a fork: the
child gets a ForkedError.
"""

import atexit
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from queue import Empty, SimpleQueue
from threading import Lock, Thread, current_thread
from typing import Any, ParamSpec, TypeVar

from winnow.engine.engine import Engine
from winnow.engine.requests.new_request import NewRequest
from winnow.errors import ClosedError, ForkedError, InvalidRequestError, ReentryError
from winnow.outputs import RequestOutput

P = ParamSpec("P")
T = TypeVar("T")

# Seconds that the thread's own threads wait for the next step of unfinished requests.
_PATIENCE = 1.0


@dataclass(eq=False)
class Mailbox:
    """Outputs of one caller's requests."""

    outputs: deque[RequestOutput] = field(default_factory=deque)
    unfinished: set[str] = field(default_factory=set)

    def take(self) -> list[RequestOutput]:
        """Remove what has arrived, and return it; each output is returned once."""
        found = []
        with suppress(IndexError):
            while True:
                found.append(self.outputs.popleft())
        return found


@dataclass(eq=False)
class _Wait:
    """A caller that waits for `box` to hold `num_outputs`; or, with `once`, until a step has been computed."""

    box: Mailbox
    num_outputs: int
    once: bool
    arrived: Future[None] = field(default_factory=Future)

    def end(self, error: BaseException | None = None) -> bool:
        """Wake the caller. Returns whether it still waited."""
        waited = self.arrived.set_running_or_notify_cancel()
        if waited and error is None:
            self.arrived.set_result(None)
        elif waited:
            self.arrived.set_exception(error)
        return waited


class EngineDriver:
    """Owner of an engine, of which any thread may call any method at any time.

    `begin` is called by the engine's thread first, `rest` when no step is expected soon, to free what it holds.

    Raises, from every method but `close` and `abandon`:
        ClosedError: the engine was closed, before the call or during it.
        ForkedError: the engine belongs to another process.
        ReentryError: the engine is in the middle of a step, which makes this call.
    """

    def __init__(
        self,
        engine: Engine,
        begin: Callable[[], object] = lambda: None,
        rest: Callable[[], None] = lambda: None,
    ) -> None:
        self._open: Engine | None = engine
        self._pid = os.getpid()
        self._queue: SimpleQueue[Callable[[EngineDriver], None] | None] = SimpleQueue()
        # It holds this object, and with it the engine, only while there is work.
        arguments = weakref.ref(self), self._queue, begin, rest
        self._thread = Thread(target=_run, args=arguments, name="winnow-engine", daemon=True)
        self._starting = Lock()
        weakref.finalize(self, self._queue.put, None).atexit = False
        self._numbers = count()
        # What follows is the thread's.
        self._unclaimed = Mailbox()
        self._mailboxes: dict[str, Mailbox] = {}
        self._waits: list[_Wait] = []
        self._stepping = False

    @property
    def engine(self) -> Engine:
        """The engine itself, unguarded. Raises if it cannot be used."""
        self.require_open()
        assert self._open is not None, "an open driver has an engine"
        return self._open

    def require_open(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedError(
                f"this LLM belongs to process {self._pid}, and its threads and locks do not survive a fork into "
                f"process {os.getpid()}: create the LLM in the child process, or start that with the spawn method"
            )
        if self._open is None:
            raise ClosedError("this LLM is closed, and requests in progress were lost: create a new one")

    def put(self, action: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        """Let the engine's thread call `action` between two steps."""
        self.require_open()
        future: Future[T] = Future()
        self._put(lambda driver: driver._perform(future, action, *args, **kwargs))
        return future

    def call(self, action: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do as `put` does, and return what `action` returns. The engine's thread may call it between two steps."""
        if current_thread() is not self._thread:
            return _result(self.put(action, *args, **kwargs))
        self._require_no_step()
        self.require_open()
        return action(*args, **kwargs)

    def new_id(self) -> str:
        return f"request-{next(self._numbers)}"

    def submit(
        self,
        requests: Sequence[NewRequest],
        box: Mailbox | None = None,
        label: str = "",
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Queue requests, all of them or none. `box` receives their outputs; None: `step` returns them.

        Args:
            label: name of the list in errors, which then name the index; empty: there is one request.
            check: called once all are queued; where it raises, none is.

        Raises:
            InvalidRequestError (or a subclass): a request cannot be served. Other requests are unaffected.
        """

        def add() -> None:
            for index, request in enumerate(requests):
                try:
                    self.engine.add(request)
                except BaseException as error:
                    self._end([added.request_id for added in requests[:index]])
                    if label and isinstance(error, InvalidRequestError):
                        raise type(error)(f"{label}[{index}]: {error}") from None
                    raise
                if box is not None:
                    box.unfinished.add(request.request_id)
                    self._mailboxes[request.request_id] = box
            try:
                check()
            except BaseException:
                self._end([added.request_id for added in requests])
                raise

        self.call(add)

    def abort(self, request_id: str) -> RequestOutput | None:
        """Abort a request. Returns its output so far, as its mailbox does; None: there is no such request."""

        def end() -> RequestOutput | None:
            output = self.engine.abort(request_id)
            if output is not None and request_id in self._mailboxes:
                self._deliver([output])
            return output

        return self.call(end)

    def abandon(self, box: Mailbox) -> None:
        """End the unfinished requests of a mailbox, before the next step. Takes no lock, since the garbage collector
        may call this on any thread at any point."""
        self._queue.put(lambda driver: driver._perform(Future(), driver._end, box.unfinished))

    def expect(self, box: Mailbox, num_outputs: int = 1, *, once: bool = True) -> "Future[None]":
        """Let steps be computed until `box` holds `num_outputs` outputs; with `once`, no more than one. The future
        fails with what a step raises, of all that wait the oldest one's. The others continue."""
        self.require_open()
        wait = _Wait(box, num_outputs, once)
        self._put(lambda driver: driver._waits.append(wait))
        return wait.arrived

    def wait(self, box: Mailbox, num_outputs: int, *, once: bool = False) -> None:
        """Do as `expect` does, and wait for it."""
        if len(box.outputs) < num_outputs or self._open is None:
            if current_thread() is self._thread:
                self._require_no_step()
                raise ReentryError("the engine's thread cannot wait for itself: use `expect`")
            _result(self.expect(box, num_outputs, once=once))

    def finish(
        self, requests: Sequence[NewRequest], label: str = "", progress: Callable[[int], None] | None = None
    ) -> list[RequestOutput]:
        """Serve `final_only` requests to their ends. Returns their outputs in the order of `requests`. Raises as
        `submit` and `wait`; an interrupt ends the requests. `progress` hears how many have finished."""
        box = Mailbox()
        try:
            self.submit(requests, box, label)
            while len(box.outputs) < len(requests):
                self.wait(box, len(box.outputs) + 1 if progress else len(requests))
                if progress is not None:
                    progress(len(box.outputs))
        except BaseException:
            self.abandon(box)
            raise
        finished = {output.request_id: output for output in box.outputs}
        return [finished[request.request_id] for request in requests]

    def step(self, box: Mailbox | None = None) -> list[RequestOutput]:
        """Compute a step, unless `box` has outputs, and return these; None: those of requests without a mailbox."""
        box = self._unclaimed if box is None else box
        self.wait(box, 1, once=True)
        return box.take()

    def compute(self) -> None:
        """Compute a step on the engine's own thread, for an action that it runs. Raises what the step raises."""
        self._stepping = True
        try:
            outputs = self.engine.step()
        finally:
            self._stepping = False
        self._deliver(outputs)

    def close(self) -> None:
        """Release the engine, after the step in progress. Threads that wait for outputs get a ClosedError. No effect in
        a forked child: the engine belongs to the parent."""
        if os.getpid() != self._pid or self._open is None:
            return

        def close() -> None:
            engine, self._open = self.engine, None
            engine.close()

        self.call(close)

    def _put(self, action: "Callable[[EngineDriver], None]") -> None:
        if current_thread() is self._thread:
            self._require_no_step()
        elif self._thread.ident is None:
            with self._starting:
                if self._thread.ident is None:
                    self._thread.start()
                    stop = partial(_stop, self._queue, self._thread)
                    atexit.register(stop)
                    weakref.finalize(self, atexit.unregister, stop).atexit = False
        self._queue.put(action)

    def _require_no_step(self) -> None:
        if self._stepping:
            raise ReentryError(
                "this LLM is in the middle of a step of the same thread: what a step calls, such as the score of a "
                "policy, cannot ask it for another; do so between two steps"
            )

    def _serve(self) -> bool:
        """Compute steps until no caller waits. Returns False once the thread should end."""
        while True:
            self._wake()
            if self._waits:
                self._step()
            while True:
                try:
                    action = self._queue.get_nowait()
                except Empty:
                    break
                if action is None:
                    return False
                action(self)
            if not self._waits:
                return True

    def _wake(self) -> None:
        waits, self._waits = self._waits, []
        closed = None
        try:
            self.require_open()
        except ClosedError as error:
            closed = error
        for wait in waits:
            if closed is not None or len(wait.box.outputs) >= wait.num_outputs:
                wait.end(closed)
            elif not wait.arrived.cancelled():
                self._waits.append(wait)

    def _step(self) -> None:
        failure: BaseException | None = None
        try:
            assert self._waits[0].once or self.engine.has_unfinished, "a request's output was lost"
            self.compute()
        except BaseException as error:
            failure = error
        waits, self._waits, unheard = self._waits, [], failure
        for wait in waits:
            if wait.once and failure is None:
                wait.end()
            elif unheard is None or not wait.end(unheard):
                self._waits.append(wait)
            else:
                unheard = None

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            box = self._mailboxes.get(output.request_id, self._unclaimed)
            box.outputs.append(output)
            if output.finished and self._mailboxes.pop(output.request_id, None) is not None:
                box.unfinished.discard(output.request_id)

    def _perform(
        self, future: "Future[T]", action: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        if future.set_running_or_notify_cancel():
            try:
                self.require_open()
                future.set_result(action(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

    def _end(self, names: Iterable[str]) -> None:
        for name in list(names):
            box = self._mailboxes.pop(name, None)
            if box is not None:
                box.unfinished.discard(name)
            self.engine.abort(name)


class OutputStream(Iterator[RequestOutput]):
    """Iterator over the outputs of a mailbox's one request. Closed or garbage-collected early, it ends the request."""

    def __init__(self, shared: EngineDriver, box: Mailbox) -> None:
        self._shared, self._box, self._ended = shared, box, False
        self._reading = Lock()

    def __next__(self) -> RequestOutput:
        with self._reading:
            if self._ended:
                raise StopIteration
            try:
                self._shared.wait(self._box, 1)
            except BaseException:
                self.close()
                raise
            output = self._box.outputs.popleft()
            self._ended = output.finished
        return output

    def close(self) -> None:
        if not self._ended:
            self._ended = True
            self._shared.abandon(self._box)

    def __del__(self) -> None:
        self.close()


def _result(future: "Future[T]") -> T:
    """Return the result of a future that has no other waiter; an interrupt cancels it."""
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def _run(
    reference: "weakref.ref[EngineDriver]",
    queue: "SimpleQueue[Callable[[EngineDriver], None] | None]",
    begin: Callable[[], object],
    rest: Callable[[], None],
) -> None:
    begin()
    patience: float | None = None
    while True:
        try:
            action = queue.get(timeout=patience)
        except Empty:
            rest()
            patience = None
            continue
        driver = reference()
        if action is None or driver is None:
            return
        action(driver)
        if not driver._serve():
            return
        opened = driver._open
        patience = None if opened is None or not opened.has_unfinished else _PATIENCE
        if patience is None:
            rest()
        del driver, opened, action


def _stop(queue: "SimpleQueue[Any]", thread: Thread) -> None:
    """End the thread before the interpreter ends: the step in progress must not outlive it."""
    queue.put(None)
    thread.join()
