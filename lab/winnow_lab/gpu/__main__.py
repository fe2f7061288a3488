"""One page about a GPU, and JSON: `python -m winnow_lab.gpu [-o runs/gpu.json] [--minutes 6] [--parts limits,8b]`.

Each part is a process that is ended when its time is over; what it has printed by then counts. `--device cpu` runs all
of it on toy shapes, to show that it works: those numbers say nothing.
"""

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from winnow_lab.checkout import ROOT

SHARES = {
    "limits": 20,
    "attention": 70,
    "8b": 100,
    "1b": 20,
    "transformers": 30,
    "flashinfer": 20,
    "vllm": 85,
}
"""Seconds of each part; what one leaves, later ones have. More is cut off, not waited for."""
NEEDS = {"attention": "triton", "flashinfer": "flashinfer", "vllm": "vllm"}
"""Packages without which a part is left out."""


def main(words: Sequence[str] | None = None) -> int:
    """Run the parts. 0: something was measured; 1: nothing; 2: no GPU, or arguments that are none."""
    parser = argparse.ArgumentParser(prog="python -m winnow_lab.gpu", description=__doc__.split("\n\n")[0])
    parser.add_argument("-o", "--out", type=Path, default=Path("runs/gpu.json"), help="file of JSON")
    parser.add_argument("--minutes", type=float, default=6, help="of all parts together")
    parser.add_argument("--parts", default=",".join(SHARES), help="names with commas between them")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: toy shapes")
    parser.add_argument("--vllm-python", default=sys.executable, help="interpreter that has vLLM")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    unknown = set(options.parts.split(",")) - set(SHARES)
    if unknown:
        parser.error(f"no part {', '.join(sorted(unknown))}; parts are {', '.join(SHARES)}")
    if options.part:
        _parts(options.device)[options.part]()
        return 0
    missing = _missing(options.device)
    if missing:
        print(f"winnow_lab.gpu: {missing}; nothing was measured", file=sys.stderr)
        return 2
    return _run_all(options)


def _missing(device: str) -> str | None:
    absent = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if absent:
        return f"{', '.join(absent)} is not installed"
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no GPU here"
    return None


def _parts(device: str) -> dict[str, Callable[[], None]]:
    from winnow_lab.gpu import peers
    from winnow_lab.gpu.rows import work

    def kernels(name: str) -> None:
        from winnow_lab.gpu import kernels

        getattr(kernels, name)(device)

    def model(name: str) -> None:
        from winnow_lab.gpu import models

        models.measure(work(name, device), device, every=name == "8b")

    return {
        "limits": lambda: kernels("limits"),
        "attention": lambda: kernels("attention"),
        "8b": lambda: model("8b"),
        "1b": lambda: model("1b"),
        "transformers": lambda: peers.transformers(work("8b", device), device),
        "flashinfer": lambda: peers.flashinfer(device),
        "vllm": lambda: peers.vllm(work("8b", device)),
    }


def _run_all(options: argparse.Namespace) -> int:
    from winnow_lab.gpu.rows import Row, page, read_rows

    wanted = [name for name in SHARES if name in options.parts.split(",")]
    end = time.monotonic() + 60 * options.minutes - 5
    found: dict[str, list[Row]] = {}
    notes: dict[str, str] = {}
    for index, name in enumerate(wanted):
        later = sum(SHARES[each] for each in wanted[index + 1 :]) * options.minutes / 6
        python = options.vllm_python if name == "vllm" else sys.executable
        if not _has(python, NEEDS.get(name)):
            found[name], notes[name] = [], f"{NEEDS[name]} is not installed"
            continue
        lines, note = _run(python, name, options.device, max(end - later - time.monotonic(), 1))
        found[name] = read_rows(lines)
        if note:
            notes[name] = note
    head = _head(options.device)
    print(page(head, found, notes))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    report = {"head": head, "parts": found, "notes": notes}
    options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0 if any(found.values()) else 1


def _has(python: str, package: str | None) -> bool:
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    return package is None or subprocess.run([python, "-c", code], check=False).returncode == 0  # noqa: S603


def _run(python: str, name: str, device: str, seconds: float) -> tuple[list[str], str | None]:
    """Run a part, and end it and its children when its time is over: lines it printed, and what went wrong."""
    paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "WINNOW_MODEL_CACHE": "0"}
    if device == "cpu":
        env["TRITON_INTERPRET"] = "1"
    command = [python, "-m", "winnow_lab.gpu", "--part", name, "--device", device]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, env=env, start_new_session=True)  # noqa: S603
        note = None
        try:
            if process.wait(seconds):
                err.seek(0)
                said = err.read().strip().splitlines() or ["no word"]
                note = f"failed: {said[-1][:200]}"
        except subprocess.TimeoutExpired:
            note = f"cut off after {seconds:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        out.seek(0)
        return out.read().splitlines(), note


def _head(device: str) -> dict[str, str]:
    import torch
    import transformers

    sys.path.insert(0, str(ROOT / "src"))
    from winnow.report.provenance import commit

    card = torch.cuda.get_device_name() if device == "cuda" else "toy shapes on a CPU"
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return {"device": card, **versions, "commit": str(commit())[:12]}


if __name__ == "__main__":
    sys.exit(main())
