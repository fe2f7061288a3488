"""The padded engine: a step is a pass of the running batch, or the first tokens of a group prefilled apart from it."""

from collections.abc import Callable
from dataclasses import replace

import torch
from transformers import PreTrainedTokenizerBase

from winnow.config import SchedulerConfig
from winnow.engine.loop import RequestLoop, Sampled
from winnow.engine.requests.new_request import NewRequest
from winnow.engine.requests.request import Request, Sequence
from winnow.engine.scheduling.queue import WaitingQueue
from winnow.errors import InvalidRequestError
from winnow.outputs import RequestOutput
from winnow_lab.padded.admission import PaddedAdmission
from winnow_lab.padded.executor import PaddedExecutor
from winnow_lab.padded.stats import PaddedStats


class PaddedEngine(RequestLoop):
    """Engine that serves requests in one padded batch, with the model as transformers runs it; see `RequestLoop`."""

    def __init__(
        self,
        executor: PaddedExecutor,
        tokenizer: PreTrainedTokenizerBase | None,
        eos_token_ids: frozenset[int],
        admission: PaddedAdmission,
        clock: Callable[[], float],
        limits: SchedulerConfig,
    ) -> None:
        super().__init__(tokenizer, eos_token_ids, clock, limits)
        self._executor = executor
        self._admission = admission

    @torch.inference_mode()
    def step(self) -> list[RequestOutput]:
        return super().step()

    @torch.inference_mode()
    def abort(self, request_id: str) -> RequestOutput | None:
        return super().abort(request_id)  # freeing a row writes to it

    def stats(self) -> PaddedStats:
        return replace(
            self._executor.stats(),
            prompt_tokens=self._requests.prompt_tokens,
            generated_tokens=self._requests.generated_tokens,
            num_steps=self._num_steps,
        )

    def kv_bytes(self, num_kvs: int) -> int:
        """Return bytes of a query of `num_kvs` KVs, without padding."""
        return self._executor.kv_bytes(num_kvs)

    def check_integrity(self) -> None:
        """Assert the invariants of batch and queue."""
        self._executor.check_integrity(self._requests.unfinished)

    # -- hooks of the loop -----------------------------------------------------------------------------------------

    @property
    def _waiting(self) -> WaitingQueue:
        return self._executor.waiting

    def _admit(self, new: NewRequest) -> Request:
        if new.observer is not None:
            raise InvalidRequestError("inspect needs engine=paged: a padded cache keeps all KVs of a query")
        if (terms := new.session) is not None and (terms.prefetch or (terms.ttl and not terms.hint)):
            raise InvalidRequestError("ttl and prefetch need engine=paged: no KVs stay of an ended request")
        max_tokens = self._admission.admit(new.token_ids, new.params)
        return Request.of(new, self._executor.with_seed(new.params), max_tokens, self._clock())

    def _enqueue(self, request: Request) -> None:
        self._executor.add(request)

    def _compute(self) -> Sampled:
        try:
            failure = self._executor.receive()
            if failure is None:
                return self._executor.step()
        except BaseException:  # also on KeyboardInterrupt
            self._restart()
            raise
        raise failure  # of a prefill in the background: the batch is as it was

    def _restart(self) -> None:
        self._executor.recompute_all(self._requests.unfinished)

    def _release(self, sequence: Sequence, reason: str, stop_reason: int | str | None) -> None:
        sequence.finish_reason, sequence.stop_reason = reason, stop_reason
        self._executor.remove(sequence)
