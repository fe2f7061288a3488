"""Answers that begin with given tokens: teacher forcing through the steps, and the rounds, of free decoding."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from tiny_llama import VOCAB, prompt, save_tiny_llama

from winnow import LLM, CompletionOutput, SamplingParams
from winnow.errors import CapacityError, ContextLengthError, InvalidRequestError

EOS = 1
TOLERANCE = 1e-4  # of a logprob in float32, computed token by token or in one pass


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("model"), seed=5)


@pytest.fixture(scope="module")
def llm(directory: Path) -> Iterator[LLM]:
    options = {"kv_memory": "8MiB", "block_size": 4, "num_accumulators": 2, "kv_floor": 1}
    # Answers are compared bit for bit: a prompt is computed whole each time.
    with LLM(directory, dtype="float32", enable_prefix_caching=False, **options) as llm:  # type: ignore[arg-type]
        yield llm


def answers(llm: LLM, tokens: list[int], **options: object) -> list[CompletionOutput]:
    params = SamplingParams(**({"temperature": 0, "logprobs": 0, "ignore_eos": True} | options))  # type: ignore[arg-type]
    return llm.generate(tokens, params)[0].outputs


def reported(answer: CompletionOutput) -> list[float]:
    assert answer.logprobs is not None
    pairs = zip(answer.token_ids, answer.logprobs, strict=True)
    return [found[token].logprob for token, found in pairs if found is not None]


def teacher_forced(llm: LLM, tokens: list[int], forced: list[int]) -> list[float]:
    """The logprobs of `forced` after `tokens`, from one prompt that holds both."""
    [output] = llm.generate(tokens + forced, SamplingParams(max_tokens=1, prompt_logprobs=0))
    assert output.prompt_logprobs is not None
    pairs = zip(forced, output.prompt_logprobs[len(tokens) :], strict=True)
    return [found[token].logprob for token, found in pairs if found is not None]


@given(
    length=st.integers(1, 40),
    forced=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20),
    chosen=st.fixed_dictionaries(
        {"temperature": st.sampled_from([0.0, 0.7, 2.0]), "seed": st.integers(0, 9)},
        optional={
            "top_k": st.just(3),
            "top_p": st.just(0.5),
            "repetition_penalty": st.just(1.7),
            "frequency_penalty": st.just(1.5),
            "logit_bias": st.just({5: 50.0}),
            "min_tokens": st.just(4),
        },
    ),
)
def test_forced_tokens_are_teacher_forcing(
    llm: LLM, length: int, forced: list[int], chosen: dict[str, object]
) -> None:
    tokens = prompt(length)
    [answer] = answers(
        llm, tokens, forced_tokens=forced, max_tokens=len(forced) + 3, **{"ignore_eos": False} | chosen
    )
    assert answer.token_ids[: len(forced)] == forced
    wanted = teacher_forced(llm, tokens, forced)
    assert reported(answer)[: len(forced)] == pytest.approx(wanted, abs=TOLERANCE)
    assert answer.cumulative_logprob == pytest.approx(sum(reported(answer)))


def test_forcing_the_greedy_answer_changes_nothing(llm: LLM) -> None:
    [free] = answers(llm, prompt(60), max_tokens=20, logprobs=3)
    for count in (1, 7, 20):
        [again] = answers(
            llm, prompt(60), max_tokens=20, logprobs=3, forced_tokens=free.token_ids[:count], temperature=0
        )
        assert (again.token_ids, again.logprobs) == (free.token_ids, free.logprobs)
        assert again.cumulative_logprob == free.cumulative_logprob


@pytest.mark.parametrize("logprobs", [None, 0])
def test_after_forced_tokens_the_answer_goes_on_as_if_they_had_been_chosen(
    llm: LLM, logprobs: int | None
) -> None:
    forced = prompt(9, 3)
    options: dict[str, object] = {"logprobs": logprobs, "temperature": 0}
    [answer] = answers(llm, prompt(30), forced_tokens=forced, max_tokens=20, **options)
    [rest] = answers(llm, prompt(30) + forced, max_tokens=11, **options)
    assert answer.token_ids == forced + rest.token_ids


def test_random_answers_draw_what_they_would_have_drawn_there(llm: LLM) -> None:
    options: dict[str, object] = {"temperature": 1.0, "seed": 4, "frequency_penalty": 0.5, "max_tokens": 16}
    free = answers(llm, prompt(30), n=3, **options)
    begun = answers(llm, prompt(30), n=3, forced_tokens=[each.token_ids[:8] for each in free], **options)
    assert [each.token_ids for each in begun] == [each.token_ids for each in free]
    assert len({tuple(each.token_ids) for each in free}) == 3


@pytest.mark.parametrize("eviction", ["full", "kv-compress", "h2o"])
def test_samples_of_one_prompt_are_forced_each_on_its_own(llm: LLM, eviction: str) -> None:
    forced = [prompt(12, 1), prompt(5, 2), [], prompt(9, 4)]
    policy = {"eviction": eviction, "max_tokens": 12} | ({} if eviction == "full" else {"kv_budget": 40})
    together = answers(llm, prompt(100), n=4, forced_tokens=forced, **policy)
    for answer, own in zip(together, forced, strict=True):
        assert answer.token_ids[: len(own)] == own
        [alone] = answers(llm, prompt(100), forced_tokens=own, **policy)
        assert answer.token_ids == alone.token_ids
        assert reported(answer) == pytest.approx(reported(alone), abs=TOLERANCE)


@pytest.mark.parametrize("eviction", ["h2o", "streaming", "kv-compress-pd", "snapkv"])
def test_rounds_fall_as_in_a_free_answer(llm: LLM, eviction: str) -> None:
    policy = {"eviction": eviction, "kv_budget": 300 if eviction == "streaming" else 60, "max_tokens": 80}
    tokens = prompt(400)
    [free] = answers(llm, tokens, **policy)
    [forced] = answers(llm, tokens, forced_tokens=free.token_ids, **policy)
    assert free.eviction is not None and forced.eviction is not None
    assert reported(forced) == reported(free)
    assert (forced.eviction.kept, forced.eviction.rounds) == (free.eviction.kept, free.eviction.rounds)
    if eviction != "snapkv":  # it has one round, after the prompt
        assert forced.eviction.rounds >= 5
    unevicted = teacher_forced(llm, tokens, free.token_ids)
    assert reported(forced) != pytest.approx(unevicted, abs=0.01)


def test_preempted_answers_go_on_where_they_were(directory: Path, llm: LLM) -> None:
    forced = prompt(40, 6)
    options: dict[str, object] = {"forced_tokens": forced, "max_tokens": 60}
    with LLM(directory, dtype="float32", kv_memory="132KiB", block_size=4, num_accumulators=0) as crowded:
        params = SamplingParams(temperature=0, logprobs=0, ignore_eos=True, **options)  # type: ignore[arg-type]
        outputs = crowded.generate([prompt(50, seed) for seed in range(4)], params)
        assert crowded.stats().num_preemptions > 0
    for seed, output in enumerate(outputs):
        [alone] = answers(llm, prompt(50, seed), **options)
        assert output.outputs[0].token_ids == alone.token_ids
        assert reported(output.outputs[0]) == pytest.approx(reported(alone), abs=TOLERANCE)


class TestNothingEndsThem:
    def test_no_token_does(self, llm: LLM) -> None:
        forced = [5, EOS, 7, EOS]
        [answer] = answers(llm, prompt(20), forced_tokens=forced, max_tokens=4, ignore_eos=False)
        assert (answer.token_ids, answer.finish_reason) == (forced, "length")
        [answer] = answers(llm, prompt(20), forced_tokens=[5, 7, 7], max_tokens=3, stop_token_ids=[7])
        assert (answer.token_ids, answer.stop_reason) == ([5, 7, 7], None)
        # The first free token may.
        ends = {"logit_bias": {EOS: 100}, "ignore_eos": False}
        [answer] = answers(llm, prompt(20), forced_tokens=forced, max_tokens=9, **ends)
        assert (answer.token_ids, answer.finish_reason) == ([*forced, EOS], "stop")

    def test_no_stop_string_does(self) -> None:
        with LLM(kv_memory="16MiB") as demo:
            assert demo.tokenizer is not None
            forced = demo.tokenizer.encode(" one two three four", add_special_tokens=False)
            [answer] = answers(
                demo, demo.tokenizer.encode("Count:"), forced_tokens=forced, stop=["two", "our"]
            )
            assert answer.token_ids[: len(forced)] == forced
            assert answer.text.startswith(" one two three four")


class TestRefused:
    def test_what_the_vocabulary_lacks(self, llm: LLM) -> None:
        with pytest.raises(InvalidRequestError, match="forced_tokens must hold token ids below 97"):
            answers(llm, [5], forced_tokens=[3, 97])

    def test_what_the_context_cannot_hold(self, llm: LLM) -> None:
        with pytest.raises(ContextLengthError, match="prompt and forced_tokens must fit into the context"):
            answers(llm, prompt(4000), forced_tokens=[5] * 97, max_tokens=None)
        [answer] = answers(llm, prompt(4000), forced_tokens=[5] * 96, max_tokens=None)
        assert answer.token_ids == [5] * 96

    def test_what_the_memory_cannot_hold(self, directory: Path) -> None:
        with (
            LLM(directory, kv_memory="64KiB", num_accumulators=0) as llm,
            pytest.raises(CapacityError, match="kv_memory"),
        ):
            answers(llm, prompt(20), forced_tokens=[5] * 2000, max_tokens=None)
