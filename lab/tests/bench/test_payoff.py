"""The benchmark of what compression pays: its works and its page."""

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from winnow.models import DEMO_MODEL
from winnow.prompt.chat import apply_template
from winnow_lab.checkout import ROOT

PEERS = ROOT / "lab/winnow_lab/peers"
Load = Callable[[str], Any]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    """Import a module of the peers by name."""
    monkeypatch.syspath_prepend(str(PEERS))
    return importlib.import_module


def row(peer: str, name: str, seconds: float | None, scores: list[float]) -> dict[str, Any]:
    ran, rates = seconds is not None, [100 / seconds] if seconds else []
    return {
        "peer": peer, "configuration": name, "kv_memory": "2 sequences", "versions": {peer: "1.0"},
        "seconds": [seconds] if ran else [], "cpu_seconds": [3.0] if ran else [], "output_tokens": [100] if ran else [],
        "output_tokens_per_second": rates, "median": rates[0] if rates else None, "scores": scores,
        "commits": ["abc"], "dates": ["2026-11-26T01:00:00"], "error": None if ran else "a\nno kernel",
    }  # fmt: skip


def work(name: str, rows: list[dict[str, Any]], requests: int = 4) -> dict[str, Any]:
    return {
        "model": "m", "work": name, "title": "t", "summary": "4 prompts", "configurations": rows,
        "workload": {"requests": requests, "contexts": 2},
    }  # fmt: skip


RIGHT, HALF = [1.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]
LOST = [0.0, 0.0, 0.0, 0.0]


def report() -> dict[str, Any]:
    p1 = [
        row("winnow", "full cache", 100, RIGHT),
        row("winnow", "winnow-seen 8x", 10, HALF),
        row("winnow", "winnow-seen 16x", 1, LOST),
        row("openvino", "u8 KVs", 40, RIGHT),
        row("llama.cpp", "f16 KVs", None, []),
    ]
    p2 = [row("winnow", "full cache", 200, RIGHT), row("winnow", "kvzip 8x", 60, RIGHT)]
    few = [row("winnow", "full cache", 20, RIGHT), row("winnow", "kvzip 8x", 42, RIGHT)]
    p3 = [row("winnow", "full cache", 100, RIGHT), row("winnow", "auto", 100, RIGHT)]
    four = [row("winnow", "full cache", 90, RIGHT), row("winnow", "auto", 60, RIGHT)]
    works = [work("p1", p1), work("p2", p2, 40), work("p2, few", few), work("p3", p3), work("p3, four", four)]
    machine = {"accelerator": None, "cpu": "c", "cores": 2, "torch_version": "2"}
    head = {"command": ["payoff.py"], "commit": "abc", "date": "d", "machine": machine}
    return head | {"works": works}


def test_a_table_says_what_each_row_came_to(load: Load) -> None:
    page = load("winnow_lab.peers.page")
    text = "\n".join(line for each in page.tables(report()) for line in each.markdown())
    row = "| winnow, winnow-seen 8x | 2 sequences | 10 |  | 10.0 | 10.00 | 25% ± 25% | 3 | 100 |"
    assert row in text, text
    assert "| none [1] |" in text and "[1] no kernel" in text and "| 5 questions |" in text


@pytest.mark.parametrize(
    ("full", "other", "questions"),
    [
        ((20.0, 200.0), (42.0, 60.0), 5),  # 10 each; 40 and 1 each: 40 + q < 10 q from 4.4 on
        ((20.0, 200.0), (10.0, 20.0), 1),
        ((20.0, 200.0), (40.0, 220.0), None),  # as much each, and 20 more
        ((20.0, 200.0), (36.0, 144.0), 7),  # 24 + 6 q and 10 q are equal at 6
    ],
)
def test_from_how_many_questions_compressing_pays(
    full: tuple[float, float], other: tuple[float, float], questions: int | None, load: Load
) -> None:
    assert load("winnow_lab.peers.page").pays_from(2, 20, full, other) == questions


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Any:
    sys.path.insert(0, str(PEERS))
    try:
        return importlib.import_module("winnow_lab.peers.works").RealModel(
            DEMO_MODEL, tmp_path_factory.mktemp("models")
        )
    finally:
        sys.path.remove(str(PEERS))


