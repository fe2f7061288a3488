"""What hardware can do: rows of data sheets, or this machine, measured."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from winnow.errors import ConfigError, known_names

GB, TB, GIB, MIB = 10**9, 10**12, 2**30, 2**20


@dataclass(frozen=True)
class Hardware:
    """One device.

    Attributes:
        memory: bytes.
        bandwidth: of its memory, bytes per second.
        compute: floating-point operations per second of dense matrix products in the type that models run in.
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

    def to_json(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)


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
"""By name. KCache-64GB is the card of that paper, which it does not name: 64 GB, 1 TB/s, 180 TFLOPS."""
THIS = "this"


def find_hardware(name: str) -> Hardware:
    """A row by name, upper or lower case; `this` measures the machine, which takes some seconds.

    Raises:
        ConfigError: there is no such row.
    """
    if name == THIS:
        return this_machine()
    found = {key.lower(): row for key, row in HARDWARE.items()}.get(name.lower().replace(" ", "-"))
    if found is None:
        raise ConfigError(f"gpu must be a known name or this, got {name!r}; {known_names(name, HARDWARE)}")
    return found


def this_machine() -> Hardware:
    """Measure this machine: its GPU where there is one, else its processor."""
    import torch

    from winnow.bench.limits import Limits
    from winnow.report.provenance import Machine
    from winnow.resources import host_memory

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    machine = Machine.here(device)
    limits = Limits.measure(torch.float32 if device.type == "cpu" else torch.bfloat16, device)
    if device.type == "cuda":
        memory = torch.cuda.mem_get_info(device)[1]
        return Hardware(
            machine.accelerator or "cuda", memory, limits.read, limits.matmul, _link_rate(device), "gpu", True
        )
    limit = host_memory()
    # Host memory is copied within itself: each byte is read and written.
    return Hardware(
        f"{machine.cpu} ({machine.cores} cores)",
        limit.limit if limit is not None else 0,
        limits.read,
        limits.matmul,
        limits.copy / 2,
        "cpu",
        True,
    )


def _link_rate(device: Any) -> float:
    """Bytes per second from pinned host memory to a GPU."""
    import time

    import torch

    host = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device=device)
    best = 0.0
    for _ in range(4):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        there.copy_(host, non_blocking=True)
        torch.cuda.synchronize(device)
        best = max(best, host.nbytes / (time.perf_counter() - start))
    return best
