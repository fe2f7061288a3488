"""What is measured, and how much of it."""

from dataclasses import dataclass
from pathlib import Path

from winnow_lab.papers.kcache.protocol import CATEGORIES, LAYERS, TOP_N
from winnow_lab.study import ModelOptions, flag, read_pairs


@dataclass(frozen=True)
class Options(ModelOptions):
    """Answers, throughput, turns, lengths: each is measured where its own flag asks for it."""

    tasks: tuple[str, ...] = flag((), "left out: no answers", choices=tuple(CATEGORIES))
    categories: tuple[str, ...] = flag((), "of these (default: some)")
    data: Path | None = flag(None, "folder of the task's files (default: what ships)")
    lengths: tuple[str, ...] = flag((), "tasks whose prompts are counted, as in Fig. 2")
    samples: int = flag(8, "of each category", least=1)
    tokens: tuple[int, ...] = flag((1024,), "of a task's prompt", least=1)
    seed: int = flag(0, "of the prompts")
    top_n: tuple[int, ...] = flag(TOP_N, least=1)
    layers: tuple[int, ...] = flag(LAYERS, least=0)
    extras: tuple[str, ...] = flag(("renormalize",), "further words of value_tier, each with L=1")
    given: int = flag(512, "tokens of a window's context", least=1)
    windows: int = flag(4, "of text", least=1)
    new_tokens: int = flag(64, "of a greedy continuation", least=1)
    cells: tuple[tuple[int, int], ...] = flag((), "INPUT:BATCH,...; none: no throughput", parse=read_pairs)
    decode_tokens: int = flag(24, "of an answer there", least=2)
    runs: int = flag(1, "of a cell there; the median counts", least=1)
    questions: int | None = flag(None, "asked in turn about each of --samples documents", least=2)
    compression: float = flag(8.0, "of kv-compress there", least=1)
    kv_memory: str = flag("1GiB", "on the device")
    max_num_seqs: int = flag(8, least=1)
    work: Path = flag(Path("runs/kcache"), "folder of journals")
    report: bool = flag(False, "measure nothing: report the journals")
    name: str = flag("kcache", "of the files in --output")
