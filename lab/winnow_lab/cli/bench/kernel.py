"""`winnow bench kernel`: the operations of attention, beside the machine's limits."""

from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console

from winnow.values.units import format_bytes
from winnow_lab.bench.kernel_config import KernelConfig
from winnow_lab.report.tables import TextTable
from winnow_lab.study import Result, StudyOptions

if TYPE_CHECKING:
    from winnow_lab.bench.kernel import KernelReport, Measurement

SUMMARY = "the operations of attention, in GB/s and GFLOP/s, beside the machine's limits"
ARGUMENTS = ""
DESCRIPTION = """\
Measure the machine's limits, then every operation of attention over the paged cache.

Operations run over several layers of distinct KVs, so that they come from memory and not from
the processor's caches. Times are those of one layer. GB/s count keys and values only, each once
for all query heads that share them; "of limit" says how near that comes to what the machine does
at most: reading memory for `decode`, copying it for `write` and `compact`, multiplying matrices
for GFLOP/s. Reading is measured again in turn with what only reads, and the median of the shares
counts. "scores" is what observing them adds to the time without.
"""
EPILOG = """\
examples:
  winnow bench kernel
  winnow bench kernel --dtype float32 --context 8192 --batch 8 --uneven
  winnow bench kernel --attention-backend auto,reference --json kernels.json
  winnow bench kernel --kv-cache-dtype bfloat16,int8,int4,k=int8,v=int4
What is compared takes turns, so that a machine that slows down slows all of it.
"""
Options = KernelConfig


def measure(config: KernelConfig) -> Result:
    from winnow_lab.bench.kernel import measure_kernels

    with Console(stderr=True).status("starting") as status:
        report = measure_kernels(config, lambda step: status.update(f"measuring: {step}"))
    shape = {name: value for name, value in vars(config).items() if name not in vars(StudyOptions())}
    numbers = {
        "config": shape,
        "caches": [asdict(cache) for cache in report.caches],
        "limits": asdict(report.limits),
        "operations": [measurement.to_json() for measurement in report.measurements],
    }
    facts = _facts(config, report)
    return Result("winnow bench kernel", [_table(report)], facts, numbers=numbers, lists=("operations",))


def _facts(config: KernelConfig, report: "KernelReport") -> list[str]:
    limits = report.limits
    order = "scattered" if config.scatter else "contiguous"
    return [
        f"limits: read {limits.read / 1e9:.1f} GB/s, copy {limits.copy / 1e9:.1f} GB/s, "
        f"{config.dtype} matrix product {limits.matmul / 1e9:,.0f} GFLOP/s",
        f"{config.batch} sequences of {config.context} KVs in {'un' * config.uneven}even rows, {config.query_heads} "
        f"query heads on {config.kv_heads} KV heads of {config.head_dim}, {order} blocks of {config.block_size}; "
        f"prefill of {config.prefill_batch} x {config.chunk}",
        "; ".join(
            f"{cache.layers} layers, {format_bytes(cache.nbytes)} of {cache.kv_format} keys and values"
            for cache in report.caches
        ),
        f"last-level cache {format_bytes(report.machine.last_level_cache)}; median of {config.repeats}",
    ]


def _table(report: "KernelReport") -> TextTable:
    """A row per operation and backend; where there are several, a column compares them with the first."""
    first: dict[str, Measurement] = {}
    rows = []
    for each in report.measurements:
        name = "" if each.operation in first else each.operation
        ratio = each.median / first.setdefault(each.operation, each).median
        entries = (
            each.backend,
            each.kv_format,
            f"{each.median * 1e3:.3f}",
            _number(each.bandwidth, 1e9, ".1f"),
            _number(each.bandwidth_share, 1, ".0%"),
            _number(each.flop_rate, 1e9, ",.0f"),
            _number(each.flop_share, 1, ".0%"),
            _number(each.scores_cost, 1, "+.0%"),
        )
        rows.append((name, (*entries, f"{ratio:.2f}x")))
    columns = ("backend", "KVs", "ms", "GB/s", "of limit", "GFLOP/s", "of limit", "scores", "time")
    several = len(rows) > len(first)
    return TextTable(
        "An operation over one layer",
        "operation",
        columns[: len(columns) if several else -1],
        tuple((name, entries[: len(columns) if several else -1]) for name, entries in rows),
        words=(0, 1),
    )


def _number(value: float | None, unit: float, form: str) -> str:
    return "" if value is None else format(value / unit, form)
