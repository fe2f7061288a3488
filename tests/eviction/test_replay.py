"""Scoring by reconstruction: the passes, the scores that attention gives, and the round in the engine."""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.extension import ISAS, native_backend
from tiny_llama import greedy, prompt, save_tiny_llama
from tokenizer_kinds import byte_level
from transformers import AutoModelForCausalLM

from winnow import LLM, RequestOutput, SamplingParams
from winnow.attention import AttentionSpec, JudgedKVs, ReferenceBackend, Spans
from winnow.attention.replay import judged_slots
from winnow.cache import CacheLayout, CacheSize, LocalCache
from winnow.engine.assemble import Instructor
from winnow.engine.plan import PlannedEviction
from winnow.errors import ContextLengthError
from winnow.eviction import PRESETS, Instruction, Reconstruction, Replay, ReplayPass, replay_passes
from winnow.eviction.replay import ReplaySpan, observe_replay

BLOCK = 4
KVZIP = PRESETS["kvzip"].policy
IN_CHUNKS = replace(KVZIP, score=Reconstruction(Replay(chunk=70)))


# -- what is asked ---------------------------------------------------------------------------------------------------


def test_chunks_follow_what_asks_for_them() -> None:
    passes = replay_passes(
        Replay(chunk=10, starting=2), range(100, 125), Instruction((1, 2), (3,), answer=(9,)), 4, 1000
    )
    assert [each.token_ids for each in passes] == [
        (1, 2, 9, *range(100, 110)),
        (3, 108, 109, 9, *range(110, 120)),
        (3, 118, 119, 9, *range(120, 125)),
    ]
    assert [(each.head, each.start, each.end) for each in passes] == [(0, 0, 10), (4, 10, 20), (4, 20, 25)]


def test_what_a_template_wrote_is_not_repeated() -> None:
    [only] = replay_passes(Replay(), range(100, 120), Instruction((1,), template=6), 4, 1000)
    assert only == ReplayPass((1, *range(106, 120)), 6, 6, 20, 20)


def test_chunks_are_no_longer_than_positions_are_left() -> None:
    passes = replay_passes(Replay(), range(300), Instruction((1,) * 10), 4, 300 + 10 + 140)
    assert [each.length - 10 for each in passes] == [100, 100, 100]
    with pytest.raises(
        ContextLengthError, match=r"a context of 300 tokens needs 74 positions more, .* has 373"
    ):
        replay_passes(Replay(), range(300), Instruction((1,) * 10), 4, 300 + 10 + 63)


def test_the_instruction_stands_inside_the_template() -> None:
    tokenizer = byte_level()
    tokenizer.chat_template = (
        "{% for message in messages %}Human: {{ message.content }}{% endfor %}\n\nplease! {{ eos_token }}"
    )
    instruction = Instructor(tokenizer)(Replay(), tokenizer.encode("Human: The quick brown fox"))
    assert tokenizer.decode(instruction.first) == f"\n\n{Replay().first}"
    assert tokenizer.decode(instruction.answer) == f"\nplease! {tokenizer.eos_token}"
    assert instruction.template == len(tokenizer.encode("Human: "))
    outside = Instructor(tokenizer)(Replay(), tokenizer.encode("The quick brown fox"))
    assert outside == replace(instruction, template=0, answer=())


# -- scores of attention ---------------------------------------------------------------------------------------------


