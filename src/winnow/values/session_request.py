"""Conversation that a request is a turn of."""

from dataclasses import dataclass

from winnow.errors import InvalidRequestError
from winnow.values.checks import require

MAX_SESSION_NAME = 256


@dataclass(frozen=True)
class SessionRequest:
    """A request's place in a conversation.

    Attributes:
        name: of the session, unique within a tenant: 1 to 256 characters.
        memory: bytes of the device beyond which its oldest turns are compressed; None: as the engine's.
        system: tokens of the system prompt, which stays whole.
        ages: it compresses the session, and is no turn of it.
        release: it is the last turn: the session is forgotten when it ends.
    """

    name: str
    memory: int | None = None
    system: int = 0
    ages: bool = False
    release: bool = False

    def __post_init__(self) -> None:
        error, name = InvalidRequestError, self.name
        named = isinstance(name, str) and 0 < len(name) <= MAX_SESSION_NAME
        require(named, "session_id", f"a text of 1 to {MAX_SESSION_NAME} characters", name, error)
        require(isinstance(self.release, bool), "release", "true or false", self.release, error)
        sized = self.memory is None or (type(self.memory) is int and self.memory >= 0)
        require(sized, "session_memory", "bytes", self.memory, error)
