"""Likelihoods by forced decoding, beside one pass of transformers and the dense rounds that they must not miss."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_llama import VOCAB, save_tiny_llama
from transformers import AutoModelForCausalLM

from winnow import LLM
from winnow.errors import ContextLengthError, EvaluationError, InvalidRequestError
from winnow.eviction import PRESETS, EqualHeads, EvictionPolicy, Random, When
from winnow.values.eviction_request import Amount
from winnow_lab.evaluate.likelihood import Keeping, Likelihood, Pair, loglikelihoods, score_pairs

TOLERANCE = 1e-4
ONCE = Keeping(EvictionPolicy(Random(), EqualHeads(), when=When(after_prefill=True)), Amount(kv_budget=20))


def tokens(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(random.Random(1000 * seed + length).choices(range(3, VOCAB), k=length))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("model"), seed=11)


@pytest.fixture(scope="module")
def llm(directory: Path) -> Iterator[LLM]:
    options = {"kv_memory": "8MiB", "block_size": 4, "num_accumulators": 2, "kv_floor": 1, "max_num_seqs": 8}
    with LLM(directory, dtype="float32", **options) as llm:
        yield llm


def close(found: Likelihood, expected: Likelihood) -> bool:
    return found.logprobs == pytest.approx(expected.logprobs, abs=TOLERANCE)


def test_the_full_cache_gives_what_one_pass_of_transformers_gives(llm: LLM, directory: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    pairs = [Pair(tokens(length, 1), tokens(count, 2)) for length, count in ((1, 5), (2, 1), (90, 30))]
    for pair, found in zip(pairs, loglikelihoods(llm, pairs), strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([pair.context + pair.continuation])).logits[0].float()
        start = len(pair.context)
        expected = logits[start - 1 : -1].log_softmax(1)
        following = torch.tensor(pair.continuation)
        assert found.logprobs == pytest.approx(
            expected.gather(1, following[:, None])[:, 0].tolist(), abs=TOLERANCE
        )
        assert found.total == pytest.approx(sum(found.logprobs))
        assert found.is_greedy == bool((expected.argmax(1) == following).all())


def test_what_greedy_decoding_would_answer_is_told(llm: LLM) -> None:
    from winnow import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    greedy = tuple(llm.generate(list(tokens(40)), params)[0].outputs[0].token_ids)
    other = (*greedy[:5], (greedy[5] + 1) % VOCAB)
    found = loglikelihoods(llm, [Pair(tokens(40), greedy), Pair(tokens(40), other)])
    assert [each.is_greedy for each in found] == [True, False]


@pytest.mark.parametrize("name", ["full", "snapkv", "h2o", "kv-compress", "streaming"])
def test_pairs_that_share_a_context_are_scored_as_if_alone(llm: LLM, name: str) -> None:
    amount = None if name == "full" else 280 if name == "streaming" else 40
    policy = PRESETS[name].policy
    keeping = Keeping(replace(policy, when=policy.when.alone), Amount(kv_budget=amount))
    context = tokens(400)
    pairs = [
        Pair(context, tokens(count, 3)) for count in (1, 9, 4, 9, 2, 2, 2, 2, 3, 7)
    ]  # more than max_num_seqs
    pairs.insert(3, Pair(tokens(100, 7), tokens(5)))
    together = loglikelihoods(llm, pairs, keeping)
    for pair, found in zip(pairs, together, strict=True):
        assert len(found.logprobs) == len(pair.continuation)
        assert close(found, loglikelihoods(llm, [pair], keeping)[0])


def test_the_round_falls_before_the_first_token(llm: LLM) -> None:
    """One token of an answer, as in multiple choice: computed in one pass with the context it would see all of it."""
    pair = Pair(tokens(200), tokens(1, 2))
    [full], [cut] = loglikelihoods(llm, [pair]), loglikelihoods(llm, [pair], ONCE)
    assert cut.eviction is not None and cut.eviction.rounds == 1
    assert cut.eviction.mean_kept == 21  # and the context's last token
    assert not close(cut, full)


def test_rounds_go_on_while_decoding(llm: LLM) -> None:
    pair = Pair(tokens(60), tokens(80, 2))
    [found] = loglikelihoods(llm, [pair], Keeping(PRESETS["recent"].policy, Amount(kv_budget=40)))
    assert found.eviction is not None and found.eviction.rounds >= 79
    assert found.eviction.mean_kept <= 41


def test_a_budget_above_all_is_the_full_cache(llm: LLM) -> None:
    pair = Pair(tokens(60), tokens(20, 2))
    [found] = loglikelihoods(llm, [pair], Keeping(PRESETS["snapkv"].policy, Amount(kv_budget=500)))
    assert found.logprobs == loglikelihoods(llm, [pair])[0].logprobs


def test_pairs_come_as_they_are_done(llm: LLM) -> None:
    pairs = [Pair(tokens(300), tokens(60)), Pair(tokens(10), tokens(2))]
    assert [index for index, _ in score_pairs(llm, pairs)] == [1, 0]


def test_interrupted_scoring_leaves_nothing_behind(llm: LLM) -> None:
    scoring = score_pairs(llm, [Pair(tokens(30), tokens(2)), Pair(tokens(40), tokens(90))])
    next(scoring)
    scoring.close()
    assert not llm.has_unfinished


@pytest.mark.parametrize(
    ("pairs", "error", "message"),
    [
        ([Pair(tokens(3), ())], EvaluationError, r"pairs\[0\] .* got 3 and 0"),
        ([Pair(tokens(3), (5,)), Pair((), (5,))], EvaluationError, r"pairs\[1\] .* got 0 and 1"),
        (
            [Pair(tokens(3), (5,)), Pair((4,), (VOCAB,))],
            InvalidRequestError,
            r"pairs\[1\]: forced_tokens must",
        ),
        ([Pair(tokens(4090), (5,) * 7)], ContextLengthError, r"pairs\[0\]: prompt and forced_tokens"),
    ],
)
def test_refused(llm: LLM, pairs: list[Pair], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        loglikelihoods(llm, pairs)
    assert not llm.has_unfinished


def test_no_pairs_no_likelihoods(llm: LLM) -> None:
    assert loglikelihoods(llm, []) == []
