"""Models with recurrent layers: greedy tokens equal transformers' own in float32, whatever becomes of the states."""

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import generate_alone, save
from hybrids import HYBRIDS, VOCAB

from winnow import LLM, RequestOutput, SamplingParams
from winnow.attention import open_backend
from winnow.cache.recurrent import Computed, RecurrentStates
from winnow.config import ModelConfig
from winnow.engine.memory import prefixes
from winnow.errors import UnsupportedModelError
from winnow.eviction import PRESETS as EVERY
from winnow.models import load_model
from winnow.models.load.paged_trial import differences_of, paged_logits, plain_layout

MAX_TOKENS = 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)


def prompt(length: int) -> list[int]:
    return random.Random(length).choices(range(3, VOCAB), k=length)


PROMPTS = [prompt(length) for length in (1, 16, 17, 33, 70)]
WHOLE = ["qwen3.5", "falcon-h1", "jamba", "minimax", "lfm2"]
"""A model of each kind of state."""


Alone = Callable[..., list[int]]
"""What transformers answers to a prompt alone, MAX_TOKENS or as many as are asked for."""


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Alone]:
    """The directory of a model with Gated DeltaNet, and its answers."""
    path, known = tmp_path_factory.mktemp("qwen"), dict[tuple[int, ...], list[int]]()
    model = save(HYBRIDS["qwen3.5"], path)

    def alone(tokens: list[int], max_tokens: int = MAX_TOKENS) -> list[int]:
        key = (max_tokens, *tokens)
        if key not in known:
            known[key] = generate_alone(model, tokens, max_tokens)
        return known[key]

    return path, alone


