"""Descriptions of policies in words, from their dataclasses."""

from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from typing import Any

from winnow.eviction.policy import EvictionPolicy
from winnow.eviction.presets import Preset
from winnow.values.json_values import json_value

PARTS = ("score", "budget", "keep", "when")


def brief(value: Any) -> str:
    """Describe a dataclass by its fields that differ from their defaults, such as `Window (size 8, continual)`."""
    chosen = brief_fields(value)
    return f"{type(value).__name__} ({chosen})" if chosen else type(value).__name__


def brief_fields(value: Any) -> str:
    """Describe the fields of a dataclass that differ from their defaults; flags that are True by name alone."""
    parts = []
    for field in fields(value):
        chosen, words = getattr(value, field.name), field.name.replace("_", " ")
        if chosen == _default(field):
            continue
        if chosen is True:
            parts.append(words)
        elif is_dataclass(chosen) and type(chosen).__name__.lower() == field.name:
            # The class name would repeat the field's.
            parts.append(f"{words} ({brief_fields(chosen)})")
        else:
            parts.append(f"{words} {_word(chosen)}")
    return ", ".join(parts)


def brief_policy(policy: EvictionPolicy) -> dict[str, str]:
    """Describe each part of a policy. Fields besides the four parts are listed with `keep`."""
    parts = {part: brief(getattr(policy, part)) for part in ("score", "budget")}
    rest = [f for f in fields(policy) if f.name not in PARTS and getattr(policy, f.name) != _default(f)]
    words = [brief_fields(policy.keep), *(field.name.replace("_", " ") for field in rest)]
    parts["keep"] = ", ".join(filter(None, words)) or "-"
    parts["when"] = brief_fields(policy.when) or "never"
    return parts


def full_preset(name: str, preset: Preset) -> dict[str, Any]:
    policy = json_value(preset.policy)
    del policy["class"]
    return {"name": name, "paper": preset.paper, "kv_budget": preset.kv_budget} | policy


def _default(field: "Field[Any]") -> Any:
    """Return the default, or `MISSING`, which equals no value."""
    return field.default if field.default_factory is MISSING else field.default_factory()


def _word(value: Any) -> str:
    if is_dataclass(value) and not isinstance(value, type):
        return brief(value)
    return str(value.value) if isinstance(value, Enum) else str(value)
