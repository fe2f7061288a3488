"""Processors and memory as control groups grant them, read from directories laid out as Linux lays them out."""

import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from winnow.process.resources import HostMemory, available_cpus, host_memory

MIB = 2**20
CORES = {
    f"sys/devices/system/cpu/cpu{n}/topology/thread_siblings_list": f"{n % 4},{n % 4 + 4}\n" for n in range(8)
}
"""Four cores of two hyperthreads each."""
MEMINFO = "MemTotal:       24576 kB\nMemFree:          512 kB\nMemAvailable:   20480 kB\n"


def lay(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 8),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 2),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "10000 100000\n"}, 1),
        # A group's parent may grant less than the group.
        (
            {
                "proc/self/cgroup": "0::/pod/box\n",
                "sys/fs/cgroup/pod/cpu.max": "300000 100000\n",
                "sys/fs/cgroup/pod/box/cpu.max": "max 100000\n",
            },
            3,
        ),
        # In a container the path is the host's, and only the mount is seen.
        ({"proc/self/cgroup": "0::/docker/12ab\n", "sys/fs/cgroup/cpu.max": "400000 100000\n"}, 4),
        # Version 1, several controllers beside each other.
        (
            {
                "proc/self/cgroup": "4:memory:/box\n1:cpu,cpuacct:/box\n",
                "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "500000\n",
                "sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "100000\n",
            },
            5,
        ),
        (
            {
                "proc/self/cgroup": "1:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            8,
        ),
    ],
)
def test_quotas_decide_the_number_of_processors(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    assert available_cpus(lay(tmp_path, files)) == expected


@pytest.mark.parametrize(
    ("cpus", "quota", "expected"),
    [
        (range(8), "max", 4),
        ({0, 4}, "max", 1),
        ({0, 1, 4}, "max", 2),
        (range(8), "300000", 3),
        (range(8), "600000", 4),
    ],
)
def test_hyperthreads_of_a_core_count_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cpus: Iterable[int], quota: str, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(cpus), raising=False)
    group = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": f"{quota} 100000\n"}
    assert available_cpus(lay(tmp_path, CORES | group)) == expected


def test_affinity_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5}, raising=False)
    assert available_cpus(tmp_path) == 2


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, HostMemory(24 * MIB, 20 * MIB)),
        (
            {
                "proc/self/cgroup": "0::/box\n",
                "sys/fs/cgroup/box/memory.max": f"{8 * MIB}\n",
                "sys/fs/cgroup/box/memory.current": f"{6 * MIB}\n",
                # Cached pages of files go when memory is asked for.
                "sys/fs/cgroup/box/memory.stat": f"anon {4 * MIB}\ninactive_file {MIB}\n",
            },
            HostMemory(8 * MIB, 3 * MIB),
        ),
        (
            {
                "proc/self/cgroup": "0::/box\n",
                "sys/fs/cgroup/box/memory.max": "max\n",
                "sys/fs/cgroup/box/memory.current": f"{6 * MIB}\n",
            },
            HostMemory(24 * MIB, 20 * MIB),
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/box\n",
                "sys/fs/cgroup/memory/box/memory.limit_in_bytes": f"{10 * MIB}\n",
                "sys/fs/cgroup/memory/box/memory.usage_in_bytes": f"{12 * MIB}\n",
            },
            HostMemory(10 * MIB, 0),
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2**63 - 4096}\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{12 * MIB}\n",
            },
            HostMemory(24 * MIB, 20 * MIB),
        ),
    ],
)
def test_the_smallest_limit_of_memory_counts(
    tmp_path: Path, files: dict[str, str], expected: HostMemory
) -> None:
    assert host_memory(lay(tmp_path, {"proc/meminfo": MEMINFO} | files)) == expected


def test_a_system_that_does_not_tell(tmp_path: Path) -> None:
    assert host_memory(tmp_path) is None


def test_this_machine() -> None:
    memory = host_memory()
    assert memory is None or 0 < memory.free <= memory.limit
