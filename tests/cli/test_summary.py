"""What the closing table says of eviction: what it did, what it cost, and whether that paid."""

from io import StringIO
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
from rich.console import Console

from winnow.batch.records import Tally
from winnow.cli.screen.summary import Forecast, Summary
from winnow.outputs import AgreementRecord, CompressionOutlook, DraftRates, EngineStats
from winnow.server.metrics import Metrics

if TYPE_CHECKING:
    from winnow import LLM

ELAPSED = {"schedule": 0.5, "execute": 90.0, "output": 0.2, "evict": 1.5}


def summary(tally: Tally | None = None, **stats: float) -> Summary:
    found = EngineStats(elapsed=dict(ELAPSED), prefill_seconds=20.0, decode_seconds=10.0, **stats)  # type: ignore[arg-type]
    return Summary(tally or Tally(requests=3), 0, 100.0, found)


def shown(found: Summary) -> str:
    screen = StringIO()
    Console(file=screen, width=100).print(found.table())
    return screen.getvalue()


def test_compression_without_need_is_called_that() -> None:
    found = summary(num_rounds=3, num_starts=3, replay_tokens=900, replay_seconds=60.0)
    assert found.payoff == (
        "KV memory was never short: the replay cost 60 s and compression saved no wait; "
        "the full cache is expected to take 38 s (--eviction full)"
    )
    assert found.phases == {
        "prompts": 20.0,
        "replays": 60.0,
        "rounds of eviction": 1.5,
        "decoding": 10.0,
        "the rest": 8.5,
    }


def test_where_memory_was_short_it_says_for_how_many() -> None:
    found = summary(num_rounds=3, num_starts=40, num_short_starts=38)
    assert found.payoff == "KV memory was short for 38 of 40 requests under the policy; rounds cost 1.5 s"


def test_prompts_that_begin_alike_are_better_kept_whole() -> None:
    found = summary(
        Tally(prompt_tokens=1000), num_rounds=3, num_starts=3, num_short_starts=3, cached_tokens=400
    )
    assert found.payoff is not None and found.payoff.endswith("so that --compression auto keeps them whole")
    few = summary(
        Tally(prompt_tokens=1000), num_rounds=3, num_starts=3, num_short_starts=3, cached_tokens=100
    )
    assert few.payoff is not None and "alike" not in few.payoff


def test_a_full_cache_that_filled_its_memory_names_auto() -> None:
    assert summary(kv_bytes_peak=80, kv_bytes_budget=100).payoff is None
    found = summary(kv_bytes_peak=95, kv_bytes_budget=100).payoff
    assert found is not None and found.startswith("KV memory was full: --compression auto")


def test_what_drafts_brought_is_said_by_number_of_sequences() -> None:
    rates = [
        DraftRates(1, True, 40.0, 70.0),
        DraftRates(16, False, 600.0, 420.0),
        DraftRates(24, False, 700.0, None),
    ]
    stats = EngineStats(elapsed=ELAPSED, num_draft_tokens=2000, num_accepted_tokens=1200, draft_rates=rates)
    found = Summary(Tally(requests=3), 0, 100.0, stats)
    lines = {
        line.split("│")[1].strip(): line.split("│")[2].strip()
        for line in shown(found).splitlines()
        if "│" in line
    }
    assert lines["drafts accepted"] == "1,200 of 2,000"
    assert lines["up to 1 running"] == "on, 1.75 times"
    assert lines["up to 16 running"] == "off, 0.70 times"
    assert lines["up to 24 running"] == "off, not measured"
    assert found.to_json()["draft_rates"][1]["most_running"] == 16
    metrics = Metrics("tiny", True, {}).render(stats, {}).decode()
    assert 'winnow_draft_tokens_per_second{kind="drafted",model_name="tiny",running="16"} 420.0' in metrics
    assert 'vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="tiny"} 1200.0' in metrics


def test_a_run_without_eviction_says_nothing_of_it() -> None:
    found = summary()
    assert found.payoff is None and "eviction" not in shown(found)
    assert found.phases == {"prompts": 20.0, "decoding": 10.0, "the rest": 70.0}


