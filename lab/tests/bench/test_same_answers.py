"""The command compares what it says, and would notice a difference."""

import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from winnow_lab.study import run_study

ROWS = (((0, 1, 2), (0, 2)), ((1, 2), (0, 1, 2)))


@pytest.fixture
def bench() -> Any:
    return importlib.import_module("winnow_lab.answers.same_answers")


@pytest.fixture
def shown(bench: Any) -> Any:
    return bench.Answered((5, 6, 7), (-1.0, -2.0, -3.0), ROWS)


def test_what_agrees(bench: Any, shown: Any) -> None:
    found = bench.Agreement.of([shown], [replace(shown, logprobs=(-1.0, -2.25, -3.0))])
    assert (found.equal_tokens, found.tokens) == (3, 3)
    assert (found.shared_kvs, found.kvs) == (10, 10)
    assert (found.difference, found.compared) == (0.25, 3)


def test_log_probabilities_count_until_tokens_differ(bench: Any, shown: Any) -> None:
    found = bench.Agreement.of([shown], [replace(shown, tokens=(5, 9, 7), logprobs=(-1.0, -2.5, 0.0))])
    assert (found.equal_tokens, found.compared, found.difference) == (2, 2, 0.5)


def test_log_probabilities_over_other_kvs_do_not_count(bench: Any, shown: Any) -> None:
    other = replace(shown, rows=(((0, 1, 2), (1, 2)), ROWS[1]), logprobs=(0.0, 0.0, 0.0))
    found = bench.Agreement.of([shown, shown], [other, shown])
    assert (found.shared_kvs, found.kvs) == (19, 20)
    assert (found.compared, found.difference) == (3, 0.0)


def test_the_command(
    bench: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tiny = replace(
        bench.PRESETS["w1"],
        shape=replace(
            bench.PRESETS["w1"].shape,
            num_hidden_layers=2,
            hidden_size=64,
            intermediate_size=128,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            vocab_size=256,
        ),
    )
    monkeypatch.setitem(bench.PRESETS, "w1", tiny)
    words = ["--requests", "2", "--prompt-tokens", "400", "--new-tokens", "4", "--threads", "1"]
    run_study(
        bench.Options,
        bench.study,
        [*words, "--eviction", "full,batch-max", "--json", str(tmp_path / "same.json")],
    )
    assert "batch-max 4x" in capsys.readouterr().out
    found = json.loads((tmp_path / "same.json").read_text())["agreement"]
    for name, kvs in (("full", 2 * 400 * 4), ("batch-max 4x", None)):
        each = found[name]
        assert each["equal_tokens"] == each["tokens"] == 8
        assert each["shared_kvs"] == each["kvs"] == (kvs or each["kvs"])
        assert each["compared"] == 8
        assert each["difference"] < 1e-5
    assert found["batch-max 4x"]["kvs"] < found["full"]["kvs"] / 2


def test_bad_input_is_refused_by_name(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run_study(bench.Options, bench.study, ["--requests", "0"])
    assert "requests must be at least 1, got 0" in capsys.readouterr().err
