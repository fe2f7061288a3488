"""`winnow plan` and `winnow simulate` as they are typed."""

import json
from pathlib import Path

import pytest

from winnow.cli.main import main
from winnow.config import SchedulerConfig
from winnow_lab.papers.__main__ import main as papers

TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:15:{second:02d}.6805900,{200 + 37 * second},{5 + second}\n" for second in range(20)
)


def run(*words: str) -> int:
    return main(list(words))


def test_plan_writes_the_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    line = ("plan", "llama-3-70b", "--gpu", "A100", "--gpus", "4", "--batch", "64", "--context", "4096")
    assert run(*line, "--json", str(file), "--price", "2") == 0
    out = capsys.readouterr().out
    assert "80.0 GiB" in out and "cost of 1M new tokens" in out
    plan = json.loads(file.read_text())
    assert (plan["kv_bytes_per_token"], plan["kv_bytes"]) == (327_680, 85_899_345_920)
    assert plan["weight_bytes"] == pytest.approx(141.1e9, rel=0.001)
    assert plan["fits"] is True and plan["fewest_gpus"] == 3


def test_a_fleet_answers_the_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    line = ("plan", "llama-3-70b", "--gpu", "A100", "--gpus", "4", "--context", "4096", "--price", "2")
    assert run(*line, "--request-rate", "5", "--json", str(file)) == 0
    assert "replicas for 5 requests/s" in (out := capsys.readouterr().out) and "price for an hour" in out
    plan = json.loads(file.read_text())
    needed = 5 * plan["new_tokens"] / plan["performance"]["output_rate"]
    assert plan["replicas"] - 1 < needed <= plan["replicas"] and plan["fleet_gpus"] == 4 * plan["replicas"]
    assert run(*line, "--request-rate", "-1") == 2
    assert "--request-rate must be" in capsys.readouterr().err


def test_policies_and_devices_stand_beside_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.json"
    line = ("plan", "llama-3-8b", "--gpu", "L4,H100", "--eviction", "full,snapkv", "--compression", "4")
    assert run(*line, "--json", str(file)) == 0
    plans = json.loads(file.read_text())["plans"]
    assert [(plan["hardware"]["name"], plan["eviction"]) for plan in plans] == [
        ("L4", "full"),
        ("L4", "snapkv"),
        ("H100", "full"),
        ("H100", "snapkv"),
    ]
    assert plans[1]["largest_batch"] > 2 * plans[0]["largest_batch"]
    assert "KVs per token" in capsys.readouterr().out


def test_the_full_cache_stands_beside_a_policy_with_what_is_known_of_its_accuracy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.json"
    line = ("plan", "llama-3-8b", "--gpu", "L4,H100", "--context", "4096", "--json", str(file))
    assert run(*line, "--eviction", "kvzip,h2o", "--compression", "4") == 0
    plans = json.loads(file.read_text())["plans"]
    assert [plan["eviction"] for plan in plans] == 2 * ["full", "kvzip", "h2o"]
    full, kvzip, h2o = plans[:3]
    assert kvzip["performance"]["prefill_seconds"] > 2 * full["performance"]["prefill_seconds"]
    known = {(each["question"], each["task"]): each["share"] for each in kvzip["accuracy"]}
    assert known["later", "ruler 2048"] == 1.036 and known["later", "needle 2048"] == 1.0
    assert full["accuracy"] == h2o["accuracy"] == []
    assert "not measured" in capsys.readouterr().out


def test_prompts_bind_where_they_take_longest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    line = ("plan", "llama-3-8b", "--gpu", "H100", "--context", "4096", "--batch", "32", "--json", str(file))
    for new_tokens, binds in (("16", "prompts: compute"), ("2048", "max_num_seqs")):
        assert run(*line, "--new-tokens", new_tokens, "--eviction", "kvzip", "--compression", "4") == 0
        full, kvzip = json.loads(file.read_text())["plans"]
        assert full["binds"] == binds
        ratio = kvzip["performance"]["output_rate"] / full["performance"]["output_rate"]
        shown = capsys.readouterr().out
        assert "to the full cache's" in shown and f"{ratio:.2f}x" in shown
        assert (ratio < 0.6) is (new_tokens == "16"), "the replay halves what short answers get"


