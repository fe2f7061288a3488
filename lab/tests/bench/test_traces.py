"""Traces: what the files say, as requests, and prompts that begin alike as theirs did."""

from pathlib import Path

import pytest

from winnow.errors import ConfigError
from winnow_lab.bench.traces import TraceRequest, read_trace, scaled

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""
MOONCAKE = """{"timestamp": 500, "input_length": 1500, "output_length": 500, "hash_ids": [0, 1, 2]}
{"timestamp": 3500, "input_length": 1100, "output_length": 0, "hash_ids": [0, 1, 3]}
"""


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_azure(tmp_path: Path) -> None:
    first, second = read_trace(written(tmp_path / "a.csv", AZURE))
    assert first == TraceRequest(0.0, 374, 44)
    assert second.arrival == pytest.approx(4.314579, abs=1e-5)
    assert (second.prompt_tokens, second.output_tokens) == (396, 109)
    assert read_trace(tmp_path / "a.csv", limit=1) == [first]


def test_mooncake_prompts_begin_alike(tmp_path: Path) -> None:
    first, second = read_trace(written(tmp_path / "m.jsonl", MOONCAKE))
    assert (second.arrival, second.output_tokens) == (3.0, 1)
    a, b = first.prompt(1000, seed=1), second.prompt(1000, seed=2)
    assert (len(a), len(b)) == (1500, 1100)
    assert a[:1024] == b[:1024]
    assert a[1024:1100] != b[1024:1100]
    assert a == first.prompt(1000, seed=9)[:1500]


def test_a_smaller_trace_shares_the_same_part(tmp_path: Path) -> None:
    first, second = scaled(
        read_trace(written(tmp_path / "m.jsonl", MOONCAKE)), tokens=0.125, rate=2.0, longest=300
    )
    assert (first.prompt_tokens, first.output_tokens, second.arrival) == (188, 62, 1.5)
    assert first.prompt(50, 1)[:128] == second.prompt(50, 2)[:128]
    assert scaled([first, second], longest=200) == [second]
    with pytest.raises(ConfigError, match="rate must be above 0"):
        scaled([first], rate=0)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.csv", "TIMESTAMP,ContextTokens\n2023-11-16 18:15:46,x\n", "a.csv, line 2"),
        ("m.jsonl", '{"timestamp": 1}\n', "m.jsonl, line 1"),
        ("m.txt", "", "a trace is"),
        ("e.jsonl", "", "holds no request"),
    ],
)
def test_what_is_no_trace(tmp_path: Path, name: str, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_trace(written(tmp_path / name, text))
