"""What each way to hold KVs adds: the stack of kv-cache-memory's "End-to-End Serving Throughput", measured.

    python -m winnow_lab.memory.stack --requests 64 --fits 2 --repeat 2

The requests are those that `python -m winnow_lab.papers plan stack` simulates, with lengths divided by --scale:
all there at once, 1024 + 512 tokens on average, exponentially drawn, of which 512 begin every prompt. The KV memory
holds --fits sequences of the longest kind (8192 / scale tokens) in 16 bits, and is the same in every row. Each row
changes one thing of the row before:

padded: batches of --fits, padded to their longest, run until all are finished (the padded engine's "static").
contiguous: a request reserves the longest sequence; a finished one makes room at once.
paged: a request holds blocks for what it has computed.
int8, prefix cache, int4: stored so; the common beginning is computed and held once.
eviction: each prompt is compressed once it is read.

Each row is an engine of its own; rows follow one another, and the whole is repeated --repeat times: medians by rate.
NAME.md has tables of throughput, latency and memory in use with what the text prints beside them, and the simulated
one; NAME.svg shows throughput.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from winnow import LLM
from winnow.cache import CacheSize
from winnow.errors import ConfigError
from winnow.values.units import format_bytes
from winnow_lab.bench.answering import answer_all, fixed_length
from winnow_lab.bench.traces import TraceRequest
from winnow_lab.papers.plan.memory_text_serving import STACK, Configuration, stack, workload
from winnow_lab.report import percentile
from winnow_lab.report.plots import Axis, Line, Panel, line_chart
from winnow_lab.report.tables import TextTable
from winnow_lab.study import PageOptions, Result, flag, in_turn, run_study

LONGEST = 8192
"""Tokens that a contiguous cache reserves, before --scale."""


@dataclass(frozen=True)
class Layer:
    """A row: engine options that it adds to the rows above it, and the row of the text that it stands beside."""

    name: str
    adds: dict[str, Any]
    printed: int | None = None


LAYERS = (
    Layer("padded", {"engine": "padded:mode=static"}),
    Layer(
        "contiguous", {"engine": "paged", "kv_reservation": "max", "enable_prefix_caching": False}, printed=0
    ),
    Layer("paged", {"kv_reservation": "on-demand"}, printed=1),
    Layer("int8", {"kv_cache_dtype": "int8"}, printed=2),
    Layer("prefix cache", {"enable_prefix_caching": True}, printed=3),
    Layer("int4", {"kv_cache_dtype": "int4"}, printed=4),
    Layer("eviction", {}),
)
NAMES = tuple(layer.name for layer in LAYERS)


@dataclass(frozen=True)
class Options(PageOptions):
    model: str | None = flag(None, "directory or GGUF file (default: the demo model)")
    requests: int = flag(128, least=1)
    scale: int = flag(4, "lengths are divided by it", least=1)
    fits: int = flag(4, "longest sequences in the KV memory", least=1)
    eviction: str = flag("leverage")
    compression: float = flag(4.0, least=1)
    rows: tuple[str, ...] = flag(NAMES, choices=NAMES)
    repeat: int = flag(1, least=1)
    threads: int | None = flag(None, "of torch", least=1)
    seed: int = flag(0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scale > 512:
            raise ConfigError(f"--scale must be at most 512, got {self.scale}")


@dataclass(frozen=True)
class Measured:
    """What one engine made of the requests.

    Attributes:
        fit: requests whose KVs the memory holds: its bytes over those that a running request held, mean over steps.
        most_running: requests with KVs at a time; not more than there are.
        token_ms, latency_s: p50 and p99 over requests: time for each token behind the first; from arrival to end.
        used: part of the KV memory in use, reserved blocks included, mean over steps.
    """

    seconds: float
    output_rate: float
    fit: float
    most_running: int
    computed: int
    preemptions: int
    token_ms: tuple[float, float]
    latency_s: tuple[float, float]
    used: float


def options_of(layer: Layer, model: str | None, kv_memory: int, typed: Options) -> dict[str, Any]:
    """The engine's options of a row: its own and those of the rows above."""
    options: dict[str, Any] = {"model": model, "dtype": "bfloat16", "kv_memory": kv_memory}
    options |= {"max_model_len": LONGEST // typed.scale, "threads": typed.threads}
    for each in LAYERS[: LAYERS.index(layer) + 1]:
        options |= each.adds
    if layer.name == "padded":
        return options | {"max_num_seqs": typed.fits}
    if layer.name == "eviction":
        options |= {"eviction": typed.eviction, "compression": typed.compression, "kv_floor": 1}
    return options | {"max_num_seqs": typed.requests}


def memory_for(model: str | None, fits: int, longest: int, requests: int) -> tuple[int, int]:
    """Bytes of `fits` sequences of the longest kind in 16 bits, tables of all requests included; and the size of the
    model's vocabulary."""
    with LLM(model, kv_memory="2GiB", dtype="bfloat16", max_model_len=longest, max_num_seqs=requests) as llm:
        executor: Any = llm._engine._executor
        layout = executor.layout
        size = CacheSize.of_blocks(layout, fits * layout.blocks_for(longest), requests, longest)
        return size.nbytes(layout), executor._model.vocab_size


def requests_of(count: int, scale: int, seed: int) -> list[TraceRequest]:
    return [
        replace(
            each,
            prompt_tokens=max(each.prompt_tokens // scale, 1),
            output_tokens=max(each.output_tokens // scale, 1),
            block_tokens=each.block_tokens // scale,
        )
        for each in workload(count, seed)
    ]


def measure(options: dict[str, Any], requests: Sequence[TraceRequest], vocab_size: int) -> Measured:
    asked = [
        (each.prompt(vocab_size, seed), fixed_length(each.output_tokens))
        for seed, each in enumerate(requests)
    ]
    with LLM(**options) as llm:
        llm.generate(
            [[vocab_size - 1 - place for place in range(64)]], fixed_length(2)
        )  # first steps cost more
        answered = answer_all(llm, asked, final_only=True)
    counted = [step.stats for step in answered.steps]
    held = sum(stats.kv_bytes_held for stats in counted)
    running = sum(stats.num_running for stats in counted)
    new_tokens = sum(each.output_tokens for each in requests)
    times: list[Any] = [output.metrics for output in answered.outputs]
    return Measured(
        answered.seconds,
        new_tokens / answered.seconds,
        counted[0].kv_bytes_budget * running / held if held else options["max_num_seqs"],
        max(stats.num_running for stats in counted),
        answered.counted("prompt_tokens"),
        answered.counted("num_preemptions"),
        middle_and_worst(
            1e3 * (each.finished_time - each.first_token_time) / (asked.output_tokens - 1)
            for each, asked in zip(times, requests, strict=True)
            if asked.output_tokens > 1
        ),
        middle_and_worst(each.latency for each in times),
        fmean(stats.kv_bytes_used / stats.kv_bytes_budget for stats in counted),
    )


def middle_and_worst(values: Iterable[Any]) -> tuple[float, float]:
    ordered = sorted(values)
    return percentile(ordered, 50), percentile(ordered, 99)


def label(layer: Layer) -> str:
    """A row's name in tables; + before what comes on top of the rows above."""
    return layer.name if layer.name in ("padded", "contiguous", "paged") else f"+ {layer.name}"


def _text(layer: Layer) -> Configuration | None:
    return None if layer.printed is None else STACK[layer.printed]


def table(rows: Mapping[str, Measured]) -> TextTable:
    """A line per row: what it brought over the row before, beside what the text prints."""
    lines: list[str] = []
    before: Measured | None = None
    printed_before: int | None = None
    for layer in (layer for layer in LAYERS if layer.name in rows):
        row, text = rows[layer.name], _text(layer)
        gain = f"{row.output_rate / before.output_rate:.2f}x" if before else ""
        printed_gain = f"{text.printed_rate / printed_before:.2f}x" if text and printed_before else ""
        fits = f"{row.fit:.1f} | {row.most_running} | {text.printed_batch if text else ''}"
        rate = f"{row.output_rate:,.0f} | {gain} | {printed_gain}"
        lines.append(f"{label(layer)} | {fits} | {rate} | {row.computed:,} | {row.preemptions}")
        before, printed_before = row, text.printed_rate if text else None
    head = "configuration | sequences that fit | most at once | printed | output tokens/s | gain | printed"
    return TextTable.read("Measured", f"{head} | prompt tokens computed | preemptions", lines)


def latencies(rows: Mapping[str, Measured]) -> TextTable:
    """A line per row: how long tokens and requests took, and how much of the memory was in use."""
    lines = []
    for layer in (layer for layer in LAYERS if layer.name in rows):
        row, text = rows[layer.name], _text(layer)
        low, high, use = (*text.printed_token_ms, f"{text.printed_use} %") if text else ("", "", "")
        tokens = f"{row.token_ms[0]:.1f} | {low} | {row.token_ms[1]:.1f} | {high}"
        requests = f"{row.latency_s[0]:.1f} | {row.latency_s[1]:.1f} | {row.used:.0%} | {use}"
        lines.append(f"{label(layer)} | {tokens} | {requests}")
    head = "ms a token, p50 | printed | p99 | printed | request p50, s | p99 | memory in use | printed"
    return TextTable.read("Latency and memory", f"configuration | {head}", lines)


def figure(rows: Mapping[str, Measured]) -> Any:
    """Sequences at once and tokens a second, as multiples of the contiguous cache's; printed ones beside."""
    names = [layer.name for layer in LAYERS if layer.name in rows]
    text = [(place, STACK[layer.printed]) for place, layer in enumerate(LAYERS) if layer.printed is not None]
    across, up = Axis("", ticks=names), Axis("times contiguous", low=0.0)

    def panel(title: str, measured: str, printed: str) -> Panel:
        base, said = getattr(rows["contiguous"], measured), getattr(STACK[0], printed)
        ours = [getattr(rows[name], measured) / base for name in names]
        theirs = [getattr(each, printed) / said for _, each in text]
        beside = Line("printed (70B)", [place for place, _ in text], theirs, reference=True)
        return Panel(title, across, up, [Line("measured", range(len(names)), ours), beside])

    batches = panel("sequences that fit", "fit", "printed_batch")
    return line_chart([batches, panel("output tokens/s", "output_rate", "printed_rate")])


def study(typed: Options) -> Iterator[Result]:
    """All rows in turn, some times; the median by seconds counts."""
    kv_memory, vocab_size = memory_for(typed.model, typed.fits, LONGEST // typed.scale, typed.requests)
    requests = requests_of(typed.requests, typed.scale, typed.seed)
    layers, simulated = {layer.name: layer for layer in LAYERS if layer.name in typed.rows}, stack()

    def of_layer(layer: Layer) -> Measured:
        return measure(options_of(layer, typed.model, kv_memory, typed), requests, vocab_size)

    model = "The demo model" if typed.model is None else Path(typed.model).name
    facts = [
        f"{model}, bfloat16; {typed.requests} requests at once, {1024 // typed.scale} + {512 // typed.scale} tokens on "
        f"average, exponentially drawn, the first {512 // typed.scale} the same. {format_bytes(kv_memory)} of KV "
        f"memory: {typed.fits} sequences of {LONGEST // typed.scale:,} tokens in bfloat16. Eviction: "
        f"{typed.eviction} {typed.compression:g}x. Medians of {typed.repeat}."
    ]
    notes = (
        "sequences that fit: KV memory over the bytes that a running request held, mean over steps; padded batches "
        "have as many as whole sequences fit. gain: over the row above. "
        "printed: `kv-cache-memory`, Llama 3 70B on 4 A100; its latencies are of tokens, its use the GPU's. "
        "ms a token: of a request, behind its first. memory in use: mean over steps; what is reserved counts. "
        "The last table is that of `python -m winnow_lab.papers plan stack`.\n"
    )
    for runs in in_turn(layers, typed.repeat, of_layer):
        rows = {name: sorted(each, key=lambda m: m.seconds)[len(each) // 2] for name, each in runs.items()}
        numbers = [
            {"row": row, "median": asdict(rows[row]), "runs": [asdict(each) for each in found]}
            for row, found in runs.items()
        ]
        yield Result(
            "The stack of KV memory",
            [table(rows), latencies(rows), simulated],
            facts,
            notes,
            {"kv_memory": kv_memory, "rows": numbers},
            figures={"": partial(figure, rows)} if len(rows) == len(LAYERS) else {},
        )


if __name__ == "__main__":
    sys.exit(run_study(Options, study))
