"""How much of a real model's accuracy each policy keeps: RULER, needles, retrieval, documents, mathematics, perplexity.

    python -m winnow_lab.real --tasks ruler --samples 10 --tokens 2048 --policies kvzip,keydiff --query later

Prompts go through the model's chat template, if it has one. The full cache comes first, and a category is run under
policies, and counts, where it reaches half of the points. With --kvpress, an environment that holds kvpress, its
presses answer the same token ids. "seen": the policy judges the question too; "later": the context alone, before the
question is known.

Answers are kept below --work as they come: the same command resumes where it was killed, and more policies,
compressions or tasks are added to what is there. real.json and real.md are written anew after every category. Cells
that cost much need not be run at every compression: several commands with the same --samples fill the same journals,
and --report computes nothing and writes the tables of all cells named that are complete.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from winnow import LLM
from winnow.errors import ConfigError
from winnow_lab.evaluate.cell import QUERIES, amounts_of, engine_needs, plan_cells
from winnow_lab.evaluate.perplexity import Perplexity
from winnow_lab.papers.kvpress.run import PRESSES
from winnow_lab.real.rows import KNOWN_TASKS, LABELS, MIN_SCORE, TASK_NAMES, Row
from winnow_lab.real.run import RealEvaluation, has_chat_template
from winnow_lab.real.tables import tables
from winnow_lab.study import RealModelOptions, Result, flag, run_study

POLICIES = ("snapkv", "ada-snapkv", "keydiff", "kv-compress", "winnow", "kvzip")
PRESS_NAMES = ("KVzip", "ExpectedAttention", "AdaKV+ExpectedAttention", "SnapKV", "KeyDiff")


def result(
    head: Mapping[str, Any], least: float, rows: Sequence[Row], perplexities: Sequence[Perplexity]
) -> Result:
    """The words, the tables, and every number."""
    notes = (
        f"Means ± standard errors over contexts. A category counts where the full cache scores {least:g} or "
        "more. KV memory is what the cache held at the end of an answer; kvpress masks what AdaKV and KVzip "
        "drop, and holds it. Seconds are of one document alone, for kvpress the mean of all.\n"
    )
    form = "prompts through its chat template" if head["chat_template"] else "prompts as they are"
    facts = [f"Model {head['model']}, {head['engine']['dtype']}, {form}."]
    values = {"rows": [asdict(row) for row in rows], "perplexity": [each.to_json() for each in perplexities]}
    lists = ("rows", "perplexity")
    shown = tables(rows, perplexities, least)
    return Result("Accuracy on a real model", shown, facts, notes, {**head, **values}, lists)


def _queries(text: str) -> tuple[str, ...]:
    names = {label: query for query, label in LABELS.items()}
    asked = [name for name in text.split(",") if name]
    unknown = [name for name in asked if name not in names]
    if unknown:
        raise argparse.ArgumentTypeError(f"no {unknown[0]!r}; known: {', '.join(names)}")
    return tuple(names[name] for name in asked)


@dataclass(frozen=True)
class RealOptions(RealModelOptions):
    """Prompts, policies, and where answers are kept."""

    policies: tuple[str, ...] = flag(POLICIES)
    compressions: tuple[float, ...] = flag((2.0, 4.0, 8.0, 16.0), least=1)
    samples: int = flag(50, "prompts a cell; needles take a few more", least=1)
    tokens: tuple[int, ...] = flag((2048, 4096), least=1)
    tasks: tuple[str, ...] = flag(TASK_NAMES, choices=KNOWN_TASKS)
    categories: tuple[str, ...] = flag((), "of RULER (default: all but qa_2)")
    query: tuple[str, ...] = flag(QUERIES, "seen, later or both", parse=_queries)
    report: bool = flag(False, "compute nothing; tables of what is complete")
    windows: int = flag(20, "of text for perplexity", least=1)
    counts_from: float = flag(MIN_SCORE, "what the full cache must reach for a category to count", least=0.01)
    seed: int = flag(0)
    dtype: str = flag("bfloat16")
    kv_memory: str = flag("1GiB")
    threads: int = flag(1, least=1)
    kvpress: Path | None = flag(None, "a virtual environment that holds kvpress; made where there is none")
    kvpress_model: Path | None = flag(None, "(default: --model, if a directory)")
    presses: tuple[str, ...] = flag(PRESS_NAMES, choices=tuple(PRESSES))
    work: Path = flag(Path("runs/real-eval"), "folder of journals")
    name: str = flag("real", "of the files in --output")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kvpress is not None and not self.peer_model.is_dir():
            raise ConfigError("--kvpress needs --kvpress-model DIR: kvpress reads safetensors")

    @property
    def peer_model(self) -> Path:
        """The model's directory as kvpress reads it."""
        return self.kvpress_model or Path(self.model)


def study(options: RealOptions) -> Iterator[Result]:
    """Every work in turn, after each of which everything is written anew."""
    options.work.mkdir(parents=True, exist_ok=True)
    cells = plan_cells(options.policies, amounts_of(options.compressions), QUERIES)
    with LLM(
        options.model,
        dtype=options.dtype,
        kv_memory=options.kv_memory,
        threads=options.threads,
        kv_floor=1,
        **engine_needs(cells),
    ) as llm:
        templated = has_chat_template(llm)
        facts = {
            "model": Path(options.model).name,
            "engine": llm.config.settings(),
            "chat_template": templated,
        }
        for rows, perplexities in RealEvaluation(options, llm).run():
            yield result(facts, options.counts_from, rows, perplexities)


def main(words: Sequence[str] | None = None) -> int:
    """Evaluate and write. Returns the exit code."""
    return run_study(RealOptions, study, words)
