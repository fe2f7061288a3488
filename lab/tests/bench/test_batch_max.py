"""The Batch-Max bench: its search, its memory, its early end of hopeless cells, and its report."""

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from winnow import LLM
from winnow.errors import ConfigError
from winnow.outputs import CompletionOutput, RequestMetrics, RequestOutput
from winnow_lab.evaluate.sample import Question
from winnow_lab.papers.__main__ import main
from winnow_lab.papers.batch_max.measure import (
    KV_STEP,
    WAVE,
    Accuracy,
    Room,
    Run,
    largest_that_holds,
    measure_accuracy,
    run_requests,
)
from winnow_lab.papers.batch_max.methods import (
    EXTREME_DECODES,
    FULL_CACHE,
    Method,
    Options,
    batch_max,
    make_tasks,
    mixed_prompts,
)
from winnow_lab.papers.batch_max.results import (
    AT_LEAST_ROWS,
    PAPER_ROWS,
    BatchMaxReport,
    Speed,
    TaskResult,
    Trial,
)
from winnow_lab.papers.judged import TimedPrompt

PROMPT_TOKENS = 300
KV_MEMORY = "8MiB"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """An engine whose steps take whole batches, with memory for a few prompts."""
    options = {"max_num_batched_tokens": 2**16, "prefill_chunk": None, "kv_floor": 1}
    with LLM(kv_memory=KV_MEMORY, enable_prefix_caching=False, **options) as opened:  # type: ignore[arg-type]
        yield opened


def prompts_of(number: int, tokens: int = PROMPT_TOKENS) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(5, 5000) for _ in range(tokens)] for _ in range(number)]


# -- the search ------------------------------------------------------------------------------------------------


@given(st.sets(st.integers(1, 60), min_size=1), st.integers(0, 61), st.data())
def test_the_search_finds_what_trying_all_finds(sizes: set[int], most: int, data: st.DataObject) -> None:
    batches, asked = sorted(sizes), []
    guess = data.draw(st.none() | st.sampled_from(batches))

    def holds(batch: int) -> bool:
        asked.append(batch)
        return batch <= most

    found = largest_that_holds(batches, holds, guess)
    assert found == max((batch for batch in batches if batch <= most), default=None)
    assert len(asked) == len(set(asked)), "each at most once"
    if guess is not None and found == guess:
        assert len(asked) <= 2
    assert largest_that_holds([], holds) is None


def test_batch_sizes_divide_the_samples() -> None:
    paper = Options(samples=960).batch_sizes[:17]
    assert paper == (1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 16, 20, 24, 30, 32, 40, 48)


# -- accuracy --------------------------------------------------------------------------------------------------


class AnswersFromAList:
    """Stands in for `LLM`: the prompt is an index, and its answer is right or not as the list says."""

    def __init__(self, right: list[bool]) -> None:
        self.right = right

    def generate(self, prompts: list[list[int]], params: list[Any]) -> list[Any]:
        texts = ["yes" if self.right[prompt[0]] else "no" for prompt in prompts]
        metrics = RequestMetrics(arrival_time=0.0)
        return [RequestOutput("", None, [], [CompletionOutput(0, text, [])], True, metrics) for text in texts]


@given(st.lists(st.booleans(), min_size=1, max_size=60), st.floats(0, 1))
def test_a_cell_ends_early_only_if_the_bar_is_out_of_reach(right: list[bool], bar: float) -> None:
    question = Question("", ("yes",), "exact", max_tokens=2)
    asks = [TimedPrompt((number,), question) for number in range(len(right))]
    accuracy = measure_accuracy(cast(LLM, AnswersFromAList(right)), asks, FULL_CACHE, bar)
    mean = sum(right) / len(right)
    assert accuracy.scores == tuple(map(float, right[: len(accuracy.scores)]))
    if accuracy.complete:
        assert accuracy.mean == pytest.approx(mean)
    else:
        assert mean <= accuracy.best_possible < bar
        before = right[: len(accuracy.scores) - WAVE]
        assert (sum(before) + len(right) - len(before)) / len(right) >= bar, "it continued after that"


def test_errors_are_those_of_differences() -> None:
    full, held = Accuracy((1.0, 1.0, 0.0, 1.0), 4), Accuracy((1.0, 0.0, 0.0, 1.0), 4)
    assert held.error_beside(full) == pytest.approx(0.25)
    assert full.error_beside(full) == 0.0


# -- memory and time -------------------------------------------------------------------------------------------


