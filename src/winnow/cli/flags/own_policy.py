"""Policies of one's own on the command line: `--eviction path.py:name` or `package.module:name`."""

import argparse
import importlib
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from winnow.errors import UsageError

if TYPE_CHECKING:
    from winnow.eviction import EvictionPolicy


def register_own_policies(namespace: argparse.Namespace) -> None:
    """Make each `path.py:name` and `package.module:name` among the policies that were typed a preset of that name, for
    this process.

    Only what is typed is run; a request that names such a place finds what was typed, or nothing. Raises UsageError:
    there is no such file or module, it does not run, or what it calls `name` is no policy.
    """
    typed = (getattr(namespace, name, None) for name in ("eviction", "presets"))
    texts = [
        text for value in typed for text in (value.split(",") if isinstance(value, str) else value or ())
    ]
    for text in filter(None, texts):
        place, found, name = text.strip().rpartition(":")
        if found:
            from winnow.eviction import PRESETS, Preset

            PRESETS[text.strip()] = Preset(_load(place, name), f"`{name}` of {place}")


def _load(place: str, name: str) -> "EvictionPolicy":
    from winnow.eviction import EvictionPolicy
    from winnow.eviction.resolve import as_policy

    given = f"--eviction {place}:{name}"
    try:
        module = _module(Path(place)) if place.endswith(".py") else importlib.import_module(place)
        policy = as_policy(getattr(module, name, None))
    except FileNotFoundError:
        raise UsageError(f"{given}: there is no such file") from None
    except Exception as error:  # also of a class whose fields have no values
        raise UsageError(f"{given}: the file does not run: {error}") from error
    if not isinstance(policy, EvictionPolicy):
        raise UsageError(f"{given} must be an EvictionPolicy or a score, got {policy!r:.80}")
    return policy


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
