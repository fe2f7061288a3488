"""The identity of a run: prompts, model files and every setting. Only a run with the same one may resume its output."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from winnow.config import EFFECTS, Effect, EngineConfig
from winnow.process.digest import model_digest
from winnow.sampling.params import GREEDY_TEMPERATURE

Fingerprint = dict[str, Any]
"""JSON values by name: `input`, `model`, and the settings."""

INPUT_BYTES = "input_bytes"
"""Key of the input's length, which shows whether an input only grew."""


def fingerprint(
    input_sha256: str, model: Path, settings: Mapping[str, Any], adapter: Path | None = None
) -> Fingerprint:
    """Return the identity of a run. Raises as `model_digest`."""
    return {"input": input_sha256, "model": model_digest(model, adapter), **settings}


@dataclass(frozen=True)
class Differences:
    """Differences between two runs, in words: those `refused` forbid a resume, those `noted` change no answer."""

    refused: tuple[str, ...]
    noted: tuple[str, ...]

    @property
    def every(self) -> list[str]:
        return sorted(self.refused + self.noted)


def differences(theirs: Fingerprint, ours: Fingerprint, *, answers_alone: bool = False) -> Differences:
    """Compare the fingerprint of an earlier run, `theirs`, with `ours`.

    An option missing in `theirs` was not known to the older version and counts as its default. With `answers_alone`
    differences that change no answer are noted; else refused too, as measurements of speed need.
    """
    harmless = partial(_is_harmless, ours) if answers_alone else lambda name: False
    defaults = EngineConfig().settings()
    refused: list[str] = []
    noted: list[str] = []
    for name in sorted((theirs.keys() | ours.keys()) - {INPUT_BYTES}):
        before, now = theirs.get(name), ours.get(name)
        if before == now:
            continue
        if name in ("input", "model"):
            refused.append({"input": "the prompts have changed", "model": "the model's files differ"}[name])
        elif name in defaults and name not in theirs:
            is_default = now == defaults[name]
            difference = f"{name} was not recorded and is {now!r}"
            (noted if is_default or harmless(name) else refused).append(difference)
        else:
            difference = f"{name} was {before!r} and is {now!r}"
            (noted if harmless(name) else refused).append(difference)
    return Differences(tuple(refused), tuple(noted))


def _is_harmless(settings: Fingerprint, name: str) -> bool:
    effect = EFFECTS.get(name, Effect.ALWAYS)
    if effect is Effect.NEVER:
        return True
    if effect is Effect.ALWAYS or _depends_on_others(settings.get("eviction")):
        return False
    # Work without a temperature of its own is greedy; None: the model's.
    temperature = settings.get("temperature", 0.0)
    return effect is Effect.MEMORY or (temperature is not None and temperature < GREEDY_TEMPERATURE)


def _depends_on_others(eviction: Any) -> bool:
    """Return whether rounds of a policy happen at moments that other requests and free memory decide."""
    # Late: the policies bring torch, which a run that differs in nothing does without here.
    from winnow.eviction import PRESETS, When

    if isinstance(eviction, Mapping):
        when = When(**{name: value for name, value in eviction["when"].items() if name != "class"})
    elif eviction in PRESETS:
        when = PRESETS[eviction].policy.when
    else:
        return False
    return when != when.alone
