"""Whether compression pays on real models: answers judged, within the same KV memory, beside other engines.

    make payoff
    python lab/winnow_lab/peers/payoff.py --model models/SmolLM2-135M-Instruct.Q4_1.gguf --rounds 3
    python lab/winnow_lab/peers/payoff.py --works p1 --only 'winnow: *' --requests 8 --lengths 1024 -o runs

p1: the question is seen: RULER's needles, long answers, KV memory for two. p2: contexts are compressed before their
questions are known, and asked often; Winnow alone. p3: chat about texts, with prefix cache, memory for all and for
four.

Environments of peers and converted models are those of run.py, below the same --folder. A round runs every row of
every work and model once, each in a fresh process. --journal is a folder: what it has is not run again, so the same
command resumes where it was stopped.
"""

import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from winnow.errors import ConfigError
from winnow_lab.peers.comparison import UNFINISHED, Comparison, PeerOptions
from winnow_lab.peers.page import NOTES, tables
from winnow_lab.peers.works import RealModel, real_works
from winnow_lab.study import PageOptions, Result, flag, run_study

MODELS = (Path("models/SmolLM2-135M-Instruct.Q4_1.gguf"), Path("models/gemma-3-270m.gguf"))
WORKS = ("p1", "p2", "p3")


@dataclass(frozen=True)
class Options(PeerOptions, PageOptions):
    model: list[Path] | None = flag(
        None, f"may be repeated (default: of {', '.join(map(str, MODELS))} those here)"
    )
    works: tuple[str, ...] = flag(WORKS, choices=WORKS)
    lengths: tuple[int, ...] = flag((2048, 3500), "of p1's prompts, in tokens", least=1)
    timeout: float = flag(3600.0, "seconds of one run", least=0)
    journal: Path | None = flag(
        Path("runs/payoff"), "folder that keeps every run; what it has is not run again"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        models = self.model or [path for path in MODELS if path.exists()]
        if not models:
            raise ConfigError(f"--model is needed: none of {', '.join(map(str, MODELS))} exists")
        for path in models:
            if not path.exists():
                raise ConfigError(f"--model must be a file or directory that exists, got {path}")
        object.__setattr__(self, "model", models)


def study(options: Options) -> Iterator[Result]:
    """Install, convert, run in turn. The program ends with `UNFINISHED` while runs are missing."""
    steps, works = options.runs(), real_works(options.lengths, options.requests)
    compared: list[tuple[RealModel, str, Comparison]] = []
    for path in options.model or ():
        model = RealModel(path, options.folder.resolve() / "models")
        for name, work in works.items():
            if name.partition(",")[0] in options.works:
                journal = options.journal and options.journal / f"{model.name}, {name}.jsonl"
                made = Comparison(work.make(name, model), options, journal, steps)
                compared.append((model, work.title, made))
    if options.prepare:
        sys.exit(0 if all([made.prepare() for _, _, made in compared]) else 1)
    for number in range(1, options.rounds + 1):
        for model, _, made in compared:
            print(f"{model.name}, {made.given.name}: {made.given.summary}", file=sys.stderr)
            made.run_round(number)
        if missing := sum(made.missing for _, _, made in compared):
            print(f"{missing} runs of round {number} are missing; start again to resume", file=sys.stderr)
            sys.exit(UNFINISHED)
        entries = [{"model": model.name, "title": title} | made.to_json() for model, title, made in compared]
        found = {"works": entries}
        yield Result("Whether compression pays", tables(found), [], NOTES, found, ("works",))


def main(argv: Sequence[str] | None = None) -> int:
    return run_study(Options, study, argv)


if __name__ == "__main__":
    # By an exception, so that what was started ends too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
