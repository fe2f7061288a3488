"""A GGUF file's own bits: Winnow as it comes beside llama.cpp's wheel, in turn. Speed, start and memory.

    python -m winnow_lab.peers.own_bits --model models/SmolLM2-135M-Instruct.Q4_1.gguf --peer PEER/bin/python

PEER is an environment with the package xllamacpp. Each measurement is a process. Tokens a second of one sequence and of
16, less what prompts of 16 tokens take, and of a prompt. Start: seconds to the first token. Memory at the end.
"""

import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from winnow.process.native import instruction_set
from winnow_lab.report.tables import TextTable
from winnow_lab.study import Result, StudyOptions, flag, run_study

COLUMNS = {
    "one": "one",
    "16": "16",
    "prompt": "prompt",
    "start": "start, s",
    "resident": "MiB",
    "not mapped": "not mapped",
}


@dataclass(frozen=True)
class Options(StudyOptions):
    model: Path = flag()
    peer: Path = flag(text="python of the environment with xllamacpp")
    rounds: int = flag(3, least=1)
    prompt: int = flag(2000, "tokens", least=1)
    threads: int = flag(2, least=1)


def study(options: Options) -> Result:
    script = Path(__file__).with_name("own_bits_peer.py")
    pythons = {"winnow": Path(sys.executable), "llama.cpp": options.peer}
    rows: list[dict[str, float | str]] = []
    for _ in range(options.rounds):
        for name, python in pythons.items():
            words = map(str, (python, script, name, options.model, options.threads, options.prompt))
            made = subprocess.run([*words], capture_output=True, text=True, check=True).stdout  # noqa: S603
            rows.append({"engine": name} | json.loads(made.splitlines()[-1]))
    of = {key: {n: [float(r[key]) for r in rows if r["engine"] == n] for n in pythons} for key in COLUMNS}
    lines = [
        (n, tuple(", ".join(f"{x:,.{1 if key == 'start' else 0}f}" for x in of[key][n]) for key in COLUMNS))
        for n in pythons
    ]
    ratios = (statistics.median(a / b for a, b in zip(*of[key].values(), strict=True)) for key in COLUMNS)
    lines.append(("ratio", tuple(f"{ratio:.2f}" for ratio in ratios)))
    title = f"{options.model.name}, {instruction_set()}, a prompt of {options.prompt:,}, {options.threads} threads"
    table = TextTable(title, "", tuple(COLUMNS.values()), tuple(lines))
    return Result("A file's own bits", [table], numbers={"rows": rows})


if __name__ == "__main__":
    sys.exit(run_study(Options, study))
