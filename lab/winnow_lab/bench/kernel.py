"""The operations of attention backends, side by side, beside what the machine can do."""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from winnow.attention import (
    AttentionBackend,
    AttentionObserver,
    AttentionSpec,
    Group,
    Smoothing,
    Spans,
    Term,
    open_backend,
)
from winnow.cache import CacheLayout
from winnow.cache.codec import codec_of
from winnow.report.provenance import Machine
from winnow_lab.bench.kernel_case import KernelCase, kernel_layout, torch_device, torch_dtype
from winnow_lab.bench.kernel_config import KernelConfig
from winnow_lab.bench.limits import Call, Limits, Reading, interleave

DECODE_OBSERVED = {
    "attention": AttentionObserver((Term.ATTENTION,)),
    "squared": AttentionObserver((Term.SQUARED,), exclude_first=10),
}
"""Observers of decoding queries: H2O, KV-Compress (eq. 19)."""
WINDOW = 8
WINDOW_OBSERVED = AttentionObserver((Term.SQUARED,), Group.SUM, replace=True, smoothing=Smoothing(7))
"""Observer of a prompt's last queries in KV-Compress."""


Prepare = Callable[[AttentionBackend], Callable[[int], object]]


@dataclass(frozen=True)
class Operation:
    """One operation over one layer.

    Attributes:
        prepare: makes of a backend what runs over a layer, as a step does once for all of them.
        bytes_read, bytes_written: of keys and values, in a layer; queries, outputs, positions and scores come on top
            and are not counted.
        flops: of the two products of attention, over the pairs of query and KV that are not masked; 0: memory is the
            limit.
    """

    name: str
    prepare: Prepare
    bytes_read: float = 0
    bytes_written: float = 0
    flops: int = 0


@dataclass(frozen=True)
class Measurement:
    """An operation as one backend computed it.

    Attributes:
        seconds: for one layer, by repeat.
        reading: bytes per second that memory is read at, at best, where KVs are only read, measured in turn, by repeat.
        unobserved: seconds of the same without scores, where they are observed, measured in turn.
    """

    operation: str
    backend: str
    kv_format: str
    seconds: tuple[float, ...]
    bytes_read: float
    bytes_written: float
    flops: int
    limits: Limits
    reading: tuple[float, ...] | None = None
    unobserved: tuple[float, ...] | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def scores_cost(self) -> float | None:
        """Cost of observing scores, as a share of the time without; the median over repeats."""
        if self.unobserved is None:
            return None
        return statistics.median(a / b for a, b in zip(self.seconds, self.unobserved, strict=True)) - 1.0

    @property
    def bandwidth(self) -> float | None:
        """Bytes of keys and values per second; None where arithmetic is the limit and hardly any are moved."""
        moved = self.bytes_read + self.bytes_written
        return moved / self.median if moved else None

    @property
    def bandwidth_share(self) -> float | None:
        """Share of the bandwidth of copying where the operation writes KVs, else of reading: median of repeats."""
        if self.reading is None:
            return None if self.bandwidth is None else self.bandwidth / self.limits.copy
        shares = (self.bytes_read / s / most for s, most in zip(self.seconds, self.reading, strict=True))
        return statistics.median(shares)

    @property
    def flop_rate(self) -> float | None:
        """Floating-point operations per second; None where memory is the limit."""
        return self.flops / self.median if self.flops else None

    @property
    def flop_share(self) -> float | None:
        """Share of the measured rate of a matrix product in this dtype."""
        return None if self.flop_rate is None else self.flop_rate / self.limits.matmul

    def to_json(self) -> dict[str, Any]:
        values = asdict(self)
        del values["limits"], values["unobserved"]
        derived = ("median", "bandwidth", "bandwidth_share", "flop_rate", "flop_share", "scores_cost")
        return values | {name: getattr(self, name) for name in derived}


@dataclass(frozen=True)
class CacheFacts:
    """A filled cache of one format; `nbytes` are those of keys and values in all layers together."""

    kv_format: str
    layers: int
    nbytes: int


@dataclass(frozen=True)
class KernelReport:
    machine: Machine
    caches: tuple[CacheFacts, ...]
    limits: Limits
    measurements: tuple[Measurement, ...]


def measure_kernels(config: KernelConfig, progress: Callable[[str], None]) -> KernelReport:
    """Measure limits, then every operation on every backend; `progress` is called with what comes next."""
    formats = config.kv_formats
    backends = {
        kind: dict(_open(name, kernel_layout(config, codec_of(kind))) for name in config.attention_backend)
        for kind in formats
    }
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device = torch_device(config)
    machine = Machine.here(device)
    progress("limits of the machine")
    limits = Limits.measure(torch_dtype(config), device)
    progress("filling the cache")
    with torch.inference_mode():
        cases = {
            kind: KernelCase.build(replace(config, kv_cache_dtype=(kind,)), machine.last_level_cache)
            for kind in formats
        }
        reading = Reading.fastest(device)
        measurements: list[Measurement] = []
        for groups in zip(*(operations(case) for case in cases.values()), strict=True):
            progress(groups[0][0].name)
            measurements += _measure(groups, backends, cases, limits, reading)
    caches = (
        CacheFacts(kind, case.layers, int(case.lengths.sum()) * case.kv_bytes) for kind, case in cases.items()
    )
    return KernelReport(machine, tuple(caches), limits, tuple(measurements))


