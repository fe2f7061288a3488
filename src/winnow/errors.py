"""User errors. Every message names the field, the value and the limit; `assert` is for invariants."""

import difflib
from collections.abc import Iterable


class WinnowError(ValueError):
    """Base class of user errors."""


class ConfigError(WinnowError):
    """An engine option is out of range, or two options contradict each other."""


class InvalidRequestError(WinnowError):
    """A prompt or a sampling parameter cannot be used. Other requests are unaffected."""


class ContextLengthError(InvalidRequestError):
    """The prompt leaves no room for an answer within the model's context."""


class CapacityError(InvalidRequestError):
    """The request could never fit into the KV memory, even alone."""


class MediaError(InvalidRequestError):
    """An image of a prompt cannot be read, or must not be: its bytes, its size, or where it comes from."""


class RequestFailedError(WinnowError):
    """A request failed while it was computed, as by logits that are not finite. Other requests are unaffected."""


class UnsupportedModelError(WinnowError):
    """The model directory is missing, incomplete, or asks for something Winnow does not compute."""


class PrefixStoreError(WinnowError):
    """A prefix cannot be saved: nothing was compressed, or the disk refuses it."""


class ClosedError(WinnowError):
    """The `LLM` was closed."""


class ForkedError(WinnowError):
    """The `LLM`, or the state of torch that a new one would need, belongs to the process that was forked."""


class RankLostError(WinnowError):
    """A process that computes a part of the model failed or ended, and with it the engine."""


class ReentryError(WinnowError):
    """The `LLM` was called from within a step of its own."""


class UsageError(WinnowError):
    """The command line, or a file that it names, is unusable."""


class EvaluationError(WinnowError):
    """An evaluation asks for what its task or the model cannot do."""


class DatasetError(EvaluationError):
    """A task's file is missing, or a row of it is malformed; names the file, and the line where there is one."""


def describe_error(error: Exception) -> str:
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message:.500}" if message else type(error).__name__


def known_names(name: str, known: Iterable[str], also: Iterable[str] = ()) -> str:
    """Return the end of a message about an unknown name: the nearest known one, if any is near, and all.

    `also` may have been meant, but is not listed.
    """
    names = list(known)
    nearest = nearest_name(name, [*names, *also])
    hint = f"did you mean {nearest}? " if nearest else ""
    return f"{hint}Known: {', '.join(names)}"


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most like one, or ends as it does (--backend: --attention-backend), if any."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1)
    word = name.strip("-")
    near += [each for each in names if len(word) > 3 and each.endswith(f"-{word}")]
    return near[0] if near else None
