"""The padded engine: a step is a pass of the running batch, or the first tokens of a group prefilled apart from it."""

from dataclasses import replace
from typing import Any, NoReturn

import torch

from winnow.engine.engine import Engine, Sampled
from winnow.engine.memory.occupancy import Occupancy
from winnow.engine.requests.new_request import NewRequest
from winnow.engine.requests.request import Request, Sequence
from winnow.errors import InvalidRequestError, PrefixStoreError
from winnow.outputs import RequestOutput
from winnow_lab.padded.stats import PaddedStats


class PaddedEngine(Engine):
    """Engine that serves requests in one padded batch, with the model as transformers runs it.

    Its executor also chooses who takes part in a step; KVs are each query's own.
    """

    _executor: Any
    _admission: Any

    @torch.inference_mode()
    def step(self) -> list[RequestOutput]:
        return super().step()

    @torch.inference_mode()
    def abort(self, request_id: str) -> RequestOutput | None:
        return super().abort(request_id)  # freeing a row writes to it

    def stats(self) -> PaddedStats:
        return replace(
            self._executor.stats(),
            prompt_tokens=self.requests.prompt_tokens,
            generated_tokens=self.requests.generated_tokens,
            num_steps=self._counters.num_steps,
        )

    def implementation(self) -> dict[str, str]:
        return {}

    def occupancy(self) -> Occupancy:
        return Occupancy({}, [])

    def kv_bytes(self, num_kvs: int) -> int:
        return int(self._executor.kv_bytes(num_kvs))

    def fork(self, request_id: str, *_: Any, **__: Any) -> None:
        raise InvalidRequestError(f"request_id {request_id!r} cannot be forked: that needs engine=paged")

    def save_prefix(self, *_: Any, **__: Any) -> NoReturn:
        raise PrefixStoreError("engine must be paged to save a prefix")

    def close(self) -> None:
        """Do nothing."""

    def check_integrity(self) -> None:
        self._executor.check_integrity(self.requests.unfinished)

    def _admit(self, new: NewRequest) -> Request:
        if new.observer is not None:
            raise InvalidRequestError("inspect needs engine=paged: a padded cache keeps all KVs of a query")
        if (terms := new.session) is not None and (terms.prefetch or (terms.ttl and not terms.hint)):
            raise InvalidRequestError("ttl and prefetch need engine=paged: no KVs stay of an ended request")
        max_tokens = self._admission.admit(new.token_ids, new.params)
        return Request.of(new, self._executor.with_seed(new.params), max_tokens, self._clock())

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
        self._executor.recompute_all(self.requests.unfinished)

    def _release(self, sequence: Sequence, reason: str, stop_reason: int | str | None) -> None:
        sequence.finish_reason, sequence.stop_reason = reason, stop_reason
        self._executor.remove(sequence)

    def _take_failed(self) -> tuple[Sequence, ...]:
        return ()

    def _report(self, sequence: Sequence) -> None:
        return None
