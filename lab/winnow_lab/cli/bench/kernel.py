"""`winnow bench kernel`: the operations of attention, beside the machine's limits."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from winnow.cli.flags.options import add_flags, given
from winnow.cli.flags.paths import check_json_path, write_json
from winnow.report.provenance import typed_command
from winnow.values.units import format_bytes
from winnow_lab.bench.kernel_config import KernelConfig
from winnow_lab.report.console import console

if TYPE_CHECKING:
    from winnow_lab.bench.kernel import KernelReport, Measurement

SUMMARY = "the operations of attention, in GB/s and GFLOP/s, beside the machine's limits"
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


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.usage = "winnow bench kernel [options]"
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument("--json", metavar="FILE", type=Path, help="write everything measured as JSON too")
    add_flags(parser, KernelConfig, "what is measured")


def execute(namespace: argparse.Namespace) -> int:
    """Measure, show, and return the exit code."""
    config = KernelConfig(**given(namespace, KernelConfig))
    check_json_path(namespace.json)
    from winnow.report.provenance import report_head
    from winnow_lab.bench.kernel import measure_kernels

    with Console(stderr=True).status("starting") as status:
        report = measure_kernels(config, lambda step: status.update(f"measuring: {step}"))
    out = console()
    for line in _facts(report):
        out.print(line, highlight=False, soft_wrap=True)
    out.print(_table(report))
    write_json(namespace.json, report_head(typed_command(), report.machine) | report.to_json())
    return 0


def _facts(report: "KernelReport") -> list[str]:
    """Return machine, limits and shape, a line each."""
    config, limits = report.config, report.limits
    order = "scattered" if config.scatter else "contiguous"
    rows = "uneven" if config.uneven else "even"
    return [
        str(report.machine),
        f"limits: read {limits.read / 1e9:.1f} GB/s, copy {limits.copy / 1e9:.1f} GB/s, "
        f"{config.dtype} matrix product {limits.matmul / 1e9:,.0f} GFLOP/s",
        f"{config.batch} sequences of {config.context} KVs in {rows} rows, {config.query_heads} query heads on "
        f"{config.kv_heads} KV heads of {config.head_dim}, {order} blocks of {config.block_size}; "
        f"prefill of {config.prefill_batch} x {config.chunk}",
        "; ".join(
            f"{cache.layers} layers, {format_bytes(cache.nbytes)} of {cache.kv_format} keys and values"
            for cache in report.caches
        ),
        f"last-level cache {format_bytes(report.machine.last_level_cache)}; median of {config.repeats}",
    ]


def _table(report: "KernelReport") -> Table:
    """Return a row per operation and backend; where there are several, a column compares them with the first."""
    several = len(report.config.backends) > 1 or len(report.caches) > 1
    table = Table()
    columns = ("operation", "backend", "KVs", "ms", "GB/s", "of limit", "GFLOP/s", "of limit", "scores")
    for column in columns + ("time",) * several:
        is_name = column in ("operation", "backend", "KVs")
        table.add_column(column, justify="left" if is_name else "right", no_wrap=is_name)
    first: Measurement | None = None
    for measurement in report.measurements:
        new = first is None or first.operation != measurement.operation
        if new:
            first = measurement
            if several:
                table.add_section()
        assert first is not None
        ratio = (f"{measurement.median / first.median:.2f}x",) if several else ()
        name = measurement.operation if new else ""
        table.add_row(name, measurement.backend, measurement.kv_format, *_cells(measurement), *ratio)
    return table


def _cells(measurement: "Measurement") -> tuple[str, ...]:
    return (
        f"{measurement.median * 1e3:.3f}",
        _number(measurement.bandwidth, 1e9, ".1f"),
        _number(measurement.bandwidth_share, 1, ".0%"),
        _number(measurement.flop_rate, 1e9, ",.0f"),
        _number(measurement.flop_share, 1, ".0%"),
        _number(measurement.scores_cost, 1, "+.0%"),
    )


def _number(value: float | None, unit: float, form: str) -> str:
    return "" if value is None else format(value / unit, form)
