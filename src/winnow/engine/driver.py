"""The one owner of an engine: whatever uses it, `LLM.generate` and a server alike, is a client of its driver.

The engine has no thread of its own. One of the threads that wait for outputs computes steps for all of them until its
own outputs have arrived; then another takes over: the one thread of a server, or that of a script, which Ctrl-C
interrupts between two steps and a profiler sees. Nothing here survives a fork: the child gets a ForkedError.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from threading import Condition, Lock, get_ident
from typing import TypeVar

from winnow.engine.interrupts import DeferredInterrupt
from winnow.engine.loop import RequestLoop
from winnow.engine.requests.new_request import NewRequest
from winnow.errors import ClosedError, ForkedError, InvalidRequestError, QueueFullError, ReentryError
from winnow.outputs import RequestOutput

T = TypeVar("T")

# Seconds after which a waiting thread checks by itself: a KeyboardInterrupt may lose a notification.
_RECHECK = 1.0


@dataclass(eq=False)
class Mailbox:
    """Mailbox of the outputs of one caller's requests."""

    arrived: Condition
    outputs: list[RequestOutput] = field(default_factory=list)
    unfinished: set[str] = field(default_factory=set)
    """Ids of requests whose last output has not arrived."""


class EngineDriver:
    """Guard of an engine, so that any thread may call any method at any time.

    Args:
        release_thread: called by a thread that has stepped and is not expected to step again soon, to free resources
            that the computation holds per thread.

    Raises, from every method but `close` and `abandon`:
        ClosedError: the engine was closed, before the call or during it.
        ForkedError: the engine belongs to another process.
        ReentryError: the calling thread is using the engine already.
    """

    def __init__(self, engine: RequestLoop, release_thread: Callable[[], None] = lambda: None) -> None:
        self._open: RequestLoop | None = engine
        self._release_thread = release_thread
        self._pid = os.getpid()
        # The holder of `_inside` uses the engine. Threads take `_entrance` first, and the one that steps passes through
        # it before each step, so that threads which came during the last step go first.
        self._entrance = Lock()
        self._inside = Lock()
        self._user: int | None = None
        # Guards the fields below; never held while the engine computes, never taken before the two locks above.
        self._mail = Lock()
        self._unclaimed = self.mailbox()
        self._mailboxes: dict[str, Mailbox] = {}
        self._waiting: list[Mailbox] = []
        self._stepping = False
        self._num_steps = 0
        # Appended to without a lock: outputs on their way to mailboxes, and abandoned mailboxes.
        self._outputs: deque[RequestOutput] = deque()
        self._abandoned: deque[Mailbox] = deque()
        self._numbers = count()

    @property
    def engine(self) -> RequestLoop:
        """The engine itself, unguarded. Raises if it cannot be used."""
        if os.getpid() != self._pid:
            raise ForkedError(
                f"this LLM belongs to process {self._pid}, and its threads and locks do not survive a fork into "
                f"process {os.getpid()}: create the LLM in the child process, or start that with the spawn method"
            )
        if self._open is None:
            raise ClosedError("this LLM is closed, and requests in progress were lost: create a new one")
        return self._open

    def call(self, action: Callable[[RequestLoop], T]) -> T:
        """Run `action` on the engine, between two steps."""
        self._require_usable()
        with self._entrance, self._used() as engine:
            if self._abandoned:
                with DeferredInterrupt():
                    self._drop_abandoned(engine)
            return action(engine)

    def change(self, action: Callable[[RequestLoop], T]) -> T:
        """Do as `call` does, for an action that Ctrl-C must not interrupt."""

        def whole(engine: RequestLoop) -> T:
            with DeferredInterrupt():
                return action(engine)

        return self.call(whole)

    def new_id(self) -> str:
        """Return a request id that no other call returns."""
        return f"request-{next(self._numbers)}"

    def mailbox(self) -> Mailbox:
        """Make an empty mailbox."""
        return Mailbox(Condition(self._mail))

    def submit(self, requests: Sequence[NewRequest], box: Mailbox | None = None, label: str = "") -> None:
        """Queue requests, all of them or none.

        Args:
            box: receives their outputs; None: `step` returns them.
            label: name of the list in errors, which then name the index; empty: there is one request.

        Raises:
            InvalidRequestError (or a subclass): a request cannot be served. Other requests are unaffected.
            QueueFullError: too much would wait.
        """

        def add(engine: RequestLoop) -> None:
            for index, request in enumerate(requests):
                try:
                    self._add(engine, request, box)
                except BaseException as error:
                    for added in requests[:index]:
                        self._drop(added.request_id)
                        engine.abort(added.request_id)
                    if label and isinstance(error, InvalidRequestError | QueueFullError):
                        raise type(error)(f"{label}[{index}]: {error}") from None
                    raise

        self.change(add)

    def abort(self, request_id: str) -> RequestOutput | None:
        """Abort a request. Returns its output so far, or None if there is no such request.

        Its mailbox receives the same output.
        """

        def end(engine: RequestLoop) -> RequestOutput | None:
            output = engine.abort(request_id)
            if output is not None and request_id in self._mailboxes:
                self._outputs.append(output)
                with self._mail:
                    self._sort()
            return output

        return self.change(end)

    def abandon(self, box: Mailbox) -> None:
        """End the unfinished requests of a mailbox, before the next use of the engine.

        Takes no lock, since the garbage collector may call this on any thread at any point.
        """
        if box.unfinished:
            self._abandoned.append(box)

    def wait(self, box: Mailbox, num_outputs: int) -> None:
        """Wait until `box` holds `num_outputs` outputs; step the engine meanwhile if no other thread does.

        Raises:
            BaseException: a step that this thread computed failed with it. Other threads continue.
        """
        self._advance(box, num_outputs, once=False)

    def finish(
        self, requests: Sequence[NewRequest], label: str = "", progress: Callable[[int], None] | None = None
    ) -> list[RequestOutput]:
        """Serve `final_only` requests to their ends. Returns their outputs in the order of `requests`.

        Raises as `submit` and `wait`; an interrupt ends the requests.

        Args:
            label: as in `submit`.
            progress: called with the number of requests that have finished, whenever it has grown.
        """
        box = self.mailbox()
        try:
            self.submit(requests, box, label)
            while len(box.outputs) < len(requests):
                self.wait(box, len(box.outputs) + 1 if progress else len(requests))
                if progress is not None:
                    progress(len(box.outputs))
        finally:
            self.abandon(box)
        finished = {output.request_id: output for output in box.outputs}
        return [finished[request.request_id] for request in requests]

    def step(self, box: Mailbox | None = None) -> list[RequestOutput]:
        """Compute a step, or wait for one of another thread.

        Returns what has arrived in `box`; None: outputs of requests without a mailbox.
        """
        box = self._unclaimed if box is None else box
        self._advance(box, 1, once=True)
        with self._mail:
            outputs, box.outputs = box.outputs, []
        return outputs

    def close(self) -> None:
        """Release the engine, after the step in progress. Threads that wait for outputs get a ClosedError.

        No effect in a forked child: the engine belongs to the parent.
        """
        if os.getpid() != self._pid:
            return
        with self._entrance, self._inside:
            engine, self._open = self._open, None
        with self._mail:
            for box in self._waiting:
                box.arrived.notify_all()
        if engine is not None:
            engine.close()

    # -- inside --------------------------------------------------------------------------------------------------

    def _require_usable(self) -> None:
        """Raise before any lock is taken: after a fork, a thread that does not exist may hold one."""
        _ = self.engine
        if self._user == get_ident() and self._inside.locked():
            raise ReentryError(
                "this LLM is in the middle of a step of the same thread: what a step calls, such as the score of a "
                "policy, cannot ask it for another; do so between two steps"
            )

    @contextmanager
    def _used(self) -> Iterator[RequestLoop]:
        """Give the calling thread the engine, to itself."""
        with self._inside:
            self._user = get_ident()
            try:
                yield self.engine
            finally:
                self._user = None

    def _advance(self, box: Mailbox, num_outputs: int, *, once: bool) -> None:
        """See `wait`; with `once`, return also after a step by any thread."""
        self._require_usable()
        leads = False
        try:
            with self._mail:
                if self._follow(box, num_outputs, once):
                    return
                self._stepping = leads = True
            with DeferredInterrupt() as interrupt:
                self._step(box, num_outputs, once)
                while not once and len(box.outputs) < num_outputs:
                    interrupt.handle()
                    self._step(box, num_outputs, once)
                if self._waiting or not (once or box.unfinished):
                    self._release_thread()
        finally:
            if leads:
                self._stepping = False
            with self._mail:
                if self._waiting and not self._stepping:
                    self._waiting[0].arrived.notify_all()

    def _follow(self, box: Mailbox, num_outputs: int, once: bool) -> bool:
        """Wait, with the mail locked, while another thread steps. Returns False if this thread is to step."""
        first = self._num_steps
        self._waiting.append(box)
        try:
            while True:
                self._sort()
                if len(box.outputs) >= num_outputs or (once and self._num_steps != first):
                    return True
                _ = self.engine
                if not self._stepping:
                    return False
                box.arrived.wait(_RECHECK)
        finally:
            self._waiting.remove(box)

    def _step(self, box: Mailbox, num_outputs: int, once: bool) -> None:
        with self._entrance:  # see `__init__`
            pass
        with self._used() as engine:
            self._drop_abandoned(engine)
            if len(box.outputs) >= num_outputs:  # aborted meanwhile
                return
            assert once or engine.has_unfinished, "a request has ended, and its output was lost"
            self._outputs.extend(engine.step())
            with self._mail:
                self._sort()
                self._num_steps += 1
                self._unclaimed.arrived.notify_all()

    def _sort(self) -> None:
        """Move outputs to their mailboxes; the mail must be locked."""
        while self._outputs:
            output = self._outputs[0]
            box = self._mailboxes.get(output.request_id, self._unclaimed)
            box.outputs.append(output)
            self._outputs.popleft()
            if output.finished:
                self._drop(output.request_id)
            box.arrived.notify_all()

    def _add(self, engine: RequestLoop, request: NewRequest, box: Mailbox | None) -> None:
        engine.add(request)
        if box is not None:  # no step comes before this: the caller is inside
            box.unfinished.add(request.request_id)
            self._mailboxes[request.request_id] = box

    def _drop(self, request_id: str) -> None:
        box = self._mailboxes.pop(request_id, None)
        if box is not None:
            box.unfinished.discard(request_id)

    def _drop_abandoned(self, engine: RequestLoop) -> None:
        while self._abandoned:
            with self._mail:
                self._sort()
            box = self._abandoned[0]
            for request_id in list(box.unfinished):
                self._drop(request_id)
                engine.abort(request_id)
            self._abandoned.popleft()


class OutputStream(Iterator[RequestOutput]):
    """Iterator over the outputs of a mailbox's one request. Closed or garbage-collected early, it ends the request.

    Several threads may read from it; each output is returned once.
    """

    def __init__(self, shared: EngineDriver, box: Mailbox) -> None:
        self._shared = shared
        self._box = box
        self._ended = False
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
            output = self._box.outputs.pop(0)
            self._ended = output.finished
        return output

    def close(self) -> None:
        """End the request, if it is unfinished."""
        self._ended = True
        self._shared.abandon(self._box)

    def __del__(self) -> None:
        self.close()
