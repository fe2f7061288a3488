"""The formats in which KVs may be stored, by name, and how a user names them. Imports no torch."""

from dataclasses import dataclass
from typing import Any

from winnow.values.checks import check_integer, require

AUTO = "auto"
PLAIN_FORMATS = ("float32", "bfloat16", "float16")
"""Vectors as they are, rounded to a floating-point format."""
NARROW_BITS = {"int4": 4, "int4-outlier": 4, "int3": 3, "int2": 2}
"""Formats of 4 bits and below, with the bits of a code."""
# The kernels' lists are held against this one (tests/cache/test_formats.py).
KV_FORMATS = (AUTO, *PLAIN_FORMATS, "fp8_e4m3", "int8", *NARROW_BITS)
ALIASES = {"fp8": "fp8_e4m3"}  # vLLM's
ROTATIONS = (AUTO, "none", "k", "kv")


@dataclass(frozen=True)
class KVDtype:
    """Value of `kv_cache_dtype`: the format of keys and that of values, each one of `KV_FORMATS`."""

    k: str
    v: str

    @classmethod
    def parse(cls, text: str, name: str = "kv_cache_dtype") -> "KVDtype":
        """Read "int8", "k=int8,v=int4", or one side alone, the other `auto`. Raises ConfigError, which names `name`."""
        what = f"one of {', '.join(KV_FORMATS)}, or one each for keys and values, such as k=int8,v=int4"
        require(isinstance(text, str), name, what, text)
        if "=" not in text:
            both = ALIASES.get(text, text)
            require(both in KV_FORMATS, name, what, text)
            return cls(both, both)
        sides: dict[str, str] = {}
        for part in text.split(","):
            side, _, given = part.strip().partition("=")
            kind = ALIASES.get(given, given)
            require(side in ("k", "v") and side not in sides and kind in KV_FORMATS, name, what, text)
            sides[side] = kind
        return cls(**{"k": AUTO, "v": AUTO} | sides)

    def resolved(self, dtype: str) -> "KVDtype":
        """Return the same with `auto` replaced by the name of the activations' dtype."""
        return KVDtype(dtype if self.k == AUTO else self.k, dtype if self.v == AUTO else self.v)

    def __str__(self) -> str:
        return self.k if self.k == self.v else f"k={self.k},v={self.v}"


@dataclass(frozen=True)
class WideParts:
    """Value of `kv_wide`, KVs kept in 16 bits beside narrow ones: first layers, and else first and last tokens."""

    layers: int = 0
    sinks: int = 0
    recent: int = 0
    dtype: str = "bfloat16"

    @classmethod
    def parse(cls, text: str | None) -> "WideParts":
        """Read "layers=1,sinks=4,recent=64", or some of them; None: nothing. Raises ConfigError."""
        what, parts = "parts with counts, such as layers=1,sinks=4,recent=64", dict[str, Any]()
        for part in () if text is None else text.split(","):
            key, _, count = part.strip().partition("=")
            known = key in ("layers", "sinks", "recent") and key not in parts
            require(known and count.isdecimal() and len(count) < 7, "kv_wide", what, text)
            parts[key] = int(count)
        return cls(**parts)

    @property
    def any(self) -> bool:
        return bool(self.layers or self.sinks or self.recent)

    def __str__(self) -> str:
        names = [name for name in ("layers", "sinks", "recent") if getattr(self, name)]
        return ",".join(f"{name}={getattr(self, name)}" for name in names)


def check_group(name: str, group: int | None) -> None:
    """Raise ConfigError unless codecs can group as many channels: 8 to 1024, a multiple of 8; None: any."""
    if group is not None:
        check_integer(name, group, 8, 1024)
        require(group % 8 == 0, name, "a multiple of 8, as codes are packed in bytes", group)
