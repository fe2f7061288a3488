"""Evaluations through the engine: what is judged, what runs together, and what a killed one leaves."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from winnow import LLM
from winnow.config import EvictionConfig
from winnow.errors import ConfigError, EvaluationError
from winnow.eviction import ModelTraits, resolve_policy
from winnow.sampling import SamplingParams
from winnow_lab.evaluate.cell import FULL_CELL, Cell, amounts_of, engine_needs, plan_cells
from winnow_lab.evaluate.plan import EvaluationPlan
from winnow_lab.evaluate.result import Evaluation
from winnow_lab.evaluate.runner import evaluate
from winnow_lab.evaluate.sample import Question, Sample
from winnow_lab.evaluate.tasks import TaskSettings, load_task
from winnow_lab.evaluate.tasks.in_prose import NEEDLE
from winnow_lab.evaluate.tasks.task import settings_for

MakePlan = Callable[..., EvaluationPlan]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(kv_floor=1, num_accumulators=2, max_num_seqs=16, kv_memory="32MiB") as model:
        yield model


@pytest.fixture
def make_plan(llm: LLM) -> MakePlan:
    """Two needles of each of two depths in 160 tokens, unless told otherwise."""

    def make(
        cells: tuple[Cell, ...] = (FULL_CELL,), controls: tuple[str, ...] = (), **options: Any
    ) -> EvaluationPlan:
        options = {"samples": 2, "tokens": (160,), "categories": ("depth-0", "depth-50")} | options
        return EvaluationPlan("needle", NEEDLE, settings_for(llm, **options), cells, controls)

    return make


@pytest.fixture
def submitted(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], SamplingParams]]:
    """Requests that were computed, in order; those only asked about and aborted again are left out."""
    kept: list[tuple[list[int], SamplingParams]] = []
    by_name: dict[str, tuple[list[int], SamplingParams]] = {}
    submit, abort = llm.submit, llm.abort

    def watched(tokens: Any, params: Any, **options: Any) -> str:
        name = submit(tokens, params, **options)
        by_name[name] = (list(tokens), params)
        kept.append(by_name[name])
        return name

    def dropped(name: str) -> Any:
        kept.remove(by_name[name])
        return abort(name)

    monkeypatch.setattr(llm, "submit", watched)
    monkeypatch.setattr(llm, "abort", dropped)
    return kept


def rows(evaluation: Evaluation) -> list[Any]:
    """Every outcome and every number of an evaluation."""
    return [
        *(outcome.to_json() for result in evaluation.results for outcome in result.outcomes),
        evaluation.to_json(),
    ]


def test_a_pool_is_for_the_presets_that_pool() -> None:
    cells = plan_cells(["snapkv"], amounts_of([4]), ["aware"], ["recent"])
    with LLM(kv_floor=1, num_accumulators=2, max_num_seqs=4, kv_memory="16MiB", pool=21) as llm:
        settings = settings_for(llm, samples=1, tokens=(160,), categories=("depth-0",))
        found = evaluate(llm, EvaluationPlan("needle", NEEDLE, settings, cells, ("recent",)))
    assert [result.refusal for result in found.results] == [None] * 3


@pytest.mark.parametrize("query", ["aware", "agnostic"])
def test_a_cell_leaves_to_the_engine_what_follows_from_the_model(query: str) -> None:
    """A pool by text is 21 tokens of a model that spends one on each digit, in an evaluation as in a chat."""
    [_, cell] = plan_cells(["winnow-seen"], amounts_of([8]), [query])
    resolved = resolve_policy(
        EvictionConfig(eviction=cell.policy, compression=8.0), ModelTraits(text_pool=21)
    )
    assert resolved.policy.pool is not None and resolved.policy.pool.size == 21


def test_a_cell_holds_what_the_engine_alone_answers(llm: LLM, make_plan: MakePlan) -> None:
    cells = plan_cells(["kv-compress"], amounts_of([2, 4]), ["agnostic"])
    plan = make_plan(cells)
    found = evaluate(llm, plan)
    assert [result.cell for result in found.results] == list(cells)
    for sample in plan.make_samples():
        [question] = sample.questions
        prompt = llm.tokenizer.encode(sample.context + question.text)
        context = len(llm.tokenizer.encode(sample.context))
        for result in found.results:
            cell = result.cell
            params = SamplingParams(
                temperature=0,
                max_tokens=question.max_tokens,
                eviction=cell.preset,
                compression=None if cell.is_full else cell.amount.compression,
                context_tokens=None if cell.is_full else context,
            )
            [alone] = llm.generate(prompt, params)
            [outcome] = [each for each in result.outcomes if each.sample == sample.name]
            assert outcome.answer == alone.outputs[0].text
            assert outcome.prompt_tokens == len(prompt)
            report = alone.outputs[0].eviction
            if report is None:
                assert outcome.achieved_compression == 1.0
                assert outcome.kv_bytes == llm.kv_bytes(len(prompt) + len(alone.outputs[0].token_ids) - 1)
            else:
                assert outcome.kv_bytes == report.bytes_held
                assert outcome.achieved_compression == pytest.approx(cell.amount.compression, rel=0.1)


def test_full_cache_finds_the_needle_and_a_window_does_not(llm: LLM, make_plan: MakePlan) -> None:
    cells = plan_cells(["recent"], amounts_of([4]), ["agnostic"])
    full, recent = evaluate(llm, make_plan(cells, categories=("depth-0",), samples=3)).results
    assert full.score("depth-0") == 1.0
    assert recent.score("depth-0") == 0.0


def test_requests_run_together_and_compressions_share_the_prompt(
    llm: LLM, make_plan: MakePlan, submitted: list[Any]
) -> None:
    running = []
    cells = plan_cells(["kv-compress", "keydiff"], amounts_of([2, 4]), ["aware"])
    evaluate(llm, make_plan(cells), on_step=lambda _done, _all, stats, _: running.append(stats.num_running))
    assert max(running) > 4
    asked = [(params.n, params.compression) for _, params in submitted]
    # Full cache; both compressions after one prompt; and one at a time where rounds fall within the prompt.
    assert asked == [(1, None)] * 4 + [(2, (2.0, 4.0))] * 4 + [(1, 2.0)] * 4 + [(1, 4.0)] * 4


@pytest.mark.parametrize("query", ["aware", "agnostic"])
def test_budgets_keep_as_many_kvs_whatever_the_length(
    llm: LLM, make_plan: MakePlan, submitted: list[Any], query: str
) -> None:
    budgets = amounts_of([4], [400, 40, 80])
    plan = make_plan(plan_cells(["kv-compress"], budgets, [query]), samples=1, tokens=(160, 300))
    _, _, many, more, few = evaluate(llm, plan).results
    assert [each.cell.label for each in (many, more, few)] == [
        f"kv-compress {kvs} KVs" for kvs in (400, 80, 40)
    ]
    # Budgets share the prompt with each other, not with a compression.
    asked = [(params.compression, params.kv_budget) for _, params in submitted]
    assert asked == [(None, None)] * 4 + [(4.0, None)] * 4 + [(None, (400, 80, 40))] * 4
    for kvs, cell in ((40, few), (80, more)):
        for outcome in cell.outcomes:
            assert outcome.achieved_compression is not None
            judged = outcome.achieved_compression * kvs
            assert judged == pytest.approx(outcome.prompt_tokens, rel=0.1 if query == "aware" else 0.3)
    assert {outcome.achieved_compression for outcome in many.outcomes} == {1.0}


def test_query_agnostic_judges_the_context_alone(llm: LLM, make_plan: MakePlan, submitted: list[Any]) -> None:
    plan = make_plan(plan_cells(["kv-compress"], amounts_of([4]), ["aware", "agnostic"]))
    _, aware, agnostic = evaluate(llm, plan).results
    contexts = [llm.tokenizer.encode(sample.context) for sample in plan.make_samples()]
    judged = [params.context_tokens for _, params in submitted]
    assert judged == [None] * 8 + [len(context) for context in contexts]
    # Of a needle at the front, a policy that does not know the question keeps less than one that does.
    front = "depth-0"
    assert (aware.score(front) or 0) > (agnostic.score(front) or 0)


def test_questions_share_a_context_that_is_judged_without_them(
    llm: LLM, make_plan: MakePlan, submitted: list[Any]
) -> None:
    cells = plan_cells(["kv-compress"], amounts_of([2]), ["aware", "agnostic"])
    plan = make_plan(cells, questions=3, samples=1, categories=("depth-50",), tokens=(200,))
    full, aware, agnostic = evaluate(llm, plan).results
    [sample] = plan.make_samples()
    context = llm.tokenizer.encode(sample.context)
    prompts = [llm.tokenizer.encode(sample.context + question.text) for question in sample.questions]
    (whole, together), *separate, (cut, shared) = submitted
    assert whole == cut == context
    assert together.n == shared.n == 3
    assert [list(each) for each in shared.forced_tokens] == [each[len(context) :] for each in prompts]
    assert [tokens for tokens, _ in separate] == prompts
    assert all(params.context_tokens is None for _, params in separate)
    # The answer alone is scored, without the question that it begins with.
    assert [outcome.answer.strip() for outcome in full.outcomes] == [
        q.references[0] for q in sample.questions
    ]
    assert [outcome.prompt_tokens for outcome in agnostic.outcomes] == [len(each) for each in prompts]
    assert agnostic.achieved_compression == pytest.approx(2.0, rel=0.1)
    assert aware.achieved_compression == pytest.approx(2.0, rel=0.1)


def test_a_killed_evaluation_goes_on_to_the_same_table(
    llm: LLM, make_plan: MakePlan, tmp_path: Path, submitted: list[Any]
) -> None:
    plan = make_plan(
        plan_cells(["kv-compress"], amounts_of([2, 4]), ["agnostic"], ["recent"]), controls=("recent",)
    )
    whole = evaluate(llm, plan)
    asked = len(submitted)
    journal = tmp_path / "outcomes.jsonl"

    def kill(done: int, *_: Any) -> None:
        if done >= 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(llm, plan, journal=journal, on_step=kill)
    assert not llm.has_unfinished
    done = journal.read_bytes().count(b"\n") - 1
    assert 7 <= done < 20
    with journal.open("ab") as file:  # the line that it was writing
        file.write(b'{"cell": "query-agnostic kv-compress 2x", "sam')
    submitted.clear()
    first: list[int] = []
    resumed = evaluate(llm, plan, journal=journal, on_step=lambda done, *_: first.append(done))
    assert first[0] == done
    assert first[-1] == 20
    assert len(submitted) < asked
    assert rows(resumed) == rows(whole)
    lines = journal.read_text(encoding="utf-8").splitlines()
    assert len(lines) == 1 + 20
    assert all(json.loads(line) for line in lines)
    submitted.clear()
    assert rows(evaluate(llm, plan, journal=journal)) == rows(whole)
    assert not submitted


def test_same_seed_same_table_other_seed_other_prompts(llm: LLM, make_plan: MakePlan) -> None:
    plan = make_plan(plan_cells(["random"], amounts_of([2]), ["aware"]))
    assert rows(evaluate(llm, plan)) == rows(evaluate(llm, plan))
    other = replace(plan, settings=replace(plan.settings, seed=1))
    assert {s.context for s in plan.make_samples()}.isdisjoint(s.context for s in other.make_samples())


def test_a_directory_belongs_to_its_settings(llm: LLM, make_plan: MakePlan, tmp_path: Path) -> None:
    journal = tmp_path / "outcomes.jsonl"
    evaluate(llm, make_plan(samples=1), journal=journal)
    with pytest.raises(EvaluationError, match=r"other settings: .*seed was 0 and is 3.*--overwrite"):
        evaluate(llm, make_plan(samples=1, seed=3), journal=journal)
    evaluate(llm, make_plan(samples=1, seed=3), journal=journal, overwrite=True)
    # More cells are no other setting: what is there is kept.
    seen: list[int] = []
    more = make_plan(plan_cells(["kv-compress"], amounts_of([2]), ["aware"]), samples=1, seed=3)
    evaluate(llm, more, journal=journal, on_step=lambda done, *_: seen.append(done))
    assert seen[0] == 2
    journal.write_text("something else\n")
    with pytest.raises(EvaluationError, match="is not the journal of an evaluation"):
        evaluate(llm, make_plan(), journal=journal)


def test_a_cell_that_the_engine_refuses_does_not_stop_the_others(llm: LLM, make_plan: MakePlan) -> None:
    full, cut, refused = evaluate(
        llm, make_plan(plan_cells(["snapkv"], amounts_of([2, 16]), ["aware"]))
    ).results
    assert full.outcomes
    assert cut.outcomes
    assert not refused.outcomes
    assert refused.refusal is not None
    assert refused.refusal.prompts == 4
    assert "smaller than the protected set of 32" in refused.refusal.reason


class OneSample:
    """A task of one sample with two questions, unless told otherwise."""

    summary = "one sample"
    categories = ("sums",)

    def __init__(self, context: str, questions: int = 2) -> None:
        self._context = context
        self._questions = tuple(Question(f"{n} + {n} =", (str(2 * n),), "exact", 2) for n in range(questions))

    def samples(self, settings: TaskSettings) -> list[Sample]:
        return [Sample("one", "sums", self._context, self._questions)]


def test_a_prompt_that_the_model_cannot_take_is_named(llm: LLM) -> None:
    plan = EvaluationPlan("sums", OneSample("word " * 5000), settings_for(llm), (FULL_CELL,))
    with pytest.raises(EvaluationError, match=r"sample 'one' is too long: .*4096"):
        evaluate(llm, plan)


def test_a_length_that_the_model_cannot_take_is_named(make_plan: MakePlan) -> None:
    with pytest.raises(EvaluationError, match=r"--tokens 5000: the model takes 4096 at most"):
        make_plan(tokens=(160, 5000)).make_samples()


@pytest.mark.parametrize("questions", [1, 2])
def test_without_a_context_there_is_nothing_to_judge_before_the_question(
    llm: LLM, questions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = EvaluationPlan(
        "sums",
        OneSample("", questions),
        settings_for(llm),
        plan_cells(["recent"], amounts_of([2]), ["agnostic"]),
    )
    with pytest.raises(EvaluationError, match=r"sample 'one' has no context .*--query aware"):
        evaluate(llm, plan)
    aware = replace(plan, cells=plan_cells(["recent"], amounts_of([2]), ["aware"]))
    begun: set[str] = set()
    with pytest.raises(EvaluationError, match=r"scores at most 0\.00 .* nothing can be learnt"):
        evaluate(llm, aware, on_step=lambda *now: begun.add(now[-1]))
    assert begun <= {"full cache", ""}, "no other cell was begun"
    monkeypatch.setattr("winnow_lab.evaluate.runner.MIN_FULL_SCORE", 0.0)
    assert [len(result.outcomes) for result in evaluate(llm, aware).results] == [questions] * 2


def test_an_unknown_category_is_answered_with_the_known(make_plan: MakePlan) -> None:
    with pytest.raises(EvaluationError, match=r"no category 'depth-5'; .*Known: depth-0, depth-10"):
        make_plan(categories=("depth-5",)).make_samples()


def test_cells() -> None:
    cells = plan_cells(
        ["kv-compress", "full", "extreme-decode"], amounts_of([1, 8, 2, 2]), ["agnostic"], ["recent"]
    )
    assert [cell.name for cell in cells] == [
        "full cache",
        "query-agnostic kv-compress 2x",
        "query-agnostic kv-compress 8x",
        "query-agnostic extreme-decode",
        "query-agnostic recent 2x",
        "query-agnostic recent 8x",
    ]
    assert not any(cell.policy.when.pressure for cell in cells)
    assert plan_cells(["full"], amounts_of([4]), ["aware"], ["recent"]) == (FULL_CELL,)
    assert len(plan_cells(["extreme-decode"], amounts_of([4]), ["aware"], ["recent"])) == 2
    assert engine_needs(plan_cells(["h2o"], amounts_of([2]), ["aware"])) == {
        "num_accumulators": 1,
        "kv_bias": False,
    }
    assert engine_needs(plan_cells(["winnow-fit"], amounts_of([2]), ["agnostic"]))["kv_bias"]
    with pytest.raises(EvaluationError, match=r"no eviction preset 'snapvk'; did you mean snapkv\?"):
        plan_cells(["snapvk"], amounts_of([2]), ["aware"])
    with pytest.raises(ConfigError, match=r"compression must be at least 1, got 0\.5"):
        plan_cells(["kv-compress"], amounts_of([0.5]), ["aware"])
    with pytest.raises(ConfigError, match="kv_budget must be at least 1, got 0"):
        amounts_of(kv_budgets=[0])
    with pytest.raises(EvaluationError, match="query must be one of aware, agnostic, got 'both'"):
        plan_cells(["kv-compress"], amounts_of([2]), ["both"])


def test_tasks_by_name() -> None:
    assert load_task("needle") is NEEDLE
    with pytest.raises(EvaluationError, match=r"no task 'nedle'; did you mean needle\? Known: demo, "):
        load_task("nedle")
