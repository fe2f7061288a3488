"""`winnow run --shard` and `winnow merge`, over an engine without a model."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from fake_llm import FakeLLM

from winnow.batch.journal import journal_path
from winnow.cli.main import main

Write = Callable[[Iterable[Any]], Path]
Run = Callable[..., int]
LINES = 11


@pytest.fixture
def prompts(write_prompts: Write) -> Path:
    return write_prompts({"prompt": f"prompt {index}"} for index in range(LINES))


@pytest.fixture
def run(prompts: Path, model_dir: Path, llms: list[FakeLLM]) -> Run:
    """Run over the prompts; the exit code."""

    def command(name: str, *more: str) -> int:
        output = str(prompts.with_name(name))
        return main(["run", str(prompts), "-o", output, "--model", str(model_dir), *more])

    return command


def merge(prompts: Path, *names: str) -> int:
    parts = [str(prompts.with_name(name)) for name in names]
    return main(["merge", str(prompts), *parts, "-o", str(prompts.with_name("merged.jsonl"))])


def run_shards(run: Run, count: int) -> list[str]:
    names = [f"part-{number}.jsonl" for number in range(1, count + 1)]
    for number, name in enumerate(names, 1):
        assert run(name, "--shard", f"{number}/{count}") == 0
    return names


@pytest.mark.parametrize("count", [1, 2, 3, LINES + 1])
def test_merged_shards_are_the_whole_run(run: Run, prompts: Path, count: int) -> None:
    assert run("whole.jsonl") == 0
    names = run_shards(run, count)
    assert merge(prompts, *reversed(names)) == 0
    merged = prompts.with_name("merged.jsonl").read_bytes()
    assert merged == prompts.with_name("whole.jsonl").read_bytes()
    assert [json.loads(line)["index"] for line in merged.splitlines()] == list(range(LINES))


def test_a_shard_resumes_as_itself_alone(
    run: Run, prompts: Path, llms: list[FakeLLM], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("part.jsonl", "--shard", "2/3") == 0
    assert run("part.jsonl", "--shard", "2/3") == 0
    assert len(llms) == 1
    assert run("part.jsonl", "--shard", "1/3") == 2
    assert "shard was '2/3' and is '1/3'" in capsys.readouterr().err


@pytest.mark.parametrize("shard", ["0/2", "3/2", "1", "a/b", "1/0"])
def test_a_shard_that_is_none_is_refused(run: Run, capsys: pytest.CaptureFixture[str], shard: str) -> None:
    assert run("part.jsonl", "--shard", shard) == 2
    assert f"NUMBER <= COUNT, got {shard!r}" in capsys.readouterr().err


def test_parts_that_are_no_whole_are_refused(
    run: Run, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, third = run_shards(run, 3)
    assert run("other.jsonl", "--shard", "3/3", "--max-tokens", "3") == 0
    assert run("half.jsonl", "--shard", "1/2") == 0

    def said(*names: str) -> str:
        assert merge(prompts, *names) == 2
        assert not prompts.with_name("merged.jsonl").exists()
        return capsys.readouterr().err

    assert "there is no 2/3" in said(first, third)
    assert "are both shard 1/3" in said(first, first, second)
    assert "max_tokens was" in said(first, second, "other.jsonl")
    assert "half.jsonl is shard 1/2" in said(first, second, third, "half.jsonl")
    torn = prompts.with_name(second)
    whole = torn.read_bytes()
    torn.write_bytes(whole[:-3])
    assert "has 3 of the 4 answers of shard 2/3" in said(first, second, third)
    torn.write_bytes(whole)
    journal_path(torn).unlink()
    assert "part-2.jsonl.journal" in said(first, second, third)
    prompts.write_text(prompts.read_text() + '{"prompt": "one more"}\n')
    assert "answers other prompts" in said(first)
