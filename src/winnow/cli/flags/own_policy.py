"""Policies of one's own on the command line: `--eviction path.py:name`."""

import argparse
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from winnow.errors import UsageError

if TYPE_CHECKING:
    from winnow.eviction import EvictionPolicy


def register_own_policies(namespace: argparse.Namespace) -> None:
    """Make each `path.py:name` among the policies that were typed a preset of that name, for this process.

    Only what is typed is run; a request that names such a path finds what was typed, or nothing.

    Raises:
        UsageError: there is no such file, it does not run, or what it calls `name` is no policy.
    """
    typed = (getattr(namespace, name, None) for name in ("eviction", "presets"))
    texts = [
        text for value in typed for text in (value.split(",") if isinstance(value, str) else value or ())
    ]
    for text in filter(None, texts):
        path, found, name = text.strip().rpartition(":")
        if found and path.endswith(".py"):
            from winnow.eviction import PRESETS, Preset

            PRESETS[text.strip()] = Preset(_load(Path(path), name), f"`{name}` of {path}")


def _load(path: Path, name: str) -> "EvictionPolicy":
    from winnow.eviction import AdaptiveRows, EvictionPolicy, Keep, Scorer, When

    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise UsageError(f"--eviction {path}:{name}: there is no such file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UsageError(f"--eviction {path}:{name}: the file does not run: {error}") from error
    policy = getattr(module, name, None)
    if isinstance(policy, Scorer):  # a score alone chooses as SnapKV's does
        policy = EvictionPolicy(policy, AdaptiveRows(), Keep(sinks=4, recent=16), When(after_prefill=True))
    if not isinstance(policy, EvictionPolicy):
        raise UsageError(f"--eviction {path}:{name} must be an EvictionPolicy or a score, got {policy!r:.80}")
    return policy
