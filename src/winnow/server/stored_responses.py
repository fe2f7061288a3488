"""Responses of one tenant that later ones continue, in memory."""

import json
import weakref
from dataclasses import dataclass
from typing import Any

from winnow.openai.errors import ApiError
from winnow.openai.response import compact_json

Record = dict[str, Any]

MAX_RESPONSES = 10_000


@dataclass(eq=False)
class Turn:
    """A response and the input `items` that it answers, as JSON; `before` None: it begins a conversation."""

    before: "Turn | None"
    items: bytes
    response: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.items) + len(self.response)

    @property
    def first_id(self) -> str:
        """The id of the response that its conversation began with."""
        turn = self
        while turn.before is not None:
            turn = turn.before
        return str(json.loads(turn.response)["id"])

    def input_items(self) -> list[Any]:
        """Return what the model read: the conversation before it, and its own input."""
        before = [] if self.before is None else self.before.conversation()
        return [*before, *json.loads(self.items)]

    def conversation(self) -> list[Any]:
        """Return the items of the whole conversation up to its answer."""
        turn, found = self, [self.own_items()]
        while turn.before is not None:
            turn = turn.before
            found.append(turn.own_items())
        return [item for each in reversed(found) for item in each]

    def own_items(self) -> list[Any]:
        """Return the items of its input and of its answer."""
        return [*json.loads(self.items), *json.loads(self.response)["output"]]


class StoredResponses:
    """Responses by id, each of which holds those that it continues. The least recently used go first.

    `max_bytes` is of their JSON.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._turns: dict[str, Turn] = {}  # the least recently used first
        self._last: dict[str, str] = {}  # responses of conversations

    def __len__(self) -> int:
        return len(self._turns)

    def add(
        self, response: Record, items: list[Any], before: Turn | None, conversation: str | None = None
    ) -> None:
        """Keep a response to `items` behind the turn `before`, the last one of a conversation if it names one."""
        if conversation is not None:
            self._last.pop(conversation, None)
            self._last[conversation] = response["id"]
            if len(self._last) > MAX_RESPONSES:
                del self._last[next(iter(self._last))]
        turn = Turn(before, compact_json(items).encode(), compact_json(response).encode())
        self.num_bytes += turn.num_bytes
        weakref.finalize(turn, self._forget, turn.num_bytes)  # once neither its id nor a later turn holds it
        self._turns[response["id"]] = turn
        del turn
        while self._turns and (self.num_bytes > self.max_bytes or len(self._turns) > MAX_RESPONSES):
            del self._turns[next(iter(self._turns))]

    def _forget(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes

    def get(self, name: str) -> Turn:
        """Return a response's turn. Raises ApiError: there is none of that id, or none any more."""
        turn = self._turns.pop(name, None)
        if turn is None:
            raise ApiError("not_found", f"there is no response {name!r:.200}, or it is no longer kept")
        self._turns[name] = turn
        return turn

    def item(self, name: str) -> Any:
        """Return an item of a response, or of what one answers. Raises ApiError: there is none (any more)."""
        for turn in reversed(self._turns.values()):
            for item in turn.own_items():
                if isinstance(item, dict) and item.get("id") == name:
                    return item
        raise ApiError("not_found", f"there is no item {name!r:.200}, or it is no longer kept", "input")

    def before(self, name: Any, conversation: str | None = None) -> Turn | None:
        """Return the turn that an id names, or a conversation's last, if any. Raises ApiError: no such id."""
        if name is None and (name := self._last.get(conversation or "")) is None:
            return None
        try:
            return self.get(str(name))
        except ApiError as error:
            raise ApiError("previous_response_not_found", str(error), "previous_response_id") from None

    def delete(self, name: str) -> None:
        """Forget a response; those that continue it stay whole. Raises as `get`."""
        self.get(name)
        del self._turns[name]