def test_prompts_that_are_the_job_are_named() -> None:
    found = Summary(Tally(requests=3), 0, 100.0, EngineStats(prefill_seconds=85.0, decode_seconds=10.0))
    assert found.payoff == "prompts are 85 % of this job: eviction cannot make it faster"
    # What preemptions let be computed again is no such part: eviction spares it.
    again = EngineStats(prefill_seconds=85.0, recompute_seconds=30.0)
    assert Summary(Tally(requests=3), 0, 100.0, again).payoff is None


def test_policies_add_up_to_the_answers() -> None:
    tally, usage = Tally(), {"prompt_tokens": 5, "completion_tokens": 2}
    report = {"eviction": {"policy": "snapkv"}, "finish_reason": "stop"}
    for _ in range(12):
        tally.add({"usage": usage, **report})
    assert "policy" in shown(summary(tally)) and "of 12" not in shown(summary(tally))
    tally.add({"usage": usage, "finish_reason": "stop"})
    assert "snapkv: 12 of 13 answers" in shown(summary(tally))
    assert "full cache: 1 of 13 answers" in shown(summary(tally))


def test_replays_that_did_not_fit_are_counted() -> None:
    assert "replays that did not fit" in shown(summary(num_rounds=1, num_replays_replaced=2))


@pytest.mark.parametrize(
    ("answer", "cut_off"),
    [
        ({"finish_reason": "length"}, 1),
        ({"finish_reason": "stop"}, 0),
        ({"outputs": [{"finish_reason": "length"}, {"finish_reason": "length"}]}, 2),
        ({"response": {"body": {"choices": [{"finish_reason": "length"}, {"finish_reason": "stop"}]}}}, 1),
    ],
)
def test_answers_that_were_cut_off_are_counted(answer: dict[str, object], cut_off: int) -> None:
    usage = {"prompt_tokens": 5, "completion_tokens": 2}
    body = answer["response"]["body"] if "response" in answer else answer  # type: ignore[index]
    body["usage"] = usage
    tally = Tally()
    tally.add(answer)
    assert tally.cut_off == cut_off
    assert ("cut off" in shown(summary(tally))) == bool(cut_off)


@pytest.mark.parametrize(
    ("compression", "stats", "line"),
    [
        (4.0, EngineStats(num_starts=2), "the requests so far fit into the KV memory whole"),
        (
            "auto",
            EngineStats(num_starts=2, num_short_starts=1, outlook=CompressionOutlook(32, 8, 20, 4.0, 1.9)),
            "8 of 32 requests fit into the KV memory whole; compressed to 4x, 1.9 times the throughput is expected",
        ),
        ("auto", EngineStats(num_starts=2), ""),
        (None, EngineStats(), ""),
    ],
)
def test_a_line_says_once_what_compressing_promises(
    compression: float | str | None, stats: EngineStats, line: str
) -> None:
    file, config = StringIO(), SimpleNamespace(eviction=SimpleNamespace(compression=compression))
    forecast = Forecast(file)
    forecast.say(
        cast("LLM", SimpleNamespace(config=config, stats=lambda: EngineStats()))
    )  # nothing has started
    assert not file.getvalue()
    for _ in range(2):
        forecast.say(cast("LLM", SimpleNamespace(config=config, stats=lambda: stats)))
    assert file.getvalue().count("winnow: ") == bool(line) and line in file.getvalue()


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (AgreementRecord(checked=4, equal=3, tokens=80, agreed=76, lines=["line-7"]), "3 of 4"),
        (AgreementRecord(waiting=2), "none: it would take too long (--check 1)"),
        (AgreementRecord(), ""),
    ],
)
def test_what_compression_cost_is_said_or_why_not(record: AgreementRecord, said: str) -> None:
    found = shown(Summary(Tally(requests=3), 0, 100.0, EngineStats(agreement=record)))
    assert said in found and ("the full cache's" in found) == bool(said)
