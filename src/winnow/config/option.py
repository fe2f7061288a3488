"""Declaration of an option of the engine.

Its metadata holds `help`, where needed `choices` (allowed values), `parse` (text -> value), `aliases` (earlier names)
and `short` (further flags), and `effect` where the option changes fewer answers than others do.
"""

import inspect
import re
from dataclasses import field
from enum import Enum
from typing import Any

_ENTRY = re.compile(r"(\w+): (.*)")


class Effect(Enum):
    """Condition under which another value of an option changes answers.

    A run is resumed under another value only where it does not.
    """

    ALWAYS = "always"
    BATCHES = "batches"
    """Effect on which requests share a batch: changes sampled answers, and evictions under memory pressure."""
    MEMORY = "memory"
    """Effect on how much room there is: changes what eviction under memory pressure takes."""
    NEVER = "never"


def option(
    default: Any, help: str, effect: Effect = Effect.ALWAYS, *, kw_only: bool = False, **extra: Any
) -> Any:
    """Declare a dataclass field that documents itself."""
    return field(default=default, metadata={"help": help, "effect": effect, **extra}, kw_only=kw_only)


def optional_int(text: str) -> int | None:
    """Return "none" -> None, else an int: for limits that can be switched off."""
    return None if text.lower() == "none" else int(text)


def documented(config: type) -> dict[str, str]:
    """Return the text of each field from the "Attributes" of a class's docstring, and of those of its bases."""
    texts: dict[str, str] = {}
    for each in reversed(config.__mro__):
        _, _, attributes = inspect.cleandoc(vars(each).get("__doc__") or "").partition("\nAttributes:\n")
        name = ""
        for line in attributes.splitlines():
            entry = _ENTRY.fullmatch(line.removeprefix("    "))
            if not line.startswith("    "):
                break
            if entry is not None:
                name, texts[entry[1]] = entry[1], entry[2]
            else:
                texts[name] += " " + line.strip()
    return texts
