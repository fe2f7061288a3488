"""Messages written from a chat's chunks, as events or as one object; and errors, as Anthropic's API writes them."""

import json
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
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
    return path == PATH or path.startswith(f"{PATH}/")


def status_of(error: ApiError) -> int:
    """Return the HTTP status: 529 where the server is full, else as OpenAI's."""
    return 529 if error.code == OVERLOADED else error.status


def error_body(error: ApiError, request_id: str | None = None) -> dict[str, Any]:
    status = status_of(error)
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    body: dict[str, Any] = {"type": "error", "error": {"type": kind, "message": str(error)}}
    return body if request_id is None else body | {"request_id": request_id}


Record = dict[str, Any]

_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


@dataclass
class MessageWriter:
    model: str
    edits: list[Record] | None = None
    """Edits of the conversation that were made; None: none were asked for."""
    id: str = field(default_factory=lambda: f"msg_{uuid.uuid4().hex}")
    content: list[Record] = field(default_factory=list)
    _begun: bool = False
    _open: Record | None = None
    _reason: str | None = None
    _stop: str | None = None

    def push(self, chunk: Mapping[str, Any], usage: Mapping[str, Any]) -> Iterator[Record]:
        """Yield the events of a chat's chunk; `usage` counts the tokens so far."""
        if not self._begun:
            self._begun = True
            yield {"type": "message_start", "message": self.object(usage)}
            yield {"type": "ping"}
        for choice in chunk["choices"]:
            delta = choice["delta"]
            if delta.get("reasoning_content"):
                yield from self._grow("thinking", delta["reasoning_content"])
            if delta.get("content"):
                yield from self._grow("text", delta["content"])
            for call in delta.get("tool_calls", ()):
                yield from self._call(call)
            if choice["finish_reason"] is not None:
                stop = choice.get("stop_reason")  # the number of a token that ends a turn is no sequence
                self._stop = stop if isinstance(stop, str) else None
                ended = "end_turn" if self._stop is None else "stop_sequence"
                self._reason = _REASONS.get(choice["finish_reason"], ended)

    def end(self, usage: Mapping[str, Any]) -> Iterator[Record]:
        yield from self._end_block()
        delta = {"stop_reason": self._reason, "stop_sequence": self._stop}
        yield {"type": "message_delta", "delta": delta, "usage": _usage(usage), **self._managed}
        yield {"type": "message_stop"}

    def object(self, usage: Mapping[str, Any]) -> Record:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": list(self.content),
            "stop_reason": self._reason,
            "stop_sequence": self._stop,
            "usage": _usage(usage),
            **self._managed,
        }

    @property
    def _managed(self) -> Record:
        return {} if self.edits is None else {"context_management": {"applied_edits": self.edits}}

    def _grow(self, kind: str, text: str) -> Iterator[Record]:
        if self._open is None or self._open["type"] != kind:
            yield from self._end_block()
            signed = {"signature": ""} if kind == "thinking" else {}
            yield from self._begin_block({"type": kind, kind: "", **signed})
        assert self._open is not None
        self._open[kind] += text
        yield self._delta({"type": f"{kind}_delta", kind: text})

    def _call(self, call: Mapping[str, Any]) -> Iterator[Record]:
        yield from self._end_block()
        function, name = call["function"], f"toolu_{call['id'].removeprefix('call_')}"
        yield from self._begin_block({"type": "tool_use", "id": name, "name": function["name"], "input": {}})
        assert self._open is not None
        self._open["input"] = _arguments(function["arguments"])
        text = json.dumps(self._open["input"], ensure_ascii=False)
        yield self._delta({"type": "input_json_delta", "partial_json": text})
        yield from self._end_block()

    def _begin_block(self, block: Record) -> Iterator[Record]:
        self._open = block
        yield {"type": "content_block_start", "index": len(self.content), "content_block": dict(block)}

    def _delta(self, delta: Record) -> Record:
        return {"type": "content_block_delta", "index": len(self.content), "delta": delta}

    def _end_block(self) -> Iterator[Record]:
        if self._open is not None:
            yield {"type": "content_block_stop", "index": len(self.content)}
            self.content.append(self._open)
            self._open = None


def _arguments(text: str) -> Record:
    """Return a call's arguments; what is no object becomes a field of one, for the API knows nothing else."""
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    return value if isinstance(value, dict) else {"arguments": value}


def _usage(usage: Mapping[str, Any]) -> Record:
    """Return tokens as Anthropic counts them: `input_tokens` are those that were computed, and what stands elsewhere
    than where it was computed is counted apart."""
    details = usage["prompt_tokens_details"]
    cached, reused = details["cached_tokens"], details.get("reused_tokens", 0)
    return {
        "input_tokens": usage["prompt_tokens"] - cached - reused,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
    } | ({"reused_input_tokens": reused} if reused else {})
