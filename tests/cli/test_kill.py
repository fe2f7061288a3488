"""`kill -9` at random moments loses no finished line and repeats none: the real command, the real engine."""

import json
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from forked import start
from tiny_llama import VOCAB, save_tiny_llama

from winnow import LLM, SamplingParams
from winnow.batch.journal import journal_path

KILLS = 2
REQUESTS = 36


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of a few thousand random weights, which takes prompts of token ids."""
    return save_tiny_llama(tmp_path_factory.mktemp("model"), seed=0)


def requests() -> list[dict[str, Any]]:
    """Requests of different lengths, so that they finish out of order."""
    chance = random.Random(0)
    return [
        {
            "prompt": [chance.randrange(3, VOCAB) for _ in range(chance.randrange(2, 60))],
            "max_tokens": chance.randrange(1, 40),
            "temperature": chance.choice([0, 1]),
            "ignore_eos": True,
        }
        for _ in range(REQUESTS)
    ]


def whole_lines(output: Path) -> int:
    """Results on disk: lines of the output and of the journal after its header."""
    files = [path.read_bytes() for path in (output, journal_path(output)) if path.exists()]
    return sum(file.count(b"\n") for file in files) - 1


def test_kills_and_a_restart(model: Path, tmp_path: Path, command_env: dict[str, str]) -> None:
    seed = time.time_ns() % 10**6
    print(f"the moments of the kills come from seed {seed}")  # shown if the test fails
    chance = random.Random(seed)
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text("".join(json.dumps(line) + "\n" for line in requests()))
    command = ["run", str(prompts), "-o", str(output), "--model", str(model)]
    command += ["--kv-memory", "256KiB", "--max-num-seqs", "8", "--progress", "off"]

    codes = []
    for _ in range(KILLS):
        # Each time a little further, so that the last one still finds work to interrupt.
        target = whole_lines(output) + chance.randrange(1, REQUESTS // (KILLS + 1))
        process = start(command, command_env)
        while process.is_alive() and whole_lines(output) < target:
            time.sleep(0.001)
        time.sleep(chance.random() / 100)
        process.kill()
        process.join()
        codes.append(process.exitcode)
        done = [
            json.loads(line) for line in output.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")
        ]
        assert [record["index"] for record in done] == list(range(len(done)))

    assert -signal.SIGKILL in codes
    process = start(command, command_env)
    process.join()
    assert process.exitcode == 0
    records = [json.loads(line) for line in output.read_bytes().splitlines()]
    assert [record["index"] for record in records] == list(range(REQUESTS))
    assert [record["token_ids"] for record in records] == uninterrupted(prompts, model, tmp_path)


def uninterrupted(prompts: Path, model: Path, tmp_path: Path) -> list[list[int]]:
    """The answers of a run that is not killed."""
    from winnow.cli.main import main

    output = tmp_path / "whole.jsonl"
    command = ["run", str(prompts), "-o", str(output), "--model", str(model)]
    command += ["--kv-memory", "256KiB", "--max-num-seqs", "8", "--progress", "off"]
    assert main(command) == 0
    return [json.loads(line)["token_ids"] for line in output.read_bytes().splitlines()]


def test_greedy_answers_are_those_of_the_library(model: Path, tmp_path: Path) -> None:
    lines = [line for line in requests()[:12] if line["temperature"] == 0]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    answers = uninterrupted(prompts, model, tmp_path)
    with LLM(model, kv_memory="1MiB") as llm:
        params = [
            SamplingParams(temperature=0, ignore_eos=True, max_tokens=line["max_tokens"]) for line in lines
        ]
        outputs = llm.generate([line["prompt"] for line in lines], params)
    assert answers == [output.outputs[0].token_ids for output in outputs]
