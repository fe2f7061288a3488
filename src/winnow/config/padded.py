"""Options of the padded engine."""

from dataclasses import dataclass

from winnow.config.option import Effect, option
from winnow.errors import ConfigError
from winnow.values.checks import check_choice, check_integer, check_number
from winnow.values.units import parse_bytes

PADDED_MODES = ("embedding", "shaping", "pd", "static")
BENCH_PADDED_MODES = ("shaping-gaps",)
"""For `python -m winnow_lab.papers baton` alone: as the paper does it, and of no other use."""


@dataclass(frozen=True)
class PaddedConfig:
    """Options of the padded engine (engine=padded)."""

    padded_mode: str = option(
        "embedding",
        "embedding: queries are prefilled apart and join at any step; shaping: prefilled in the batch's own pass; pd: "
        "prefilled apart, batches run to completion; static: batches run to completion",
        choices=PADDED_MODES,
        effect=Effect.BATCHES,
    )
    prefill_group: int = option(
        8, "most queries that are prefilled together, apart from the batch", effect=Effect.BATCHES
    )
    group_padding: float = option(
        0.02, "most padding in such a group, as a part of what it computes", effect=Effect.BATCHES
    )
    park_memory: int | None = option(
        None,
        "most host memory for KVs of queries that are out of the batch, which are computed again if they do not fit; "
        "left out: as much as kv_memory",
        parse=parse_bytes,
        effect=Effect.MEMORY,
    )
    park_above: float = option(
        1.0, "queries are parked in host memory above this part of kv_memory", effect=Effect.BATCHES
    )
    admit_below: float = option(
        0.9, "queries join others only up to this part of kv_memory", effect=Effect.BATCHES
    )
    overlap_prefill: bool | None = option(
        None,
        "prefill queries in the background while the batch decodes (padded_mode=embedding); left out: where the model "
        "lies on cuda",
        effect=Effect.BATCHES,
    )

    def __post_init__(self) -> None:
        if self.padded_mode not in BENCH_PADDED_MODES:
            check_choice("padded_mode", self.padded_mode, PADDED_MODES)
        if self.overlap_prefill and self.padded_mode != "embedding":
            raise ConfigError(
                f"overlap_prefill needs padded_mode=embedding, got {self.overlap_prefill!r} and "
                f"padded_mode={self.padded_mode}"
            )
        check_integer("prefill_group", self.prefill_group, 1, 1024)
        if self.park_memory is not None:
            object.__setattr__(self, "park_memory", parse_bytes(self.park_memory, "park_memory"))
        for name in ("group_padding", "park_above", "admit_below"):
            check_number(name, getattr(self, name), 0.0, 1.0)
        if not self.park_above:
            raise ConfigError("park_above must be greater than 0, got 0")
        if self.admit_below > self.park_above:
            raise ConfigError(
                f"admit_below must be at most park_above ({self.park_above:g}), got {self.admit_below:g}"
            )