def _open(name: str, layout: CacheLayout) -> tuple[str, AttentionBackend]:
    """A backend and what the report calls it: "auto" alone would mean another one tomorrow."""
    backend = open_backend(name, layout=layout)
    kind = type(backend).__name__.removesuffix("Backend").lower()
    return (f"auto ({kind})" if name == "auto" else name), backend


def operations(case: KernelCase) -> Iterator[list[Operation]]:
    """Yield each operation of a backend, without and with observed scores.

    Compaction comes last: afterwards rows are no prompts any more.
    """
    config = case.config
    decode, prefill = case.spans(config.batch, 0), case.spans(0, config.prefill_batch)
    mixed = case.spans(config.batch - 1, 1)
    yield [Operation("write, decode", _write(case, decode), bytes_written=_written(case, decode))]
    yield [Operation("write, prefill", _write(case, prefill), bytes_written=_written(case, prefill))]
    read = _read(case, decode)
    observed = [
        Operation(f"decode, {name}", _attend(case, case.spans(config.batch, 0, observe)), read)
        for name, observe in DECODE_OBSERVED.items()
    ]
    yield [Operation("decode", _attend(case, decode), read), *observed]
    flops = attention_flops(case, prefill)
    window = case.spans(0, config.prefill_batch, WINDOW_OBSERVED, min(WINDOW, config.chunk))
    yield [
        Operation("prefill", _attend(case, prefill), flops=flops),
        Operation(f"prefill, window {WINDOW}", _attend(case, window), flops=flops),
    ]
    yield [Operation("mixed", _attend(case, mixed), _read(case, mixed), flops=attention_flops(case, mixed))]
    moves = [case.moves(layer) for layer in range(case.layers)]
    moved = sum(len(source) for source, _ in moves) / case.layers * case.kv_bytes

    def compact(backend: AttentionBackend, layer: int) -> None:
        backend.compact(case.cache.pool, *moves[layer])

    yield [Operation("compact", lambda backend: partial(compact, backend), moved, moved)]


def attention_flops(case: KernelCase, spans: Spans) -> int:
    """Operations of q k^T and of the product with v, over unmasked pairs, a multiplication and an addition counted as
    two; the mean over the layers, where rows differ."""
    lengths = case.cache.tables.host_lengths[spans.slots].astype(np.int64)  # [B, layers, heads]
    counts = spans.counts[:, None, None]
    # The last of n queries sees the whole row, the one before it one KV less, and so on.
    pairs = (counts * lengths - counts * (counts - 1) // 2).sum() / case.layers
    config = case.config
    return round(4 * config.head_dim * pairs * (config.query_heads // config.kv_heads))


def _read(case: KernelCase, spans: Spans) -> float:
    return float(case.cache.tables.host_lengths[spans.slots].sum()) / case.layers * case.kv_bytes


def _written(case: KernelCase, spans: Spans) -> float:
    return float(spans.counts.sum()) * case.config.kv_heads * case.kv_bytes


def _attend(case: KernelCase, spans: Spans) -> Prepare:
    spec = AttentionSpec(scale=case.config.head_dim**-0.5)
    q = case.q[: int(spans.counts.sum())]
    return _over_layers(case, spans, lambda step, layer: step.attend(layer, q, spec))


def _write(case: KernelCase, spans: Spans) -> Prepare:
    tokens = int(spans.counts.sum())
    k, v = case.k[:tokens], case.v[:tokens]
    return _over_layers(case, spans, lambda step, layer: step.write(layer, k, v))


def _over_layers(case: KernelCase, spans: Spans, compute: Callable[[Any, int], object]) -> Prepare:
    return lambda backend: partial(compute, backend.prepare(case.cache, spans))


def _measure(
    groups: Sequence[Sequence[Operation]],
    backends: Mapping[str, Mapping[str, AttentionBackend]],
    cases: Mapping[str, KernelCase],
    limits: Limits,
    reading: Reading,
) -> Iterator[Measurement]:
    """Measure the operations of a group, by format of KVs, on each backend, all in turn, a pass over all layers at a
    time. So is reading, where they only read: memory is faster in one minute than in another."""
    first, any_case = groups[0][0], next(iter(cases.values()))
    reads = first.bytes_read > 0 and not first.bytes_written

    def over_layers(operation: Operation, kind: str, name: str) -> Call:
        backend, layers = backends[kind][name], cases[kind].layers

        def run() -> None:
            compute = operation.prepare(backend)
            for layer in range(layers):
                compute(layer)

        return run

    rows = [
        (operation, kind, name)
        for alike in zip(*groups, strict=True)
        for operation, kind in zip(alike, cases, strict=True)
        for name in backends[kind]
    ]
    calls = [over_layers(*row) for row in rows]
    rounds = interleave(calls + [reading.run] * reads, any_case.config.repeats, any_case.q.device)
    rates = tuple(reading.num_bytes / second for second in rounds.pop()) if reads else None
    unobserved: dict[tuple[str, str], tuple[float, ...]] = {}
    for (operation, kind, name), seconds in zip(rows, rounds, strict=True):
        of_layer = tuple(second / cases[kind].layers for second in seconds)
        yield Measurement(
            operation.name,
            name,
            kind,
            of_layer,
            operation.bytes_read,
            operation.bytes_written,
            operation.flops,
            limits,
            rates,
            unobserved.get((kind, name)),
        )
        unobserved.setdefault((kind, name), of_layer)
