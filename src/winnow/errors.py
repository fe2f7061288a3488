"""What Winnow raises when the user, not the program, is wrong.

Every message names the field, the value and the limit. `assert` is kept for invariants of our own.
"""

import difflib
from collections.abc import Iterable


class WinnowError(ValueError):
    """Base of all errors that a user can mend."""


class ConfigError(WinnowError):
    """An engine option is out of range, or two options contradict each other."""


class InvalidRequestError(WinnowError):
    """A prompt or a sampling parameter is unusable; no other request is affected."""


class ContextLengthError(InvalidRequestError):
    """The prompt leaves no room for an answer within the model's context."""


class CapacityError(InvalidRequestError):
    """The request could never fit into the KV memory, even alone."""


class RequestFailedError(WinnowError):
    """A request failed while it was computed, such as by logits that are not finite; no other is affected."""


class UnsupportedModelError(WinnowError):
    """The model directory is missing, incomplete, or asks for something Winnow does not compute."""


class ClosedError(WinnowError):
    """The `LLM` was closed."""


class ForkedError(WinnowError):
    """The `LLM`, or the state of torch that a new one would need, belongs to the process that was forked."""


class UsageError(WinnowError):
    """The command line, or a file that it names, is unusable."""


class EvaluationError(WinnowError):
    """An evaluation was asked for something that its task, or the model, cannot do."""


class DatasetError(EvaluationError):
    """A task's file is missing, or a row of it is malformed; names the file, and the line where there is one."""


def describe_error(error: Exception) -> str:
    """An error of any kind in one line: its class, and what it says."""
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message:.500}" if message else type(error).__name__


def known_names(name: str, known: Iterable[str]) -> str:
    """The end of a message about a name that is not known: the nearest one, if any is near, and all."""
    names = list(known)
    nearest = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {nearest[0]}? " if nearest else ""
    return f"{hint}Known: {', '.join(names)}"
