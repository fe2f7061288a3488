"""The stack of KV memory, small: rows answer all requests, and each adds what its name says."""

import json
from pathlib import Path

import pytest
from tiny_llama import save_tiny_llama

from winnow_lab.memory import stack
from winnow_lab.memory.stack import LAYERS, Measured, Options, latencies, options_of, study, table
from winnow_lab.report.tables import TextTable
from winnow_lab.study import run_study


def test_rows_build_on_those_above() -> None:
    typed = Options(fits=3, requests=9, eviction="keydiff")
    options = {layer.name: options_of(layer, None, 1 << 20, typed) for layer in LAYERS}
    assert options["padded"]["max_num_seqs"] == 3 and options["contiguous"]["max_num_seqs"] == 9
    assert options["contiguous"]["kv_reservation"] == "max"
    assert options["paged"] | {"kv_cache_dtype": "int8"} == options["int8"]
    assert options["int8"] | {"enable_prefix_caching": True} == options["prefix cache"]
    assert options["eviction"]["kv_cache_dtype"] == "int4" and options["eviction"]["eviction"] == "keydiff"


def test_gains_are_over_the_row_above() -> None:
    rows = {
        layer.name: Measured(1.0, 100.0 * 2**place, 4.0 * 2**place, 9, 10, 0, (5.0, 9.0), (1.0, 2.0), 0.5)
        for place, layer in enumerate(LAYERS)
    }
    shown = dict(table(rows).rows)
    assert shown["padded"][4:6] == ("", "") and shown["contiguous"][4:6] == ("2.00x", "")
    assert shown["paged"][2:6] == ("58", "400", "2.00x", "1.86x")
    assert shown["+ eviction"][5] == "", "the text has no such row"
    assert dict(latencies(rows).rows)["+ int8"] == ("5.0", "65", "9.0", "160", "1.0", "2.0", "50%", "88 %")


def test_rows_hold_more_and_answer_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = TextTable("Simulated", "configuration", ("tokens/s",), (("paged INT4", ("1",)),))
    monkeypatch.setattr(stack, "stack", lambda: simulated)  # a test of its own has it
    model = save_tiny_llama(
        tmp_path / "model", seed=1, head_dim=16, num_hidden_layers=1, max_position_embeddings=512
    )
    names = ["padded", "contiguous", "paged", "prefix cache", "eviction"]
    words = ["--model", str(model), "--requests", "6", "--scale", "32", "--fits", "2", "--threads", "1"]
    words += ["--eviction", "keydiff", "--compression", "2", "-o", str(tmp_path), "--rows", ",".join(names)]
    run_study(Options, study, words)
    rows = json.loads((tmp_path / "stack.json").read_text())["rows"]
    found = {row["row"]: row["median"] for row in rows}
    assert [*found] == names
    fit = [each["fit"] for each in found.values()]
    assert fit[1:] == sorted(fit[1:])
    assert found["contiguous"]["most_running"] == 2 < found["paged"]["most_running"]
    assert found["prefix cache"]["computed"] < found["paged"]["computed"]
    for each in found.values():
        assert 0 < each["token_ms"][0] <= each["token_ms"][1]
        assert 0 < each["latency_s"][0] <= each["latency_s"][1] <= each["seconds"]
        assert 0 < each["used"] <= 1
    assert found["contiguous"]["latency_s"][0] > 0.5 * found["contiguous"]["seconds"] / 6, "waiting counts"
    page = (tmp_path / "stack.md").read_text()
    assert "## Latency and memory" in page and "## Simulated" in page
