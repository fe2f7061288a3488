"""Answers written from the chunks of chats and completions, as lines of JSON."""

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

Record = dict[str, Any]


@dataclass
class LineWriter:
    """Writer of an answer of /api/chat, or of /api/generate unless `is_chat`."""

    model: str
    is_chat: bool
    _text: str = ""
    _thoughts: str = ""
    _calls: list[Record] = field(default_factory=list)
    _reason: str = "stop"
    _begun: int = field(default_factory=time.monotonic_ns)
    _first: int | None = None

    def push(self, chunk: Mapping[str, Any]) -> Iterator[Record]:
        """Yield the line of a chunk, if it says something."""
        for choice in chunk["choices"]:
            delta = choice.get("delta") or {"content": choice.get("text")}
            text, thoughts = (delta.get(name) or "" for name in ("content", "reasoning_content"))
            calls = [_call(each) for each in delta.get("tool_calls", ())]
            if choice["finish_reason"] is not None:
                self._reason = "length" if choice["finish_reason"] == "length" else "stop"
            if text or thoughts or calls:
                self._first = self._first or time.monotonic_ns()
                self._text, self._thoughts, self._calls = (
                    self._text + text, self._thoughts + thoughts, self._calls + calls,
                )  # fmt: skip
                yield self.line(text, thoughts, calls)

    def line(self, text: str = "", thoughts: str = "", calls: list[Record] | None = None) -> Record:
        """Return the line of a part of the answer that is not the last."""
        return self._head(text, thoughts, calls or []) | {"done": False}

    def end(self, usage: Mapping[str, Any], *, whole: bool) -> Record:
        """Return the last line, which counts tokens and nanoseconds; with the answer if `whole`."""
        now, first = time.monotonic_ns(), self._first or time.monotonic_ns()
        said = (self._text, self._thoughts, self._calls) if whole else ("", "", list[Record]())
        return self._head(*said) | {
            "done": True,
            "done_reason": self._reason,
            "total_duration": now - self._begun,
            "load_duration": 0,
            "prompt_eval_count": usage["prompt_tokens"],
            "prompt_eval_duration": first - self._begun,
            "eval_count": usage["completion_tokens"],
            "eval_duration": now - first,
        }

    def loaded(self) -> Record:
        """Return the answer to a body that asks nothing."""
        return self._head("", "", []) | {"done": True, "done_reason": "load"}

    def _head(self, text: str, thoughts: str, calls: list[Record]) -> Record:
        found: Record = {"content" if self.is_chat else "response": text}
        found |= {"thinking": thoughts} if thoughts else {}
        if self.is_chat:
            found = {"message": {"role": "assistant", **found} | ({"tool_calls": calls} if calls else {})}
        created = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        return {"model": self.model, "created_at": created, **found}


def _call(call: Mapping[str, Any]) -> Record:
    try:
        arguments = json.loads(call["function"]["arguments"])
    except ValueError:
        arguments = None
    given = arguments if isinstance(arguments, dict) else {"arguments": call["function"]["arguments"]}
    return {"function": {"name": call["function"]["name"], "arguments": given}}
