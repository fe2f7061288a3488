"""What is run, how much of it, and what the paper printed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from winnow import LLM
from winnow_lab.study import ModelOptions, flag, read_pairs
from winnow_lab.study.journal import CellJournal

TOP_N, LAYERS = (32, 64, 128), (0, 1, 2, 3)
"""Values that a query head reads, and first layers whose values stay on the device: the paper's."""
CATEGORIES = {
    "demo": (),
    "ruler": ("niah_single_1", "niah_single_2"),
    "kv-retrieval": ("grown",),
    "bbh": (),
    "gsm8k": (),
    "nq-open": (),
}
"""By task; empty: all that it has."""
PAPER = {
    "full": (39.87, 15.09, 64.24),
    "N=32, L=0": (33.19, 5.46, 63.57),
    "N=32, L=1": (36.94, 12.59, 64.16),
    "N=32, L=2": (37.08, 14.25, 64.12),
    "N=32, L=3": (36.63, 14.33, 64.14),
    "N=64, L=0": (35.75, 6.14, 62.48),
    "N=64, L=1": (38.03, 13.42, 64.18),
    "N=64, L=2": (37.97, 15.31, 64.18),
    "N=64, L=3": (38.07, 15.16, 64.22),
    "N=128, L=0": (37.26, 8.49, 64.07),
    "N=128, L=1": (38.57, 14.25, 64.24),
    "N=128, L=2": (39.0, 15.01, 64.24),
    "N=128, L=3": (38.89, 15.09, 64.25),
}
"""Table 2, LLaMA2-7B: BBH 3-shot, GSM8K 8-shot, TriviaQA 5-shot."""


SHOTS = {"bbh": 3, "gsm8k": 8, "nq-open": 5}
"""Worked examples, as the paper gives; nq-open stands for its TriviaQA, which is not shipped."""
PLAIN = ("demo", *SHOTS)
"""Tasks whose prompts go through no chat template."""
SUBJECTS = {
    "boolean_expressions": (87.60, 88.40),
    "causal_judgement": (47.59, 54.55),
    "date_understanding": (82.40, 82.40),
    "disambiguation_qa": (46.00, 60.80),
    "dyck_languages": (10.00, 10.80),
    "formal_fallacies": (53.60, 53.60),
    "geometric_shapes": (41.20, 41.20),
    "hyperbaton": (92.80, 92.00),
    "logical_deduction_five_objects": (44.40, 44.80),
    "logical_deduction_seven_objects": (36.40, 34.40),
    "logical_deduction_three_objects": (79.20, 76.40),
    "movie_recommendation": (88.40, 89.60),
    "multistep_arithmetic_two": (31.60, 37.20),
    "navigate": (88.80, 86.80),
    "object_counting": (82.80, 82.40),
    "penguins_in_a_table": (69.18, 67.81),
    "reasoning_about_colored_objects": (76.40, 74.00),
    "ruin_names": (69.20, 69.60),
    "salient_translation_error_detection": (54.00, 52.00),
    "snarks": (60.11, 67.98),
    "sports_understanding": (96.00, 96.00),
    "temporal_sequences": (71.20, 66.80),
    "tracking_shuffled_objects_five_objects": (36.80, 40.40),
    "tracking_shuffled_objects_seven_objects": (32.00, 28.80),
    "tracking_shuffled_objects_three_objects": (61.60, 59.60),
    "web_of_lies": (100.00, 100.00),
    "word_sorting": (43.60, 38.40),
}
"""Table 4, LLaMA3-8B: the full cache, and KCache, of which it does not say N and L."""


@dataclass(frozen=True)
class Setting:
    """One row of the tables. `top_n` None: the full cache; `extra`: further words of `value_tier`."""

    top_n: int | None = None
    layers: int = 1
    extra: str = ""

    @property
    def label(self) -> str:
        if self.top_n is None:
            return "full"
        return f"N={self.top_n}, L={self.layers}" + (f", {self.extra}" if self.extra else "")

    @property
    def options(self) -> dict[str, Any]:
        if self.top_n is None:
            return {}
        # The paper does not say what becomes of the weights; the rows without a word are the plain sum.
        words = self.extra if "renormalize" in self.extra else f"as-softmaxed,{self.extra}".rstrip(",")
        return {"value_tier": f"host:L={self.layers},N={self.top_n},{words}"}

    @property
    def folder(self) -> str:
        return (
            "full"
            if self.top_n is None
            else f"n{self.top_n}-l{self.layers}-{self.extra}".strip("-").replace("=", "")
        )


def settings(top_n: Sequence[int], layers: Sequence[int], extras: Sequence[str]) -> Iterator[Setting]:
    """The full cache, then every pair, then each of `extras` with the first layer's values on the device."""
    yield Setting()
    for n in top_n:
        for count in layers:
            yield Setting(n, count)
    for extra in extras:
        for n in top_n:
            yield Setting(n, 1, extra)


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

    def open(self, **own: Any) -> LLM:
        options = {"dtype": "bfloat16", "kv_memory": self.kv_memory, "threads": self.threads}
        return LLM(self.model, **options | own)

    def journal(self, name: str) -> CellJournal:
        names = ("kv_memory", "decode_tokens", "runs", "questions", "samples", "tokens", "seed")
        own = {each: getattr(self, each) for each in names} | {"tokens": list(self.tokens)}
        return CellJournal(self.work / f"{name}.jsonl", own | {"model": self.model and Path(self.model).name})
