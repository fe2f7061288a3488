"""Configuration of `winnow bench pressure`: a trace, and settings to play it under."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from winnow.config import EngineConfig, option
from winnow.values.checks import check_choice, check_integer, check_number
from winnow_lab.bench.lists import integers, numbers
from winnow_lab.bench.traces import TraceRequest, read_trace, scaled

SWEEPS = ("watermark", "preemption", "prefix-cache", "reservation")


@dataclass(frozen=True)
class PressureConfig:
    """Trace that is played, and settings to play it under."""

    sweep: str = option(
        "watermark",
        "what changes from one run to the next: the high watermark; preempted requests computed again or swapped "
        "to the host, with the break-even by length; the prefix cache; or what a request holds from its start",
        choices=SWEEPS,
    )
    watermarks: tuple[float, ...] = option(
        (0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 1.0),
        "high watermarks of --sweep watermark, with commas between",
        parse=numbers,
        metavar="X,...",
    )
    lengths: tuple[int, ...] = option(
        (128, 512, 1024, 2048),
        "tokens of the requests whose preemption --sweep preemption times; those that exceed the model's context are "
        "left out",
        parse=integers,
        metavar="N,...",
    )
    requests: int = option(64, "requests of the trace, from its start")
    token_scale: float = option(0.125, "lengths of prompts and answers, as a part of the trace's")
    rate: float = option(1.0, "how many times as dense as the trace's the arrivals are")
    prompt_seed: int = option(0, "of the prompts' tokens")

    def __post_init__(self) -> None:
        check_choice("sweep", self.sweep, SWEEPS)
        for watermark in self.watermarks:
            check_number("watermarks", watermark, 0.01, 1.0)
        for length in self.lengths:
            check_integer("lengths", length, 1)
        check_integer("requests", self.requests, 1)
        check_integer("prompt_seed", self.prompt_seed, 0)
        for name in ("token_scale", "rate"):
            check_number(name, getattr(self, name), 1e-6, 1e6)

    def settings(self, options: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Return the engine's options that each run changes, by the name of its line; `options` are those of all."""
        memory = EngineConfig.from_options(options).cache.kv_memory
        if self.sweep == "watermark":
            return {f"{watermark:.0%}": {"watermark_high": watermark} for watermark in self.watermarks}
        if self.sweep == "preemption":
            return {"recompute": {"kv_offloading_size": None}, "swap": {"kv_offloading_size": memory}}
        if self.sweep == "reservation":
            without: dict[str, dict[str, Any]] = {
                name: {"kv_reservation": name, "enable_prefix_caching": False}
                for name in ("max", "prompt", "on-demand")
            }
            return without | {
                "on-demand + prefix cache": {"kv_reservation": "on-demand", "enable_prefix_caching": True}
            }
        return {f"prefix cache {name}": {"enable_prefix_caching": name == "on"} for name in ("off", "on")}

    def load(self, trace: Path, longest: int) -> list[TraceRequest]:
        """Return the trace's requests, scaled; those of more than `longest` tokens are left out.

        Raises:
            ConfigError: the trace cannot be read.
        """
        found = read_trace(trace, self.requests)
        return scaled(found, tokens=self.token_scale, rate=self.rate, longest=longest)
