"""Errors as the OpenAI API writes them."""

from typing import Any

from winnow.errors import CapacityError, ContextLengthError, WinnowError, describe_error
from winnow.sampling.rows import Fault

INTERNAL = "internal_error"
"""The code of a fault of Winnow's own."""
FAILED = "request_failed"
"""The code of a valid request that failed while it was computed."""
OVERLOADED = "server_overloaded"
SHUTTING_DOWN = "shutting_down"
UNHEALTHY = "engine_failed"
RATE_LIMIT = "rate_limit_exceeded"
QUOTA = "insufficient_quota"

# Code -> HTTP status and OpenAI's type; every other code is a fault of the request.
_KINDS = {
    INTERNAL: (500, "server_error"),
    FAILED: (500, "server_error"),
    "invalid_api_key": (401, "authentication_error"),
    "cross_site": (403, "permission_error"),
    "model_not_found": (404, "invalid_request_error"),
    "not_found": (404, "invalid_request_error"),
    "method_not_allowed": (405, "invalid_request_error"),
    "request_too_large": (413, "invalid_request_error"),
    "unsupported_media_type": (415, "invalid_request_error"),
    RATE_LIMIT: (429, "rate_limit_error"),
    QUOTA: (429, "insufficient_quota"),
    OVERLOADED: (503, "server_error"),
    SHUTTING_DOWN: (503, "server_error"),
    UNHEALTHY: (503, "server_error"),
}


class ApiError(WinnowError):
    """One request cannot be served; others are unaffected.

    Args:
        param: the field that is wrong, as a path; None: no single one.
        retry_after: seconds after which the same request may be served; None: never, or not known.
    """

    def __init__(
        self, code: str, message: str, param: str | None = None, *, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.param = param
        self.retry_after = retry_after

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
        return _KINDS.get(self.code, (400, ""))[0]

    def body(self) -> dict[str, Any]:
        _, kind = _KINDS.get(self.code, (400, "invalid_request_error"))
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def failed(reason: str) -> ApiError:
    """Return the error of an answer that failed; what its own parameters rule out is the request's fault."""
    return ApiError("invalid_request" if reason == Fault.NOTHING_LEFT.explain() else FAILED, reason)


def invalid(subject: str, fault: str, param: str | None = None) -> ApiError:
    """Return the error of a field that is wrong, with the message `subject` `fault`; `param` None: the subject."""
    return ApiError("invalid_request", f"{subject} {fault}", param or subject)


def unsupported(subject: str, fault: str = "is not supported", param: str | None = None) -> ApiError:
    return ApiError("unsupported_parameter", f"{subject} {fault}", param or subject)
