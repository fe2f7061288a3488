"""The kernel bench: the cache it builds, the arithmetic of its columns, and that all of it is reported."""

import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from winnow.attention import AttentionSpec, ReferenceBackend
from winnow.cli.main import main
from winnow_lab.bench import kernel, limits as limits_module
from winnow_lab.bench.kernel import Measurement, attention_flops, measure_kernels, operations
from winnow_lab.bench.kernel_case import KernelCase
from winnow_lab.bench.kernel_config import KernelConfig
from winnow_lab.bench.limits import Limits

SMALL = KernelConfig(
    attention_backend=("auto", "reference"),
    dtype="float32",
    batch=3,
    query_heads=4,
    kv_heads=2,
    head_dim=8,
    context=64,
    chunk=16,
    prefills=2,
    block_size=4,
    repeats=2,
)
TYPED = (
    "bench kernel --attention-backend auto,reference --dtype float32 --batch 3 --query-heads 4 --kv-heads 2 "
    "--head-dim 8 --context 64 --chunk 16 --prefills 2 --block-size 4 --repeats 2"
)
LIMITS = Limits(read=10e9, copy=8e9, matmul=100e9)


@pytest.fixture
def no_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the limits nor anything larger than the processor's cache: seconds for nothing."""
    monkeypatch.setattr(kernel.Limits, "measure", lambda dtype, device: LIMITS)
    monkeypatch.setattr(limits_module, "_LEAST_BYTES", 2**20)
    monkeypatch.setattr(limits_module, "_TIMES_CACHE", 0)
    build = KernelCase.build
    monkeypatch.setattr(kernel.KernelCase, "build", lambda config, cache: build(config, 1))


