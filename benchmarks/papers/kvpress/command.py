"""`python -m benchmarks.papers kvpress`: answers under Winnow's presets beside NVIDIA's kvpress."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from benchmarks.papers.kvpress.presses import PACKAGE, PRESSES, SOURCES
from winnow.bench.presets import model_cache
from winnow.cli.engine import add_engine_flags, engine_options, open_llm, silence_transformers
from winnow.cli.errors import UsageError
from winnow.cli.eval import typed
from winnow.cli.eval.cells import add_compression_flag
from winnow.cli.eval.display import show_evaluation
from winnow.cli.eval.prompts import add_prompt_flags, prompt_settings
from winnow.cli.paths import require_writable
from winnow.cli.progress import add_progress_flag
from winnow.errors import known_names

if TYPE_CHECKING:
    from benchmarks.papers.kvpress.compare import Comparison
    from winnow.evaluate.result import Evaluation
    from winnow.llm import LLM

DESCRIPTION = """\
Answer the demo model's tasks under Winnow's presets and under kvpress's presses, and tell how many
answers are right and how many bytes are held.

kvpress gets an environment of its own below --folder, since it needs an older transformers. Both
see the same token ids, keep as many KVs of them, answer greedily in float32, and are scored alike.
Query-agnostic, the context is compressed before the question is seen; query-aware, the question is
compressed with it, but for its last line ("Answer:").

What is answered stays below --folder: a comparison that was interrupted goes on where it stood.
"""
EPILOG = f"""\
examples:
  python -m benchmarks.papers kvpress --samples 2 --compression 4
  python -m benchmarks.papers kvpress --presets winnow,keydiff --presses KeyDiff,Compactor --query agnostic
  python -m benchmarks.papers kvpress --samples 10 -o docs/results
presses: {", ".join(PRESSES)}
"""
QUERIES = {"aware": ("aware",), "agnostic": ("agnostic",), "both": ("agnostic", "aware")}
DEFAULT_PRESETS = ("winnow", "winnow-pd", "keydiff", "kv-compress", "snapkv", "ada-snapkv")
_OWN = ("model", "eviction", "compression", "kv_budget", "seed", "dtype", "device", "num_scores")
_KV_FLOOR = 1
_NAME = "kvpress"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.usage = f"{parser.prog} [options]"
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument(
        "--presets",
        metavar="A,B,...",
        type=typed.names,
        default=DEFAULT_PRESETS,
        help=f"Winnow's (default: {','.join(DEFAULT_PRESETS)})",
    )
    parser.add_argument(
        "--presses", metavar="A,B,...", type=typed.names, default=tuple(PRESSES), help="default: all"
    )
    add_compression_flag(parser, (4.0, 8.0))
    parser.add_argument("--query", choices=QUERIES, default="both", help="(default: both)")
    add_prompt_flags(parser, samples=5)
    parser.add_argument(
        "--folder",
        metavar="DIR",
        type=Path,
        default=model_cache() / _NAME,
        help="for kvpress's environment and what is answered (default: %(default)s)",
    )
    parser.add_argument(
        "-o", "--output", metavar="DIR", type=Path, help=f"write {_NAME}.json and {_NAME}.md there"
    )
    add_progress_flag(parser)
    add_engine_flags(parser, _OWN, {"kv_floor": _KV_FLOOR})


def execute(namespace: argparse.Namespace) -> int:
    """Compare, show, write, and return the exit code."""
    _check(namespace)
    options = engine_options(namespace)
    import torch

    from benchmarks.papers.kvpress.compare import CONTROLS, Comparison
    from winnow.bench.environment import Environment, PeerError
    from winnow.cli.eval.output import run_head, show_tables
    from winnow.evaluate.cell import check_presets, num_scores, plan_cells
    from winnow.evaluate.settings import settings_for
    from winnow.evaluate.tables import all_tables
    from winnow.threads import set_threads

    check_presets(namespace.presets)
    silence_transformers()
    set_threads(options.get("threads"))
    threads = torch.get_num_threads()  # kvpress's too
    comparison = Comparison(
        namespace.presets,
        tuple(PRESSES[name] for name in namespace.presses),
        namespace.compressions,
        QUERIES[namespace.query],
    )
    folder = namespace.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    environment = Environment(folder / "environment")
    cells = plan_cells(namespace.presets, namespace.compressions, ("agnostic",), CONTROLS)
    needs = {"kv_floor": _KV_FLOOR, "num_scores": num_scores(cells), "dtype": "float32", "device": "cpu"}
    try:
        with Console(stderr=True).status(f"an environment with {PACKAGE}"):
            environment.prepare([PACKAGE], sources=SOURCES)
        with open_llm(needs | options) as llm:
            settings = settings_for(llm, **prompt_settings(namespace))
            head = run_head(llm, needs | options) | {"peer": PACKAGE, "threads": threads}
            evaluation = _run(namespace, comparison, llm, settings, environment, folder, threads)
    except PeerError as error:
        raise UsageError(f"kvpress: {error}") from None
    show_tables(head, f"{evaluation.prompts} prompts per cell", all_tables(evaluation))
    if namespace.output is not None:
        _write(namespace.output, head, evaluation)
    return 0


def _check(namespace: argparse.Namespace) -> None:
    """Refuse what would be found unusable only after the work.

    Raises:
        UsageError: a press that does not exist, or a path that cannot be written.
    """
    for name in namespace.presses:
        if name not in PRESSES:
            raise UsageError(f"--presses: no press {name!r}; {known_names(name, PRESSES)}")
    if namespace.output is not None:
        require_writable(namespace.output / f"{_NAME}.json", f"-o {namespace.output}")
    require_writable(namespace.folder / "work.json", f"--folder {namespace.folder}")


def _run(
    namespace: argparse.Namespace,
    comparison: "Comparison",
    llm: "LLM",
    settings: Any,
    environment: Any,
    folder: Path,
    threads: int,
) -> "Evaluation":
    with show_evaluation(namespace.progress) as show:

        def tell(query: str) -> None:
            print(f"winnow: kvpress answers, query-{query}", file=sys.stderr)

        return comparison.run(llm, settings, environment, folder, threads, show, tell)


def _write(directory: Path, head: dict[str, Any], evaluation: "Evaluation") -> None:
    from benchmarks.papers.kvpress.document import markdown
    from benchmarks.papers.page import results_json

    results, tables = directory / f"{_NAME}.json", directory / f"{_NAME}.md"
    results.write_text(results_json(head | evaluation.to_json()), encoding="utf-8")
    tables.write_text("\n".join(markdown(evaluation, head)) + "\n", encoding="utf-8")
    print(f"winnow: wrote {results} and {tables}", file=sys.stderr)
