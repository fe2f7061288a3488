"""Hardware: rows of data sheets, or this machine, measured."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING

from winnow.errors import ConfigError, known_names

if TYPE_CHECKING:
    import torch

GB, TB, GIB, MIB = 10**9, 10**12, 2**30, 2**20
_CHUNK, _FEATURES = 512, 512
"""Rows and features of the product that is measured: a chunk of a prompt, and a call of less than a millisecond."""
_MEMORY, _PIECE = 2**28, 2**24
_MEASURED = 0.4  # seconds of each measurement


@dataclass(frozen=True)
class Hardware:
    """One device.

    Attributes:
        memory: bytes.
        bandwidth: of its memory, bytes per second.
        compute: floating-point operations per second of dense matrix products in the type that models run in; measured
            on a CPU: of the engine's own linear layers in the type of the run.
        link: bytes per second between its memory and the host's, one way; for a CPU, what copying within memory takes.
        kind: gpu or cpu.
        measured: on this machine, not read from a data sheet.
    """

    name: str
    memory: int
    bandwidth: float
    compute: float
    link: float
    kind: str = "gpu"
    measured: bool = False


_GEN3, _GEN4, _GEN5 = 16 * GB, 32 * GB, 64 * GB  # PCIe, 16 lanes, one way

_ROWS = (
    # Data sheets: 16-bit tensor operations without sparsity. Memory: where ECC takes a part, what the driver reports.
    Hardware("T4", 16 * GIB, 320 * GB, 65 * TB, _GEN3),
    Hardware("V100-16GB", 16 * GIB, 900 * GB, 125 * TB, _GEN3),
    Hardware("V100", 32 * GIB, 900 * GB, 125 * TB, _GEN3),
    Hardware("TITAN-V", 12 * GIB, 653 * GB, 110 * TB, _GEN3),
    Hardware("A10", 23028 * MIB, 600 * GB, 125 * TB, _GEN4),
    Hardware("L4", 23034 * MIB, 300 * GB, 121 * TB, _GEN4),
    Hardware("L40S", 46068 * MIB, 864 * GB, 362 * TB, _GEN4),
    Hardware("A6000", 48 * GIB, 768 * GB, 155 * TB, _GEN4),
    Hardware("RTX-3090", 24 * GIB, 936 * GB, 71 * TB, _GEN4),
    Hardware("RTX-4090", 24 * GIB, 1008 * GB, 165 * TB, _GEN4),
    Hardware("A100-40GB", 40 * GIB, 1555 * GB, 312 * TB, _GEN4),
    Hardware("A100", 80 * GIB, 2039 * GB, 312 * TB, _GEN4),
    Hardware("H100", 81559 * MIB, 3350 * GB, 989.5 * TB, _GEN5),
    Hardware("H200", 141 * GIB, 4800 * GB, 989.5 * TB, _GEN5),
    Hardware("KCache-64GB", 64 * GIB, 1 * TB, 180 * TB, _GEN4),
    # Channels times transfers; cores times clock times operations of their vector units in float32.
    Hardware("desktop-ddr5", 64 * GIB, 89.6 * GB, 1.2 * TB, 45 * GB, "cpu"),
    Hardware("epyc-9654", 384 * GIB, 460.8 * GB, 7.4 * TB, 230 * GB, "cpu"),
    Hardware("xeon-8480", 256 * GIB, 307.2 * GB, 7.2 * TB, 150 * GB, "cpu"),
)
HARDWARE: Mapping[str, Hardware] = {each.name: each for each in _ROWS}
"""Hardware by name. KCache-64GB is the card of that paper, which it does not name: 64 GB, 1 TB/s, 180 TFLOPS."""
THIS = "this"


def find_hardware(
    name: str,
    dtype: str = "auto",
    weight_dtype: str = "auto",
    model_dtype: str = "bfloat16",
    cpu_dtype: str = "float32",
) -> Hardware:
    """A row by name, upper or lower case; `this` measures the machine, which takes a second or two.

    Args:
        dtype, weight_dtype: of the run, as options of the engine; what products of `this` are measured in.
        model_dtype, cpu_dtype: what `dtype` auto is on a GPU, and on a CPU.
    """
    if name == THIS:
        own = (model_dtype, cpu_dtype) if dtype == "auto" else (dtype, dtype)
        return _this_machine(*own, weight_dtype)
    found = {key.lower(): row for key, row in HARDWARE.items()}.get(name.lower().replace(" ", "-"))
    if found is None:
        raise ConfigError(f"gpu must be a known name or this, got {name!r}; {known_names(name, HARDWARE)}")
    return found


def _this_machine(gpu_dtype: str, cpu_dtype: str, weight_dtype: str) -> Hardware:
    """Measure this machine: its GPU where there is one, else its processor, by the engine's own linear layers."""
    import torch

    from winnow.process.resources import host_memory
    from winnow.process.threads import TeamWait, set_threads
    from winnow.report.provenance import Machine
    from winnow_lab.bench.limits import Limits

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    machine = Machine.here(device)
    if device.type == "cuda":
        limits = Limits.measure(getattr(torch, gpu_dtype), device)
        name, memory = machine.accelerator or "cuda", torch.cuda.mem_get_info(device)[1]
        return Hardware(name, memory, limits.read, limits.matmul, _link_rate(device), "gpu", True)
    set_threads(None)  # as the engine does, like the way in which threads wait
    with TeamWait():
        product = _linear_rate(getattr(torch, cpu_dtype), weight_dtype)
        read, copy = _memory_rates(max(_MEMORY, 8 * machine.last_level_cache))
    limit = host_memory()
    memory = limit.limit if limit is not None else 0
    return Hardware(f"{machine.cpu} ({machine.cores} cores)", memory, read, product, copy, "cpu", True)