def tokens_of(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    outputs = llm.generate(prompts, params)
    llm.check_integrity()
    return [completion.token_ids for output in outputs for completion in output.outputs]


@pytest.mark.parametrize("name", HYBRIDS)
def test_batches_that_requests_join_and_leave(name: str, tmp_path: Path) -> None:
    """Tokens, of prompts in chunks and whole; and logits, over each backend."""
    model = save(HYBRIDS[name], tmp_path)
    expected = [generate_alone(model, tokens, MAX_TOKENS) for tokens in PROMPTS]
    for chunk in (None, 16) if name in WHOLE else (16,):
        with LLM(tmp_path, kv_memory="8MiB", max_num_seqs=3, prefill_chunk=chunk) as llm:
            assert tokens_of(llm, PROMPTS) == expected, chunk
            loaded: Any = llm._engine._executor._model
    tokens = torch.tensor(PROMPTS[-1])
    with torch.inference_mode():
        logits = model(tokens[None]).logits[0].to(loaded.device)
    for backend in ("auto", "reference"):
        computes = open_backend(backend, loaded.device)
        found = paged_logits(loaded, tokens.to(loaded.device), computes, plain_layout(loaded))
        assert float(differences_of(found, logits).max()) < 2e-4


@pytest.mark.parametrize("host", [None, "8MiB"], ids=["recompute", "swap"])
def test_preempted_sequences_go_on(qwen: tuple[Path, Alone], host: str | None) -> None:
    path, alone = qwen
    prompts = [prompt(length) for length in range(60, 66)]
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    options = {"block_size": 4, "max_num_seqs": 6, "kv_offloading_size": host, "enable_prefix_caching": False}
    with LLM(path, kv_memory="150KiB", **options) as llm:
        found = tokens_of(llm, prompts, params)
        stats = llm.stats()
        assert stats.num_preemptions, "memory was meant to be too small"
        assert bool(stats.num_swaps) == (host is not None)
    assert found == [alone(tokens, 60) for tokens in prompts]


def test_samples_and_forks_have_their_own_states(qwen: tuple[Path, Alone]) -> None:
    path, alone = qwen
    params = SamplingParams(n=3, temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    with LLM(path, kv_memory="8MiB", max_num_seqs=6) as llm:
        found = tokens_of(llm, PROMPTS, params)
    assert found == [alone(tokens) for tokens in PROMPTS for _ in range(3)]


def test_samples_that_differ_are_those_of_requests_alone(qwen: tuple[Path, Alone]) -> None:
    path, _ = qwen
    params = SamplingParams(n=4, seed=7, temperature=1.5, max_tokens=MAX_TOKENS, ignore_eos=True)
    with LLM(path, kv_memory="8MiB", max_num_seqs=4) as llm:
        together = tokens_of(llm, PROMPTS[3:4], params)
    with LLM(path, kv_memory="8MiB", max_num_seqs=1, enable_prefix_caching=False) as llm:
        assert tokens_of(llm, PROMPTS[3:4], params) == together
    assert len({tuple(tokens) for tokens in together}) == 4


# -- prefixes --------------------------------------------------------------------------------------------------------


def cached_tokens(llm: LLM, tokens: list[int]) -> tuple[int, list[int]]:
    [output] = llm.generate([tokens], GREEDY)
    llm.check_integrity()
    return output.num_cached_tokens, output.outputs[0].token_ids


def test_a_conversation_computes_no_token_twice(qwen: tuple[Path, Alone]) -> None:
    path, alone = qwen
    with LLM(path, kv_memory="8MiB", max_num_seqs=4, prefill_chunk=32) as llm:
        tokens: list[int] = []
        for turn in range(4):
            known = max(len(tokens) - 1, 0)  # the last token was sampled, and is not computed
            tokens += prompt(20 + turn)
            cached, answer = cached_tokens(llm, tokens)
            assert cached == known
            assert answer == alone(tokens)
            tokens += answer


def test_a_prompt_again_and_prompts_that_part(qwen: tuple[Path, Alone]) -> None:
    path, alone = qwen
    shared = prompt(100)
    with LLM(path, kv_memory="8MiB", max_num_seqs=4) as llm:
        assert cached_tokens(llm, shared)[0] == 0
        # Up to the last whole block that leaves a token to compute.
        assert cached_tokens(llm, shared) == (96, alone(shared))
        for number, known in enumerate((0, 64, 64)):  # the first to part leaves a state where it does
            other = shared[:70] + prompt(30 + number)
            assert cached_tokens(llm, other) == (known, alone(other))


def test_states_are_kept_every_so_many_tokens(
    qwen: tuple[Path, Alone], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a prompt that is the first to part finds one; else, as above, it leaves one where it does."""
    path, alone = qwen
    monkeypatch.setattr(prefixes, "_STATE_TOKENS", 32)
    shared = prompt(100)
    with LLM(path, kv_memory="8MiB", max_num_seqs=4) as llm:
        cached_tokens(llm, shared)
        for number in range(2):
            other = shared[:70] + prompt(30 + number)
            assert cached_tokens(llm, other) == (64, alone(other))


def test_prompts_that_begin_alike_wait_for_one(qwen: tuple[Path, Alone]) -> None:
    path, alone = qwen
    prompts = [prompt(128) + prompt(5 + number) for number in range(4)]
    with LLM(path, kv_memory="8MiB", max_num_seqs=4, prefill_chunk=64) as llm:
        outputs = llm.generate(prompts, GREEDY)
        assert [output.num_cached_tokens for output in outputs] == [0, 128, 128, 128]
    found = [output.outputs[0].token_ids for output in outputs]
    assert found == [alone(tokens) for tokens in prompts]


def test_states_beyond_their_memory_are_forgotten(qwen: tuple[Path, Alone]) -> None:
    path, alone = qwen
    prompts = [prompt(length) for length in range(40, 52)]
    with LLM(path, kv_memory="2MiB", max_num_seqs=2) as llm:
        for tokens in (*prompts, *prompts):
            cached, answer = cached_tokens(llm, tokens)
            assert answer == alone(tokens)
        assert cached == 0 and cached_tokens(llm, prompts[-1])[0] == 48


# -- eviction ---------------------------------------------------------------------------------------------------------


def every_preset(**without: bool) -> list[str]:
    """Names of presets whose budget a request may give."""
    own = {name: preset.policy for name, preset in EVERY.items() if name != "full"}
    bounded = [name for name, each in own.items() if each.budget.fixed is None]
    return [name for name in bounded if not (without.get("compact") and own[name].compact)]


@pytest.mark.parametrize("name", ["qwen3-next", "deepseek-v3"])
def test_every_preset(name: str, tmp_path: Path) -> None:
    """Within a budget for all tokens nothing changes; within a smaller one rows are as small."""
    model, tokens, hybrid = save(HYBRIDS[name], tmp_path), prompt(150), name == "qwen3-next"
    presets, params = every_preset(compact=not hybrid), replace(GREEDY, max_tokens=12)
    options: dict[str, Any] = {"kv_memory": "16MiB", "max_num_seqs": 8, "prefill_chunk": 512}
    with LLM(tmp_path, num_accumulators=2, kv_bias=hybrid, kv_floor=1, block_size=4, **options) as llm:

        def answers(budget: int) -> list[RequestOutput]:
            each = [replace(params, eviction=preset, kv_budget=budget) for preset in presets]
            found = llm.generate([tokens] * len(presets), each)
            llm.check_integrity()
            return found

        expected = generate_alone(model, tokens, 12)
        kept = answers(400)
        assert {
            preset: o.outputs[0].token_ids for preset, o in zip(presets, kept, strict=True)
        } == dict.fromkeys(presets, expected)
        answers(100)
        assert llm.stats().num_rounds >= len(presets)


@pytest.mark.parametrize("preset", ["kvzip", "kv-compress-pd", "h2o", "winnow"])
def test_policies_act_on_layers_that_attend(qwen: tuple[Path, Alone], preset: str) -> None:
    """What a round left is found again with the states after it, and rounds leave states alone."""
    path, alone = qwen
    tokens = prompt(150)
    params = replace(GREEDY, max_tokens=12)
    answers = []
    options: dict[str, Any] = {"kv_memory": "8MiB", "max_num_seqs": 4, "prefill_chunk": 64, "block_size": 4}
    for caching in (False, True):
        policy = {"eviction": preset, "compression": 3, "kv_floor": 1}
        with LLM(path, enable_prefix_caching=caching, **policy, **options) as llm:
            for _ in range(2):
                [output] = llm.generate([tokens], params)
                llm.check_integrity()
                answers.append(output.outputs[0].token_ids)
            assert llm.stats().num_rounds
    assert all(each == answers[0] for each in answers)
    assert answers[0] != alone(tokens, 12), "it was meant to lose something"


# -- negative controls -----------------------------------------------------------------------------------------------


def changed(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    begin = RecurrentStates.begin

    def wrong(self: RecurrentStates, step: Iterable[Computed]) -> None:
        step = list(step)
        begin(self, step)
        old = [each.slot for each in step if each.start]
        if change == "not carried":
            self._rows[old] = 0
        elif change == "of another" and len(old) > 1:
            self._rows[old] = self._rows[old[1:] + old[:1]]
        elif change == "not begun anew":
            self._rows[[each.slot for each in step if not each.start]] = 63

    monkeypatch.setattr(RecurrentStates, "begin", wrong)


@pytest.mark.parametrize("change", ["not carried", "of another", "not begun anew"])
def test_a_change_is_noticed(qwen: tuple[Path, Alone], change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, alone = qwen
    changed(monkeypatch, change)
    if change in ("not carried", "not begun anew"):
        with pytest.raises(UnsupportedModelError, match="Winnow computes something else than its own code"):
            load_model(ModelConfig(path))
    with LLM(path, kv_memory="8MiB", max_num_seqs=8, verify_model=False, prefill_chunk=16) as llm:
        assert tokens_of(llm, PROMPTS) != [alone(tokens) for tokens in PROMPTS]


def test_a_state_of_other_tokens_is_never_gone_on_from() -> None:
    [shape] = {each: None for each in load_shapes() if each.kind == "recurrent" and each.layer == 0}
    states = RecurrentStates([shape], 2)
    states.begin([Computed(0, 0, 16)])
    states.begin([Computed(0, 16, 20), Computed(1, 0, 4)])
    assert states.save(0, (0, 16)) is None, "it ends elsewhere"
    with pytest.raises(AssertionError, match="slot 0 has the state after 20 tokens, not 17"):
        states.begin([Computed(0, 17, 18)])


def test_what_does_not_stay_leaves_the_state_as_it_was() -> None:
    states = RecurrentStates(load_shapes(), 1)
    [rows] = {
        id(part): part for parts in states.by_layer.values() for part in list(parts.values())[:1]
    }.values()
    states.begin([Computed(0, 0, 8)])
    rows += 1
    for _ in range(2):
        states.begin([Computed(0, 8, 12, stays=False)])
        assert (rows == 1).all()
        rows += 1
        states.begin([Computed(0, 12, 14, stays=False)])
        assert (rows == 2).all()
        rows += 1
    states.begin([Computed(0, 8, 9)])
    assert (rows == 1).all()


def load_shapes() -> list[Any]:
    from winnow.cache.recurrent import StateShape

    return [StateShape(0, "recurrent", 0, (2, 3), str(torch.float32).removeprefix("torch."))]