def test_a_batch_is_what_the_scheduler_lets_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    line = ("plan", "llama-3-8b", "--gpu", "H100", "--context", "512", "--json", str(file))
    for words, batch, binds in (
        (("--max-num-seqs", "5"), 5, "max_num_seqs"),
        ((), SchedulerConfig().max_num_seqs, "max_num_seqs"),
        (("--batch", "100"), 100, "max_num_seqs"),
    ):
        assert run(*line, *words) == 0
        plan = json.loads(file.read_text())
        assert (plan["batch"], plan["binds"]) == (batch, binds)
        assert plan["largest_batch"] > 500
    assert run(*line, "--max-num-seqs", "5", "--batch", "6") == 2
    assert "batch must be at most max_num_seqs (5), got 6" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("llama-3-8b", "--gpu", "L44"), "did you mean L4"),
        (("llama-3-8", "--gpu", "L4"), "did you mean llama-3-8b"),
        (("llama-3-8b", "--batch", "0"), "batch"),
        (("llama-3-8b", "--context", "10", "--new-tokens", "10"), "new_tokens"),
        (("llama-3-8b", "--kv-cache-dtype", "int9"), "int9"),
        (("llama-3-8b", "--eviction", "full", "--utilization", "1.5"), "utilization"),
    ],
)
def test_what_is_wrong_is_said(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str) -> None:
    assert run("plan", *words) == 2
    assert said in capsys.readouterr().err


def test_one_command_for_each_table(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("memory", "swap", "bandwidth"):
        assert papers(["plan", name]) == 0
    assert papers(["plan", "kcache"]) == 0
    out = capsys.readouterr().out
    assert "printed" in out and "KCache" in out


def test_simulate_serves_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, file, events = (tmp_path / name for name in ("trace.csv", "out.json", "events.json"))
    trace.write_text(TRACE)
    line = ("simulate", "llama-3-8b", "--gpu", "L4", "--trace", str(trace))
    options = ("--eviction", "full,kv-compress", "--compression", "4", "--replicas", "2")
    assert run(*line, *options, "--json", str(file), "--chrome-trace", str(events), "--max-ttft", "5") == 0
    full, compressed = json.loads(file.read_text())["simulations"]
    assert full["requests"] == compressed["requests"] == 20
    assert full["output_tokens"] == sum(5 + second for second in range(20))
    assert compressed["kv_bytes_peak"] <= full["kv_bytes_peak"]
    assert {event["pid"] for event in json.loads(events.read_text())["traceEvents"]} == {0, 1}
    assert "ttft p99" in capsys.readouterr().out


def test_requests_of_a_trace_run_on_the_accounts_of_tenants_in_turn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, file = tmp_path / "trace.csv", tmp_path / "out.json"
    trace.write_text(TRACE)
    line = ("simulate", "llama-3-8b", "--gpu", "L4", "--trace", str(trace), "--scheduling-policy", "fair")
    tenants = ("--tenants", '{"a": {"weight": 3}, "b": {"limit": 0.5}, "*": {}}')
    assert run(*line, *tenants, "--kv-memory", "1GiB", "--json", str(file)) == 0
    [simulation] = json.loads(file.read_text())["simulations"]
    assert {name: each["requests"] for name, each in simulation["tenants"].items()} == {"a": 10, "b": 10}
    assert "By tenant" in capsys.readouterr().out


def test_a_model_that_does_not_fit_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "trace.csv").write_text(TRACE)
    assert run("simulate", "llama-3-70b", "--gpu", "L4", "--trace", str(tmp_path / "trace.csv")) == 2
    assert "leaves no room" in capsys.readouterr().err
    assert run("simulate", "llama-3-8b", "--trace", str(tmp_path / "none.csv")) == 2
