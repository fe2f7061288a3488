"""`winnow bench agents`: conversations of many turns, and what of them is computed again."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.server.running import running

from winnow import LLM
from winnow.cli.main import main
from winnow.errors import ConfigError
from winnow_lab.bench.agents import AgentLoad, Played, agent_sessions, spread_over, summarise_agents
from winnow_lab.bench.serve import Outcome

LOAD = [
    *("--num-sessions", "3", "--num-turns", "3", "--system-tokens", "30", "--prompt-min", "20"),
    *("--prompt-max", "60", "--answer-min", "3", "--answer-max", "8", "--think-mean", "0.02", "--ramp", "0"),
]


def results_of(path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main(["bench", "agents", *LOAD, "--json", str(path), *arguments])
    return code, json.loads(path.read_text())


def test_a_turn_computes_what_is_new(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache = ["--prefix-cache-dir", str(tmp_path / "cache"), "--kv-memory", "32MiB"]
    code, found = results_of(tmp_path / "own.json", *cache, "--check", "5")
    assert code == 0 and (found["completed"], found["failed"]) == (9, 0)
    assert found["num_checked"] == found["num_equal"] == 5
    # A block at most is computed again in each turn, and the instructions of all are computed once.
    assert found["computed_tokens"] <= found["new_tokens"] + 9 * 16 < found["prompt_tokens"]
    assert found["engine"]["disk_tier"]["num_files"] > 0
    assert "5 of 5 answers equal" in " ".join(capsys.readouterr().out.split())
    # After a restart the same conversations are on disk.
    _, again = results_of(tmp_path / "again.json", *cache)
    assert again["computed_tokens"] <= 9 * 20 and again["engine"]["disk_tier"]["loaded_tokens"] > 0


def test_against_a_server_and_another_that_checks(tmp_path: Path) -> None:
    with LLM(kv_memory="16MiB", enable_prefix_caching=False) as llm, running(llm) as server:
        url = ["--base-url", server.address]
        code, found = results_of(tmp_path / "a.json", *url, "--check", "2", "--check-url", server.address)
        assert code == 0 and found["num_equal"] == 2 and found["hit_rate"] == 0
        assert found["computed_tokens"] == found["prompt_tokens"] > found["new_tokens"]
        assert main(["bench", "agents", *LOAD, *url, "--check", "2"]) == 2  # nobody to check


def test_conversations_follow_from_the_seed() -> None:
    load = AgentLoad(num_sessions=2, num_turns=3, ramp=4.0)
    assert agent_sessions(load) == agent_sessions(load)
    _, sessions = agent_sessions(load)
    assert [turns[0].pause for turns in sessions] == [0.0, 2.0]
    assert len({t.text for s in sessions for t in s}) == 6
    assert all(50 <= turn.answer_tokens <= 300 for turns in sessions for turn in turns)
    with pytest.raises(ConfigError, match="answer_max must be at least answer_min, 50, got 10"):
        AgentLoad(answer_max=10)


def test_sums_count_what_the_server_does_not_say() -> None:
    def turn(number: int, ttft: float, prompt: int, cached: int | None) -> Played:
        outcome = Outcome(
            0.0, ok=True, ttft=ttft, prompt_tokens=prompt, output_tokens=5, cached_tokens=cached
        )
        return Played(0, number, [], 5, outcome, new_tokens=10)

    known = [turn(0, 4.0, 10, 0), turn(1, 1.0, 25, 16), turn(2, 2.0, 40, 32)]
    found = summarise_agents(known, 2.0)
    assert (found["computed_tokens"], found["new_tokens"], found["hit_rate"]) == (27, 30, 1 - 27 / 75)
    assert (found["ttft_p50"], found["later_ttft_p50"], found["output_throughput"]) == (2.0, 1.5, 7.5)
    found = summarise_agents([*known, turn(3, 1.0, 60, None)], 2.0)
    assert found["computed_tokens"] is found["hit_rate"] is None
    assert [each.turn for each in spread_over(known, 2)] == [0, 1] and len(spread_over(known, 9)) == 3