def _memory_rates(num_bytes: int) -> tuple[float, float]:
    """Return bytes per second that are read, and that are copied, of a buffer much larger than the caches.

    In pieces, one after the other: none is in a cache when it comes round, and a short call is likelier to have the
    processor for itself.
    """
    import torch

    pieces = torch.ones(num_bytes // _PIECE, _PIECE // 8, dtype=torch.int64, device="cpu")
    read, copied = (
        _PIECE / _least_seconds(partial(call, cycle(range(len(pieces)))))
        for call in (
            lambda turn: pieces[next(turn)].sum(),
            lambda turn: pieces[next(turn)].copy_(pieces[next(turn)]),
        )
    )
    return read, copied


def _linear_rate(dtype: "torch.dtype", weight_dtype: str) -> float:
    """Return operations per second of the engine's linear layers on this processor, at a chunk of a prompt."""
    import torch

    from winnow.config import ModelConfig
    from winnow.models.model.blocks import BlockWeights
    from winnow.process.native import native_kernels

    plain = torch.nn.Linear(_FEATURES, _FEATURES, bias=False, dtype=dtype)
    layer: torch.nn.Module = plain
    kernels = native_kernels()
    if kernels is not None:
        from winnow.models.fast.fused.kernels import LayerKernels
        from winnow.models.fast.packed_linear import linear_maker

        blocks = BlockWeights.of(ModelConfig(weight_dtype=weight_dtype))
        layer = linear_maker(LayerKernels(kernels), dtype, blocks=blocks)([plain])
    x = torch.ones(_CHUNK, _FEATURES, dtype=dtype, device="cpu")
    with torch.inference_mode():
        return 2 * _CHUNK * _FEATURES**2 / _least_seconds(lambda: layer(x))


def _least_seconds(call: Callable[[], object]) -> float:
    """Return the least time of calls over some tenths of a second: other work on the machine only adds to it."""
    call()
    least, end = math.inf, time.perf_counter() + _MEASURED
    while (start := time.perf_counter()) < end or math.isinf(least):
        call()
        least = min(least, time.perf_counter() - start)
    return least


def _link_rate(device: "torch.device") -> float:
    import torch

    host = torch.empty(_MEMORY, dtype=torch.uint8, pin_memory=True, device="cpu")
    there = torch.empty_like(host, device=device)

    def copy() -> None:
        there.copy_(host, non_blocking=True)
        torch.cuda.synchronize(device)

    return _MEMORY / _least_seconds(copy)
