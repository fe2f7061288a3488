"""Beams lose their KVs together: a loop over running sequences meanwhile finds fewer of them."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_llama import save_tiny_llama

from winnow import LLM, RequestOutput, SamplingParams

VOCAB = 97


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("model"), seed=1)


def opened(model: Path, **options: Any) -> LLM:
    return LLM(
        model, dtype="float32", block_size=4, prefill_chunk=16, num_accumulators=2, kv_floor=1, **options
    )


def prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB), k=length)


def beams(max_tokens: int, **policy: Any) -> SamplingParams:
    return SamplingParams(
        n=3,
        use_beam_search=True,
        temperature=0.0,
        max_tokens=max_tokens,
        ignore_eos=True,
        detokenize=False,
        **policy,
    )


def finished(llm: LLM, between: Callable[[], None] = lambda: None) -> dict[str, RequestOutput]:
    """Step to the end, and assert that nothing is left."""
    outputs: dict[str, RequestOutput] = {}
    while llm.has_unfinished:
        between()
        outputs |= {output.request_id: output for output in llm.step() if output.finished}
        llm.check_integrity()
    assert llm._engine.scheduler.ledger.allocator.num_used == 0  # type: ignore[attr-defined]
    for output in outputs.values():
        output.raise_for_error()
    return outputs


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> Callable[[LLM], list[int]]:
    """Let an engine lack the memory for copies of shared blocks once, beside running beams."""

    def refuse(llm: LLM) -> list[int]:
        scheduler: Any = llm._engine.scheduler  # type: ignore[attr-defined]
        own, refused = scheduler.ledger.own_or_forget, list[int]()

        def own_or_forget(slot: int) -> bool:
            if len(scheduler.running) < 3 or refused:
                return bool(own(slot))
            refused.append(slot)
            return False

        monkeypatch.setattr(scheduler.ledger, "own_or_forget", own_or_forget)
        return refused

    return refuse


@pytest.mark.parametrize("preset", ["kv-compress", "kv-compress-pd", "streaming"])
def test_no_memory_for_a_copy_of_their_own(
    model: Path, preset: str, refusing: Callable[[LLM], list[int]]
) -> None:
    with opened(model, kv_memory="8MiB") as llm:
        llm.submit(prompt(40, 1), beams(24, eviction=preset, kv_budget=24), request_id="beams")
        refused = refusing(llm)
        [output] = finished(llm).values()
    assert len(output.outputs) == 3 and all(len(each.token_ids) == 24 for each in output.outputs)
    assert refused


def test_a_round_in_which_a_beam_gives_way(model: Path) -> None:
    with opened(model, kv_memory="8MiB") as llm:
        scheduler: Any = llm._engine.scheduler  # type: ignore[attr-defined]
        rounds, refused = scheduler.rounds, list[Any]()
        own = scheduler.running.own

        def give_way(sequence: Any) -> bool:
            # The last beam lacks memory: those before it were to take part, and go with it.
            if not refused and len(scheduler.running) >= 3 and sequence is scheduler.running[-1]:
                refused.append(sequence)
                scheduler.running.preempt(sequence)
                return False
            return bool(own(sequence))

        scheduler.running.own, rounds._most_copies = give_way, lambda *_: 10**9
        params = beams(24, eviction="kv-compress-pd", kv_budget=24)
        llm.submit(prompt(40, 1), params, request_id="beams")

        def under_pressure() -> None:
            able = [s for s in scheduler.running if s.num_output_tokens > 4]
            if len(able) == 3 and not refused:
                for sequence in able:
                    sequence.__dict__["may_share_outside"] = True
                rounds._evict(rounds._shrinkable(able))

        [output] = finished(llm, under_pressure).values()
    assert refused and all(len(each.token_ids) == 24 for each in output.outputs)


def test_a_tenant_above_its_limit_parks_beams(model: Path) -> None:
    limited = opened(
        model, kv_memory="8MiB", enable_prefix_caching=False, tenants={"a": {"limit": 0.9}}, max_num_seqs=8
    )
    with limited as llm:
        scheduler: Any = llm._engine.scheduler  # type: ignore[attr-defined]
        alone = [llm.generate([prompt(40, seed)], beams(40), tenant="a")[0] for seed in (1, 2)]
        for seed in (1, 2):
            llm.submit(prompt(40, seed), beams(40), request_id=f"{seed}", tenant="a")
        while len(scheduler.running) < 6:
            llm.step()
        scheduler.accounts.limit = lambda tenant: 1  # as if they had grown beyond it
        llm.step()
        assert len({sequence.request for sequence in scheduler.running}) == 1, "one of them goes on"
        assert len(scheduler.running) == 3 and scheduler.running.num_preemptions > 0
        del scheduler.accounts.limit
        outputs = finished(llm)
    for seed, expected in zip((1, 2), alone, strict=True):
        found = [each.token_ids for each in outputs[f"{seed}"].outputs]
        assert found == [each.token_ids for each in expected.outputs]


def test_others_look_for_a_prefix_beside_beams_that_start_again(model: Path) -> None:
    met = list[int]()
    with opened(model, kv_memory="8MiB") as llm:
        scheduler: Any = llm._engine.scheduler  # type: ignore[attr-defined]
        for seed in range(3):
            before = len(met)
            [alone] = llm.generate([prompt(13, seed)], beams(40))
            llm.submit(prompt(13, seed), beams(40), request_id="beams")

            def disturb(seed: int = seed, before: int = before) -> None:
                running = [s for s in scheduler.running if s.request.request_id == "beams"]
                if len(running) < 3:
                    return
                if any(s.num_to_compute > 1 for s in running) and len(met) == before:
                    # They share what they have in common, and compute the rest each for itself, in the next step.
                    met.append(seed)
                    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, detokenize=False)
                    llm.submit(prompt(90, 100 + seed), params)
                elif running[0].num_tokens % 4 == 0 and len(met) == before:
                    scheduler.running.preempt(
                        running[0]
                    )  # the last token of a block is known, and not computed

            outputs = finished(llm, disturb)
            found = [each.token_ids for each in outputs["beams"].outputs]
            assert found == [each.token_ids for each in alone.outputs]
    assert met
