"""Conversation that a request is a turn of."""

from dataclasses import dataclass

from winnow.errors import InvalidRequestError
from winnow.values.checks import require

MAX_SESSION_NAME = 256
MAX_TTL = 7 * 24 * 3600


@dataclass(frozen=True)
class SessionRequest:
    """A request's place in a conversation.

    Attributes:
        name: of the session, unique within a tenant: 1 to 256 characters.
        ttl: seconds for which it is kept once it is idle, and after which it is forgotten first; None: as it was.
        hint: the ttl is a wish: for as long it gives way to running requests alone.
        prefetch: nothing is generated: what files hold of the prompt comes back before the next turn.
        release: it is the last turn: the session is forgotten when it ends.
    """

    name: str
    ttl: float | None = None
    hint: bool = False
    prefetch: bool = False
    release: bool = False

    def __post_init__(self) -> None:
        error, name = InvalidRequestError, self.name
        named = isinstance(name, str) and 0 < len(name) <= MAX_SESSION_NAME
        require(named, "session_id", f"a text of 1 to {MAX_SESSION_NAME} characters", name, error)
        for field in ("prefetch", "release"):
            value = getattr(self, field)
            require(isinstance(value, bool), field, "true or false", value, error)
        is_kept = self.ttl is not None and not self.hint
        if self.prefetch and (self.release or is_kept):
            raise error("prefetch goes without ttl and release, which are a turn's")
        if self.ttl is not None:
            number = isinstance(self.ttl, int | float) and not isinstance(self.ttl, bool)
            require(number and 0 <= self.ttl <= MAX_TTL, "ttl", f"0 to {MAX_TTL} seconds", self.ttl, error)