def test_room_is_what_the_engine_holds_and_no_more(llm: LLM) -> None:
    room = Room(llm, prompts_of(8), new_tokens=4)
    first = room.first_batch_out_of_memory()
    assert first > 2
    per_prompt = llm.kv_bytes(PROMPT_TOKENS)
    there = llm.stats().kv_bytes_budget - llm.stats().kv_bytes_used
    assert (first - 1) * per_prompt <= there < first * per_prompt
    for batch in (first, 2 * first):
        kvs = room.most_kvs(batch)
        assert kvs is not None and kvs % KV_STEP == 0
        assert room.holds(batch, batch_max("average", kvs))
        assert kvs + KV_STEP > PROMPT_TOKENS or not room.holds(batch, batch_max("average", kvs + KV_STEP))
    assert room.most_kvs(50) is None
    assert llm.stats().num_running == 0 and not llm.has_unfinished


def test_memory_for_no_prompt_is_refused(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="at least one prompt of 3000 tokens"):
        Room(llm, prompts_of(1, 3000), new_tokens=4).first_batch_out_of_memory()


@pytest.mark.parametrize(
    "method", [*EXTREME_DECODES, batch_max("average", 192), batch_max("key-difference", 192)]
)
def test_a_static_batch_runs_as_one_within_its_memory(llm: LLM, method: Method) -> None:
    run = run_requests(llm, prompts_of(3), method, new_tokens=70)
    assert run.together and run.most_running == 3
    rounds_in_prompt = 0 if method in EXTREME_DECODES else 2
    assert run.steps == 70 + rounds_in_prompt, "all take every step together"
    assert run.rounds >= (69 if method.max_kvs == 2 else 2)
    assert run.prefill + run.decode + run.evict + run.host == pytest.approx(run.seconds)
    assert min(run.prefill, run.decode, run.evict, run.host) > 0
    assert run.rate == pytest.approx(3 * 70 / run.seconds)
    held = PROMPT_TOKENS if method in EXTREME_DECODES else method.max_kvs
    tables = llm.stats().kv_bytes_used
    assert run.kv_bytes == tables + 3 * llm.kv_bytes(held or 0) <= llm.stats().kv_bytes_budget


def test_a_batch_that_memory_does_not_hold_is_not_together(llm: LLM) -> None:
    room = Room(llm, prompts_of(8), new_tokens=4)
    batch = room.first_batch_out_of_memory()
    run = run_requests(llm, prompts_of(batch), EXTREME_DECODES[1], new_tokens=4)
    assert run.waited and not run.together


def test_methods_are_the_papers_algorithms() -> None:
    loop = batch_max("average", 1024)
    assert loop.policy.when.within and loop.policy.when.prefill_every == loop.policy.when.decode_every == 64
    assert batch_max("key-difference", 1024).policy == replace(
        loop.policy, score=batch_max("key-difference", 64).policy.score
    )
    two, many = EXTREME_DECODES
    assert (two.policy.budget.fixed, two.policy.when.decode_every, two.max_kvs) == (1, 1, 2)
    assert (many.policy.budget.fixed, many.policy.when.decode_every, many.max_kvs) == (1, 64, 65)
    assert loop.params(5, to_the_end=True).ignore_eos and not loop.params(5, to_the_end=False).ignore_eos


def test_prompts_are_of_all_tasks_in_turn(llm: LLM) -> None:
    config = Options(tasks=("passkey", "key-points"), samples=2, prompt_tokens=400)
    passkey, points = make_tasks(config, llm)
    assert (passkey.metric, points.metric) == ("exact", "rouge-l")
    assert mixed_prompts((passkey, points)) == [
        list(ask.token_ids) for ask in (passkey.asks[0], points.asks[0], passkey.asks[1], points.asks[1])
    ]
    assert 300 < passkey.longest <= 400


# -- the report ------------------------------------------------------------------------------------------------


def speed(method: Method, batch: int, *seconds: float) -> Speed:
    run = Run(batch, 10, 1.0, 0.4, 0.3, 0.2, 0.1, 12, 3, batch, waited=False, preemptions=0, kv_bytes=100)
    return Speed(method, batch, tuple(replace(run, seconds=each) for each in seconds))


