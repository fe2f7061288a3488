"""Lines of a batch file: `{"custom_id", "method": "POST", "url", "body"}`, and the lines that answer them."""

from collections.abc import Mapping
from typing import Any

from winnow.openai.errors import ApiError
from winnow.openai.request import CompletionRequest, Endpoint, read_body

BATCH_KEYS = ("method", "url", "body")
"""Keys of a line besides its custom_id."""


def endpoint_of(line: Mapping[str, Any]) -> Endpoint:
    """Return the endpoint that a line names, or seems to mean: its error must have a form too."""
    return Endpoint.CHAT if line.get("url") == Endpoint.CHAT.value else Endpoint.COMPLETION


def read_batch_line(line: Mapping[str, Any], defaults: Mapping[str, Any]) -> CompletionRequest:
    """Read what a line asks; `defaults` are the sampling parameters of bodies that do not set them. Raises ApiError:
    names the field, the value and what is allowed."""
    if not line.get("custom_id"):
        raise ApiError("invalid_request", "custom_id must be a text that is not empty")
    if line.get("method") != "POST":
        raise ApiError("invalid_request", f"method must be POST, got {line.get('method')!r}")
    endpoint = endpoint_of(line)
    if line.get("url") != endpoint.value:
        urls = f"{Endpoint.CHAT.value} or {Endpoint.COMPLETION.value}"
        raise ApiError("invalid_url", f"url must be {urls}, got {line.get('url')!r}")
    return read_body(endpoint, line.get("body"), defaults)


def batch_response(
    index: int,
    custom_id: Any,
    request_id: str,
    body: dict[str, Any],
    *,
    status: int = 200,
    error: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the line that answers line `index` of a file."""
    response = {"status_code": status, "request_id": request_id, "body": body}
    return {"id": f"batch_req_{index}", "custom_id": custom_id, "response": response, "error": error}
