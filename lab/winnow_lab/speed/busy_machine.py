"""A decode step and a batch on a quiet machine and beside busy processes, by how OpenMP's threads wait.

    python -m winnow_lab.speed.busy_machine [--busy 2] [--rounds 3]

`winnow` is what a user gets: waits are short while this process's threads queue for processors, and libgomp's default
otherwise. `default` is libgomp's default all the time, `passive` is OMP_WAIT_POLICY=PASSIVE. Each figure is the median
over processes in turn, because results depend on which processor the system gives to each thread. Nothing else may run.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

from winnow import LLM, SamplingParams
from winnow.report.provenance import Machine

WAITS: dict[str, dict[str, str]] = {
    "winnow": {},
    # libgomp's own default, said aloud: then Winnow leaves waiting alone.
    "default": {"GOMP_SPINCOUNT": "300000"},
    "passive": {"OMP_WAIT_POLICY": "PASSIVE"},
}
STEPS = 300
BATCH, PROMPT, ANSWER = 32, 512, 32


def measure() -> dict[str, float]:
    """In this process: milliseconds of a decode step of one sequence, and seconds of a batch of long prompts."""
    with LLM(kv_memory="256MiB", max_num_seqs=BATCH, enable_prefix_caching=False) as llm:
        step = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True)
        batch = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
        prompts = [[3 + (7 * row + place) % 200 for place in range(PROMPT)] for row in range(BATCH)]
        llm.generate([3, 4, 5], step)
        start = time.perf_counter()
        llm.generate([3, 4, 5], step)
        stepped = time.perf_counter()
        llm.generate(prompts, batch)
        return {"step ms": (stepped - start) / STEPS * 1e3, "batch s": time.perf_counter() - stepped}


def measure_apart(wait: str) -> dict[str, float]:
    """The same in a process of its own, whose threads wait in one of the ways of `WAITS`."""
    kept = {
        name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    }
    done = subprocess.run(  # noqa: S603
        [sys.executable, __file__, "--measure"],
        env=kept | WAITS[wait],
        check=True,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def table(busy: int, rounds: int) -> dict[str, dict[str, float]]:
    """Wait -> figure -> median, beside `busy` processes that compute without an end."""
    beside = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(busy)]
    try:
        found: dict[str, list[dict[str, float]]] = {wait: [] for wait in WAITS}
        for _ in range(rounds):
            for wait in WAITS:
                found[wait].append(measure_apart(wait))
    finally:
        for process in beside:
            process.kill()
            process.wait()
    return {
        wait: {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        for wait, runs in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--busy", type=int, default=os.cpu_count(), help="busy processes beside (default: one a core)"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--measure", action="store_true", help="measure in this process and print JSON")
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure()))
        return
    machine = Machine.here()
    print(
        f"{machine.cpu}, {machine.threads} threads, torch {machine.torch_version}; medians of {arguments.rounds}"
    )
    print(f"{'machine':<16} {'waits':<8} {'step ms':>8} {'batch s':>8}")
    for name, busy in (("quiet", 0), (f"{arguments.busy} busy beside", arguments.busy)):
        for wait, figures in table(busy, arguments.rounds).items():
            print(f"{name:<16} {wait:<8} {figures['step ms']:8.2f} {figures['batch s']:8.2f}")


if __name__ == "__main__":
    main()
