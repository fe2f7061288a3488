"""The model that lm_eval sees, on tasks that lie here: nothing is downloaded."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager

from winnow import LLM, SamplingParams
from winnow.errors import EvaluationError
from winnow.eviction import PRESETS
from winnow.values.eviction_request import Amount
from winnow_lab.evaluate.likelihood import Keeping, Pair, loglikelihoods, rolling_pairs
from winnow_lab.evaluate.lm_eval import WinnowLM, lm_eval_cell
from winnow_lab.evaluate.lm_eval.generation import sampling_for
from winnow_lab.evaluate.lm_eval.lm_eval_cell import LmEvalPlan, LmEvalResult, lm_eval_table, run_cell

# In words that the demo model knows.
NAMES, CITIES = ("Adam", "Betty", "Carl", "Diana"), ("Oslo", "Rome", "Cairo", "Paris")
TASKS = {
    "tiny_choice": """
output_type: multiple_choice
doc_to_text: "{{text}}\\nQuestion: What is the home town of {{name}}?\\nAnswer:"
doc_to_choice: "{{cities}}"
doc_to_target: "{{cities.index(city)}}"
metric_list: [{metric: acc}]
""",
    "tiny_until": """
output_type: generate_until
doc_to_text: "{{text}}\\nQuestion: What is the home town of {{name}}?\\nAnswer:"
doc_to_target: "{{city}}"
generation_kwargs: {until: ["\\n", "."], max_gen_toks: 8, do_sample: false}
filter_list: [{name: stripped, filter: [{function: remove_whitespace}, {function: take_first}]}]
metric_list: [{metric: exact_match, ignore_case: true, ignore_punctuation: true}]
""",
    "tiny_rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}]
""",
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of task files, and the documents that they name."""
    directory = tmp_path_factory.mktemp("tasks")
    draw = random.Random(5)
    documents = directory / "documents.jsonl"
    with documents.open("w") as file:
        for _ in range(6):
            homes = dict(zip(NAMES, draw.sample(CITIES, 4), strict=True))
            text = " ".join(f"The home town of {name} is {city}." for name, city in homes.items())
            name = draw.choice(NAMES)
            document = {"text": text, "name": name, "city": homes[name], "cities": CITIES}
            file.write(json.dumps(document) + "\n")
    for name, body in TASKS.items():
        place = {"data_files": {"test": str(documents)}, "cache_dir": str(directory / "cache")}
        head = f"task: {name}\ndataset_path: json\ndataset_kwargs: {json.dumps(place)}\ntest_split: test"
        (directory / f"{name}.yaml").write_text(head + body)
    return directory


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(kv_memory="64MiB", kv_floor=1, num_accumulators=2) as llm:
        yield llm


def ask(kind: str, *arguments: Any) -> Instance:
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)  # type: ignore[arg-type]


def test_tasks_of_all_kinds_run_and_eviction_shows(llm: LLM, tasks: Path) -> None:
    plan = LmEvalPlan(tuple(TASKS), limit=4, include_path=tasks)
    manager = plan.task_manager()
    full = run_cell(llm, plan, manager, "full cache", Keeping())
    cut = run_cell(llm, plan, manager, "recent", Keeping(PRESETS["recent"].policy, Amount(kv_budget=4)))
    assert LmEvalResult.from_json(json.loads(json.dumps(full.to_json()))) == full
    metrics = full.metrics()
    answered = {("tiny_choice", "acc"), ("tiny_until", "exact_match (stripped)")}
    assert set(metrics) == answered | {("tiny_rolling", "word_perplexity")}
    assert all(metrics[key][0] == 1.0 > cut.metrics()[key][0] for key in answered)
    perplexity = ("tiny_rolling", "word_perplexity")
    assert 1 < metrics[perplexity][0] < cut.metrics()[perplexity][0]
    assert full.found["n-samples"]["tiny_choice"] == {"original": 6, "effective": 4}


def test_a_cell_that_the_engine_refuses_says_why(llm: LLM, tasks: Path) -> None:
    plan = LmEvalPlan(("tiny_choice",), limit=1, include_path=tasks)
    small = Keeping(PRESETS["snapkv"].policy, Amount(kv_budget=8))
    refused = run_cell(llm, plan, plan.task_manager(), "snapkv", small)
    assert "smaller than the protected set" in (refused.refusal or "") and not refused.metrics()
    table = lm_eval_table([refused])
    assert table.columns == ("snapkv [1]",) and table.notes == (f"[1] {refused.refusal}",)
    assert not llm.has_unfinished


def test_by_name_with_options_of_the_engine(tasks: Path) -> None:
    assert get_model("winnow") is WinnowLM
    found = simple_evaluate(
        "winnow",
        "eviction=h2o,kv_budget=16,num_accumulators=1,kv_memory=32MiB",
        tasks=["tiny_choice"],
        task_manager=LmEvalPlan(("tiny_choice",), include_path=tasks).task_manager(),
        limit=1,
        bootstrap_iters=0,
        log_samples=False,
    )
    assert found is not None and "acc,none" in found["results"]["tiny_choice"]


class TestLoglikelihood:
    def test_it_is_that_of_forced_decoding_after_the_cut_context(self, llm: LLM) -> None:
        keeping = Keeping(PRESETS["snapkv"].policy, Amount(kv_budget=40))
        model = WinnowLM(llm, keeping)
        context, endings = (
            "Ada lives in Oslo. " * 12 + "Ada lives in",
            [" Oslo", " Rome", " the city of Oslo"],
        )
        found = model.loglikelihood([ask("loglikelihood", context, ending) for ending in endings])
        tokenizer: Any = llm.tokenizer
        front = tuple(tokenizer.encode(context))
        pairs = [Pair(front, tuple(tokenizer.encode(context + each)[len(front) :])) for each in endings]
        expected = loglikelihoods(llm, pairs, keeping)
        assert [value for value, _ in found] == pytest.approx([each.total for each in expected], abs=1e-3)
        assert [greedy for _, greedy in found] == [each.is_greedy for each in expected]
        [uncut, *_] = WinnowLM(llm, Keeping()).loglikelihood([ask("loglikelihood", context, endings[0])])
        assert uncut[0] != pytest.approx(found[0][0], abs=1e-3)

    def test_without_a_context_the_text_follows_its_beginning(self, llm: LLM) -> None:
        [(value, _)] = WinnowLM(llm).loglikelihood([ask("loglikelihood", "", "Oslo is a city")])
        [whole] = WinnowLM(llm).loglikelihood_rolling([ask("loglikelihood_rolling", "Oslo is a city")])
        assert value == pytest.approx(whole, abs=1e-3) and value < 0

    def test_a_context_too_long_loses_its_front(self, llm: LLM) -> None:
        model = WinnowLM(llm, Keeping())
        pair = model._fit(list(range(5000)), [7] * 6)
        assert pair == Pair(tuple(range(5000 - llm.max_model_len + 6, 5000)), (7,) * 6)
        with pytest.raises(EvaluationError, match="leave room for a context within"):
            model._fit([1], [7] * llm.max_model_len)


class TestRolling:
    def test_every_token_once_after_the_tokens_before_it(self) -> None:
        pairs = rolling_pairs([10, 11, 12, 13, 14, 15, 16], 1, 3)
        assert pairs == [
            Pair((1,), (10, 11, 12)),
            Pair((10, 11, 12), (13, 14, 15)),
            Pair((13, 14, 15), (16,)),
        ]
        assert rolling_pairs([], 1, 3) == []

    def test_a_text_is_the_sum_of_its_stretches(self, llm: LLM) -> None:
        tokenizer: Any = llm.tokenizer
        text = "Ada lives in Oslo and Bo lives in Rome, which is a large city."
        tokens = tokenizer.encode(text, add_special_tokens=False)
        [found] = WinnowLM(llm, rolling_context=5).loglikelihood_rolling([ask("loglikelihood_rolling", text)])
        total = sum(
            each.total for each in loglikelihoods(llm, rolling_pairs(tokens, tokenizer.bos_token_id, 5))
        )
        assert found == pytest.approx(total, abs=1e-3)
        for wrong in (0, llm.max_model_len):
            with pytest.raises(
                EvaluationError, match=f"rolling_context must be between 1 and .* got {wrong}"
            ):
                WinnowLM(llm, rolling_context=wrong)


class TestGenerate:
    def test_answers_end_where_the_task_says(self, llm: LLM) -> None:
        context = "one two three four one two three four one two"
        params = SamplingParams(temperature=0, max_tokens=8)
        free = llm.generate(context, params)[0].outputs[0].text
        stop = free.strip()[1:3]
        found = WinnowLM(llm).generate_until(
            [ask("generate_until", context, {"until": [stop], "max_gen_toks": 8}),
             ask("generate_until", context, {"until": [], "max_gen_toks": 8})]
        )  # fmt: skip
        assert found == [free[: free.index(stop)], free]

    def test_what_tasks_ask_for(self) -> None:
        asked = {"until": "\n", "max_new_tokens": 5, "do_sample": True, "temperature": 0.5, "top_p": 0.9}
        assert sampling_for(asked, 256) == SamplingParams(stop="\n", max_tokens=5, temperature=0.5, top_p=0.9)
        # Greedy decoding draws nothing, whatever else a task says.
        greedy = {"until": ["\n", ""], "do_sample": False, "temperature": 0.5, "top_p": 0.9}
        assert sampling_for(greedy, 256) == SamplingParams(stop="\n", max_tokens=256, temperature=0)
        with pytest.raises(EvaluationError, match=r"num_beams are not served \(num_beams only at 1, got 4\)"):
            sampling_for({"until": [], "num_beams": 4}, 256)

    def test_arguments_that_change_nothing_are_taken(self) -> None:
        plain = sampling_for({"until": ["\n"], "do_sample": False}, 256)
        neutral = {
            "num_beams": 1,
            "num_return_sequences": 1,
            "use_cache": True,
            "early_stopping": False,
            "length_penalty": 1,
            "repetition_penalty": 1.0,
            "no_repeat_ngram_size": 0,
            "typical_p": 1.0,
            "pad_token_id": 7,
            "temperature": 0,
            "top_p": 1.0,
        }
        assert sampling_for({"until": ["\n"], "do_sample": False} | neutral, 256) == plain
        unset = dict.fromkeys(
            ("num_beams", "temperature", "top_k", "min_tokens", "bad_words_ids", "do_sample")
        )
        assert sampling_for({"until": ["\n"]} | unset, 256) == plain

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("length_penalty", 2.0),
            ("early_stopping", True),
            ("num_return_sequences", 2),
            ("no_repeat_ngram_size", 3),
            ("bad_words_ids", [[3]]),
            ("typical_p", 0.9),
            ("num_beems", 1),
            ("temperature", "hot"),
        ],
    )
    def test_arguments_that_would_change_something_are_refused(self, name: str, value: object) -> None:
        with pytest.raises(EvaluationError, match=name if name != "temperature" else "hot"):
            sampling_for({"until": [], "do_sample": False, "num_beams": 1, name: value}, 256)

    def test_chats_go_through_the_template(self, llm: LLM) -> None:
        model, tokenizer = WinnowLM(llm), llm.tokenizer
        assert tokenizer is not None
        chat = [{"role": "user", "content": "Where?"}]
        text = model.apply_chat_template(chat)
        assert text == tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        # A template writes the token that texts begin with; it is not put there twice.
        assert model.tok_encode(tokenizer.bos_token + "Where?") == tokenizer.encode("Where?")


def test_the_engines_own_policy_less_pressure() -> None:
    with LLM(eviction="streaming", kv_memory="32MiB") as llm:
        keeping = WinnowLM(llm)._keeping
        assert (keeping.policy, keeping.amount.kv_budget) == (
            PRESETS["streaming"].policy,
            PRESETS["streaming"].kv_budget,
        )
    with LLM(eviction="kv-compress", compression=8, kv_memory="32MiB") as llm:
        keeping = WinnowLM(llm)._keeping
        assert (keeping.amount.compression, keeping.amount.kv_budget) == (8, None)
        assert PRESETS["kv-compress"].policy.when.pressure and not keeping.policy.when.pressure


def test_a_task_that_does_not_exist(tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_its_own(include_path: str, include_defaults: bool = True) -> TaskManager:
        """Thousands of files, which say nothing of ours."""
        return TaskManager(include_path=include_path, include_defaults=False)

    monkeypatch.setattr(lm_eval_cell, "TaskManager", without_its_own)
    with pytest.raises(EvaluationError, match="lm_eval has no task 'tiny_choise'; did you mean tiny_choice"):
        LmEvalPlan(("tiny_choise",), include_path=tasks).task_manager()
