"""Rows of a report: what a part prints, a line of JSON each, and the page that they make."""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

Row = Mapping[str, Any]
READ, PRODUCT = "read", "product, 16 bits"
"""Names of the limits that other rows are held beside."""


def put(name: str, value: float, unit: str, **more: Any) -> None:
    """Print a row. `bytes` or `flops` of it say what the device has to read or compute at least."""
    print(json.dumps({"name": name, "value": value, "unit": unit, **more}), flush=True)


def milliseconds(call: Callable[[], object], device: str) -> float:
    """The median of a call's durations: of a CUDA graph of it, where one can be captured."""
    if device == "cpu":
        call()
        start = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - start)
    from triton.testing import do_bench, do_bench_cudagraph

    try:
        return float(do_bench_cudagraph(call, rep=30, return_mode="median"))
    except RuntimeError:
        torch.cuda.synchronize()
        return float(do_bench(call, warmup=10, rep=60, return_mode="median"))


def page(head: Mapping[str, Any], parts: Mapping[str, Sequence[Row]], notes: Mapping[str, str]) -> str:
    """One page: a table of each part, beside the limits where they apply; `notes` say what was cut off."""
    limits = {row["name"]: row["value"] for row in parts.get("limits", ())}
    lines = [", ".join(f"{name} {value}" for name, value in head.items())]
    for part, rows in parts.items():
        lines += ["", f"{part}{f' ({notes[part]})' if part in notes else ''}"]
        width = max((len(row["name"]) for row in rows), default=0)
        lines += [
            f"  {row['name']:{width}} {_number(row['value']):>9} {row['unit']}{_beside(row, limits)}"
            for row in rows
        ]
    return "\n".join(lines)


def _beside(row: Row, limits: Mapping[str, float]) -> str:
    read, product = limits.get(READ), limits.get(PRODUCT)
    least = [1e3 * row["bytes"] / (read * 1e12)] if "bytes" in row and read else []
    least += [1e3 * row["flops"] / (product * 1e12)] if "flops" in row and product else []
    if not least or row["unit"] != "ms":
        return ""
    return f"   limit {_number(max(least))}, {100 * max(least) / row['value']:.0f} %"


def _number(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:,.1f}"


def read_rows(lines: Iterable[str]) -> list[Row]:
    """The rows among what a part printed; libraries print too."""
    found: list[Row] = []
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and {"name", "value", "unit"} <= set(row):
            found.append(row)
    return found
