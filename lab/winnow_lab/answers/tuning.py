"""What `winnow tune` promises, and what comes of it: the demo model on its own tasks, labels compared by their metric.

    python -m winnow_lab.answers.tuning --folder DIR [--json FILE]

Writes prompts, runs the search over them (with a journal in the folder, so that it resumes where it stopped), and
measures the winner, the default preset and the full cache again on the prompts that were held back, in turn.
"""

import contextlib
import io
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from winnow import LLM
from winnow.cli.main import main as winnow
from winnow.config import FULL
from winnow_lab.cli.tune import read_prompts
from winnow_lab.evaluate.settings import settings_for
from winnow_lab.evaluate.tasks.demo import DEMO
from winnow_lab.plan.tuning.candidates import Candidate, from_json
from winnow_lab.plan.tuning.measure import TunePrompt, agreement, run, wilson
from winnow_lab.plan.tuning.search import Search
from winnow_lab.report.tables import TextTable
from winnow_lab.study import Result, StudyOptions, flag, run_study

AGREEMENT, TOKENS, SAMPLES = 0.95, 1024, 12
PRESETS = ("winnow", "leverage-pd", "kv-compress", "kv-compress-pd", "snapkv", "streaming")
ENGINE: dict[str, Any] = {"kv_memory": "24MiB", "enable_prefix_caching": False}
BATCH = 32
DEFAULT = Candidate("winnow", 4.0, BATCH)
"""What `--compression` alone gives."""
PASSES = 3


@dataclass(frozen=True)
class Options(StudyOptions):
    """Options of the study: the prompts, and the folder of the search's journal."""

    folder: Path = flag()


def write_prompts(path: Path) -> None:
    """A line for each sample of the demo model's tasks, with its label."""
    with LLM() as llm:
        samples = DEMO.samples(settings_for(llm, samples=SAMPLES, tokens=(TOKENS,)))
    lines = [
        {
            "prompt": sample.context + question.plain,
            "max_tokens": question.max_tokens,
            "reference": question.references[0],
            "metric": question.metric,
        }
        for sample in samples
        for question in sample.questions
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def search(prompts: Path, folder: Path) -> tuple[dict[str, Any], str]:
    """Run `winnow tune`. Returns its report and what it printed."""
    line = ["tune", str(prompts), "--agreement", str(AGREEMENT), "--presets", ",".join(PRESETS)]
    line += ["--compressions", "2,4", "--batches", str(BATCH), "--kv-memory", ENGINE["kv_memory"]]
    for name in ("journal", "json", "plot"):
        line += [f"--{name}", str(folder / ("tune" if name == "plot" else f"tune.{name}"))]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        winnow(line)
    return json.loads((folder / "tune.json").read_text()), printed.getvalue()


def again(candidates: dict[str, Candidate], held_back: list[TunePrompt]) -> dict[str, Any]:
    """Each candidate on the prompts held back, some times in turn."""
    rates: dict[str, list[float]] = {name: [] for name in candidates}
    agreed: dict[str, list[float]] = {}
    with LLM(max_num_seqs=BATCH, num_accumulators=2, **ENGINE) as llm:
        full, _, _ = run(llm, Candidate(FULL, None, BATCH), held_back)
        for _ in range(PASSES):
            for name, candidate in candidates.items():
                answers, seconds, _ = run(llm, candidate, held_back)
                rates[name].append(sum(len(each.token_ids) for each in answers) / seconds)
                agreed[name] = [
                    agreement(prompt, answer, own, "tokens")
                    for prompt, answer, own in zip(held_back, answers, full, strict=True)
                ]
    return {
        name: {
            "candidate": str(candidate),
            "rates": rates[name],
            "rate": statistics.median(rates[name]),
            "agreement": statistics.fmean(agreed[name]),
            "bounds": wilson(statistics.fmean(agreed[name]), len(held_back)),
        }
        for name, candidate in candidates.items()
    }


def study(options: Options) -> Result:
    """Search, then measure the winner, the default and the full cache again."""
    options.folder.mkdir(parents=True, exist_ok=True)
    prompts = options.folder / "prompts.jsonl"
    if not prompts.is_file():
        write_prompts(prompts)
    report, printed = search(prompts, options.folder)
    print(printed)
    _, held_back = Search(AGREEMENT).split(read_prompts(prompts, 64))
    winner, full = from_json(report["best"]["candidate"]), Candidate(FULL, None, BATCH)
    found = again({"winner": winner, "default": DEFAULT, "full": full}, held_back)
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "candidate": lambda each: each["candidate"],
        "tokens/s": lambda each: f"{each['rate']:.1f}",
        "agreement": lambda each: f"{each['agreement']:.3f}",
        "above, with 95 % confidence": lambda each: f"{each['bounds'][0]:.2f}",
    }
    table = TextTable.of("On the prompts held back", "", found, columns)
    numbers = {"engine": ENGINE, "prompts": len(held_back), "held_back": found, "search": report}
    return Result("What a search for settings promises", [table], numbers=numbers)


if __name__ == "__main__":
    sys.exit(run_study(Options, study))
