"""How a decode step grows with batch and context: its time against the KVs it reads, beside the machine's read limit.

    python -m winnow_lab.speed.step_growth [--preset w1] [--scatter] [--threads N] [--json FILE] [--plot FILE.svg]

Sequences are given rows of the wanted length, filled with random KVs, and one token each goes through the whole
model: layers, attention and head, without the scheduler. For every batch size a straight line is fitted to time against
bytes of keys and values; 1 / slope is the rate at which a step reads its cache. Blocks lie as a fresh cache hands them
out, in runs; `--scatter` takes them in random order, as after long use with much eviction.
"""

import argparse
import json
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from winnow.attention import Spans, open_backend
from winnow.cache import Ledger
from winnow.config import EngineConfig
from winnow.executor.torch_executor import TorchExecutor
from winnow.models import load_model
from winnow.report.provenance import Machine, report_head
from winnow_lab.bench.limits import Limits
from winnow_lab.bench.presets import PRESETS, model_cache
from winnow_lab.bench.timing import seconds_of

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXTS = (1024, 2048, 4096, 8192, 16384, 32768)
MOST_KVS = 2**17  # batch times context
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Point:
    """One batch size and context."""

    batch: int
    context: int
    kv_bytes: int
    """Keys and values of all rows of all layers."""
    seconds: float
    """Median."""


@dataclass(frozen=True)
class Line:
    """seconds = start + kv_bytes / rate, fitted to the points of one batch size."""

    batch: int
    start: float
    rate: float
    """Bytes per second."""
    worst: float
    """Largest distance of a point from the line, as a share of its time."""

    @classmethod
    def fit(cls, points: list[Point]) -> "Line":
        size = np.array([point.kv_bytes for point in points], dtype=float)
        seconds = np.array([point.seconds for point in points])
        # Relative distances count alike: without weights the longest context alone would decide.
        slope, start = np.polyfit(size, seconds, 1, w=1 / seconds)
        worst = float((np.abs(slope * size + start - seconds) / seconds).max())
        return cls(points[0].batch, float(start), float(1 / slope), worst)


class Steps:
    """A model and a cache for so many KVs a row in all."""

    def __init__(self, preset: str, *, scatter: bool) -> None:
        shape = PRESETS[preset].shape
        config = EngineConfig.from_options(
            {
                "model": shape.save(model_cache()),
                "dtype": PRESETS[preset].dtype,
                "max_model_len": max(CONTEXTS) + 1,
                "max_num_seqs": max(BATCHES),
                # keys, values, position, one score and tables
                "kv_memory": int(
                    1.1
                    * MOST_KVS
                    * shape.num_hidden_layers
                    * shape.num_key_value_heads
                    * (4 * shape.head_dim + 8)
                ),
            }
        )
        # Positions beyond those that the model was made for take as long as any other.
        loaded = load_model(config.model, beyond_trained_len=True)
        self._executor = TorchExecutor(
            loaded, config, open_backend("auto", loaded.device), loaded.kv_layout(config.cache, 1)
        )
        self._ledger = Ledger(self._executor.layout, self._executor.size)
        pool = self._executor.cache.pool
        pool.of_layer(-1).k.normal_()
        pool.of_layer(-1).v.normal_()
        pool.position.zero_()
        if scatter:
            allocator = self._ledger.allocator
            allocator.release(np.random.default_rng(0).permutation(allocator.allocate(pool.num_blocks)))

    def measure(self, batch: int, context: int, repeats: int) -> Point:
        ledger, layout = self._ledger, self._executor.layout
        slots = [ledger.open() for _ in range(batch)]
        ledger.append(slots, [context] * batch)
        self._executor.apply(ledger.take_update())
        spans = Spans.build(slots, [context - 1] * batch, [1] * batch, np.full(batch, context))
        tokens = torch.arange(batch)[None]

        def step() -> None:
            with torch.inference_mode():
                self._executor.decode_logits(tokens, spans)

        step()
        seconds = statistics.median(seconds_of(step, _CPU) for _ in range(repeats))
        for slot in slots:
            ledger.close(slot)
        kv_bytes = batch * context * layout.rows_per_seq * 2 * layout.head_dim * layout.dtype.itemsize
        return Point(batch, context, kv_bytes, seconds)


def plot(points: list[Point], lines: list[Line], limits: Limits, file: Path) -> None:
    """Left: time against bytes, a line for each batch size. Right: time against batch size, a line for each context."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (by_bytes, by_batch) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    colours = plt.get_cmap("viridis")(np.linspace(0, 0.9, len(lines)))
    for line, colour in zip(lines, colours, strict=True):
        own = [point for point in points if point.batch == line.batch]
        size = np.array([point.kv_bytes / 1e9 for point in own])
        by_bytes.plot(
            size, [point.seconds * 1e3 for point in own], "o", color=colour, label=f"batch {line.batch}"
        )
        by_bytes.plot(size, (line.start + size * 1e9 / line.rate) * 1e3, "-", color=colour)
    most = max(point.kv_bytes for point in points)
    by_bytes.plot([0, most / 1e9], [0, most / limits.read * 1e3], "k--", label="read limit")
    by_bytes.set(xlabel="keys and values read, GB", ylabel="decode step, ms")
    by_bytes.legend(fontsize="small")
    for context in CONTEXTS:
        own = [point for point in points if point.context == context]
        by_batch.plot([p.batch for p in own], [p.seconds * 1e3 for p in own], "o-", label=f"{context} tokens")
    by_batch.set(xlabel="batch size", ylabel="decode step, ms", xscale="log", yscale="log")
    by_batch.set_xticks(BATCHES, [str(batch) for batch in BATCHES], minor=False)
    by_batch.legend(fontsize="small", title="context")
    figure.savefig(file, dpi=150, metadata={"Date": None} if file.suffix == ".svg" else {})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=list(PRESETS), default="w1", help="whose model")
    parser.add_argument("--repeats", type=int, default=5, help="steps of each point; the median counts")
    parser.add_argument("--scatter", action="store_true", help="blocks in random order")
    parser.add_argument("--threads", type=int, help="threads of torch")
    parser.add_argument("--json", type=Path, help="write everything measured there")
    parser.add_argument("--plot", type=Path, help="draw it there, as PNG or SVG")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)

    machine = Machine.here()
    limits = Limits.measure(torch.bfloat16, _CPU)
    print(f"{machine}; reads {limits.read / 1e9:.1f} GB/s")
    steps = Steps(arguments.preset, scatter=arguments.scatter)
    points: list[Point] = []
    for batch in BATCHES:
        for context in CONTEXTS:
            if batch * context <= MOST_KVS:
                points.append(steps.measure(batch, context, arguments.repeats))
                last = points[-1]
                print(f"batch {batch:4} context {context:6}: {last.seconds * 1e3:7.2f} ms", flush=True)
    several = [batch for batch in BATCHES if sum(point.batch == batch for point in points) > 1]
    lines = [Line.fit([point for point in points if point.batch == batch]) for batch in several]
    for line in lines:
        print(
            f"batch {line.batch:4}: {line.start * 1e3:6.2f} ms + bytes / {line.rate / 1e9:5.1f} GB/s "
            f"({line.rate / limits.read:4.0%} of the read limit), off by {line.worst:4.0%} at most"
        )
    if arguments.json:
        report = report_head(sys.argv, machine) | {
            "limits": asdict(limits),
            "points": [asdict(point) for point in points],
            "lines": [asdict(line) for line in lines],
        }
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    if arguments.plot:
        plot(points, lines, limits, arguments.plot)


if __name__ == "__main__":
    main()
