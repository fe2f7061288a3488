"""The benchmark of accuracy under eviction, at its smallest: files appear, finished cells are not computed again."""

import importlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from winnow import LLM

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
OPTIONS = ("--samples", "1", "--tokens", "160")
Main = Callable[[Sequence[str]], int]


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Main:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    entry: Main = importlib.import_module("eviction_accuracy").main
    return entry


def run(main: Main, out: Path, *options: str) -> dict[str, Any]:
    """The results after a run that ended well."""
    assert main([*OPTIONS, "--out", str(out), *options]) == 0
    results: dict[str, Any] = json.loads((out / "eviction_accuracy.json").read_text())
    return results


def by_name(results: dict[str, Any]) -> dict[tuple[str | None, str, float | None], dict[str, Any]]:
    return {(cell["mode"], cell["preset"], cell["compression"]): cell for cell in results["cells"]}


def test_tables_plots_and_cells_that_are_done(
    main: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = by_name(run(main, tmp_path, "--presets", "full,h2o-once,fastgen", "--compressions", "2,4,32"))
    modes = ("aware", "agnostic")
    expected = {("h2o-once", 2.0), ("h2o-once", 4.0), ("h2o-once", 32.0), ("fastgen", None)}
    assert set(cells) == {(None, "full", 1.0)} | {(mode, *each) for mode in modes for each in expected}
    assert cells[None, "full", 1.0]["reached"] == 1.0
    for mode in modes:
        kept = cells[mode, "h2o-once", 2.0]
        assert len(kept["scores"]) == 8
        assert all(0.0 <= each <= 1.0 for scores in kept["scores"].values() for each in scores)
        assert kept["reached"] == pytest.approx(2.0, abs=0.1)
        assert "protected set of 8" in cells[mode, "h2o-once", 32.0]["refused"]

    table = (tmp_path / "eviction_accuracy.md").read_text()
    assert "| query-aware | 2x | 4x | 32x |" in table
    assert "| query-agnostic, 4x | single |" in table
    assert "refused for all prompts: the budget of" in table
    for mode in modes:
        assert f"eviction_accuracy_{mode}.svg" in table
        assert "<svg" in (tmp_path / f"eviction_accuracy_{mode}.svg").read_text()

    asked: list[str] = []
    generate = LLM.generate

    def watched(self: LLM, prompts: Any, params: Any) -> Any:
        asked.extend(each.eviction for each in params)
        return generate(self, prompts, params)

    monkeypatch.setattr(LLM, "generate", watched)
    more = by_name(run(main, tmp_path, "--presets", "full,h2o-once,recent", "--compressions", "2"))
    assert set(asked) == {"recent"}
    assert {name: more[name] for name in cells} == cells

    monkeypatch.setattr(LLM, "__init__", lambda *_, **__: pytest.fail("there was nothing left to compute"))
    run(main, tmp_path, "--presets", "h2o-once,recent", "--compressions", "2")
    with pytest.raises(SystemExit, match="other settings"):
        main([*OPTIONS, "--seed", "1", "--out", str(tmp_path)])


def test_an_interrupted_run_keeps_what_is_done(
    main: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate, calls = LLM.generate, 0

    def interrupted(self: LLM, prompts: Any, params: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise KeyboardInterrupt
        return generate(self, prompts, params)

    monkeypatch.setattr(LLM, "generate", interrupted)
    assert main([*OPTIONS, "--out", str(tmp_path), "--presets", "full,recent", "--modes", "aware"]) == 130
    results = json.loads((tmp_path / "eviction_accuracy.json").read_text())
    assert [cell["preset"] for cell in results["cells"]] == ["full"]
    assert (tmp_path / "eviction_accuracy.md").exists()


@pytest.mark.parametrize("options", [["--presets", "nope"], ["--compressions", "0.5"], ["--samples", "0"]])
def test_options_that_make_no_sense_are_refused(main: Main, options: list[str]) -> None:
    with pytest.raises(SystemExit):
        main(options)
