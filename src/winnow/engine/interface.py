"""What `LLM` needs of an engine, whichever it is."""

from typing import Protocol

from winnow.engine.new_request import NewRequest
from winnow.outputs import EngineStats, RequestOutput


class RequestEngine(Protocol):
    """Requests in, answers out, one step at a time."""

    @property
    def has_unfinished(self) -> bool:
        """Whether a step has anything to compute."""

    def add(self, new: NewRequest) -> None:
        """Queue a request.

        Raises:
            InvalidRequestError (or a subclass): the request cannot be served. Other requests are unaffected.
        """

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request at once. Returns what it had, or None if there is no such request."""

    def step(self) -> list[RequestOutput]:
        """Compute one step. Returns the requests that got tokens or finished, as they stand; see `add`."""

    def stats(self) -> EngineStats:
        """The engine as it stands."""

    def kv_bytes(self, num_kvs: int) -> int:
        """Bytes of a sequence that keeps `num_kvs` KVs in every row."""

    def check_integrity(self) -> None:
        """Assert the engine's invariants."""
