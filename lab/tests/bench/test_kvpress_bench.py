"""The comparison with kvpress, with a script that plays kvpress, and the real script's own arithmetic."""

import importlib.util
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from winnow import LLM, SamplingParams
from winnow.models.load.loader import DEMO_MODEL
from winnow_lab.evaluate.prompt import PromptMaker
from winnow_lab.evaluate.tasks import load_task
from winnow_lab.evaluate.tasks.task import settings_for
from winnow_lab.papers.kvpress import run as run_module
from winnow_lab.papers.kvpress.run import PRESSES, KvpressRun, PressCell
from winnow_lab.peers.environment import Environment, PeerError

# Answers every ask with the prompt's own last tokens; says how often it ran.
PLAYED = """
import json, sys
work = json.loads(open(sys.argv[1]).read())
with open(work["answers"] + ".runs", "a") as runs:
    runs.write(f"{{len(work['asks'])}}\\n")
with open(work["answers"], "a") as answers:
    for ask in work["asks"]:
        prompt = work["prompts"][ask["prompt"]]
        found = dict(answers=[each["token_ids"][-2:] for each in prompt["questions"]], seen=float(ask["kept"]))
        found |= dict(kv_bytes=1000, seconds=2.0, compress_seconds=1.0)
        if {refused!r} in ask["classes"]:
            found = dict(error="ValueError: too short")
        answers.write(json.dumps(ask | found) + "\\n")
"""


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(dtype="float32", device="cpu", kv_memory="16MiB", kv_floor=1) as llm:
        yield llm


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Environment:
    """An environment whose interpreter is this one, and a script that refuses one press."""
    script = tmp_path / "played.py"
    script.write_text(PLAYED.format(refused="TOVAPress"))
    monkeypatch.setattr(run_module, "_SCRIPT", script)
    monkeypatch.setattr(Environment, "python", Path(sys.executable))
    monkeypatch.setattr(Environment, "prepare", lambda self, packages, sources: None)
    return Environment(tmp_path / "environment")


def demo_settings(llm: LLM) -> Any:
    return settings_for(llm, samples=1, tokens=(200,), categories=("single", "passkey"))


class TestRun:
    CELLS = (PressCell(PRESSES["KeyDiff"], 4.0), PressCell(PRESSES["TOVA"], 4.0))

    def start(self, llm: LLM, folder: Path) -> KvpressRun:
        samples = load_task("demo").samples(demo_settings(llm))
        return KvpressRun(DEMO_MODEL, samples, PromptMaker(llm.tokenizer), folder)

    def test_outcomes_are_those_of_an_evaluation(self, llm: LLM, played: Environment, tmp_path: Path) -> None:
        run = self.start(llm, tmp_path)
        run.answer(played, self.CELLS, threads=1)
        done, refused = run.results(self.CELLS, "agnostic", llm.tokenizer)
        prompt = PromptMaker(llm.tokenizer).make(*self.first(llm))
        first = done.outcomes[0]
        assert done.cell.name == first.cell == "query-agnostic kvpress KeyDiff 4x"
        assert first.prompt_tokens == len(prompt.token_ids)
        assert first.achieved_compression == prompt.context_tokens / -(-prompt.context_tokens // 4)
        assert first.kv_bytes == 1000
        assert first.answer == llm.tokenizer.decode(prompt.token_ids[-2:]), "and it is scored as text"
        assert first.score == 0.0
        assert refused.refusal is not None
        assert (refused.outcomes, refused.refusal.prompts) == ((), 2)

    def first(self, llm: LLM) -> tuple[Any, Any]:
        sample = load_task("demo").samples(demo_settings(llm))[0]
        return sample, sample.questions[0]

    def test_a_second_start_asks_what_is_missing_alone(
        self, llm: LLM, played: Environment, tmp_path: Path
    ) -> None:
        self.start(llm, tmp_path).answer(played, self.CELLS[:1], threads=1)
        [answers] = tmp_path.glob("answers-*.jsonl")
        with answers.open("a") as file:
            file.write('{"classes": ["TOVAPr')  # killed in the midst of a line
        self.start(llm, tmp_path).answer(played, self.CELLS, threads=1)
        self.start(llm, tmp_path).answer(played, self.CELLS, threads=1)
        assert answers.with_name(answers.name + ".runs").read_text().split() == ["2", "2"]
        assert len([json.loads(line) for line in answers.read_text().splitlines()]) == 4

    def test_what_was_never_answered_is_said(self, llm: LLM, tmp_path: Path) -> None:
        with pytest.raises(PeerError, match="kvpress left KeyDiff unanswered on prompt 0"):
            self.start(llm, tmp_path).results(self.CELLS, "agnostic", llm.tokenizer)


def test_all_but_the_last_token_is_compressed_with_a_question_that_is_seen(llm: LLM, tmp_path: Path) -> None:
    samples, maker = load_task("demo").samples(demo_settings(llm)), PromptMaker(llm.tokenizer)
    run = KvpressRun(DEMO_MODEL, samples, maker, tmp_path, query="aware")
    prompt = maker.make(samples[0], samples[0].questions[0])
    [first, _] = run._work["prompts"]
    assert first["context"] == list(prompt.token_ids[:-1])
    assert first["questions"][0]["token_ids"] == list(prompt.token_ids[-1:])
    kept = PressCell(PRESSES["KeyDiff"], 4.0).ask(0, len(prompt.token_ids) - 1, 1)["kept"]
    assert kept + 1 == -(-len(prompt.token_ids) // 4), "of the same budget"


class TestPeer:
    """The script that runs in kvpress's environment, here with classes in kvpress's place."""

    @pytest.fixture
    def peer(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        class KeepFirst:
            """Cuts the cache to its first KVs when the block ends."""

            def __init__(self, compression_ratio: float) -> None:
                self.compression_ratio = compression_ratio

        class Around:
            def __init__(self, press: Any) -> None:
                self.press = press

        stub = types.ModuleType("kvpress")
        stub.KeepFirst, stub.Around = KeepFirst, Around  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "kvpress", stub)
        place = Path(run_module.__file__).with_name("peer.py")
        spec = importlib.util.spec_from_file_location("kvpress_peer", place)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    def test_a_press_keeps_as_many_as_asked(self, peer: Any) -> None:
        for context in range(1, 300):
            for kept in range(1, context + 1):
                ask = {"classes": ["Around", "KeepFirst"], "options": {}, "kept": kept}
                ratio = peer.make_press(ask, context).press.compression_ratio
                # What kvpress's compute_n_kept does.
                assert max(1, int(context * (1 - ratio))) == kept

    def test_without_a_press_answers_are_those_of_the_full_cache(self, peer: Any, llm: LLM) -> None:
        model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval()
        ids = llm.tokenizer.encode(
            "The hobby of Tom is chess. It rained.\nQuestion: What is the hobby of Tom?\nAnswer:"
        )
        question = {"token_ids": ids[-5:], "max_tokens": 6}
        prompt = {"context": ids[:-5], "questions": [question, {**question, "max_tokens": 2}]}
        found = peer.answer(model, prompt, {"classes": []})
        [ours] = llm.generate([ids], SamplingParams(temperature=0.0, max_tokens=6))
        answer, short = found["answers"]
        assert answer == list(ours.outputs[0].token_ids)
        assert short == answer[:2], "the first answer left nothing in the cache"
        assert found["seen"] == len(ids) - 5
        held = len(ids) + len(answer) - 1
        assert found["kv_bytes"] == held * 6 * 2 * 2 * 64 * 4
