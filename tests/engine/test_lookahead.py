"""Steps submitted before the tokens of those before them are known: answers are those of one step after the other."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_llama import VOCAB, save_tiny_llama

from winnow import LLM, SamplingParams
from winnow.engine.plan import StepPlan, StepResult
from winnow.engine.scheduling.draft_gate import DraftGate
from winnow.executor import torch_executor
from winnow.executor.step_graphs import computes_apart
from winnow.executor.torch_executor import TorchExecutor


class OverlappingExecutor:
    """A device of its own: a thread computes what is asked for, in order, and only results are waited for."""

    def __init__(self, *arguments: Any) -> None:
        self._inner = TorchExecutor(*arguments)
        self._inner.overlaps = self.overlaps = True
        self._thread = ThreadPoolExecutor(1)
        self.in_flight = self.most_in_flight = self.fails = 0

    def submit(self, plan: StepPlan) -> Future[Any]:
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        return self._thread.submit(self._compute, plan)

    def _compute(self, plan: StepPlan) -> StepResult:
        handle = self._inner.submit(plan)
        if self.fails:
            self.fails -= 1
            raise MemoryError("no luck")
        return self._inner.collect(handle)

    def collect(self, handle: Future[Any]) -> StepResult:
        self.in_flight = 0 if handle.exception() else self.in_flight - 1
        result: StepResult = handle.result()
        return result

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not callable(found):
            return found
        call: Callable[..., Any] = lambda *given: self._thread.submit(found, *given).result()  # noqa: E731
        return call


@pytest.fixture
def opened(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[LLM, LLM]]]:
    """Two engines with the same options: the first one's steps follow each other, the second's overlap."""
    made: list[LLM] = []

    def make(model: Path | None = directory, **options: Any) -> tuple[LLM, LLM]:
        options = {"kv_memory": "2MiB", "max_num_seqs": 6} | options
        made.append(LLM(model, **options))
        with monkeypatch.context() as patch:
            patch.setattr("winnow.executor.tensor_parallel.TorchExecutor", OverlappingExecutor)
            made.append(LLM(model, **options))
        return made[-2], made[-1]

    yield make
    for llm in made:
        llm.close()


def executor_of(llm: LLM) -> OverlappingExecutor:
    found: Any = llm._engine._executor  # type: ignore[attr-defined]
    assert isinstance(found, OverlappingExecutor)
    return found


def prompts_of(count: int, seed: int = 0) -> list[list[int]]:
    random = Random(seed)
    return [random.choices(range(3, VOCAB), k=random.randrange(4, 60)) for _ in range(count)]


def params_of(kind: str, number: int) -> SamplingParams:
    """Answers of many lengths, which end in many ways."""
    options: dict[str, Any] = {"max_tokens": 5 + 7 * (number % 4), "temperature": 0.0, "seed": number}
    if kind == "greedy":
        options["ignore_eos"] = number % 2 == 0
    elif kind == "sampled":
        options |= {
            "temperature": 0.9,
            "top_p": 0.9,
            "n": 1 + number % 3,
            "stop_token_ids": [number % VOCAB, 7, 8],
        }
    elif kind == "penalties":
        options |= {"temperature": 0.7, "repetition_penalty": 1.3, "presence_penalty": 0.5, "logprobs": 2}
    elif kind == "evicted" and number % 2:
        options |= {"eviction": "snapkv", "kv_budget": 32, "max_tokens": 6}
    return SamplingParams(**options)


def answers(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[Any]:
    outputs = llm.generate(prompts, params)
    return [[(each.token_ids, each.finish_reason) for each in output.outputs] for output in outputs]


@pytest.mark.parametrize("kind", ["greedy", "sampled", "penalties", "evicted"])
def test_answers_are_those_of_one_step_after_the_other(
    opened: Callable[..., tuple[LLM, LLM]], kind: str
) -> None:
    serial, overlapping = opened(num_accumulators=2, kv_floor=8)
    prompts = prompts_of(10)
    params = [params_of(kind, number) for number in range(10)]
    expected = answers(serial, prompts, params)
    assert answers(overlapping, prompts, params) == expected
    assert executor_of(overlapping).most_in_flight == 2
    overlapping.check_integrity()
    assert overlapping.stats().kv_bytes_used == serial.stats().kv_bytes_used


@pytest.mark.parametrize("temperature", [0.0, 0.2])
def test_steps_overlap_while_no_drafts_are_made(
    opened: Callable[..., tuple[LLM, LLM]], monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    """The gate opens and closes after every third step, as a look of its own does."""
    steps = [0]

    def record(self: DraftGate, *step: Any) -> None:
        steps[0] += 1

    monkeypatch.setattr(DraftGate, "record", record)
    monkeypatch.setattr(DraftGate, "drafts", lambda self, number: steps[0] // 3 % 2 == 1)
    serial, overlapping = opened(
        speculative_config={"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 3}
    )
    prompts = [each[:12] * 3 for each in prompts_of(6)]
    params = [
        SamplingParams(temperature=temperature, seed=n, max_tokens=40, ignore_eos=True) for n in range(6)
    ]
    expected = answers(serial, prompts, params)
    steps[0] = 0
    assert answers(overlapping, prompts, params) == expected
    assert executor_of(overlapping).most_in_flight == 2
    assert overlapping.stats().num_accepted_tokens > 0
    overlapping.check_integrity()


@pytest.mark.parametrize(
    ("eviction", "least"), [("snapkv", 0.8), ("kv-compress-pd", 0.6), ("batch-max", 0.6), ("h2o", 0.0)]
)
def test_steps_overlap_between_rounds(
    opened: Callable[..., tuple[LLM, LLM]], eviction: str, least: float
) -> None:
    """Rounds wait for the step before them, and other steps do not, though queries add to accumulators."""
    serial, overlapping = opened(num_accumulators=2, kv_floor=8, max_num_seqs=3)
    random = Random(0)
    prompts = [random.choices(range(3, VOCAB), k=150 + 9 * number) for number in range(3)]
    params = [
        SamplingParams(
            temperature=0.8,
            seed=number,
            eviction=eviction,
            compression=2,
            max_tokens=40 + number,
            ignore_eos=True,
        )
        for number in range(3)
    ]
    expected = answers(serial, prompts, params)
    executor, overlapped, asked = executor_of(overlapping), 0, list[int]()
    plan_evictions = executor._inner.plan_evictions

    def count(planned: Any) -> Any:
        asked.append(len(planned))
        return plan_evictions(planned)

    executor._inner.plan_evictions = count  # type: ignore[method-assign]
    names = [overlapping.submit(prompt, each) for prompt, each in zip(prompts, params, strict=True)]
    found: dict[str, Any] = {}
    while overlapping.has_unfinished:
        for each in overlapping.step():
            found[each.request_id] = each.outputs[0].token_ids
        overlapped += executor.in_flight == 1
    assert [[(found[name], "length")] for name in names] == expected
    stats = overlapping.stats(), serial.stats()
    assert stats[0].num_rounds == stats[1].num_rounds > 0
    assert overlapped >= least * stats[0].num_steps
    # What a round leaves comes with the step before it, unless one of its sequences ends with that step.
    assert len(asked) <= (2 if eviction == "h2o" else 0)
    overlapping.check_integrity()


def shown(llm: LLM, prompts: list[Any], params: list[SamplingParams]) -> list[list[Any]]:
    """All that callers see of each request, step by step."""
    names = [llm.submit(prompt, each) for prompt, each in zip(prompts, params, strict=True)]
    seen: dict[str, list[Any]] = {name: [] for name in names}
    while llm.has_unfinished:
        for output in llm.step():
            [answer] = output.outputs
            said = answer.text, list(answer.token_ids), answer.finish_reason, answer.stop_reason
            seen[output.request_id].append((*said, answer.logprobs, output.prompt_logprobs, output.error))
    return [seen[name] for name in names]


def test_texts_forms_and_logprobs_trail_by_one_step(opened: Callable[..., tuple[LLM, LLM]]) -> None:
    """What is seen after each step is the same: a token too many is never part of it."""
    pytest.importorskip("llguidance")
    serial, overlapping = opened(None, kv_memory="16MiB")
    base: dict[str, Any] = {"temperature": 0.7, "max_tokens": 24, "ignore_eos": True}
    forms = [
        base | {"stop": ["e", "the"]},
        base | {"stop": [" a"], "include_stop_str_in_output": True},
        base | {"prompt_logprobs": 2, "logprobs": 1},
        base | {"ignore_eos": False},
        base | {"structured_outputs": {"regex": "[0-9]{3}-[a-f]{2}"}, "ignore_eos": False},
        base | {"max_tokens": 9},
    ]
    params = [SamplingParams(**each, seed=number) for number, each in enumerate(forms)]
    # At once, and each alone: beside an answer with a form no step is submitted ahead.
    prompts = ["Once upon a time there were three words"] * len(params)
    assert shown(overlapping, prompts, params) == shown(serial, prompts, params)
    executor = executor_of(overlapping)
    for prompt, each in zip(prompts, params, strict=True):
        executor.in_flight = executor.most_in_flight = 0  # a step of nobody is not collected
        found = shown(overlapping, [prompt], [each])
        assert found == shown(serial, [prompt], [each])
        assert executor.most_in_flight == (1 if each.structured_outputs else 2)
        assert found[0][-1][2] is not None
    overlapping.check_integrity()
    assert overlapping.stats().kv_bytes_used == serial.stats().kv_bytes_used


def test_a_fault_is_read_while_the_next_step_runs(
    opened: Callable[..., tuple[LLM, LLM]], tmp_path: Path
) -> None:
    """A request fails alone, by name and once, though a further step of it was submitted."""
    model = save_tiny_llama(tmp_path, seed=3)
    weights = load_file(model / "model.safetensors")
    weights["model.embed_tokens.weight"][50] = torch.nan
    weights["lm_head.weight"][50] = 0  # no other answer says it
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    serial, overlapping = opened(model)
    params = [SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)] * 3
    params[1] = SamplingParams(temperature=0.0, max_tokens=20, forced_tokens=[5, 6, 50, 7, 8])
    prompts = [[5, 6, 7], [8, 9], [10, 11, 12]]
    found = shown(overlapping, prompts, params)
    assert found == shown(serial, prompts, params)
    assert executor_of(overlapping).most_in_flight == 2
    assert [each[-1][2] for each in found] == ["length", "error", "length"]
    assert found[1][-1][1] == [5, 6, 50] and "finite" in found[1][-1][-1]
    overlapping.check_integrity()


def test_where_memory_runs_out(opened: Callable[..., tuple[LLM, LLM]]) -> None:
    serial, overlapping = opened(kv_memory="64KiB", max_model_len=200, kv_offloading_size="1MiB")
    prompts = prompts_of(8)
    params = [SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)] * 8
    assert answers(overlapping, prompts, params) == answers(serial, prompts, params)
    assert overlapping.stats().num_preemptions and executor_of(overlapping).most_in_flight == 2
    overlapping.check_integrity()


def test_calls_between_two_steps_see_no_half_of_one(opened: Callable[..., tuple[LLM, LLM]]) -> None:
    found = []
    for llm in opened():
        outputs: dict[str, list[int]] = {}

        def step(llm: LLM = llm, outputs: dict[str, list[int]] = outputs) -> None:
            outputs.update({each.request_id: each.outputs[0].token_ids for each in llm.step()})

        params = SamplingParams(temperature=0.8, seed=1, max_tokens=40, ignore_eos=True)
        for name, prompt in zip("abc", prompts_of(3), strict=True):
            llm.submit(prompt, params, request_id=name)
        for _ in range(6):
            step()
        llm.check_integrity()
        llm.fork("a", new_request_id="child")
        for _ in range(4):
            step()
        llm.abort("b")
        outputs.pop("b")
        llm.submit(prompts_of(1, 5)[0], params, request_id="late")
        while llm.has_unfinished:
            step()
            llm.stats()
        llm.check_integrity()
        found.append(outputs)
    assert found[0] == found[1]
    assert set(found[0]) == {"a", "c", "child", "late"} and found[0]["child"] == found[0]["a"]


@pytest.mark.parametrize("after", [1, 9])
def test_a_step_that_fails_loses_no_token(opened: Callable[..., tuple[LLM, LLM]], after: int) -> None:
    serial, overlapping = opened()
    prompts, params = prompts_of(4), SamplingParams(temperature=0.8, seed=2, max_tokens=30, ignore_eos=True)
    expected = answers(serial, prompts, [params] * 4)
    names = [overlapping.submit(prompt, params) for prompt in prompts]
    found, executor = dict[str, list[int]](), executor_of(overlapping)
    failures = 0
    for number in range(500):
        if not overlapping.has_unfinished:
            break
        if number == after:
            executor.fails = 1
        try:
            found |= {each.request_id: each.outputs[0].token_ids for each in overlapping.step()}
        except MemoryError:
            failures += 1
    assert failures == 1
    assert [[(found[name], "length")] for name in names] == expected
    overlapping.check_integrity()


def test_steps_overlap_by_default_where_the_device_computes_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for apart in (False, True):
        with monkeypatch.context() as patch:
            assert computes_apart(torch.device("cuda")) and not computes_apart(torch.device("cpu"))
            patch.setattr(torch_executor, "computes_apart", lambda device, apart=apart: apart)
            with LLM(kv_memory="8MiB") as llm:
                assert llm._engine._looks_ahead == apart
                [output] = llm.generate(["some words"], SamplingParams(temperature=0, max_tokens=8))
                found.append(output.outputs[0].token_ids)
    assert found[0] == found[1]
