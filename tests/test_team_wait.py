"""How many threads compute, and how they wait beside other work."""

import subprocess
import sys
import time

import pytest
import torch

from winnow.process import threads

pytestmark = pytest.mark.cpu

_native = pytest.importorskip("winnow._native")


@pytest.fixture(autouse=True)
def same_number_afterwards() -> object:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("asked", "granted", "expected"), [(None, 2, 2), (None, 64, 4), (3, 2, 3), (1, 64, 1)]
)
def test_number_of_threads(
    asked: int | None, granted: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is asked for counts; else torch's number, unless less is granted."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    monkeypatch.setattr(threads, "available_cpus", lambda: granted)
    torch.set_num_threads(4)
    threads.set_threads(asked)
    assert torch.get_num_threads() == expected


def test_the_users_own_number_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    monkeypatch.setattr(threads, "available_cpus", lambda: 2)
    torch.set_num_threads(4)
    threads.set_threads(None)
    assert torch.get_num_threads() == 4


@pytest.mark.skipif(_native.run_queue_delay_ns() < 0, reason="needs Linux with schedstat")
def test_waits_are_short_beside_other_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice as many busy processes as processors: whatever computes here has to queue."""
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    busy = [
        subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"])
        for _ in range(2 * threads.available_cpus())
    ]
    try:
        with threads.TeamWait() as wait:
            deadline = time.monotonic() + 60
            while not wait.is_short and time.monotonic() < deadline:
                torch.ones(200, 200) @ torch.ones(200, 200)
            assert wait.is_short or threads.available_cpus() == 1
        assert not wait.is_short, "stopping leaves the runtime's default in force"
    finally:
        for process in busy:
            process.kill()
            process.wait()


def test_stopping_twice_and_results_after_releasing_a_team() -> None:
    wait = threads.TeamWait()
    wait.stop()
    wait.stop()
    torch.set_num_threads(2)
    values = torch.arange(2**20, dtype=torch.float64)
    for _ in range(3):
        assert float((values * 2).sum()) == 2**20 * (2**20 - 1)
        threads.release_team()


def test_a_team_is_released() -> None:
    """Threads of the process: fewer after than before."""
    script = """
import os, time, torch
from winnow.process.threads import release_team
torch.set_num_threads(3)
torch.ones(2**22).mul_(2)
count = lambda: len(os.listdir("/proc/self/task"))
before = count()
release_team()
deadline = time.monotonic() + 30  # threads that have ended are listed a little longer
while before - count() < 2 and time.monotonic() < deadline:
    time.sleep(0.01)
print(before - count())
"""
    if not sys.platform.startswith("linux"):
        pytest.skip("needs Linux")
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120
    )
    assert int(found.stdout) == 2
