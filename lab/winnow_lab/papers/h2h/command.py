"""Eviction presets side by side on a task, beside what papers report."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from winnow.cli.flags.engine import open_llm, silence_transformers
from winnow.eviction import PRESETS
from winnow_lab.cli.eval.display import show_evaluation
from winnow_lab.evaluate.cell import amounts_of, engine_needs, plan_cells
from winnow_lab.evaluate.outcome import JOURNAL
from winnow_lab.evaluate.plan import EvaluationPlan
from winnow_lab.evaluate.result import Evaluation
from winnow_lab.evaluate.runner import evaluate
from winnow_lab.evaluate.settings import settings_for
from winnow_lab.papers.h2h.protocol import Continuations, text_presets
from winnow_lab.papers.h2h.results import NOTES, TITLE, best_chart, tables
from winnow_lab.papers.h2h.variants import VARIANTS
from winnow_lab.papers.judged import DEMO, AskedTask, chat_mode
from winnow_lab.study import EngineOptions, Result, as_command, flag
from winnow_lab.tasks import load_task

DESCRIPTION = """\
Run a task under every eviction preset, query-aware and query-agnostic, and predict text with a quarter
of the KVs. Beside the presets that papers have numbers for stand those numbers,
and what differs in their setting.

Categories that a plain window or chance answers as well as the full cache are marked, and means
leave them out. With -o, answers reach the disk as they finish, and the same command resumes where
it was stopped.

examples:
  python -m winnow_lab.papers h2h --presets winnow,keydiff,kv-compress --compression 4,8
  python -m winnow_lab.papers h2h --presets kv-compress,snapkv-w8 --kv-budget 128,256,512,1024 --query aware
  python -m winnow_lab.papers h2h --samples 2 --windows 0
  python -m winnow_lab.papers h2h --model DIR --task ruler --categories niah_single_1 --tokens 2048 --query aware
  python -m winnow_lab.papers h2h --model DIR --text-only --presets kv-compress --window-tokens 1024
  python -m winnow_lab.papers h2h -o docs/results --journal h2h-work
"""
CONTROLS = ("recent", "random")
QUERIES = {"aware": ("aware",), "agnostic": ("agnostic",), "both": ("agnostic", "aware")}
# Those left out decide themselves how much they keep, which is no compression to compare at.
COMPARED = tuple(name for name in (*PRESETS, *VARIANTS) if name not in ("full", "extreme-decode"))


@dataclass(frozen=True)
class Options(AskedTask, EngineOptions):
    """Presets and amounts, the task, and the text."""

    presets: tuple[str, ...] = flag(COMPARED)
    query: str = flag("both", choices=QUERIES)
    kv_budget: tuple[int, ...] = flag((), "KVs kept per row on average, in place of compressions", least=1)
    compression: tuple[float, ...] = flag((), "tokens judged per KV kept (default: 2,4,8,16)", least=1)
    samples: int = flag(3, "of each category", least=1)
    tokens: tuple[int, ...] = flag((1024,), "of prompt and answer, where the task's length is free", least=1)
    seed: int = flag(0, "of the prompts", least=0)
    categories: tuple[str, ...] = flag((), "(default: all)")
    text_only: bool = flag(False, "no task: perplexity alone")
    windows: int = flag(4, "of text to predict; 0: no perplexity", least=0)
    window_tokens: int = flag(2048, "of a window", least=16)
    journal: Path | None = flag(None, "folder of the journal to resume from (default: that of -o)")
    CHOSEN: ClassVar[tuple[str, ...]] = (
        *("eviction", "compression", "kv_budget", "seed", "dtype", "num_accumulators", "kv_bias"),
    )
    SHOWN: ClassVar[Mapping[str, Any]] = MappingProxyType({"kv_floor": 1})

    def __post_init__(self) -> None:
        EngineOptions.__post_init__(self)
        AskedTask.__post_init__(self)
        object.__setattr__(self, "name", self.name or ("h2h_text" if self.text_only else "h2h"))
        object.__setattr__(self, "journal", self.journal or self.output)


def study(options: Options) -> Result:
    """The task under every preset, and the text."""
    silence_transformers()
    compressions = options.compression or (() if options.kv_budget else (2.0, 4.0, 8.0, 16.0))
    amounts = amounts_of(sorted(set(compressions)), sorted(set(options.kv_budget)))
    cells = plan_cells(options.presets, amounts, QUERIES[options.query], CONTROLS, VARIANTS)
    opened = {"kv_floor": 1, **engine_needs(cells), "dtype": "float32", **options.engine}
    continuations, journal = Continuations(options.windows, options.window_tokens), options.journal
    with open_llm(opened) as llm:
        model = str(llm.config.model.model or "the demo model")
        numbers: dict[str, Any] = {"model": model, "engine": llm.config.settings()}
        fact, evaluation = f"{model}.", None
        if not options.text_only:
            task = options.task or DEMO
            names = ("samples", "tokens", "seed", "data", "shots", "categories")
            settings = settings_for(llm, **{name: getattr(options, name) for name in names})
            chat = chat_mode(task, llm.tokenizer)
            plan = EvaluationPlan(task, load_task(task), settings, cells, CONTROLS, chat)
            with show_evaluation("auto") as show:
                evaluation = evaluate(llm, plan, journal=journal and journal / JOURNAL, on_step=show)
            numbers |= evaluation.to_json()
            fact = _fact(model, evaluation)
        own = [name for name in ("leverage", "keydiff", "kv-compress") if name in options.presets]
        windows = journal and journal / "windows.jsonl"
        found = continuations.measure(llm, [*text_presets(), *own], windows) if continuations.windows else []
    numbers["perplexity"] = [each.to_json() for each in found]
    chart = evaluation and best_chart(evaluation)
    return Result(
        TITLE,
        tables(evaluation, found, continuations),
        [fact],
        NOTES if evaluation else "",
        numbers,
        ("cells", "perplexity"),
        {"": lambda: chart} if chart else {},
    )


def _fact(model: str, evaluation: Evaluation) -> str:
    lengths = " and ".join(f"{length:,}" for length in evaluation.lengths)
    task = f"tasks of `winnow eval {evaluation.task}`"
    return f"{model}, {task}, {lengths} tokens, {evaluation.prompts} prompts per cell."


configure, execute = as_command(Options, study, DESCRIPTION)
