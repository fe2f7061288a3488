"""The search: what it tries, that it keeps its promise on prompts held back, and that it resumes where it stopped."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from tests.tiny_llama import VOCAB, save_tiny_llama

from winnow import LLM
from winnow.cli.main import main
from winnow.errors import ConfigError
from winnow.sampling import SamplingParams
from winnow_lab.plan.tuning.measure import (
    Answer,
    Candidate,
    Trial,
    TunePrompt,
    agreement,
    candidates,
    prompts_for,
    risk_bound,
    wilson,
)
from winnow_lab.plan.tuning.search import HELD_BACK, Search, Tuned, Tuner
from winnow_lab.plan.tuning.tune_tables import command, tune_table, verdict


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny") / "model", 0)


def prompts(count: int = 9, length: int = 60) -> list[TunePrompt]:
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    return [
        TunePrompt([(i * 31 + place * (7 + i)) % (VOCAB - 2) + 2 for place in range(length)], None, params)
        for i in range(count)
    ]


def test_candidates_are_all_combinations_and_the_full_cache() -> None:
    found = candidates(["snapkv", "extreme-decode"], [2.0, 4.0], [8, 16])
    assert len(found) == 2 * (1 + 2 + 1)
    assert Candidate("full", None, 8) in found
    assert Candidate("extreme-decode", None, 16) in found  # decides itself how much it keeps


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="no-such"):
        candidates(["no-such"])
    with pytest.raises(ConfigError, match="compression"):
        candidates(["snapkv"], [0.5])


def test_agreement_of_answers() -> None:
    prompt = TunePrompt("", None, SamplingParams())
    full = Answer((1, 2, 3, 4), "")
    assert agreement(prompt, full, full, "exact") == agreement(prompt, full, full, "tokens") == 1.0
    other = Answer((1, 2, 9, 4), "")
    assert agreement(prompt, other, full, "exact") == 0.0
    assert agreement(prompt, other, full, "tokens") == 0.5
    assert agreement(prompt, Answer((1, 2), ""), full, "tokens") == 0.5
    assert agreement(prompt, Answer((), ""), Answer((), ""), "tokens") == 1.0


def test_labels_are_compared_by_their_metric() -> None:
    prompt = TunePrompt("", None, SamplingParams(), ("Paris",))
    right, wrong = Answer((1,), "Paris"), Answer((2,), "Rome")
    assert agreement(prompt, right, right, "exact") == 1.0
    assert agreement(prompt, wrong, right, "exact") == 0.0
    assert agreement(prompt, wrong, wrong, "exact") == 1.0, "the full cache is wrong too"


@pytest.mark.parametrize(("mean", "target", "count"), [(1.0, 0.98, 49), (0.99, 0.98, 98), (0.98, 0.98, None)])
def test_the_prompts_that_would_show_a_target(mean: float, target: float, count: int | None) -> None:
    assert prompts_for(mean, target) == count
    if count is not None:
        assert risk_bound(mean, count) <= 1 - target + 1e-9 < risk_bound(mean, count - 1)


def test_the_most_compression_that_the_bound_allows_keeps_the_loss_on_further_prompts() -> None:
    """Over draws of 30 prompts: losses grow with compression, and the mean loss of what is chosen stays below .1."""
    rng = np.random.default_rng(0)
    losses = np.array([0.0, 0.02, 0.05, 0.09, 0.2, 0.5])  # expected, by compression

    def chosen() -> float:
        drawn = rng.random((30, 1)) < losses
        allowed = [i for i in range(len(losses)) if risk_bound(1 - drawn[:, i].mean(), 30) <= 0.1]
        return float(losses[max(allowed, default=0)])

    assert np.mean([chosen() for _ in range(4000)]) <= 0.1


@given(st.floats(0, 1), st.integers(1, 500))
def test_wilson_holds_the_mean_and_narrows(mean: float, count: int) -> None:
    low, high = wilson(mean, count)
    assert 0.0 <= low <= mean <= high <= 1.0
    narrow = wilson(mean, 4 * count)
    assert narrow[1] - narrow[0] <= high - low + 1e-12
    assert wilson(mean, count, looks=3)[0] <= low + 1e-12, "who looks thrice promises less"


@given(st.integers(2, 60), st.floats(0.0, 0.9), st.integers(1, 10))
def test_prompts_are_split_once_and_rungs_double(count: int, part: float, first: int) -> None:
    search = Search(0.9, first=first, held_back=part)
    chosen, held = search.split(prompts(count, 2))
    assert len(chosen) >= 1 <= len(held) and len(chosen) + len(held) == count
    rungs = search.rungs(len(chosen))
    assert rungs[-1] == len(chosen) and rungs == sorted(set(rungs))


def search_with(
    tiny: Path, target: float, found: tuple[Trial, ...] = ()
) -> tuple[Tuned, list[Trial], list[Any]]:
    opened: list[Any] = []

    def open_engine(own: Mapping[str, Any]) -> LLM:
        opened.append(own)
        return LLM(
            tiny,
            dtype="float32",
            device="cpu",
            threads=1,
            kv_memory="256KiB",
            kv_floor=8,
            num_accumulators=2,
            enable_prefix_caching=False,
            **own,  # type: ignore[arg-type]
        )

    recorded: list[Trial] = []
    tried = candidates(["recent", "snapkv", "random"], [1.5, 6.0], [4])
    tuned = Tuner(Search(target, first=2), open_engine, recorded.append, found).tune(tried, prompts())
    return tuned, recorded, opened


def test_the_winner_keeps_its_promise_on_prompts_held_back(tiny: Path) -> None:
    for target in (0.05, 1.0):
        tuned, recorded, opened = search_with(tiny, target)
        assert tuned.best is not None and tuned.check is not None
        assert tuned.best.mean >= target and tuned.check.mean >= target
        assert tuned.check.stage == HELD_BACK
        assert [dict(own) for own in opened] == [{"max_num_seqs": 4}]
        full = [t for t in recorded if t.candidate.eviction == "full"]
        assert all(t.mean == 1.0 for t in full), "the full cache agrees with itself"
        failed = [t for t in recorded if t.error is not None]
        assert {t.candidate.eviction for t in failed} == {"snapkv"}, "its window exceeds the budget"
        assert any("protected" in str(t.error) for t in failed)
        front = tuned.pareto()
        assert [t.mean for t in front] == sorted(t.mean for t in front)
        assert command(tuned, "p.jsonl", []) == (
            f"winnow run p.jsonl -o answers.jsonl --eviction {tuned.best.candidate.eviction}"
            + (
                f" --compression {tuned.best.candidate.compression:g}"
                if tuned.best.candidate.compression
                else ""
            )
            + " --max-num-seqs 4"
        )
        assert len(tune_table(tuned).rows) == 7
        assert "held back" in verdict(tuned)[1] and "split-conformal" in verdict(tuned)[2]


def test_a_search_goes_on_where_it_stood(tiny: Path) -> None:
    tuned, recorded, _ = search_with(tiny, 0.05)
    kept = tuple(Trial.from_json(json.loads(json.dumps(trial.to_json()))) for trial in recorded)
    again, measured, opened = search_with(tiny, 0.05, kept)
    assert not measured and not opened
    assert again.best == tuned.best and again.check == tuned.check


def test_the_command_prints_what_to_run_and_resumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, journal, report = (tmp_path / name for name in ("p.jsonl", "journal.jsonl", "report.json"))
    file.write_text(
        "".join(
            json.dumps({"prompt": "one two three " * 12 + str(i), "max_tokens": 3}) + "\n" for i in range(5)
        )
    )
    line = [
        *("tune", str(file), "--presets", "recent", "--compressions", "2", "--kv-floor", "8", "--first", "2"),
        *("--agreement", "0.01", "--journal", str(journal), "--json", str(report), "--threads", "1"),
    ]
    assert main(line) == 0
    first = capsys.readouterr()
    assert "winnow run" in first.out and "--kv-floor 8" in first.out
    assert json.loads(report.read_text())["held_back"]["stage"] == HELD_BACK
    size = journal.stat().st_size
    assert main(line) == 0
    # Nothing is measured again; how many prompts it takes is said before.
    [said] = capsys.readouterr().err.splitlines()
    assert "2 of 5 prompts are held back: it takes 1, 3 in all, to show an agreement of 0.01" in said
    assert journal.stat().st_size == size
    assert main([*line[:3], "recent", "--journal", str(journal), "--threads", "1", "--kv-floor", "16"]) == 2
    assert "kv_floor" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"), [('{"prompt": "a"}\n', "at least 2"), ('{"prompt": "a"}\n{"promt": "b"}\n', "line 2")]
)
def test_unusable_prompts_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(text)
    assert main(["tune", str(file)]) == 2
    assert said in capsys.readouterr().err
