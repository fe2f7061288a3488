"""Resources of the machine that this process may use: processors and memory, as affinity and control groups allow.

The machine's own counts are no guide in a container: it may have 64 cores of which a quota grants two.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from math import ceil
from pathlib import Path

try:
    import resource
except ImportError:  # not Unix
    resource = None  # type: ignore[assignment]

_ROOT = Path("/")
_MOST_FILES = 2**20
# Larger than any machine's memory: how control groups of version 1 write "no limit".
_NO_LIMIT = 2**60


@dataclass(frozen=True)
class HostMemory:
    """Bytes of memory: the machine's or its control groups' smallest limit, and what can be taken without swapping,
    files' cached pages included."""

    limit: int
    free: int


def available_cpus(root: Path = _ROOT) -> int:
    """Return processor cores of this process's affinity, as its control groups' quotas allow; `root` has proc and sys.
    Hyperthreads of a core count once: they share what multiplies."""
    try:
        cpus = os.sched_getaffinity(0)  # which control groups' cpusets limit
    except AttributeError:  # not Linux
        cpus = set(range(os.cpu_count() or 1))
    cores = {_siblings(root / f"sys/devices/system/cpu/cpu{cpu}/topology") or str(cpu) for cpu in cpus}
    quotas = [quota for group in _groups(root, "cpu") if (quota := _cpu_quota(group)) is not None]
    return max(1, min([len(cores), *(ceil(quota) for quota in quotas)]))


def host_memory(root: Path = _ROOT) -> HostMemory | None:
    """Return the memory that this process may use; None where the system does not tell."""
    machine = _numbers(root / "proc/meminfo", unit=1024)
    if "MemTotal:" not in machine or "MemAvailable:" not in machine:
        return None
    limit, free = machine["MemTotal:"], machine["MemAvailable:"]
    for group in _groups(root, "memory"):
        for limit_file, used_file, cache_key in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            most, used = _integer(group / limit_file), _integer(group / used_file)
            if most is not None and used is not None and most < _NO_LIMIT:
                reclaimable = _numbers(group / "memory.stat").get(cache_key, 0)
                limit, free = min(limit, most), min(free, max(0, most - used + reclaimable))
    return HostMemory(limit, free)


def raise_open_files() -> int | None:
    """Raise this process's soft limit of open files to the hard one, where the system lets it. Returns the limit; None:
    the system has none, or does not tell."""
    if resource is None:
        return None  # type: ignore[unreachable]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, _MOST_FILES) if hard != resource.RLIM_INFINITY else _MOST_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return None if soft == resource.RLIM_INFINITY else soft


def resident_bytes(root: Path = _ROOT) -> int | None:
    """Return the bytes of memory that this process takes now; None where the system does not tell."""
    return _numbers(root / "proc/self/status", unit=1024).get("VmRSS:")


def directory_bytes(directory: Path) -> int:
    """Return bytes of all files below a directory, those that go meanwhile left out."""
    total = 0
    for path in directory.rglob("*"):
        with suppress(FileNotFoundError):
            total += path.stat().st_size * path.is_file()
    return total


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield directories of the control groups that this process is in, each with those above it, versions 1 and 2."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / (controller if controllers else "")
        group = mount / name.lstrip("/")
        # In a container the path may be the host's, of which only the mount itself is seen.
        yield from (path for path in (group, *group.parents) if path == mount or mount in path.parents)


def _siblings(topology: Path) -> str | None:
    """Return the processors of a core, as Linux writes them; None: it does not tell."""
    try:
        return (topology / "thread_siblings_list").read_text(encoding="ascii").strip()
    except OSError:
        return None


def _cpu_quota(group: Path) -> float | None:
    """Return processors that a control group grants, as a fraction; None: as many as there are."""
    try:
        quota, period = (group / "cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        quota, period = (str(_integer(group / f"cpu.cfs_{name}_us")) for name in ("quota", "period"))
    if not quota.isdigit() or not period.isdigit() or int(period) == 0:
        return None  # "max", -1, or no such file
    return int(quota) / int(period)


def _integer(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _numbers(path: Path, unit: int = 1) -> dict[str, int]:
    """Return lines of a name and a number, as bytes."""
    try:
        lines = [line.split() for line in path.read_text(encoding="ascii").splitlines()]
    except (OSError, ValueError):
        return {}
    return {line[0]: int(line[1]) * unit for line in lines if len(line) > 1 and line[1].isdigit()}