def test_works_ask_equally_often_of_each_context(demo: Any, load: Load) -> None:
    works = load("works").real_works((600,), 6)
    given = {name: works[name].make(name, demo) for name in ("p1", "p3, four")}
    p1, p3 = given["p1"], given["p3, four"]
    assert len(p1.prompts) == 6 and p1.contexts == 6 and not p1.end_tokens and p1.new_tokens == 512
    assert all(question is not None for question in p1.exam.questions)
    assert p3.contexts == 6 and p3.kv_seqs == 4 and p3.end_tokens and p3.prefix_caching
    assert p3.identity() != p1.identity()
    # As LLM.chat finds the tail; p1's answers are begun behind it.
    chat = apply_template(demo.tokenizer, [{"role": "user", "content": "Who?"}])
    assert p3.sampling == [{"template_tail": chat.template_tail, "answer_prefix": 0}] * 6
    assert all(
        prompt[-chat.template_tail :] == chat.token_ids[-chat.template_tail :] for prompt in p3.prompts
    )
    begun = [each["answer_prefix"] for each in p1.sampling]
    assert min(begun) > 5
    assert [each["template_tail"] for each in p1.sampling] == [chat.template_tail + each for each in begun]
    later = works["p2"]
    assert later.later and load("works").real_works((600,), None)["p2, few"].requests == 32


def test_texts_rise_in_length_and_a_summary_is_not_judged(demo: Any, load: Load) -> None:
    samples = load("works").manual_samples(demo.settings((300, 800)), 60)
    lengths = [demo.settings(()).count_tokens(sample.context) for sample in samples]
    assert len(samples) == 10 and len({sample.category for sample in samples}) == 10
    assert all(len(sample.questions) == 6 for sample in samples)
    assert 150 < lengths[0] < 300 and 600 < lengths[-1] < 800
    for sample in samples:
        assert not sample.questions[-1].references
        assert all(question.references[0] in sample.context for question in sample.questions[:-1])


def test_answers_may_end_before_their_length(load: Load) -> None:
    protocol, runner = load("protocol"), load("runner")
    asked = protocol.Work("m", [[1], [2]], 2, 1, {}, end_tokens=[9])

    def printed(tokens: list[list[int]]) -> str:
        return json.dumps({"seconds": 1.0, "cpu_seconds": 1.0, "tokens": tokens, "versions": {}})

    assert runner.parse_answers(printed([[9], [5, 5]]), asked).tokens == [[], [5, 5]]
    with pytest.raises(
        runner.PeerError, match=r"2 answers of at most 2 tokens were asked for, 2 of \[1, 3\] came"
    ):
        runner.parse_answers(printed([[5], [5, 5, 5]]), asked)


BUSY = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True); input()"


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux")
def test_time_of_a_process_that_a_peer_started_counts(load: Load) -> None:
    cpu_seconds = load("protocol").cpu_seconds
    before = cpu_seconds()
    with subprocess.Popen(
        [sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as busy:
        assert busy.stdout is not None
        busy.stdout.readline()
        assert cpu_seconds() - before >= 0.25
        busy.communicate(b"\n")


ANSWER = """
import sys
from pathlib import Path
sys.path.insert(0, {folder!r})
from protocol import Answers, Work, emit
work = Work.read(Path(sys.argv[1]))
tokens = [[prompt[-1]] * work.new_tokens for prompt in work.prompts]
emit(Answers(1.0, 2.0, tokens, dict(pytest="1")))
"""


def test_every_work_is_measured_and_the_page_written(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    payoff, peers = load("winnow_lab.peers.payoff"), load("winnow_lab.peers.peers")
    script = tmp_path / "peer.py"
    script.write_text(ANSWER.format(folder=str(PEERS)))
    rows = [peers.Configuration("full cache", "2", {})]
    monkeypatch.setitem(peers.PEERS, "winnow", peers.Peer("winnow", str(script), lambda _: rows))
    typed = ["--works", "p1,p3", "--lengths", "600", "--requests", "2", "--rounds", "1", "--peers", "winnow"]
    typed += ["--folder", str(tmp_path / "f"), "--journal", str(tmp_path / "j"), "-o", str(tmp_path)]
    typed += ["--name", "page", "--model", str(DEMO_MODEL)]
    with pytest.raises(SystemExit) as stop:
        payoff.main([*typed, "--steps", "2"])
    assert stop.value.code == 3 and "1 runs of round 1 are missing" in capsys.readouterr().err
    assert payoff.main(typed) == 0
    shown = capsys.readouterr().err
    assert shown.count("round 1, winnow, full cache: 1024.0 tokens/s") == 1 and shown.count("round 1") == 3
    works = json.loads((tmp_path / "page.json").read_text())["works"]
    assert [each["work"] for each in works] == ["p1", "p3", "p3, four"]
    assert "| winnow, full cache | 2 | 1024 |" in (tmp_path / "page.md").read_text()
