"""Winnow beside other engines: the same model, the same work, the same threads, in turn.

    python lab/winnow_lab/peers/run.py
    python lab/winnow_lab/peers/run.py --peers winnow,openvino --rounds 5 --json peers.json
    python lab/winnow_lab/peers/run.py --requests 4 --prompt-tokens 64 --new-tokens 8 --kv-seqs 2

The work is W1: random prompts on a model of random weights. payoff.py compares on real models.

Every peer gets a virtual environment of its own below --folder and the model in the format it wants; both stay there
for the next start. Then come the rounds: each runs every configuration once, in a fresh process, with loading and a
tiny first request outside the time. What cannot be installed or fails is shown with its error.

With --journal a comparison may be made in pieces: what the journal has is not run again, and --steps says after how
many runs to stop. The exit code is then 3 while runs are missing.
"""

import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console

from winnow.report.provenance import Machine, report_head
from winnow_lab.peers.arguments import command_line, parse
from winnow_lab.peers.comparison import Comparison, Steps
from winnow_lab.peers.environment import PeerError
from winnow_lab.peers.peers import PEERS
from winnow_lab.peers.report import show
from winnow_lab.peers.works import make_w1

UNFINISHED = 3


def main(argv: Sequence[str] | None = None) -> int:
    """Install, convert, run in turn, show. Returns 0 if Winnow itself ran, else 1.

    2: something is unusable. `UNFINISHED`: runs are missing.
    """
    arguments = parse(argv, __doc__)
    console = Console(stderr=True, highlight=False)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    console.print("making the model")
    given = make_w1(arguments.workload, arguments.kv_seqs, arguments.folder.resolve() / "models")
    try:
        comparison = Comparison(given, PEERS, arguments, arguments.journal, console, Steps(arguments.steps))
    except PeerError as error:
        console.print(str(error), markup=False, soft_wrap=True)
        return 2
    if arguments.prepare:
        return 0 if comparison.prepare() else 1
    for number in range(1, arguments.rounds + 1):
        comparison.run_round(number)
    if comparison.missing:
        console.print(f"{comparison.missing} runs are missing; start again to resume")
        return UNFINISHED
    machine = replace(Machine.here(), threads=arguments.threads)
    head = report_head(command_line(sys.argv[1:] if argv is None else argv), machine)
    outcomes = comparison.outcomes
    show(outcomes, given, machine, head)
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(head | comparison.to_json(), indent=2) + "\n"
        arguments.json.write_text(text, encoding="utf-8")
    return 0 if any(outcome.median for outcome in outcomes if outcome.peer.name == "winnow") else 1


if __name__ == "__main__":
    # By an exception, so that what was started ends too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
