"""Every example runs as it stands and prints something."""

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from winnow.cli.main import main

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


def test_there_are_examples() -> None:
    assert EXAMPLES


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [str(path)])
    # In this process: one of its own takes five seconds and more to import torch and transformers.
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.strip()


def test_the_demo_ends_in_what_compression_brings(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = EXAMPLES[0].parent / "demo" / "compare.py"
    monkeypatch.setattr("sys.argv", [str(script), "--prompts", "4", "--new-tokens", "16"])
    runpy.run_path(str(script), run_name="__main__")
    head, whole, less, last = capsys.readouterr().out.splitlines()
    assert head == "4 prompts, answers of 16 tokens, 24MiB of KV memory"
    assert re.match(r"whole cache +\d+ tokens/s +100% right", whole)
    assert re.match(r"leverage 8x +\d+ tokens/s +100% right", less)
    assert re.fullmatch(r"same memory: \d\.\d times the tokens per second, 100% right for 100%", last)


def test_the_notebook_runs_and_shows_tables_and_a_page() -> None:
    cells = json.loads((EXAMPLES[0].parent / "own_policy.ipynb").read_text())["cells"]
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)  # noqa: S102
    tables, page = names["found"]._repr_markdown_(), names["inspection"]._repr_html_()
    assert "| ValueNorm |" in tables and "| kv-compress |" in tables and "| full cache |" in tables
    assert page.startswith("<iframe srcdoc=") and page.count("<") == 2, "the page within is escaped"
    assert names["inspection"].after_prompt.compression > 3.0
    names["llm"].close()


def test_a_policy_of_a_file_in_commands(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    own = f"{EXAMPLES[0].parent}/own_score.py:MINE"
    prompt = (
        "The hobby of Tom is chess. " + "It rained. " * 60 + "\nQuestion: What is the hobby of Tom?\nAnswer:"
    )
    amount = ["--kv-memory", "16MiB", "--compression", "4", "--kv-floor", "1"]
    page = tmp_path / "page.html"
    assert main(["inspect", prompt, "-o", str(page), "--eviction", own, *amount]) == 0
    assert page.exists() and "ValueNorm" in capsys.readouterr().out
    assert (
        main(
            [
                "eval",
                "demo",
                "--eviction",
                f"kv-compress,{own}",
                "--samples",
                "1",
                "--tokens",
                "256",
                "--control",
                "none",
                "--categories",
                "single",
                "--query",
                "aware",
                "--compression",
                "2",
            ]
        )
        == 0
    )
    assert own[-12:] in capsys.readouterr().out.replace("\n", "")
    (tmp_path / "bad.py").write_text("policy = 3\n")
    for name, message in (
        ("bad.py:policy", "must be an EvictionPolicy or a score, got 3"),
        ("bad.py:none", "must be an EvictionPolicy or a score, got None"),
        ("none.py:policy", "there is no such file"),
    ):
        assert main(["generate", "a", "--model", "demo", "--eviction", f"{tmp_path}/{name}"]) == 2
        assert message in capsys.readouterr().err
