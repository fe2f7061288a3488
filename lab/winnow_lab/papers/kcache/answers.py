"""Answers of a model under each setting: scores of tasks, and how far greedy continuations agree."""

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from winnow import LLM, SamplingParams
from winnow_lab.evaluate.cell import FULL_CELL
from winnow_lab.evaluate.likelihood import Keeping, Pair
from winnow_lab.evaluate.perplexity import resumed_perplexity
from winnow_lab.evaluate.plan import EvaluationPlan
from winnow_lab.evaluate.prompt import PromptMaker, common_length
from winnow_lab.evaluate.result import CellResult
from winnow_lab.evaluate.runner import evaluate
from winnow_lab.evaluate.tasks import TaskSettings
from winnow_lab.evaluate.tasks.task import settings_for
from winnow_lab.evaluate.wikitext import cut_windows, wikitext
from winnow_lab.papers.kcache.protocol import CATEGORIES, PLAIN, SHOTS, Options, Setting
from winnow_lab.report import standard_error
from winnow_lab.tasks import load_task


@dataclass(frozen=True)
class Answered:
    """One setting.

    Attributes:
        scores: mean by category; errors: standard errors; counts: prompts.
        same_tokens: of the full cache's greedy continuations, as a share; leading: up to the first that differs.
        perplexity: of text that is forced token by token after a context of as many tokens.
    """

    setting: Setting
    scores: dict[str, float]
    errors: dict[str, float]
    counts: dict[str, int]
    same_tokens: float
    leading: float
    perplexity: float

    @property
    def mean(self) -> float:
        return fmean(self.scores.values())

    def to_json(self) -> dict[str, Any]:
        fields = {name: value for name, value in vars(self).items() if name != "setting"}
        return {"setting": self.setting.label, "mean": self.mean} | fields


def known_answer(setting: Setting, work: Path) -> Answered | None:
    """What `answer` left of a setting; None: it is not done."""
    path = work / setting.folder / "answered.json"
    if not path.exists():
        return None
    values = json.loads(path.read_text(encoding="utf-8"))
    return Answered(setting, **{name: values[name] for name in Answered.__annotations__ if name != "setting"})


def answer(setting: Setting, arguments: Options) -> Answered:
    work: Path = arguments.work / setting.folder
    work.mkdir(parents=True, exist_ok=True)
    results: list[CellResult] = []
    with LLM(
        arguments.model,
        kv_memory=arguments.kv_memory,
        threads=arguments.threads,
        max_num_seqs=arguments.max_num_seqs,
        **setting.options,
    ) as llm:
        for task in arguments.tasks:
            results.append(_evaluate(llm, task, arguments, work / f"{task}.jsonl", setting.label))
        windows = cut_windows(
            llm.tokenizer, wikitext(None), 2 * arguments.given, arguments.given, arguments.windows
        )
        tokens = _continuations(llm, windows, arguments.new_tokens, work / "continuations.json")
        [found] = resumed_perplexity(llm, windows, {FULL_CELL.label: Keeping()}, work / "perplexity.jsonl")
    full = _read(arguments.work / Setting().folder / "continuations.json")
    scores = {name: found for result in results for name, found in result.scores.items()}
    pairs = list(zip(tokens, full, strict=True))
    answered = Answered(
        setting,
        {name: fmean(found) for name, found in scores.items()},
        {name: standard_error(found) or 0.0 for name, found in scores.items()},
        {name: len(found) for name, found in scores.items()},
        fmean(fmean(a == b for a, b in zip(ours, theirs, strict=True)) for ours, theirs in pairs),
        fmean(common_length(ours, theirs) / len(theirs) for ours, theirs in pairs),
        found.value or math.nan,
    )
    (work / "answered.json").write_text(json.dumps(answered.to_json()), encoding="utf-8")
    return answered


def _evaluate(llm: LLM, task: str, arguments: Options, journal: Path, label: str) -> CellResult:
    settings = _settings(llm, task, arguments)
    plan = EvaluationPlan(task, load_task(task), settings, (FULL_CELL,), chat=_chat(task))

    def show(done: int, total: int, *_: Any) -> None:
        print(f"\r{label}, {task}: {done} of {total}", end="", file=sys.stderr)

    [result] = evaluate(llm, plan, journal=journal, on_step=show).results
    return result


def prompt_lengths(arguments: Options) -> dict[str, list[int]]:
    """Tokens of each prompt of the tasks of `--lengths`, ascending (the paper's Fig. 2)."""
    with LLM(arguments.model, kv_memory=arguments.kv_memory) as llm:
        found = {}
        for task in arguments.lengths:
            make = PromptMaker(llm.tokenizer, _chat(task)).make
            samples = load_task(task).samples(_settings(llm, task, arguments))
            found[task] = sorted(
                len(make(each, question).token_ids) for each in samples for question in each.questions
            )
        return found


def _settings(llm: LLM, task: str, arguments: Options) -> TaskSettings:
    return settings_for(
        llm,
        samples=arguments.samples,
        tokens=arguments.tokens,
        categories=arguments.categories or CATEGORIES[task],
        shots=SHOTS.get(task),
        data=arguments.data,
        questions=1,
        seed=arguments.seed,
    )


def _chat(task: str) -> str:
    return "off" if task in PLAIN else "on"


def _continuations(llm: LLM, windows: Sequence[Pair], new_tokens: int, path: Path) -> list[list[int]]:
    if path.exists():
        return _read(path)
    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    outputs = llm.generate([list(window.context) for window in windows], params)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    path.write_text(json.dumps(tokens), encoding="utf-8")
    return tokens


def _read(path: Path) -> list[list[int]]:
    found: list[list[int]] = json.loads(path.read_text(encoding="utf-8"))
    return found
