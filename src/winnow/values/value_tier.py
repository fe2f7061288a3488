"""Place of the values of the upper layers, and the number of them that a query reads (KCache). Imports no torch."""

from dataclasses import dataclass
from pathlib import Path

from winnow.values.checks import require
from winnow.values.units import format_bytes, parse_bytes

KINDS = ("host", "disk")
_WHAT = (
    "host:L=1,N=128 or disk:DIRECTORY:L=1,N=128 (L first layers whose values stay on the device, N values that a query "
    "head reads in the others while decoding; also as-softmaxed, and size=4GiB, the most that all may take there)"
)
# Of the weights of the values read; the first is the default.
_FLAGS = ("renormalize", "as-softmaxed")
_MOST_LAYERS, _MOST_VALUES = 10**4, 2**31 - 1


@dataclass(frozen=True)
class ValueTier:
    """Value of `value_tier`: K of all layers and V of the first ones on the device, the other V on the host or a disk.

    While decoding, the softmax over all keys picks the values that a query head weighs most, and only those are read.
    """

    kind: str
    path: Path | None = None
    """Directory of the file of values, for `disk`."""
    layers: int = 1
    """L: the first layers, whose values stay on the device. With 0 answers are ruined (KCache, Table 2)."""
    top_n: int = 128
    """N: values that a query head reads; as many as a row holds is exact."""
    renormalize: bool = True
    """Scale the weights of the values read to the sum of all; False: as softmaxed, as the paper's figures are."""
    size: int | None = None
    """Bytes that values may take there; None: as many as the device's keys have values."""

    @classmethod
    def parse(cls, text: str | None, name: str = "value_tier") -> "ValueTier | None":
        """Read "host:L=1,N=128" or "disk:DIRECTORY:L=1,N=128"; None: there is no tier. Raises ConfigError, which names
        `name`: an unknown tier or part, one twice or missing, or a number out of range."""
        if text is None:
            return None
        require(isinstance(text, str), name, _WHAT, text)
        kind, _, rest = text.partition(":")
        directory, _, given = rest.rpartition(":")
        path = Path(directory) if kind == "disk" and directory else None
        require(kind in KINDS and bool(directory) == (kind == "disk"), name, _WHAT, text)
        parts: dict[str, str] = {}
        for part in given.split(","):
            key, _, value = part.strip().partition("=")
            known = key in ("L", "N", *_FLAGS, "size") and key not in parts
            require(known and (key in _FLAGS) == ("=" not in part), name, _WHAT, text)
            parts[key] = value
        require("N" in parts, name, _WHAT, text)
        require(len(parts.keys() & {*_FLAGS}) < 2, f"{name}: as-softmaxed", "without renormalize", text)
        size = parse_bytes(parts["size"], f"{name}: size") if "size" in parts else None
        return cls(
            kind,
            path,
            _number(f"{name}: L", parts.get("L", "1"), 0, _MOST_LAYERS),
            _number(f"{name}: N", parts["N"], 1, _MOST_VALUES),
            "as-softmaxed" not in parts,
            size,
        )

    def __str__(self) -> str:
        where = self.kind if self.path is None else f"{self.kind}:{self.path}"
        size = "" if self.size is None else f",size={format_bytes(self.size).replace(' ', '')}"
        return f"{where}:L={self.layers},N={self.top_n}{',as-softmaxed' * (not self.renormalize)}{size}"


def _number(name: str, text: str, low: int, high: int) -> int:
    whole = text.isascii() and text.isdecimal() and len(text) < 12
    require(whole and low <= int(text) <= high, name, f"an integer from {low} to {high}", text)
    return int(text)
