"""The outputs of one caller's requests, on their way from the engine's thread to the task that reads them."""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace

from winnow.engine.requests.new_request import NewRequest
from winnow.openai.errors import ApiError, failed
from winnow.outputs import RequestOutput


@dataclass(eq=False)
class RequestStream:
    """The outputs of one caller's requests, as they come. To be read by one task, on the engine's event loop.

    Attributes:
        background: no client waits for them.
        unfinished: ids of requests whose last output has not come.
        waiting: ids of requests whose computation has not begun.
        generated: tokens of the answers so far, by request id.
    """

    requests: Sequence[NewRequest]
    background: bool = False
    unfinished: set[str] = field(default_factory=set)
    waiting: set[str] = field(default_factory=set)
    generated: Counter[str] = field(default_factory=Counter)
    error: ApiError | None = None
    _outputs: deque[RequestOutput] = field(default_factory=deque)
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.unfinished = {request.request_id for request in self.requests}
        self.waiting = set(self.unfinished)

    def count(self, output: RequestOutput) -> tuple[int, int]:
        """Count an output's new tokens. Returns what its request has used: tokens of the prompt, of the answers.

        A prompt counts whole once its computation has begun.
        """
        name = output.request_id
        self.generated[name] += sum(len(answer.token_ids) for answer in output.outputs)
        begun = output.metrics.first_scheduled_time is not None
        return len(output.prompt_token_ids) if begun else 0, self.generated[name]

    def put(self, output: RequestOutput) -> None:
        """Take an output; a delta that is not yet read grows."""
        if self._outputs and self._outputs[-1].request_id == output.request_id:
            request = next(each for each in self.requests if each.request_id == output.request_id)
            if request.deltas:
                output = merge_deltas(self._outputs.pop(), output)
        self._outputs.append(output)
        self.waiting.discard(output.request_id)
        if output.finished:
            self.unfinished.discard(output.request_id)
        self._arrived.set()

    def fail(self, error: ApiError) -> None:
        """End the stream with an error, after the outputs that are there."""
        self.error = self.error or error
        self.unfinished.clear()
        self.waiting.clear()
        self._arrived.set()

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        """Yield outputs until the last request is finished. Raises ApiError: `fail` was called."""
        while True:
            while self._outputs:
                yield self._outputs.popleft()
            if self.error is not None:
                raise self.error
            if not self.unfinished:
                return
            self._arrived.clear()
            await self._arrived.wait()

    async def answers(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """Yield outputs as they come, each behind the number of its request. Raises ApiError: one failed."""
        ids = [request.request_id for request in self.requests]
        async for output in self:
            if output.error is not None:
                raise failed(output.error)
            yield ids.index(output.request_id), output


def merge_deltas(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    """Return two outputs of one request, each what was new, as one."""
    merged = []
    for earlier, later in zip(first.outputs, second.outputs, strict=True):
        logprobs = None if later.logprobs is None else [*(earlier.logprobs or ()), *later.logprobs]
        text, token_ids = earlier.text + later.text, earlier.token_ids + later.token_ids
        merged.append(replace(later, text=text, token_ids=token_ids, logprobs=logprobs))
    return replace(second, outputs=merged)
