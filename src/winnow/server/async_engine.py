"""Async client of the engine's thread: requests go in, outputs come out, no caller waits.

Outputs go back once per step, in one call on the event loop.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from winnow.engine.driver import EngineDriver, Mailbox
from winnow.engine.requests.new_request import NewRequest
from winnow.errors import ClosedError, describe_error
from winnow.openai.errors import FAILED, SHUTTING_DOWN, UNHEALTHY, ApiError
from winnow.outputs import RequestOutput
from winnow.sampling import SamplingParams
from winnow.server.request_stream import RequestStream

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger("winnow.server")

RETRY_SECONDS = 10
"""After which a client may ask again whom a server refused that is about to end."""
_PROBE = "probe"
_PROBE_STEPS = 64
_GENERIC = "the engine failed while it computed this request; the server's log says why"


@dataclass(eq=False)
class AsyncEngine:
    """Server of requests of an event loop from one engine, which may have other clients.

    Attributes:
        observe: called on the loop with each step's outputs; for metrics.
        discard: called on the loop with the ids of requests whose last output will not come.
        on_failure: called on the loop once, when the engine has failed for good.
        charge: called on the loop with the tenant of a request that has ended, also one whose client has left, and its
            tokens: of the prompt, of the answers.
        after_step: called on the engine's thread after each step.
        failure: why the engine has failed for good; None: it has not.
    """

    driver: EngineDriver
    observe: Callable[[list[RequestOutput]], None] = lambda outputs: None
    discard: Callable[[Sequence[str]], None] = lambda names: None
    on_failure: Callable[[], None] = lambda: None
    charge: Callable[[str | None, int, int], None] = lambda tenant, prompt, answers: None
    after_step: Callable[[], None] = lambda: None
    failure: str | None = None
    draining: bool = False

    def __post_init__(self) -> None:
        self._box = Mailbox()
        self._loop: asyncio.AbstractEventLoop | None = None
        # The engine's thread's: the wait for its next step, and who had begun after the last one.
        self._stopping = self._paused = self._retried = False
        self._next: Future[Any] | None = None
        self._begun: frozenset[str] = frozenset()
        self._step_began: float | None = None
        # By request id; the loop's. Of those that were abandoned the last output is to come.
        self._streams: dict[str, RequestStream] = {}
        self._left: dict[str, RequestStream] = {}

    # -- on the event loop -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Serve the running event loop. A second call does nothing."""
        self._loop = asyncio.get_running_loop()

    async def submit(
        self,
        requests: Sequence[NewRequest],
        *,
        background: bool = False,
        check: Callable[[Collection[str]], None] = lambda clients: None,
    ) -> RequestStream:
        """Queue requests, all of them or none; those of a batch (`background`) leave others' share of the queue alone.

        Raises InvalidRequestError: one cannot be served; ApiError: the engine has failed, the server is shutting down,
        or `check` refuses them, which the engine's thread calls with the ids of clients' unfinished requests.
        """
        self.require_usable()
        stream = RequestStream(requests, background)
        for request in requests:
            self._streams[request.request_id] = stream
        clients = frozenset(each.request_id for each, _ in self._in_progress())
        try:
            await self.call(self.driver.submit, requests, self._box, "", lambda: check(clients))
        except ApiError:  # none came in
            for request in requests:
                self._streams.pop(request.request_id, None)
            raise
        except BaseException:
            # Also where the caller has left: what was queued meanwhile is of no use to anybody.
            self.abandon(stream)
            raise
        return stream

    @property
    def background(self) -> int:
        """Answers of batches in progress."""
        streams = {stream for stream in self._streams.values() if stream.background}
        return sum(each.params.n for stream in streams for each in stream.requests)

    def require_usable(self) -> None:
        """Refuse requests that nothing would come of. Raises ApiError: says why."""
        if self.failure is not None:
            fault = "the engine has failed, and the server is about to end"
            raise ApiError(UNHEALTHY, fault, retry_after=RETRY_SECONDS)
        if self.draining:
            raise ApiError(SHUTTING_DOWN, "the server is shutting down", retry_after=RETRY_SECONDS)

    def abandon(self, stream: RequestStream) -> None:
        """End a stream's unfinished requests before the next step. No effect on one that has ended."""
        ids = [request.request_id for request in stream.requests]
        known = [name for name in ids if self._streams.pop(name, None) is not None]
        if known:
            self._left |= dict.fromkeys(known, stream)
            self.discard(known)
            self._send(self._abort, known)

    def abort_all(self, error: ApiError, *, waiting: bool = False) -> None:
        """End all requests; with `waiting` those of clients that nothing was computed of."""
        for stream in set(self._streams.values()):
            if waiting and (stream.background or len(stream.waiting) < len(stream.requests)):
                continue
            self.abandon(stream)
            stream.fail(error)

    async def call(self, action: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `action` on the engine's thread, between two steps, and return what it returns."""
        return await asyncio.wrap_future(self._send(action, *args, **kwargs))

    def _in_progress(self) -> Iterator[tuple[NewRequest, bool]]:
        """Yield the clients' unfinished requests, and whether their computation has yet to begin."""
        for stream in {stream for stream in self._streams.values() if not stream.background}:
            for each in stream.requests:
                if each.request_id in stream.unfinished:
                    yield each, each.request_id in stream.waiting

    @property
    def num_unfinished(self) -> int:
        """Answers in progress."""
        return sum(each.params.n for each, _ in self._in_progress())

    def num_queued(self) -> tuple[int, int]:
        """Return answers whose computation has not begun, and the tokens of their prompts."""
        waiting = [each for each, waits in self._in_progress() if waits]
        return sum(each.params.n for each in waiting), sum(len(each.token_ids) for each in waiting)

    def by_tenant(self) -> dict[str | None, tuple[int, int]]:
        """Return tenant -> answers that are computed, answers that wait."""
        found: dict[str | None, tuple[int, int]] = {}
        for each, waits in self._in_progress():
            (running, waiting), n = found.get(each.tenant, (0, 0)), each.params.n
            found[each.tenant] = (running, waiting + n) if waits else (running + n, waiting)
        return found

    def stuck_for(self) -> float:
        """Return seconds since the step in progress began; 0 between steps."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    def unfinished(self) -> list[str]:
        return list(self._streams)

    def pause(self) -> None:
        """Compute no step until `resume`. Call both on the engine's thread."""
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    async def stop(self) -> None:
        """Wait for the step in progress, the last one."""
        await self.call(self.end)

    def end(self) -> None:
        """Ask for no further step."""
        self._stopping = True

    def _send(self, action: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        def run() -> T:
            try:
                return action(*args, **kwargs)
            finally:
                self._go_on()

        return self.driver.put(run)

    def _deliver(self, outputs: list[RequestOutput], begun: frozenset[str]) -> None:
        for name in begun & self._streams.keys():
            self._streams[name].waiting.discard(name)
        delivered = []
        for output in outputs:
            name = output.request_id
            held = self._streams if name in self._streams else self._left
            stream = held.get(name)
            if stream is None:
                continue  # the engine gave it up
            used = stream.count(output)
            if output.finished:
                del held[name]
                self.charge(stream.requests[0].tenant, *used)
            if held is self._streams:
                stream.put(output)
                delivered.append(output)
        self.observe(delivered)

    def _discard_left(self, names: Sequence[str]) -> None:
        for name in names:
            self._left.pop(name, None)

    def _fail_all(self, reason: str, *, for_good: bool) -> None:
        self.discard(list(self._streams))
        streams, self._streams = set(self._streams.values()), {}
        self._left.clear()
        if for_good:
            self.failure = reason
        for stream in streams:
            stream.fail(ApiError(FAILED, _GENERIC))
        if for_good:
            self.on_failure()

    # -- on the engine's thread ------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Ask for a step, if one is wanted and none is asked for."""
        # Steps of other clients bring outputs too, the last one among them.
        if self._next or self._stopping or self._paused or self.failure is not None:
            return
        if self._box.unfinished or self._box.outputs or self.driver.engine.has_unfinished:
            self._step_began = time.monotonic()
            self._next = self.driver.expect(self._box)
            self._next.add_done_callback(self._take_step)
        elif self.driver.engine.has_check:
            self._next = self.driver.put(self.driver.engine.check_step)
            self._next.add_done_callback(self._take_check)

    def _take_check(self, _: "Future[Any]") -> None:
        self._next = None
        self._go_on()

    def _take_step(self, step: "Future[None]") -> None:
        """Hand on what a step has brought. One that failed is tried again once: the engine is whole again then."""
        self._next = self._step_began = None
        error = step.exception()
        if isinstance(error, ClosedError):
            return
        if isinstance(error, Exception) and not self._retried:
            log.warning("a step failed, and is tried again: %s", describe_error(error), exc_info=error)
            self._retried = True
        else:
            self._retried = False
            if error is not None:
                self._give_up(error)
            self.after_step()
            outputs = self._box.take()
            begun = frozenset[str]() if error is not None else self.driver.engine.requests.begun
            if outputs or begun != self._begun:
                self._post(self._deliver, outputs, begun)
            self._begun = begun
        self._go_on()

    def _give_up(self, error: BaseException) -> None:
        """End the requests of a step that failed twice, and find out whether the engine can serve others."""
        reason = describe_error(error) if isinstance(error, Exception) else type(error).__name__
        log.error("the engine failed: %s", reason, exc_info=error)
        sound = isinstance(error, Exception) and self._recovers()
        self._stopping = self._stopping or not sound
        self._post(lambda: self._fail_all(reason, for_good=not sound))
        if sound:
            log.warning("the engine serves again without the requests that were in progress")

    def _recovers(self) -> bool:
        """Abort every request that the loop knows, and return whether the engine serves one of its own."""
        params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
        try:
            for name in list(self._streams):
                self.driver.abort(name)
            box = Mailbox()
            self.driver.submit([NewRequest(_PROBE, None, [0], params, final_only=True)], box)
            for _ in range(_PROBE_STEPS):
                self.driver.compute()
                for output in box.take():
                    return output.error is None
        except Exception as error:
            log.error("the engine cannot end requests, or serve one of its own: %s", describe_error(error))
        self._abort([_PROBE])
        return False

    def _abort(self, names: Sequence[str]) -> None:
        gone = []
        for name in names:
            try:
                if self.driver.abort(name) is None:
                    gone.append(name)  # it never came in, or its last output is delivered before this arrives
            except Exception as error:
                log.error("request %s could not be ended: %s", name, describe_error(error))
                gone.append(name)
        if gone:
            self._post(self._discard_left, gone)

    def _post(self, action: Callable[..., Any], *arguments: Any) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(action, *arguments)
        except RuntimeError:  # the loop has ended
            self._stopping = True
