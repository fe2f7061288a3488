"""The fit of what stays, in the engine: what is stored, and that it does not depend on how it is computed."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from architectures import save
from tiny_llama import VOCAB, save_tiny_llama
from torch import Tensor
from transformers import BloomConfig

from winnow import LLM, SamplingParams
from winnow.attention import AttentionSpec, BackendStep, PagedCache, ReplayQueries, Spans
from winnow.attention.replay import replay_shortened_rows
from winnow.cache.layout import ceil_div
from winnow.errors import ConfigError, InvalidRequestError
from winnow.eviction import PRESETS, EvictionPolicy, Fit, KeyNorm, Reconstruction, Replay, When
from winnow.eviction.probes import ReferenceProbe
from winnow.eviction.signals import ReferenceQueries

BLOCK = 4
KVZIP = PRESETS["kvzip"].policy
IN_CHUNKS = replace(KVZIP, score=Reconstruction(Replay(chunk=70)), compact=Fit(most_queries=40))
DOCUMENT = random.Random(5).choices(range(3, VOCAB), k=150)
QUESTION = random.Random(6).choices(range(3, VOCAB), k=9)


def greedy(**options: object) -> SamplingParams:
    values = {
        "temperature": 0.0,
        "max_tokens": 8,
        "ignore_eos": True,
        "compression": 4,
        "context_tokens": 150,
    }
    return SamplingParams(**(values | options))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("model"), seed=5, num_hidden_layers=3)


def open_llm(directory: Path, **options: object) -> LLM:
    settings: dict[str, object] = {"kv_memory": "8MiB", "block_size": BLOCK, "kv_floor": 1}
    return LLM(directory, **(settings | {"eviction": IN_CHUNKS} | options))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def llm(directory: Path) -> Iterator[LLM]:
    with open_llm(directory) as llm:
        yield llm


class HeldRow(NamedTuple):
    """The context's KVs of a row, by position."""

    position: Tensor
    keys: Tensor
    values: Tensor
    bias: Tensor


def held_rows(llm: LLM, slot: int) -> list[HeldRow]:
    cache, rows = llm._engine._executor.cache, []
    for layer, heads in enumerate(cache.tables.host_lengths[slot].tolist()):
        pool = cache.pool.of_layer(layer)
        blocks = cache.tables.lookup(torch.tensor([slot]), layer, ceil_div(max(heads), BLOCK))[0].long()
        for head, length in enumerate(heads):
            slots = pool.numbers.slots_of(blocks[head])[:length]
            position = pool.numbers.positions_of(blocks[head])[:length]
            order = position.argsort()
            slots, position = slots[order[position[order] < 150]], position[order][position[order] < 150]
            rows.append(HeldRow(position, pool.keys(slots), pool.values(slots), pool.biases(slots)))
    return rows


def rows_of(
    llm: LLM, params: SamplingParams, tokens: list[int] | None = None, preempt_at: int | None = None
) -> list[HeldRow]:
    """What a request's rows hold of the document when its answer begins."""
    request_id = llm.submit(tokens or DOCUMENT + QUESTION, params)
    scheduler = llm._engine.scheduler
    while True:
        llm.step()
        llm.check_integrity()
        [sequence] = scheduler.running or [None]
        if sequence is None:
            continue
        if preempt_at is not None and sequence.kv.passes_done == preempt_at:
            scheduler.running.preempt()
            preempt_at = None
        elif sequence.num_output_tokens >= 2:
            break
    rows = held_rows(llm, sequence.kv.running_slot)
    llm.abort(request_id)
    return rows


@pytest.fixture(scope="module")
def fitted(llm: LLM) -> list[HeldRow]:
    return rows_of(llm, greedy())


def test_keys_and_who_stays_are_those_of_the_selection(llm: LLM, fitted: list[HeldRow]) -> None:
    selected = rows_of(llm, greedy(eviction=replace(IN_CHUNKS, compact=None)))
    whole = rows_of(llm, greedy(eviction="full", compression=None))
    assert len({len(row.position) for row in fitted}) > 1, "rows compete"
    for fit, plain, full in zip(fitted, selected, whole, strict=True):
        assert torch.equal(fit.position, plain.position)
        torch.testing.assert_close(fit.keys, plain.keys)
        torch.testing.assert_close(plain.values, full.values[plain.position.long()])
        assert not plain.bias.any() and not full.bias.any()
        sinks = fit.position < 4
        assert not fit.bias[sinks].any() and torch.allclose(fit.values[sinks], plain.values[sinks], atol=1e-5)
        if len(fit.position) < 150:
            assert fit.bias[~sinks].any() and not torch.allclose(fit.values, plain.values, atol=1e-2)


