"""How much of a real model's accuracy each policy keeps: RULER, needles, retrieval, documents, mathematics, perplexity.

    python -m winnow_lab.real [--model DIR] [--policies A,...] [--compressions 2,4,8,16] [--samples 50]
        [--tokens 2048,4096] [--tasks A,...] [--categories A,...] [--query seen,later] [--kvpress DIR]
        [--report] [-o docs/results]

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
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from winnow import LLM
from winnow.report.provenance import Machine, report_head, typed_command
from winnow_lab.evaluate.cell import QUERIES, amounts_of, engine_needs, plan_cells
from winnow_lab.evaluate.perplexity import Perplexity
from winnow_lab.papers.kvpress.presses import PRESSES
from winnow_lab.papers.page import page, results_json
from winnow_lab.real.rows import MIN_SCORE, Row
from winnow_lab.real.run import RealEvaluation, has_chat_template
from winnow_lab.real.tables import tables
from winnow_lab.real.work import KNOWN_TASKS, LABELS, TASK_NAMES

POLICIES = "snapkv,ada-snapkv,keydiff,kv-compress,winnow,kvzip"
PRESS_NAMES = "KVzip,ExpectedAttention,AdaKV+ExpectedAttention,SnapKV,KeyDiff"


def write_results(
    output: Path,
    head: dict[str, Any],
    least: float,
    rows: Sequence[Row],
    perplexities: Sequence[Perplexity],
) -> None:
    """real.json with every number, real.md with the tables."""
    output.mkdir(parents=True, exist_ok=True)
    values = {"rows": [asdict(row) for row in rows], "perplexity": [each.to_json() for each in perplexities]}
    (output / "real.json").write_text(results_json(head | values, ("rows", "perplexity")), encoding="utf-8")
    notes = (
        f"Means ± standard errors over contexts. A category counts where the full cache scores {least:g} or "
        "more. KV memory is what the cache held at the end of an answer; kvpress masks what AdaKV and KVzip "
        "drop, and holds it. Seconds are of one document alone, for kvpress the mean of all."
    )
    form = "prompts through its chat template" if head["chat_template"] else "prompts as they are"
    facts = [f"Model {head['model']}, {head['engine']['dtype']}, {form}."]
    text = page(
        "Accuracy on a real model", [head], facts, f"{notes}\n", tables(rows, perplexities, least), []
    )
    (output / "real.md").write_text(text, encoding="utf-8")


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(",")))


def _queries(text: str) -> tuple[str, ...]:
    names = {label: query for query, label in LABELS.items()}
    unknown = [name for name in _names(text) if name not in names]
    if unknown:
        raise argparse.ArgumentTypeError(f"no {unknown[0]!r}; known: {', '.join(names)}")
    return tuple(names[name] for name in _names(text))


def default_model() -> str | None:
    """The real model that `make real-model` puts here."""
    found = sorted(Path("models").glob("SmolLM2*.gguf"), key=lambda path: path.name.lower())
    return str(found[0]) if found else None


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m winnow_lab.real",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default=default_model(), help="(default: models/SmolLM2*.gguf)")
    parser.add_argument("--policies", type=_names, default=_names(POLICIES), help=f"(default: {POLICIES})")
    parser.add_argument(
        "--compressions", type=lambda text: tuple(map(float, _names(text))), default=(2, 4, 8, 16)
    )
    parser.add_argument("--samples", type=int, default=50, help="prompts a cell; needles take a few more")
    parser.add_argument("--tokens", type=lambda text: tuple(map(int, _names(text))), default=(2048, 4096))
    parser.add_argument("--tasks", type=_names, default=TASK_NAMES, help=f"of {','.join(KNOWN_TASKS)}")
    parser.add_argument("--categories", type=_names, help="of RULER (default: all but qa_2)")
    parser.add_argument("--query", type=_queries, default=QUERIES, help="seen, later or both (default: both)")
    parser.add_argument("--report", action="store_true", help="compute nothing; tables of what is complete")
    parser.add_argument("--windows", type=int, default=20, help="of text for perplexity")
    parser.add_argument(
        "--counts-from",
        type=float,
        default=MIN_SCORE,
        metavar="SCORE",
        help="what the full cache must reach for a category to count (default: %(default)g)",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv-memory", default="1GiB")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--kvpress", type=Path, metavar="DIR", help="a virtual environment that holds kvpress"
    )
    parser.add_argument(
        "--kvpress-model", type=Path, metavar="DIR", help="(default: --model, if a directory)"
    )
    parser.add_argument(
        "--presses", type=_names, default=_names(PRESS_NAMES), help=f"(default: {PRESS_NAMES})"
    )
    parser.add_argument("--work", type=Path, default=Path("runs/real-eval"), help="(default: %(default)s)")
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("docs/results"), help="(default: %(default)s)"
    )
    arguments = parser.parse_args(words)
    if arguments.model is None:
        parser.error("no models/SmolLM2*.gguf: run make real-model, or name a model with --model")
    for name, known in (("tasks", KNOWN_TASKS), ("presses", PRESSES)):
        for each in getattr(arguments, name):
            if each not in known:
                parser.error(f"--{name}: no {each!r}; known: {', '.join(known)}")
    if arguments.kvpress_model is None:
        arguments.kvpress_model = Path(arguments.model)
    if arguments.kvpress is not None and not arguments.kvpress_model.is_dir():
        parser.error("--kvpress needs --kvpress-model DIR: kvpress reads safetensors")
    return arguments


def main(words: Sequence[str] | None = None) -> None:
    """Evaluate and write."""
    arguments = parse(words)
    arguments.work.mkdir(parents=True, exist_ok=True)
    cells = plan_cells(arguments.policies, amounts_of(arguments.compressions), QUERIES)
    with LLM(
        arguments.model,
        dtype=arguments.dtype,
        kv_memory=arguments.kv_memory,
        threads=arguments.threads,
        kv_floor=1,
        **engine_needs(cells),
    ) as llm:
        head = report_head(typed_command(), Machine.here("cpu")) | {
            "model": Path(arguments.model).name,
            "engine": llm.config.settings(),
            "chat_template": has_chat_template(llm),
        }
        write = partial(write_results, arguments.output, head, arguments.counts_from)
        RealEvaluation(arguments, llm, write).run()
