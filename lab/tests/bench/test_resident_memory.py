"""What the command tells of a process's memory is what the process holds."""

import importlib
import mmap
import sys
from pathlib import Path
from typing import Any

import pytest

from winnow.models import DEMO_MODEL
from winnow_lab.bench.workload import Workload
from winnow_lab.study import run_study

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is read from /proc")

MIB = 2**20
SIZE = 64 * MIB
SLACK = 8 * MIB


@pytest.fixture
def bench() -> Any:
    return importlib.import_module("winnow_lab.memory.resident_memory")


def stages(bench: Any, loading_peak: int, answering_peak: int) -> Any:
    few = bench.Resident(3 * MIB, 2 * MIB)
    return bench.Stages(few, few, loading_peak, few, few, answering_peak)


def test_memory_of_its_own_and_of_files_stand_apart(bench: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(SIZE))
    before = bench.Resident.now()
    own = b"x" * SIZE
    with_own = bench.Resident.now()
    assert abs(with_own.anonymous - before.anonymous - len(own)) < SLACK
    assert abs(with_own.of_files - before.of_files) < SLACK
    with (tmp_path / "file").open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert not any(mapped[:: mmap.PAGESIZE])
        with_file = bench.Resident.now()
    assert abs(with_file.of_files - with_own.of_files - SIZE) < SLACK
    assert with_file.total == with_file.anonymous + with_file.of_files


def test_a_peak_is_remembered_until_it_is_to_be_forgotten(bench: Any) -> None:
    before = bench.Resident.now().total
    held = b"x" * SIZE
    del held
    assert bench.memory_sizes()["VmHWM"] > before + SIZE - SLACK
    bench.forget_peak()
    assert bench.memory_sizes()["VmHWM"] < before + SIZE - SLACK


def test_a_process_of_its_own_tells_its_stages(bench: Any) -> None:
    options = {"model": str(DEMO_MODEL), "kv_memory": 16 * MIB}
    found = bench.measure_apart(bench.Case(options, Workload(2, 32, 4), 256, 1), "the demo model")
    totals = [part.total for part in (found.torch, found.imports, found.loaded)]
    assert 50 * MIB < totals[0] < totals[1] < totals[2] <= found.loading_peak + MIB
    assert found.answered.total <= found.answering_peak + MIB
    assert found.peak == max(found.loading_peak, found.answering_peak)


def test_a_process_that_fails_is_told(bench: Any, tmp_path: Path) -> None:
    from winnow_lab.peers.environment import PeerError

    case = bench.Case({"model": str(tmp_path / "none")}, Workload(1, 8, 2), 256, 1)
    with pytest.raises(PeerError, match="no such directory"):
        bench.measure_apart(case, "nothing")


def test_the_limit_is_for_weights_kvs_and_an_allowance(bench: Any) -> None:
    found = {"a": stages(bench, 500 * MIB, 400 * MIB), "b": stages(bench, 300 * MIB, 484 * MIB)}
    table = bench.table("title", found, 100 * MIB, 100 * MIB)
    rows = dict(table.rows)
    assert table.columns == ("a", "b")
    assert rows["limit"] == ("480", "480") and rows["weights"] == ("100", "100")
    assert rows["loading, peak"] == ("500", "300") and rows["answering, peak"] == ("400", "484")
    assert rows["peak - limit"] == ("+20", "+4") and rows["loaded"] == ("5 (3 + 2)", "5 (3 + 2)")


@pytest.mark.parametrize(
    "typed", [["--eviction", "nothing-such"], ["--kv-seqs", "0"], ["--compression", "0.5"]], ids=" ".join
)
def test_what_cannot_run_is_refused(bench: Any, typed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("winnow_lab.bench.presets.LlamaShape.save", lambda *_: DEMO_MODEL)
    monkeypatch.setattr(bench, "measure_apart", lambda *_: pytest.fail("nothing may be measured"))
    with pytest.raises(SystemExit, match="error: "):
        run_study(bench.Options, bench.study, [*typed, "--prompt-tokens", "8", "--new-tokens", "2"])