def tables(case: KernelCase) -> np.ndarray[Any, Any]:
    """Block ids of all rows of the first layer, [batch, heads, blocks]."""
    slots = torch.tensor(case.slots)
    return case.cache.tables.lookup(slots, 0, SMALL.context // SMALL.block_size).numpy()


@pytest.mark.parametrize(("batch", "expected"), [(1, 1), (3, 3), (32, 4)])
def test_prefills_fit_the_batch_where_none_are_given(batch: int, expected: int) -> None:
    assert KernelConfig(batch=batch).prefill_batch == expected


class TestCase:
    @pytest.mark.parametrize("uneven", [False, True])
    @pytest.mark.parametrize("scatter", [False, True])
    def test_the_cache_is_sound_and_filled(self, uneven: bool, scatter: bool) -> None:
        case = KernelCase.build(replace(SMALL, uneven=uneven, scatter=scatter), last_level_cache=1)
        case.local.ledger.check_integrity()
        assert (case.lengths == SMALL.context).all() != uneven
        assert (SMALL.chunk < case.lengths).all() and (case.lengths <= SMALL.context).all()
        assert len(np.unique(case.lengths)) > 1 or not uneven

    def test_blocks_lie_in_order_or_all_over_the_pool(self) -> None:
        in_order = tables(KernelCase.build(replace(SMALL, scatter=False), 1))
        scattered = tables(KernelCase.build(SMALL, 1))
        assert np.abs(np.diff(scattered)).mean() > 3 * np.abs(np.diff(in_order)).mean()

    def test_layers_hold_four_times_the_cache(self) -> None:
        cache = 100_000
        case = KernelCase.build(SMALL, cache)
        assert case.lengths.sum() * case.kv_bytes >= 4 * cache
        assert case.kv_bytes == 2 * 8 * 4

    def test_the_last_tokens_see_their_whole_rows(self) -> None:
        case = KernelCase.build(replace(SMALL, uneven=True), 1)
        spans = case.spans(decodes=3, prefills=0)
        case.cache.pool.of_layer(-1).v.fill_(1.0)
        case.cache.pool.of_layer(-1).v[-1] = torch.nan  # and nothing that no row holds
        q = case.q[:3]
        held = case.cache.pool.of_layer(-1).v.clone()
        for slot in case.slots:
            held[torch.from_numpy(case.local.ledger.blocks_of(slot)).long()] = 1.0
        case.cache.pool.of_layer(-1).v.copy_(held)
        out = ReferenceBackend().prepare(case.cache, spans).attend(1, q, AttentionSpec(1.0))
        assert torch.allclose(out, torch.ones_like(out))

    def test_compaction_moves_within_rows_to_holes(self) -> None:
        case = KernelCase.build(SMALL, 1)
        source, target = case.moves(layer=0)
        assert len(source) == len(target) == 3 * 2 * SMALL.context // 4
        assert not set(source.tolist()) & set(target.tolist())
        assert len(set(target.tolist())) == len(target)
        owner = {int(block): (sequence, head) for (sequence, head, _), block in np.ndenumerate(tables(case))}
        for one, other in zip((source // 4).tolist(), (target // 4).tolist(), strict=True):
            assert owner[one] == owner[other]


class TestColumns:
    def test_flops_are_those_of_the_unmasked_pairs(self) -> None:
        case = KernelCase.build(replace(SMALL, uneven=True), 1)
        spans = case.spans(decodes=1, prefills=2)
        pairs = 0
        for slot, count in zip(spans.slots, spans.counts, strict=True):
            for length in case.local.ledger.lengths[slot].ravel():
                pairs += sum(length - after for after in range(count))
        # Two products of head_dim multiplications and additions, for each of the group's 2 query heads.
        assert attention_flops(case, spans) == round(pairs / case.layers * 2 * 2 * 8 * 2)

    def test_bytes_are_keys_and_values_of_a_layer(self) -> None:
        case = KernelCase.build(SMALL, 1)
        by_name = {operation.name: operation for group in operations(case) for operation in group}
        row = 64 * 2 * 8 * 4
        assert by_name["decode"].bytes_read == by_name["decode, squared"].bytes_read == 3 * 2 * row
        assert by_name["write, decode"].bytes_written == 3 * 2 * 2 * 8 * 4
        assert by_name["write, prefill"].bytes_written == 2 * 16 * 2 * 2 * 8 * 4
        assert by_name["compact"].bytes_read == by_name["compact"].bytes_written == 3 * 2 * row / 4
        assert by_name["prefill"].bytes_read == 0 < by_name["prefill"].flops

    def test_rates_and_shares(self) -> None:
        measured = Measurement(
            "decode", "reference", "float32", (3.0, 1.0, 2.0), 4e9, 0, 0, LIMITS, reading=(10e9,) * 3
        )
        assert (measured.median, measured.bandwidth, measured.bandwidth_share) == (2.0, 2e9, 0.2)
        assert measured.flop_rate is None and measured.flop_share is None
        moving = replace(measured, bytes_written=4e9, reading=None)
        assert (moving.bandwidth, moving.bandwidth_share) == (4e9, 0.5)
        computing = replace(measured, bytes_read=0, flops=int(40e9))
        assert (computing.flop_rate, computing.flop_share, computing.bandwidth) == (20e9, 0.2, None)

    def test_memory_is_compared_with_the_same_repeat(self) -> None:
        measured = Measurement(
            "decode", "reference", "float32", (4.0, 1.0, 2.0), 4e9, 0, 0, LIMITS, reading=(2e9, 5e9, 8e9)
        )
        assert measured.bandwidth_share == 0.5  # of the medians alone: 0.4
        assert measured.to_json()["reading"] == (2e9, 5e9, 8e9)

    def test_scores_are_compared_with_the_same_repeat(self) -> None:
        measured = Measurement(
            "decode", "reference", "float32", (3.0, 1.0, 2.0), 4e9, 0, 0, LIMITS, reading=(10e9,) * 3
        )
        assert measured.scores_cost is None and measured.to_json()["scores_cost"] is None
        observing = replace(measured, unobserved=(1.0, 2.0, 1.6))
        assert observing.scores_cost == pytest.approx(0.25)
        uneven = replace(observing, seconds=(3.0, 4.0, 8.0))
        assert uneven.scores_cost == pytest.approx(2.0)  # of the medians alone: 1.5

    def test_every_backend_is_compared_with_itself(self, no_measuring: None) -> None:
        report = measure_kernels(SMALL, lambda _: None)
        plain = {(m.operation, m.backend): m.seconds for m in report.measurements if m.unobserved is None}
        for measured in report.measurements:
            operation, _, scores = measured.operation.partition(", ")
            if scores and operation != "write":
                assert measured.unobserved == plain[operation, measured.backend]
            else:
                assert measured.unobserved is None

    def test_limits_are_measured(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in (("_LEAST_BYTES", 2**20), ("_TIMES_CACHE", 1), ("_MATRIX_SIZES", (128, 256))):
            monkeypatch.setattr(limits_module, name, value)
        limits = Limits.measure(torch.float32, torch.device("cpu"))
        # Wide enough for any machine, too narrow for a mistake of a factor of 1024.
        assert 0.5e9 < limits.read < 20e12
        assert 0.5e9 < limits.copy < 20e12
        assert 1e9 < limits.matmul < 1e15


def test_every_operation_is_measured_on_every_backend(no_measuring: None) -> None:
    shown: list[str] = []
    report = measure_kernels(SMALL, shown.append)
    names = [measurement.operation for measurement in report.measurements]
    assert names[::2] == names[1::2]  # side by side
    assert {"write, decode", "decode", "decode, attention", "decode, squared", "prefill", "mixed"} < set(
        names
    )
    unobserved = [name for name in names[::2] if not name.startswith(("decode, ", "prefill, "))]
    assert shown == ["limits of the machine", "filling the cache", *unobserved]
    # What "auto" stands for today is said too.
    backends = [measurement.backend.partition(" (")[0] for measurement in report.measurements]
    assert backends == ["auto", "reference"] * len(names[::2])
    assert all(len(m.seconds) == 2 and min(m.seconds) > 0 for m in report.measurements)
    for measured in report.measurements:
        if measured.operation.startswith(("decode", "mixed")):
            assert measured.reading is not None and len(measured.reading) == 2 and min(measured.reading) > 0
        else:
            assert measured.reading is None


def test_formats_of_kvs_are_compared_side_by_side(no_measuring: None) -> None:
    config = replace(
        SMALL, attention_backend=("auto",), kv_cache_dtype=("auto", "int8", "k=int8", "v=int4", "int8+bias")
    )
    report = measure_kernels(config, lambda _: None)
    formats = ["float32", "int8", "k=int8,v=int4", "int8+bias"]
    decodes = [m for m in report.measurements if m.operation == "decode"]
    assert [m.kv_format for m in decodes] == formats == [cache.kv_format for cache in report.caches]
    # A scale each, and where there are 4 bits a minimum; a bias.
    assert [m.bytes_read / (3 * 2 * 64) for m in decodes] == [64, 20, 18, 22]
    observed = [m for m in report.measurements if m.operation == "decode, attention"]
    assert [m.unobserved for m in observed] == [m.seconds for m in decodes]


def test_the_command_prints_a_table_and_writes_json(
    no_measuring: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "deep" / "kernels.json"
    assert main([*TYPED.split(), "--uneven", "--json", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "read 10.0 GB/s, copy 8.0 GB/s, float32 matrix product 100 GFLOP/s" in shown
    assert "uneven rows" in shown and "scattered blocks of 4" in shown
    assert "prefill, window 8" in shown
    report = json.loads(path.read_text())
    assert {"command", "date", "commit", "machine"} < set(report)
    assert report["config"]["context"] == 64 and report["config"]["uneven"] is True
    [decode, _] = [entry for entry in report["operations"] if entry["operation"] == "decode"]
    assert decode["median"] == statistics.median(decode["seconds"])
    assert decode["bandwidth"] == pytest.approx(decode["bytes_read"] / decode["median"])


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("--attention-backend reference,fast", "attention_backend must name some of auto, "),
        ("--attention-backend reference,reference", "attention_backend must name each once"),
        ("--kv-cache-dtype int8,int9", "kv_cache_dtype must be one of auto, "),
        ("--kv-cache-dtype int8,int8", "kv_cache_dtype must be formats that differ"),
        ("--dtype int8", "argument --dtype: invalid choice: 'int8'"),
        ("--query-heads 6", "query_heads must be a multiple of kv_heads (4), got 6"),
        ("--chunk 2000", "chunk must be at most half the context (1024), got 2000"),
        ("--prefills 64", "prefills must be at most batch (32), got 64"),
        ("--batch 0", "batch must be at least 1, got 0"),
        ("--device nowhere", "device: 'nowhere' is not usable here"),
        (
            "--contxt 5",
            "unknown argument '--contxt'; did you mean --context? (see `winnow bench kernel --help`)",
        ),
        ("--json /dev/null/x", "cannot write --json /dev/null/x"),
    ],
)
def test_what_is_unusable_is_one_line(typed: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "kernel", *typed.split()]) == 2
    shown = capsys.readouterr().err.splitlines()
    assert len(shown) == 1 and message in shown[0]
