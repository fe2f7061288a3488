"""The methods of kvpress that Winnow is held beside, with kvpress's own defaults."""

from dataclasses import dataclass, field
from typing import Any

PACKAGE = "kvpress==0.5.5"
SOURCES = ("fire",)
"""What it needs that is published as source alone: pure Python."""


@dataclass(frozen=True)
class Press:
    """A press, or one around another.

    Attributes:
        classes: from the outside in.
        options: of the innermost, besides the compression ratio; what is left out has kvpress's default.
    """

    name: str
    classes: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """For tables that hold Winnow's presets too."""
        return f"kvpress {self.name}"


_ALL = (
    Press("KeyDiff", ("KeyDiffPress",)),
    Press("AdaKV+SnapKV", ("AdaKVPress", "SnapKVPress")),
    Press("SnapKV", ("SnapKVPress",)),
    Press("PyramidKV", ("PyramidKVPress",)),
    Press("TOVA", ("TOVAPress",)),
    Press("ExpectedAttention", ("ExpectedAttentionPress",)),
    Press("AdaKV+ExpectedAttention", ("AdaKVPress", "ExpectedAttentionPress")),
    Press("LeverageScore", ("LeverageScorePress",)),
    Press("Compactor", ("CompactorPress",)),
    Press("KVzip", ("KVzipPress",)),
    Press("KVzip+", ("KVzipPress",), {"kvzip_plus_normalization": True}),
    Press("Merging+ExpectedAttention", ("MergingPress", "ExpectedAttentionPress")),
    Press("StreamingLLM", ("StreamingLLMPress",)),
    Press("Random", ("RandomPress",), {"seed": 0}),
)
PRESSES: dict[str, Press] = {press.name: press for press in _ALL}
