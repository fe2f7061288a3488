"""What a report says of the machine."""

import json
import sys
from pathlib import Path

import pytest
import torch

import winnow_lab.papers.__main__ as papers
from winnow.report.provenance import Machine, cpu_cache_bytes, report_head, typed_command
from winnow_lab.study.study import results_json


def write_cpu(folder: Path, cpu: int, shared_by: str) -> None:
    for index, (level, size) in enumerate([(1, "32K"), (3, "16384K"), (2, "1024K")]):
        cache = folder / f"cpu{cpu}" / "cache" / f"index{index}"
        cache.mkdir(parents=True)
        (cache / "level").write_text(f"{level}\n")
        (cache / "size").write_text(f"{size}\n")
        (cache / "shared_cpu_list").write_text(f"{shared_by if level == 3 else cpu}\n")


def test_last_level_caches_of_all_sockets_count_once_each(tmp_path: Path) -> None:
    for cpu in range(4):
        write_cpu(tmp_path, cpu, "0-1" if cpu < 2 else "2-3")
    (tmp_path / "cpufreq").mkdir()
    assert cpu_cache_bytes(tmp_path) == 2 * 16 * 2**20


def test_a_system_that_does_not_say_has_a_usual_cache(tmp_path: Path) -> None:
    assert cpu_cache_bytes(tmp_path) == 32 * 2**20


def test_without_a_gpu_auto_is_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert Machine.here("auto") == Machine.here("cpu")


@pytest.mark.parametrize("program", ["/somewhere/bin/winnow", "/somewhere/winnow/__main__.py"])
def test_the_command_is_told_as_a_user_types_it(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [program, "bench", "h2h"])
    assert typed_command() == ["winnow", "bench", "h2h"]


def test_a_package_is_told_as_python_starts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [papers.__file__, "h2h"])
    assert typed_command() == ["python", "-m", "winnow_lab.papers", "h2h"]


def test_a_report_can_be_placed() -> None:
    machine = Machine.here()
    head = report_head(["winnow", "bench"], machine)
    assert head["command"] == ["winnow", "bench"]
    assert head["date"].endswith("+00:00")
    assert head["machine"]["torch_version"] in str(machine)
    assert head["machine"]["cores"] >= 1


def test_results_have_a_line_for_each_entry() -> None:
    numbers = {"task": "demo", "cells": [{"a": 1}, {"a": [2, None]}], "none": []}
    text = results_json(numbers)
    assert json.loads(text) == numbers
    assert text.splitlines()[3:5] == ['{"a": 1},', '{"a": [2, null]}']
    assert json.loads(results_json({"cells": []})) == {"cells": []}
