"""Policies and requests that are refused, policies of one's own, and what an amount alone means."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.extension import needs_extension
from tiny_llama import greedy, prompt, save_tiny_llama
from torch import Tensor

from winnow import LLM
from winnow.errors import ConfigError, InvalidRequestError
from winnow.eviction import (
    AdaptiveHeads,
    AdaptiveRows,
    ByValueNorm,
    EqualHeads,
    EvictionPolicy,
    Keep,
    KeyNorm,
    LastQuery,
    LayerRows,
    Pyramid,
    Reconstruction,
    Replay,
    Scorer,
    When,
    Window,
)

LAYERS, BLOCK = 3, 4


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("model"), seed=5, num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def llm(directory: Path) -> Iterator[LLM]:
    with LLM(directory, kv_memory="8MiB", block_size=BLOCK, num_accumulators=2, kv_floor=1) as llm:
        yield llm


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (
            lambda: EvictionPolicy(Window(32), when=When(prefill_every=16)),
            "observes the last 32 queries before a round, and prefill_every has a round every 16",
        ),
        (
            lambda: EvictionPolicy(LastQuery(), AdaptiveHeads(), when=When(after_prefill=True)),
            "LastQuery picks one token set per layer",
        ),
        (
            lambda: EvictionPolicy(Reconstruction(), when=When(after_prefill=True, decode_every=8)),
            "Reconstruction repeats the context once all of it is there: it needs after_prefill",
        ),
        (lambda: EvictionPolicy(Reconstruction()), "it needs after_prefill, and takes no other rounds"),
        (lambda: Replay(chunk=0), "chunk of a replay must be at least 1, got 0"),
        (lambda: When(within=True), "within needs prefill_every"),
        (
            lambda: When(prefill_every=8, after_prefill=True, prefill_compression=0.5),
            "prefill_compression must be at least 1, got 0.5",
        ),
        (
            lambda: When(prefill_every=8, prefill_compression=4.0),
            "prefill_compression needs prefill_every and after_prefill",
        ),
        (lambda: When(decode_every=0), "decode_every must be at least 1, got 0"),
        (lambda: Keep(sinks=-1), "sinks must be at least 0, got -1"),
        (lambda: Keep(recent=1.5), "recent must be a count, or a share between 0.0 and 1.0, got 1.5"),
        (lambda: Window(power=3), "power must be 1 or 2, got 3"),
        (lambda: AdaptiveHeads(floor=1.5), "floor must be between 0 and 1, got 1.5"),
        (lambda: AdaptiveRows(row_floor=1.5), "row_floor must be a count, or a share between 0.0 and 1.0"),
        (lambda: AdaptiveHeads(layer_floor=-1), "layer_floor must be a count, or a share .* got -1"),
        (lambda: ByValueNorm(KeyNorm()), "KeyNorm may be below 0 or is no amount"),
        (lambda: ByValueNorm(Window(), epsilon=-0.1), "epsilon must be at least 0, got -0.1"),
        (lambda: Pyramid(beta=0), "beta must be at least 1, got 0"),
    ],
)
def test_impossible_combinations_say_why(make: object, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        make()  # type: ignore[operator]


class TestBadRequests:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"eviction": "snapvk"}, "eviction must be one of full, winnow, .* got 'snapvk'"),
            ({"eviction": 3}, "eviction must be a preset's name, an EvictionPolicy or a Scorer, got int"),
            (
                {"eviction": "snapkv", "kv_budget": 20},
                "budget of 20 KVs per row is smaller than the protected set of 32",
            ),
            ({"eviction": "batch-max", "kv_budget": 64}, r"kv_budget must be above 64 \(prefill_every\)"),
            (
                {"eviction": "extreme-decode", "compression": 4.0},
                "compression cannot be chosen: 'extreme-decode'",
            ),
            (
                {"eviction": "recent", "kv_budget": 30, "protect": [(90, 130)]},
                "protect must lie within the first 100",
            ),
            (
                {"eviction": "recent", "kv_budget": 30, "protect": [(0, 31)]},
                "smaller than the protected set of 31",
            ),
            ({"context_tokens": 101}, "context_tokens must be at most the prompt's 100 tokens, got 101"),
            (
                {"n": 2, "eviction": "batch-max", "kv_budget": [80, 90]},
                "kv_budget must be one number for a policy with",
            ),
        ],
    )
    def test_is_refused_alone(self, llm: LLM, options: dict[str, object], message: str) -> None:
        with pytest.raises((InvalidRequestError, ConfigError), match=message):
            llm.submit(prompt(100), greedy(**options))
        assert not llm.has_unfinished

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"compression": 0.5}, "compression must be at least 1, got 0.5"),
            ({"compression": 2, "kv_budget": 9}, "mean the same, give one"),
            ({"kv_budget": [4, 5]}, "kv_budget must be one number, or one for each of the n = 1 samples"),
            ({"protect": [(5, 5)]}, "an end in protect must be at least 6, got 5"),
            ({"protect": "0-5"}, "protect must be a list of pairs"),
            ({"context_tokens": 0}, "context_tokens must be at least 1, got 0"),
        ],
    )
    def test_parameters(self, options: dict[str, object], message: str) -> None:
        with pytest.raises(InvalidRequestError, match=message):
            greedy(**options)

    def test_what_the_engine_was_opened_with_sets_limits(self, directory: Path) -> None:
        with (
            LLM(directory, kv_memory="2MiB", num_accumulators=0, prefill_chunk=16) as llm,
            pytest.raises(
                InvalidRequestError, match="needs 1 accumulators per KV, and the engine was opened"
            ),
        ):
            llm.submit(prompt(100), greedy(eviction="h2o", kv_budget=40))
        with (
            LLM(directory, kv_memory="2MiB", prefill_chunk=16) as llm,
            pytest.raises(InvalidRequestError, match="prefill_chunk must be at least 32, got 16"),
        ):
            llm.submit(prompt(100), greedy(eviction="snapkv", kv_budget=40))
        for options in (
            {"compression": 0.2},
            {"kv_budget": 0},
            {"num_accumulators": 3},
            {"eviction": "none"},
        ):
            with pytest.raises(ConfigError, match=next(iter(options))):
                LLM(directory, **options)


@pytest.mark.parametrize("window", [3, 40])
def test_a_score_of_ones_own(llm: LLM, window: int) -> None:
    class EvenPositions(Scorer):
        def score(self, rows: LayerRows) -> torch.Tensor:
            return (rows.position % 2 == 0).float()

    policy = EvictionPolicy(EvenPositions(), EqualHeads(), Keep(recent=window), When(after_prefill=True))
    [output] = llm.generate(prompt(200), greedy(eviction=policy, kv_budget=80))
    report = output.outputs[0].eviction
    assert report is not None and report.policy == "own"
    assert report.kept == ((91, 91),) * LAYERS, "80, and the answer's tokens but the last"


@needs_extension
def test_a_round_on_the_cpu_is_one_call_of_the_kernels(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from winnow.attention.native import NativeBackend

    calls = 0
    keep_best = NativeBackend.keep_best

    def counted(self: NativeBackend, *args: Tensor) -> None:
        nonlocal calls
        calls += 1
        keep_best(self, *args)

    def refused(*_: object) -> None:
        raise AssertionError("moved by a list of slots")

    monkeypatch.setattr(NativeBackend, "keep_best", counted)
    monkeypatch.setattr(NativeBackend, "compact", refused)
    with LLM(
        directory, kv_memory="8MiB", attention_backend="native", eviction="batch-max", kv_budget=80
    ) as llm:
        llm.generate([prompt(300)], greedy())
        assert calls == llm.stats().num_rounds > 1


def test_an_amount_without_a_policy_means_winnow(directory: Path) -> None:
    """Asked of the engine or of a request; and "full" on a request lifts the engine's own amount."""
    with LLM(directory, kv_memory="4MiB") as plain, LLM(directory, kv_memory="4MiB", kv_budget=80) as engine:
        [named] = plain.generate(prompt(200), greedy(eviction="winnow", kv_budget=80))
        asked = [*plain.generate(prompt(200), greedy(kv_budget=80)), *engine.generate(prompt(200), greedy())]
        [full] = engine.generate(prompt(200), greedy(eviction="full"))
        [never] = plain.generate(prompt(200), greedy())
        with pytest.raises(InvalidRequestError, match="eviction=full keeps every KV and compression=4 asks"):
            plain.submit(prompt(200), greedy(eviction="full", compression=4))
    reports = [output.outputs[0].eviction for output in (named, *asked)]
    assert [report.policy for report in reports if report is not None] == ["winnow-sentence"] * 3
    assert {report.kept for report in reports if report is not None} == {reports[0].kept}  # type: ignore[union-attr]
    assert full.outputs[0].eviction is None
    assert full.outputs[0].token_ids == never.outputs[0].token_ids


def test_an_amount_for_a_policy_that_takes_none_is_refused_when_the_engine_opens(directory: Path) -> None:
    for options in ({"compression": 4.0}, {"kv_budget": 80}):
        with pytest.raises(ConfigError, match=f"{next(iter(options))} cannot be chosen: 'extreme-decode'"):
            LLM(directory, kv_memory="4MiB", eviction="extreme-decode", **options)
    with LLM(
        directory, kv_memory="4MiB", kv_budget=80
    ) as llm:  # a request's own policy takes no engine's amount
        [output] = llm.generate(prompt(100), greedy(eviction="extreme-decode"))
    assert output.error is None