def test_gains_are_beside_the_fastest_ed_and_mean_over_what_tells_something() -> None:
    good, poor = Accuracy((1.0,) * 4, 4), Accuracy((0.0, 0.0), 4)
    slow, fast = batch_max("average", 512), batch_max("average", 128)

    def task(name: str, held: Method | None, control: Accuracy) -> TaskResult:
        tried = Trial("average", fast, 8, poor, held=False)
        trials = (tried,) if held is None else (tried, Trial("average", held, 4, good, held=True))
        controls = {} if held is None else {cast(int, held.max_kvs): control}
        return TaskResult(name, "exact", 900, good, trials, controls, bar=0.97, seconds=1.0)

    two, many = EXTREME_DECODES
    report = BatchMaxReport(
        Options(rules=("average",)),
        3,
        (task("a", slow, poor), task("b", None, poor), task("c", slow, good)),
        (speed(two, 2, 2.0), speed(many, 2, 1.0, 4.0, 2.0 / 3), speed(slow, 4, 1.0, 2.0, 0.5)),
        (),
        1000,
        {},
    )
    assert report.extreme_decode.rate == pytest.approx(20.0)
    assert [each.name for each, _ in report.held("average")] == ["a", "c"]
    assert report.mean_gain("average") == pytest.approx(1.0), "c is solved by the latest KVs, b by nothing"
    shown = report.to_json()
    assert shown["gains"] == {"average": {"a": pytest.approx(1.0), "c": pytest.approx(1.0)}}
    json.dumps(shown)


def test_the_papers_rows_give_the_papers_mean() -> None:
    assert sum(row.gain for row in AT_LEAST_ROWS) / len(AT_LEAST_ROWS) == pytest.approx(0.380, abs=2e-3)
    assert sum(row.gain for row in PAPER_ROWS) / len(PAPER_ROWS) == pytest.approx(0.440, abs=5e-4)
    assert 1 - sum(row.accuracy_share for row in PAPER_ROWS) / len(PAPER_ROWS) == pytest.approx(
        0.022, abs=2e-3
    )


WORK = (
    "--tasks passkey --samples 6 --prompt-tokens 512 --new-tokens 6 --kv-memory 5MiB --repeats 2 --requests 3"
)


def test_the_command_runs_the_whole_protocol(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = tmp_path / "journal"
    typed = [*WORK.split(), "--rules", "key-difference", "-o", str(tmp_path), "--journal", str(journal)]
    assert main(["batch-max", *typed]) == 0
    report = json.loads((tmp_path / "batch_max.json").read_text())
    assert {"command", "date", "commit", "machine"} < set(report)
    [task] = report["tasks"]
    assert len(task["full"]["scores"]) == 6 and task["bar"] == pytest.approx(0.97 * task["full"]["mean"])
    assert task["trials"], "something larger than ED's batch was tried"
    assert [len(each["scores"]) for each in task["extreme"]] == [6, 6]
    ed = [row for row in report["speeds"] if row["method"] == "ED"]
    assert [row["max_kvs"] for row in ed] == [2, 65]
    assert all(row["together"] and row["batch"] < report["out_of_memory"] for row in ed)
    for row in report["speeds"]:
        assert len(row["runs"]) == 2 and row["rate"] > 0
        assert all(run["kv_bytes"] <= report["kv_bytes_budget"] for run in row["runs"])
    assert {row["batch"] for row in report["continuous"]} == {3}
    shown = capsys.readouterr().out
    assert "out of memory" in shown and "accuracy: passkey, FKV" in shown
    page = (tmp_path / "batch_max.md").read_text()
    assert "| passkey | FKV |" in page and "\\|kv\\|" in page

    with journal.open("ab") as file:
        file.write(b'{"name": "torn')
    assert main(["batch-max", *typed]) == 0
    again = json.loads((tmp_path / "batch_max.json").read_text())
    assert again["tasks"] == report["tasks"], "known from the journal"
    assert "accuracy: passkey" not in capsys.readouterr().out
    assert main(["batch-max", *typed, "--seed", "1"]) == 2
    assert "is of other work: seed was 0 and is 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("--repeats 0", "--repeats must be at least 1, got 0"),
        ("--samples 0", "--samples must be at least 1, got 0"),
        ("--tasks single,sinlge", "tasks must be of single, "),
        ("--rules average,h2o", "--rules: no 'h2o'"),
        ("--within 100", "--within must be below 100, got 100"),
        ("--kv-memory much", "kv_memory must be a size"),
        ("--dtype auto", "--dtype: invalid choice: 'auto'"),
        ("--task gsm8k --tasks passkey", "tasks must be of gsm8k, got 'passkey'"),
        ("--json /dev/null/x", "cannot write /dev/null/x"),
        ("-o /dev/null/x", "cannot write /dev/null/x"),
        ("--prompt-tokens 5", "--prompt-tokens must be at least 256, got 5"),
        ("--new-tokens 600", "prompt_tokens + new_tokens must be at most the model's 4096, got 4184"),
    ],
)
def test_what_is_unusable_is_one_line(typed: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["batch-max", *typed.split()]) == 2
    shown = capsys.readouterr().err.splitlines()
    assert len(shown) == 1 and message in shown[0]