@pytest.mark.parametrize(
    "options",
    [
        {"prefill_chunk": 16, "attention_backend": "reference"},
        {"max_num_batched_tokens": 48, "max_num_seqs": 24, "optimize": False},
    ],
    ids=lambda options: " and ".join(options),
)
def test_it_does_not_depend_on_how_it_is_computed(
    directory: Path, options: dict[str, object], fitted: list[HeldRow]
) -> None:
    with open_llm(directory, **options) as llm:
        check_same(rows_of(llm, greedy()), fitted)


@pytest.mark.parametrize("swaps", [False, True])
def test_who_is_preempted_within_a_replay_is_fitted_to_the_same(
    directory: Path, fitted: list[HeldRow], swaps: bool
) -> None:
    with open_llm(directory, kv_offloading_size="4MiB" if swaps else None) as llm:
        check_same(rows_of(llm, greedy(), preempt_at=1), fitted)


def check_same(found: list[HeldRow], expected: list[HeldRow]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.position, theirs.position)
        torch.testing.assert_close(ours.values, theirs.values, atol=2e-4, rtol=2e-3)
        torch.testing.assert_close(ours.bias, theirs.bias, atol=2e-3, rtol=2e-3)


def test_reference_queries_are_those_of_the_replay(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every fourth of each pass, so that they are about 40."""
    found: list[ReferenceQueries | None] = []
    replayed: dict[int, list[tuple[range, Tensor]]] = {}
    with open_llm(directory, prefill_chunk=50) as llm:
        executor = llm._engine._executor
        compact, prepare = executor.compact, executor._backend.prepare

        def watched(cache: PagedCache, spans: Spans) -> BackendStep:
            step = prepare(cache, spans)
            replay = step.replay

            def watch(layer: int, slot: int, queries: ReplayQueries, spec: AttentionSpec) -> None:
                first, q = queries.first, queries.q
                replayed.setdefault(layer, []).append((range(first, first + len(q)), q.clone()))
                replay(layer, slot, queries, spec)

            step.replay = watch  # type: ignore[method-assign]
            return step

        def remember() -> None:
            for each in executor._planned_rounds:
                found.extend(
                    executor._signals.probe(ReferenceProbe).of(layer, each.slots[0]) for layer in range(3)
                )
            compact()

        monkeypatch.setattr(executor._backend, "prepare", watched)
        monkeypatch.setattr(executor, "compact", remember)
        rows_of(llm, greedy())
    for layer, reference in enumerate(found):
        assert reference is not None and 36 <= len(reference.q) <= 42
        every = [
            (at, q) for positions, each in replayed[layer] for at, q in zip(positions, each, strict=True)
        ]
        chosen = [(at, q) for at, q in every if (at - 150) % 4 == 0]
        assert reference.position.tolist() == [at for at, _ in chosen]
        assert torch.equal(reference.q, torch.stack([q for _, q in chosen]))


def test_inspections_say_what_biases_add(llm: LLM, fitted: list[HeldRow]) -> None:
    inspection = llm.inspect(DOCUMENT + QUESTION, greedy())
    expected = [float(row.bias.exp().sum()) - len(row.bias) for row in fitted]
    added = [each for layer in inspection.after_prompt.added for each in layer]
    assert added == pytest.approx(expected, abs=0.05) and max(map(abs, added)) > 1.0
    labels = [label for layer in inspection.after_prompt.labels for label in layer]
    counts = [count for layer in inspection.after_prompt.counts for count in layer]
    assert labels == [
        f"{count}({each:+.1f})" if abs(each) >= 0.05 else f"{count}"
        for count, each in zip(counts, added, strict=True)
    ]
    page = inspection.to_html()
    assert all(f"head {index % 2}: {label} KVs" in page for index, label in enumerate(labels))
    assert inspection.to_json()["at_end"]["added"] == [list(layer) for layer in inspection.at_end.added]
    plain = llm.inspect(DOCUMENT, greedy(eviction="full", compression=None))
    assert not any(each for layer in plain.at_end.added for each in layer)
    assert plain.at_end.labels == tuple(tuple(map(str, layer)) for layer in plain.at_end.counts)


@pytest.mark.parametrize("kv_cache_dtype", ["bfloat16", "k=int8,v=int4"])
def test_fitted_values_are_encoded(directory: Path, fitted: list[HeldRow], kv_cache_dtype: str) -> None:
    with open_llm(directory, kv_cache_dtype=kv_cache_dtype) as llm:
        rows = rows_of(llm, greedy())
    shared = [
        (
            ours.values[torch.isin(ours.position, theirs.position)],
            theirs.values[torch.isin(theirs.position, ours.position)],
        )
        for ours, theirs in zip(rows, fitted, strict=True)
    ]
    error = sum(float((a - b).square().sum()) for a, b in shared) / sum(
        float(b.square().sum()) for _, b in shared
    )
    assert error < 0.1


def test_saved_prefixes_hold_the_fit(directory: Path, tmp_path: Path, fitted: list[HeldRow]) -> None:
    options = {"eviction": replace(IN_CHUNKS, compact=Fit(most_queries=40)), "compression": 4.0}
    with open_llm(directory, **options) as llm:
        llm.save_prefix(DOCUMENT, tmp_path)
    with open_llm(directory, prefix_store=tmp_path, **options) as llm:
        check_same(rows_of(llm, greedy(compression=None)), fitted)
        assert llm.stats().replay_tokens == 0
    with open_llm(
        directory, prefix_store=tmp_path, **(options | {"eviction": replace(IN_CHUNKS, compact=Fit())})
    ) as llm:
        rows_of(llm, greedy(compression=None))
        assert llm.stats().replay_tokens > 0, "another fit is another prefix"


def biased_by_distance(path: Path) -> Path:
    config = BloomConfig(vocab_size=VOCAB, hidden_size=64, n_layer=2, n_head=4, pad_token_id=2)
    config.max_position_embeddings = 512
    save(config, path)
    return path


@pytest.mark.parametrize("model", [None, biased_by_distance], ids=["rotated", "biased by distance"])
def test_replays_of_shortened_rows_judge_as_those_of_whole_ones(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Callable[[Path], Path] | None
) -> None:
    directory = directory if model is None else model(tmp_path)
    with open_llm(directory) as llm:
        fitted = rows_of(llm, greedy())
    with open_llm(directory) as llm:
        backend = llm._engine._executor._backend
        prepare = backend.prepare

        def by_position(cache: PagedCache, spans: Spans) -> BackendStep:
            step = prepare(cache, spans)
            step.replay = partial(replay_shortened_rows, cache, again=False)  # type: ignore[method-assign]
            return step

        monkeypatch.setattr(backend, "prepare", by_position)
        check_same(rows_of(llm, greedy()), fitted)


def test_saved_prefixes_are_loaded_again_when_forgotten(directory: Path, tmp_path: Path) -> None:
    options = {"eviction": IN_CHUNKS, "compression": 4.0}
    with open_llm(directory, **options) as llm:
        llm.save_prefix(DOCUMENT, tmp_path)
    with open_llm(directory, prefix_store=tmp_path, **options) as llm:
        llm.submit(DOCUMENT + QUESTION, greedy(compression=None))
        llm.step()
        scheduler = llm._engine.scheduler
        llm.reset_prefix_cache()
        scheduler.running.park(scheduler.running[0])
        llm.step()
        [sequence] = scheduler.running
        assert sequence.kv.num_computed >= 150 and llm.stats().replay_tokens == 0


def test_samples_share_what_is_fitted(llm: LLM) -> None:
    [output] = llm.generate([DOCUMENT + QUESTION], greedy(n=2))
    assert output.outputs[0].token_ids == output.outputs[1].token_ids


def test_what_cannot_be_fitted_is_refused(directory: Path) -> None:
    with open_llm(directory, eviction="full") as llm:
        with pytest.raises(
            InvalidRequestError, match=r"compact\) needs KVs with a bias: open the engine with kv_bias=True"
        ):
            llm.generate([DOCUMENT], greedy(eviction=IN_CHUNKS))
        plain = llm.kv_bytes(100)
    with open_llm(directory, eviction="full", kv_bias=True) as llm:
        assert llm.kv_bytes(100) > plain
        llm.generate([DOCUMENT], greedy(eviction=IN_CHUNKS))
    with pytest.raises(ConfigError, match="does not go with kv_bias, or a policy with compact"):
        open_llm(directory, value_tier="host:L=1,N=64")


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (
            lambda: EvictionPolicy(KeyNorm(), when=When(after_prefill=True), compact=Fit()),
            "such as Reconstruction",
        ),
        (lambda: Fit(ridge=0.0), "ridge of a fit must be above 0"),
        (lambda: Fit(most_queries=0), "most_queries of a fit must be at least 1"),
    ],
)
def test_policies_that_cannot_fit(make, reason: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=reason):
        make()
