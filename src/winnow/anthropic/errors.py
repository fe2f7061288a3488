"""Errors as Anthropic's API writes them."""

from typing import Any

from winnow.openai.errors import OVERLOADED, ApiError

PATH = "/v1/messages"

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}


def speaks_anthropic(path: str) -> bool:
    """Return whether a path is one of Anthropic's API."""
    return path == PATH or path.startswith(f"{PATH}/")


def status_of(error: ApiError) -> int:
    """Return the HTTP status: 529 where the server is full, else as OpenAI's."""
    return 529 if error.code == OVERLOADED else error.status


def error_body(error: ApiError, request_id: str | None = None) -> dict[str, Any]:
    """Return the response's body."""
    status = status_of(error)
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    body: dict[str, Any] = {"type": "error", "error": {"type": kind, "message": str(error)}}
    return body if request_id is None else body | {"request_id": request_id}
