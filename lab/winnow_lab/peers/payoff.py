"""Whether compression pays on real models: answers judged, within the same KV memory, beside other engines.

    make payoff
    python lab/winnow_lab/peers/payoff.py --model models/SmolLM2-135M-Instruct.Q4_1.gguf --rounds 3
    python lab/winnow_lab/peers/payoff.py --works p1 --only 'winnow: *' --requests 8 --lengths 1024 --out runs/payoff

p1: the question is seen: RULER's needles, long answers, KV memory for two. p2: contexts are compressed before their
questions are known, and asked often; Winnow alone. p3: chat about texts, with prefix cache, memory for all and for
four.

Environments of peers and converted models are those of run.py, below the same --folder. A round runs every row of
every work and model once, each in a fresh process. --journal is a folder: what it has is not run again, so the same
command resumes where it was stopped. --out STEM names what is written after each round: STEM.json, .md, .svg.
"""

import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from winnow.errors import WinnowError
from winnow.report.provenance import Machine, report_head
from winnow_lab.peers.arguments import check, command_line, make_parser
from winnow_lab.peers.comparison import Comparison, Steps
from winnow_lab.peers.payoff_page import chart, page
from winnow_lab.peers.peers import PEERS
from winnow_lab.peers.works import RealModel, real_works
from winnow_lab.report.plots import can_draw, save_figure

UNFINISHED = 3
MODELS = (Path("models/SmolLM2-135M-Instruct.Q4_1.gguf"), Path("models/gemma-3-270m.gguf"))
OUT, JOURNAL = Path("docs/results/payoff"), Path("runs/payoff")


def main(argv: Sequence[str] | None = None) -> int:
    """Install, convert, run in turn, write the page. Returns 0, or 1 where something could not be prepared.

    2: something is unusable. `UNFINISHED`: runs are missing.
    """
    parser = make_parser(__doc__, timeout=3600)
    add = parser.add_argument
    add("--model", type=Path, action="append", help=f"may be repeated (default: of {MODELS}, what is there)")
    add("--works", default="p1,p2,p3", help="commas between them (default: %(default)s)")
    add("--lengths", default="2048,3500", help="of p1's prompts, in tokens (default: %(default)s)")
    add("--journal", type=Path, default=JOURNAL, help="(default: %(default)s)")
    add("--out", type=Path, default=OUT, help="(default: %(default)s)")
    arguments = parser.parse_args(argv)
    check(parser, arguments)
    models = arguments.model or [path for path in MODELS if path.exists()]
    for path in models:
        if not path.exists():
            parser.error(f"--model must be a file or directory that exists, got {path}")
    if not models:
        parser.error(f"--model is needed: none of {', '.join(map(str, MODELS))} exists")
    console = Console(stderr=True, highlight=False)
    steps = Steps(arguments.steps)
    works = real_works(tuple(map(int, arguments.lengths.split(","))), arguments.requests)
    asked, known = set(arguments.works.split(",")), {name.partition(",")[0] for name in works}
    if unknown := asked - known:
        parser.error(f"--works must be of {', '.join(sorted(known))}, got {', '.join(sorted(unknown))}")
    wanted = {name: work for name, work in works.items() if name.partition(",")[0] in asked}
    comparisons: list[tuple[RealModel, str, Comparison]] = []
    try:
        for path in models:
            console.print(f"reading {path.name}", markup=False)
            model = RealModel(path, arguments.folder.resolve() / "models")
            for name, work in wanted.items():
                journal = arguments.journal / f"{model.name}, {name}.jsonl"
                made = Comparison(work.make(name, model), PEERS, arguments, journal, console, steps)
                comparisons.append((model, work.title, made))
    except WinnowError as error:
        console.print(str(error), markup=False, soft_wrap=True)
        return 2
    if arguments.prepare:
        return 0 if all([made.prepare() for _, _, made in comparisons]) else 1

    machine = replace(Machine.here(), threads=arguments.threads)
    for number in range(1, arguments.rounds + 1):
        for model, _, made in comparisons:
            console.print(f"{model.name}, {made.given.name}: {made.given.summary}", markup=False)
            made.run_round(number)
        missing = sum(made.missing for _, _, made in comparisons)
        if missing:
            console.print(f"{missing} runs of round {number} are missing; start again to resume")
            return UNFINISHED
        head = report_head(command_line(sys.argv[1:] if argv is None else argv), machine)
        entries = [
            {"model": model.name, "title": title} | made.to_json() for model, title, made in comparisons
        ]
        write(arguments.out, head | {"works": entries})
    return 0


def write(stem: Path, report: dict[str, object]) -> None:
    """The report as JSON, as a page and as a chart."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(report, indent=1) + "\n"
    stem.with_name(f"{stem.name}.json").write_text(text, encoding="utf-8")
    stem.with_name(f"{stem.name}.md").write_text(page(report, stem.name), encoding="utf-8")
    figure = chart(report) if can_draw() else None
    if figure is not None:
        save_figure(figure, stem)


if __name__ == "__main__":
    # By an exception, so that what was started ends too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