BACKENDS = {"torch": ReferenceBackend} | {isa: partial(native_backend, isa) for isa in ISAS}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize(
    "spec",
    [
        AttentionSpec(0.3),
        AttentionSpec(0.3, window=11),
        AttentionSpec(0.3, softcap=0.8),
        AttentionSpec(0.3, sinks=torch.tensor([0.3, -1.0, 2.0, 0.0])),
        AttentionSpec(0.3, slopes=torch.tensor([0.3, 0.1, 0.05, 0.01])),
        AttentionSpec(0.3, window=11, chunked=True),
    ],
    ids=["plain", "window", "softcap", "sinks", "slopes", "chunked"],
)
def test_the_largest_probability_by_the_formula(
    spec: AttentionSpec, every: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "winnow.attention.replay._TEMPORARY", {True: 100, False: 100}
    )  # a few queries at a time
    generator = torch.Generator().manual_seed(1)
    layout = CacheLayout.even(2, 2, 8, BLOCK, torch.float32, 1)
    size = CacheSize.of_blocks(layout, 200, 2, 400)
    local = LocalCache(layout, size)
    cache, other, slot = local.paged, local.ledger.open(), local.ledger.open()
    for length in (5, 20, 17):  # rows of two sequences lie between one another
        local.append([other, slot], [length, length])
    cache.pool.of_layer(-1).k.copy_(torch.randn(cache.pool.of_layer(-1).k.shape, generator=generator))
    cache.pool.accumulators.zero_()
    context, layer = 30, 1
    replay = ReplayPass(tuple(range(12)), 3, 9, 25, context, every)
    attention = BACKENDS[backend]()
    q = torch.randn(12, 4, 8, generator=generator)
    step = attention.prepare(cache, Spans.build([slot], [context], [12], cache.tables.longest([slot])))
    for done, count in ((0, 7), (7, 5)):
        span = ReplaySpan(slot, replay, slice(done, done + count), done)
        observe_replay(step, span, layer, q[done : done + count], spec)

    blocks = cache.tables.lookup(torch.tensor([slot]), layer, -(-42 // BLOCK))[0].long()
    for head in range(2):
        keys = cache.pool.of_layer(-1).k[blocks[head]].flatten(0, 1)
        expected = [0.0] * 42
        for i in range(12):
            at = context + i
            if at % every:
                continue
            reach = spec.reach(at) if spec.window else 99
            seen = [j for j in (*range(3), *range(9, 25), *range(30, at + 1)) if at - j < reach]
            for h in range(2 * head, 2 * head + 2):
                logits = [float(q[i, h] @ keys[j]) * spec.scale for j in seen]
                if spec.softcap:
                    logits = [spec.softcap * math.tanh(x / spec.softcap) for x in logits]
                if spec.slopes is not None:
                    fall = float(spec.slopes[h])
                    logits = [x - fall * (at - j) for x, j in zip(logits, seen, strict=True)]
                sink = [] if spec.sinks is None else [float(spec.sinks[h])]
                mass = sum(math.exp(x) for x in logits + sink)
                for j, x in zip(seen, logits, strict=True):
                    if j < context:
                        expected[j] = max(expected[j], math.exp(x) / mass)
        found = cache.pool.accumulators[0, blocks[head]].flatten()[:42]
        torch.testing.assert_close(found, torch.tensor(expected), atol=1e-6, rtol=1e-5)
    # Nothing else has changed.
    assert int((cache.pool.accumulators != 0).sum()) == sum(
        int((cache.pool.accumulators[0, blocks[head]] != 0).sum()) for head in range(2)
    )


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        *((dtype, dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
    ],
    ids=str,
)
@pytest.mark.parametrize(("group", "dim"), [(3, 64), (1, 40), (40, 8)])
def test_kernels_tell_what_torch_tells(
    isa: str, dtype: torch.dtype, kv_dtype: torch.dtype, group: int, dim: int
) -> None:
    generator = torch.Generator().manual_seed(group)
    context, count, heads = 300, 90, 2
    layout = CacheLayout.even(1, heads, dim, BLOCK, kv_dtype, 1)
    size = CacheSize.of_blocks(layout, 400, 2, 600)
    local = LocalCache(layout, size)
    cache, other, slot = local.paged, local.ledger.open(), local.ledger.open()
    for length in (150, context + count - 150):
        local.append([other, slot], [length, length])
    cache.pool.of_layer(-1).k.copy_(torch.randn(cache.pool.of_layer(-1).k.shape, generator=generator))
    cache.pool.of_layer(-1).v.copy_(torch.randn(cache.pool.of_layer(-1).v.shape, generator=generator))
    q = torch.randn(count, group * heads, dim, generator=generator).to(dtype)
    span = ReplaySpan(slot, ReplayPass(tuple(range(count)), 5, 70, 260, context, 2), slice(0, count), 0)
    spans = Spans.build([slot], [context], [count], cache.tables.longest([slot]))
    observed = []
    for backend in (ReferenceBackend(), native_backend(isa)):
        cache.pool.accumulators.zero_()
        observe_replay(backend.prepare(cache, spans), span, 0, q, AttentionSpec(dim**-0.5))
        observed.append(cache.pool.accumulators.clone())
    assert int((observed[0] > 0).sum()) == heads * 195
    torch.testing.assert_close(observed[1], observed[0], rtol=2e-5, atol=1e-9)


# -- in the engine ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("model"), seed=5, num_hidden_layers=3)


def open_llm(directory: Path, **options: object) -> LLM:
    settings: dict[str, object] = {"kv_memory": "8MiB", "block_size": BLOCK, "kv_floor": 1}
    return LLM(directory, **({"eviction": IN_CHUNKS} | settings | options))


@pytest.fixture(scope="module")
def llm(directory: Path) -> Iterator[LLM]:
    with open_llm(directory) as llm:
        yield llm


def kept_by(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[list[list[list[int]]]]:
    """Positions of the context that each prompt's first sample holds when its answer begins."""
    context = [params.context_tokens or len(each) for each in prompts]
    ids = [llm.submit(each, params) for each in prompts]
    held: dict[str, list[list[list[int]]]] = {}
    while llm.has_unfinished:
        llm.step()
        llm.check_integrity()
        for sequence in llm._engine.scheduler.running:
            request_id = sequence.request.request_id
            if sequence.index == 0 and sequence.num_output_tokens == 3 and not sequence.before_replay_round:
                held[request_id] = llm._engine._executor.kept_positions(sequence.kv.running_slot)
    return [
        [[[p for p in row if p < length] for row in layer] for layer in held[request_id]]
        for request_id, length in zip(ids, context, strict=True)
    ]


PROMPTS = [prompt(150), prompt(90), prompt(211), prompt(64)]
QUARTER = greedy(compression=4)


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[list[list[list[int]]]]:
    return [kept_by(llm, [each], QUARTER)[0] for each in PROMPTS]


def test_documents_in_a_batch_keep_what_each_would_keep_alone(
    llm: LLM, alone: list[list[list[list[int]]]]
) -> None:
    assert kept_by(llm, PROMPTS, QUARTER) == alone
    sizes = {len(row) for layer in alone[0] for row in layer}
    assert len(sizes) > 1, "rows compete, so that they differ"


@pytest.mark.parametrize(
    "options",
    [
        {"prefill_chunk": 16, "kv_memory": "700KiB", "max_num_seqs": 3},
        {"max_num_batched_tokens": 48, "max_num_seqs": 24},
        {"prefill_chunk": None, "attention_backend": "reference", "optimize": False},
    ],
    ids=["chunks in little memory", "few tokens a step", "whole prompts by reference, not fused"],
)
def test_what_is_kept_does_not_depend_on_how_it_is_computed(
    directory: Path, options: dict[str, object], alone: list[list[list[list[int]]]]
) -> None:
    with open_llm(directory, **options) as llm:
        assert kept_by(llm, PROMPTS, QUARTER) == alone


def test_who_is_preempted_within_a_replay_keeps_the_same(
    llm: LLM, alone: list[list[list[list[int]]]]
) -> None:
    request_id = llm.submit(PROMPTS[2], QUARTER)
    scheduler = llm._engine.scheduler
    while not (scheduler.running and scheduler.running[0].kv.passes_done == 1):
        llm.step()
    scheduler.running.preempt()
    llm.check_integrity()
    while scheduler.waiting or scheduler.running[0].num_output_tokens < 3:
        llm.step()
    held = llm._engine._executor.kept_positions(scheduler.running[0].kv.running_slot)
    assert [[[p for p in row if p < 211] for row in layer] for layer in held] == alone[2]
    llm.abort(request_id)
    assert llm._engine.scheduler.ledger.allocator.num_used == 0


def test_a_context_is_judged_before_its_question(llm: LLM) -> None:
    document = prompt(160)
    params = greedy(compression=4, context_tokens=160)
    first, second = (kept_by(llm, [document + prompt(n, seed=n)], params)[0] for n in (9, 30))
    assert first == second


def test_a_budget_above_the_context_leaves_answers_bit_for_bit(llm: LLM) -> None:
    for each in PROMPTS:
        params = greedy(logprobs=3, prompt_logprobs=1)
        [with_replay] = llm.generate(each, replace(params, kv_budget=len(each) + 4))
        [full] = llm.generate(each, replace(params, eviction="full"))
        assert with_replay.outputs[0].logprobs == full.outputs[0].logprobs
        assert report(with_replay).replay_tokens == 0


def test_a_replay_itself_changes_nothing_that_is_computed(directory: Path, llm: LLM) -> None:
    # One block more than the budget is all that goes, and it would not be looked at: positions 0 to 3 are kept, and
    # the first token is sampled before the round.
    params = greedy(max_tokens=1, logprobs=3, prompt_logprobs=2, compression=4)
    for each in PROMPTS:
        [one] = llm.generate(each, params)
        [full] = llm.generate(each, replace(params, eviction="full", compression=None))
        assert one.outputs[0].logprobs == full.outputs[0].logprobs
        assert one.prompt_logprobs == full.prompt_logprobs


def test_the_report_says_what_the_replay_cost(llm: LLM) -> None:
    before = llm.stats()
    [output] = llm.generate(PROMPTS[0], greedy(compression=4))
    reported, stats = report(output), llm.stats()
    # No words: the model has no tokenizer.
    assert reported.replay_tokens == stats.replay_tokens - before.replay_tokens == 150
    assert reported.replay_seconds == pytest.approx(stats.replay_seconds - before.replay_seconds)
    assert reported.replay_seconds > 0
    assert stats.prompt_tokens - before.prompt_tokens + output.num_cached_tokens == 150


def test_a_context_without_room_behind_it_is_judged_by_a_window(directory: Path) -> None:
    with open_llm(directory, max_model_len=200) as llm:
        [repeated] = llm.generate(prompt(120), greedy(compression=4))
        [watched] = llm.generate(prompt(150), greedy(compression=4, kv_budget=None))
        assert [report(each).policy for each in (repeated, watched)] == ["own", "winnow-seen"]
        llm.generate(prompt(150), greedy(kv_budget=190))  # nothing is cut, so nothing is repeated


def report(output: RequestOutput):  # type: ignore[no-untyped-def]
    eviction = output.outputs[0].eviction
    assert eviction is not None
    return eviction


# -- KVzip ------------------------------------------------------------------------------------------------------------


def dense_scores(directory: Path, token_ids: list[int]) -> torch.Tensor:
    """The formula on transformers' full attention of a context and its repetition, [layers, H, context]."""
    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32)
    n, heads = len(token_ids), model.config.num_key_value_heads
    with torch.inference_mode():
        attentions = model(torch.tensor([token_ids * 2]), output_attentions=True).attentions
        paid = torch.stack(attentions)[:, 0, :, n:, :n]  # [layers, Hq, n, n]
    return paid.unflatten(1, (heads, -1)).amax(dim=(2, 3))


@pytest.mark.parametrize(
    "options",
    [{"prefill_chunk": 48}, {"optimize": False}, {"attention_backend": "reference"}],
    ids=["chunks", "transformers' layers", "reference"],
)
def test_scores_are_those_of_full_attention(directory: Path, options: dict[str, object]) -> None:
    document = prompt(120)
    with open_llm(directory, eviction="kvzip", **options) as llm:
        executor = llm._engine._executor
        collected = []
        plan_evictions = executor.plan_evictions

        def look_then_evict(members: list[PlannedEviction]) -> Any:
            for layer in range(executor.layout.num_layers):
                n, slot = len(document), members[0].slot
                place, _ = judged_slots(executor.cache, layer, slot, JudgedKVs(0, 0, n, n), n)
                collected.append(executor.cache.pool.accumulators[0].flatten()[place].clone())
            return plan_evictions(members)

        executor.plan_evictions = look_then_evict
        llm.generate(document, greedy(compression=4, max_tokens=2))
    expected = dense_scores(directory, document)
    torch.testing.assert_close(torch.stack(collected), expected, rtol=1e-3, atol=1e-6)
