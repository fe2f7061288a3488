"""Winnow beside other engines: the same model, the same work, the same threads, in turn.

    python lab/winnow_lab/peers/run.py
    python lab/winnow_lab/peers/run.py --peers winnow,openvino --rounds 5 -o runs

The work is W1: random prompts on a model of random weights. payoff.py compares on real models.

Every peer gets a virtual environment of its own below --folder and the model in the format it wants; both stay there
for the next start. Then come the rounds: each runs every configuration once, in a fresh process, with loading and a
tiny first request outside the time. What cannot be installed or fails is shown with its error.

With --journal a comparison may be made in pieces: what the journal has is not run again, and --steps says after how
many runs to stop. The exit code is then 3 while runs are missing.
"""

import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from winnow_lab.bench.presets import PRESETS
from winnow_lab.peers.comparison import UNFINISHED, Comparison, PeerOptions
from winnow_lab.peers.page import W1_NOTES, comparison
from winnow_lab.peers.works import make_w1
from winnow_lab.study import Result, flag, run_study


@dataclass(frozen=True)
class Options(PeerOptions):
    prompt_tokens: int | None = flag(None, "in place of the work's own", least=1)
    new_tokens: int | None = flag(None, "in place of the work's own", least=1)
    kv_seqs: int = flag(PRESETS["w1"].kv_seqs, "KV memory, as whole sequences, the longest", least=1)
    name: str = flag("peers", "of the files in --output")


def study(options: Options) -> Result:
    """Install, convert, run in turn. The program ends with `UNFINISHED` while runs are missing."""
    options.folder.mkdir(parents=True, exist_ok=True)
    numbers = {name: getattr(options, name) for name in ("requests", "prompt_tokens", "new_tokens")}
    workload = PRESETS["w1"].workload.having(**numbers)
    given = make_w1(workload, options.kv_seqs, options.folder.resolve() / "models")
    compared = Comparison(given, options, options.journal, options.runs())
    if options.prepare:
        sys.exit(0 if compared.prepare() else 1)
    for number in range(1, options.rounds + 1):
        compared.run_round(number)
    if compared.missing:
        print(f"{compared.missing} runs are missing; start again to resume", file=sys.stderr)
        sys.exit(UNFINISHED)
    found = compared.to_json()
    ok = any(outcome.median for outcome in compared.outcomes if outcome.peer.name == "winnow")
    title = "Winnow beside other engines"
    return Result(title, [comparison(found)], [], W1_NOTES, found, ("configurations",), ok=ok)


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if Winnow itself ran, else 1."""
    return run_study(Options, study, argv)


if __name__ == "__main__":
    # By an exception, so that what was started ends too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
