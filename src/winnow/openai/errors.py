"""Errors as the OpenAI API writes them."""

from typing import Any

from winnow.errors import CapacityError, ContextLengthError, WinnowError, describe_error

INTERNAL = "internal_error"
"""The code of a fault of Winnow's own."""
FAILED = "request_failed"
"""The code of a valid request that failed while it was computed."""


class ApiError(WinnowError):
    """One request cannot be served; others are unaffected.

    Attributes:
        code: for programs; the message is for people.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code

    @classmethod
    def wrap(cls, error: Exception) -> "ApiError":
        """Return `error` with the code that fits; what is no `WinnowError` is an internal error."""
        if isinstance(error, cls):
            return error
        if isinstance(error, ContextLengthError):
            return cls("context_length_exceeded", str(error))
        if isinstance(error, CapacityError):
            return cls("kv_memory_exceeded", str(error))
        if isinstance(error, WinnowError):
            return cls("invalid_request", str(error))
        return cls(INTERNAL, describe_error(error))

    @property
    def status(self) -> int:
        """The HTTP status: 500 for faults of the server, else 400."""
        return 500 if self.code in (INTERNAL, FAILED) else 400

    def body(self) -> dict[str, Any]:
        """Return the response's body."""
        kind = "server_error" if self.status == 500 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": None, "code": self.code}}
