"""Options of a study that runs a named work under several presets of eviction."""

from dataclasses import dataclass
from typing import Any

from winnow_lab.bench.presets import PRESETS, Workload, kv_memory_for
from winnow_lab.study import StudyOptions, flag


@dataclass(frozen=True)
class WorkOptions(StudyOptions):
    """A work, numbers in place of its own, and what evicts."""

    work: str = flag("w1", "model and work", choices=tuple(PRESETS))
    requests: int | None = flag(None, "in place of the work's own")
    prompt_tokens: int | None = flag(None, "in place of the work's own")
    new_tokens: int | None = flag(None, "in place of the work's own")
    kv_seqs: int | None = flag(None, "KV memory, in whole sequences (default: the work's)")
    eviction: tuple[str, ...] = flag(("full", "batch-max", "kv-compress-pd"), "presets of eviction")
    compression: float = flag(4.0, "of those that evict")

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.workload, "its numbers are checked"

    @property
    def workload(self) -> Workload:
        """The work with what was typed in its place."""
        own = {name: getattr(self, name) for name in ("requests", "prompt_tokens", "new_tokens")}
        return PRESETS[self.work].workload.having(**own)


def options_by_eviction(typed: WorkOptions, common: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Options of `LLM` for each preset, by a name that tells the compression; all have the same KV memory.

    Args:
        common: what they have in common, the model at least.

    Raises:
        ConfigError: a value is out of range, or there is no such preset.
    """
    # Late: a script that measures imports takes its arguments first.
    from winnow.config import EngineConfig
    from winnow.eviction import find_preset

    config = EngineConfig.from_options(common | {"compression": typed.compression})
    sequences = PRESETS[typed.work].kv_seqs if typed.kv_seqs is None else typed.kv_seqs
    common = common | {"kv_memory": kv_memory_for(config, sequences, typed.workload.sequence_tokens)}
    found = {}
    for eviction in typed.eviction:
        find_preset(eviction)  # an unknown name is refused before anything is measured
        own = {} if eviction == "full" else {"eviction": eviction, "compression": typed.compression}
        found[f"{eviction} {typed.compression:g}x" if own else eviction] = common | own
    return found
