"""Values on their way to a tier: reads do not wait for them, moves of whole blocks do; a thread is the device."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.attention.paged import PagedBatch, paged_batch
from tiny_llama import save_tiny_llama
from torch import Tensor

from winnow import LLM, SamplingParams
from winnow.attention import AttentionSpec, ReferenceBackend
from winnow.cache.pool import KindPool
from winnow.cache.tiers.copies_in_flight import CopiesInFlight
from winnow.engine.memory.swap_costs import SwapCosts

SPEC = AttentionSpec(scale=0.25)


class LateCopies(CopiesInFlight):
    """Copies that do not arrive before the gate is open."""

    def __init__(self, pool: KindPool, pass_gate: Callable[[], object]) -> None:
        super().__init__(pool.tier_fields, pool.device)
        self._pass_gate, self.num_sent = pass_gate, 0

    def _send(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Callable[[], None]]:
        self.num_sent += 1
        return [each.clone() for each in tensors], lambda: self._pass_gate() and None


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    opened = threading.Event()
    yield opened
    opened.set()  # a thread that waits would keep the process


def attend(batch: PagedBatch) -> Tensor:
    step = ReferenceBackend().prepare(batch.cache, batch.spans)
    step.write(batch.layer, batch.k, batch.v)
    return step.attend(batch.layer, batch.q, SPEC)


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_a_layer_is_attended_before_its_values_are_stored(
    gate: threading.Event, kv_dtype: str | None
) -> None:
    """Prompts, which read all values, and decoded tokens, which read few, as if these were there."""
    made = [paged_batch(3, (1, 1, 5, 1), value_tier="host:N=7", kv_dtype=kv_dtype) for _ in range(2)]
    pools = [batch.cache.pool.of_layer(-1) for batch in made]
    pools[1].copies = copies = LateCopies(pools[1], gate.wait)
    stored = [pool.tier.data for pool in pools if pool.tier is not None]
    stored[1].copy_(stored[0])
    before = stored[1].clone()
    expected, found = (attend(batch) for batch in made)
    assert torch.equal(found, expected)
    assert torch.equal(stored[1], before) and not torch.equal(stored[1], stored[0])
    gate.set()
    assert copies.num_sent == 1 and copies.wait() >= 0.0
    assert torch.equal(stored[1], stored[0])


def test_the_last_write_counts_and_the_third_waits_for_the_first(gate: threading.Event) -> None:
    pool = paged_batch(3, (1, 1), value_tier="host:N=7").cache.pool.of_layer(-1)
    pool.copies = LateCopies(pool, lambda: gate.wait(0.05))
    slots = torch.tensor([[3, 9], [4, 21]]) + 4 * pool.first
    k, *values = torch.randn(4, 2, 2, 16)
    waited = []
    for v in values:
        pool.write(slots, k, v, torch.zeros(2, 2))
        waited.append(pool.traffic.seconds_waited)
        assert torch.equal(pool.values(slots), v)
    assert waited[0] < 0.02 and waited[1] < 0.02 and waited[2] > 0.02
    moved = tuple(pool.numbers.place(slots[:1, :]))
    pool.move(tuple(x[0, :1] for x in moved), tuple(x[0, 1:] for x in moved))
    assert torch.equal(pool.values(slots[0, 1]), values[2][0, 0])


def test_what_cannot_be_stored_is_raised() -> None:
    pool = paged_batch(3, (1, 1), value_tier="host:N=7").cache.pool.of_layer(-1)

    def fail() -> None:
        raise OSError("no space")

    pool.copies = LateCopies(pool, fail)
    pool.write(torch.tensor([4 * pool.first]), *torch.randn(2, 1, 16), torch.zeros(1))
    with pytest.raises(OSError, match="no space"):
        pool.parts  # noqa: B018  # what copies whole blocks reads it


@pytest.mark.parametrize(
    ("tier", "options"),
    [
        ("host:N=9", {}),
        ("host:N=9", {"eviction": "kv-compress", "kv_budget": 40}),
        ("host:L=0,N=9", {"n": 2, "temperature": 0.8, "seed": 1}),
    ],
)
def test_answers_are_those_of_copies_that_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tier: str, options: dict[str, Any]
) -> None:
    """With rounds, swaps, preemptions and blocks that samples share."""
    save_tiny_llama(tmp_path, seed=3, num_hidden_layers=3)
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 12, "ignore_eos": True} | options)
    prompts = [[3 + (i * n) % 50 for i in range(60 + 9 * n)] for n in range(1, 4)]

    def answers() -> list[Any]:
        with LLM(
            tmp_path,
            dtype="float32",
            kv_memory="2MiB",
            kv_floor=1,
            prefill_chunk=48,
            attention_backend="reference",
            value_tier=tier,
            kv_offloading_size="1MiB",
        ) as llm:
            engine: Any = llm._engine
            scheduler = engine.scheduler
            scheduler.memory.swap.costs = SwapCosts(1e-15, 1.0)
            ids = [llm.submit(tokens, params) for tokens in prompts]
            found = {}
            while llm.has_unfinished:
                for output in llm.step():
                    if output.finished:
                        found[output.request_id] = [each.token_ids for each in output.outputs]
                if len(scheduler.running) > 1 and llm.stats().num_steps % 3 == 0:
                    scheduler.running.preempt(scheduler.running[-1])
                llm.check_integrity()
            return [found[request_id] for request_id in ids]

    expected, opened, make = answers(), [], KindPool.__init__

    def make_late(pool: KindPool, *given: Any, **named: Any) -> None:
        make(pool, *given, **named)
        if pool.tier is not None:
            pool.copies = LateCopies(pool, lambda: time.sleep(0.001))
            opened.append(pool.copies)

    monkeypatch.setattr(KindPool, "__init__", make_late)
    assert answers() == expected
    assert sum(copies.num_sent for copies in opened) > 20
