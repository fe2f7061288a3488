"""The public face over the padded engine: the outputs of the paged one, and what is refused."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from padded_models import prompt
from tiny_llama import save_tiny_llama

from winnow import LLM, RequestOutput, SamplingParams
from winnow.errors import ConfigError, ContextLengthError, InvalidRequestError, UnsupportedModelError


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without a tokenizer."""
    return save_tiny_llama(tmp_path_factory.mktemp("model"), seed=3, max_position_embeddings=256)


@pytest.fixture(scope="module")
def paged(directory: Path) -> Iterator[LLM]:
    with LLM(directory, kv_memory="4MiB", seed=5) as llm:
        yield llm


@pytest.fixture(scope="module")
def padded(directory: Path) -> Iterator[LLM]:
    with LLM(directory, kv_memory="4MiB", seed=5, engine="padded", max_num_seqs=3) as llm:
        yield llm


def seen(outputs: list[RequestOutput]) -> list[tuple[object, ...]]:
    """All of an answer that must not depend on the engine."""
    return [
        (o.prompt_token_ids, c.index, c.token_ids, c.text, c.finish_reason, c.stop_reason)
        for o in outputs
        for c in o.outputs
    ]


PROMPTS = [prompt(length) for length in (40, 3, 90, 17, 60)]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=12),
        SamplingParams(n=5, temperature=1.0, seed=4, max_tokens=10, repetition_penalty=1.2, min_p=0.01),
        SamplingParams(temperature=0.0, max_tokens=12, logit_bias={7: 3.0}, min_tokens=4, stop_token_ids=[7]),
        SamplingParams(n=2, temperature=0.0, max_tokens=1),
        SamplingParams(temperature=0.0, max_tokens=9, forced_tokens=[5, 6, 7], ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True),
    ],
    ids=["greedy", "seeded", "samples", "bias and stops", "one token", "forced", "to the end of the context"],
)
def test_switching_engines_changes_no_output(paged: LLM, padded: LLM, params: SamplingParams) -> None:
    assert seen(padded.generate(PROMPTS, params)) == seen(paged.generate(PROMPTS, params))
    padded.check_integrity()


def test_seeds_that_were_not_given_are_drawn_alike(directory: Path) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)
    outputs = []
    for engine in ("paged", "padded"):
        with LLM(directory, kv_memory="4MiB", seed=11, engine=engine) as llm:
            outputs.append(seen(llm.generate(PROMPTS, params)))
    assert outputs[0] == outputs[1]


def test_logprobs_agree(paged: LLM, padded: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    for one, other in zip(paged.generate(PROMPTS, params), padded.generate(PROMPTS, params), strict=True):
        ours, theirs = ([*o.prompt_logprobs[1:], *o.outputs[0].logprobs] for o in (other, one))
        assert len(ours) == len(theirs) == len(one.prompt_token_ids) - 1 + 5
        for a, b in zip(ours, theirs, strict=True):
            assert list(a) == list(b)
            assert [x.logprob for x in a.values()] == pytest.approx([x.logprob for x in b.values()], abs=1e-4)


@pytest.mark.parametrize("mode", ["static", "pd", "shaping"])
def test_samples_and_prompt_logprobs_in_every_mode(paged: LLM, directory: Path, mode: str) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=2, max_tokens=6, ignore_eos=True, prompt_logprobs=0)
    with LLM(directory, kv_memory="4MiB", engine=f"padded:mode={mode}", max_num_seqs=2) as llm:
        outputs = llm.generate(PROMPTS, params)
        llm.check_integrity()
    assert seen(outputs) == seen(paged.generate(PROMPTS, params))
    assert all(len(output.prompt_logprobs) == len(output.prompt_token_ids) for output in outputs)


def test_abort_wherever_a_request_is(padded: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=1, n=2, max_tokens=30, ignore_eos=True)
    names = [padded.submit(tokens, params) for tokens in PROMPTS]
    for _ in range(4):
        padded.step()
    aborted = [padded.abort(name) for name in names]
    assert all(c.finish_reason == "abort" for output in aborted for c in output.outputs)
    padded.check_integrity()
    assert not padded.has_unfinished
    assert padded.stats().kv_bytes_used == padded.stats().parked_bytes == 0


class TestRefusals:
    @pytest.mark.parametrize(
        "option",
        [
            {"eviction": "snapkv"},
            {"block_size": 32},
            {"compression": 4.0},
            {"kv_floor": 1},
            {"kv_offloading_size": "1GiB"},
            {"kv_cache_dtype": "int8"},
            {"kv_reservation": "max"},
            {"value_tier": "host:N=8"},
            {"weight_dtype": "int8"},
        ],
    )
    def test_options_of_the_paged_engine(self, option: dict[str, object]) -> None:
        [name] = option
        with pytest.raises(ConfigError, match=f"{name} needs engine=paged"):
            LLM(engine="padded", **option)

    @pytest.mark.parametrize(
        ("option", "message"),
        [
            ("mode=orca", "mode must be one of embedding, shaping, pd, static, got 'orca'"),
            ("prefill_group=0", "prefill_group must be at least 1, got 0"),
            ("prefill_group=many", "engine: prefill_group cannot be 'many'"),
            ("park_memory=lots", "park_memory must be a size such as 512MiB, .*, got 'lots'"),
            ("group_padding=1.5", "group_padding must be at most 1.0, got 1.5"),
            ("park_above=0.5", r"admit_below must be at most park_above \(0.5\), got 0.9"),
            ("park_above=0,admit_below=0", "park_above must be greater than 0"),
            ("fast", "an option of engine=padded must be one of mode, .*, got 'fast'"),
        ],
    )
    def test_options_out_of_range(self, option: str, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            LLM(engine=f"padded:{option}")

    @pytest.mark.parametrize(
        ("tokens", "params", "error", "message"),
        [
            ([], {}, InvalidRequestError, "prompt must hold at least 1 token"),
            ([5, 97], {}, InvalidRequestError, "prompt token ids must be between 0 and 96, got 97"),
            ([5] * 256, {}, ContextLengthError, "prompt must be shorter than the context of 256 tokens"),
            (
                [5],
                {"stop_token_ids": [200]},
                InvalidRequestError,
                "stop_token_ids must hold token ids below 97",
            ),
            ([5], {"eviction": "snapkv"}, InvalidRequestError, "eviction needs engine=paged"),
            ([5], {"compression": 2.0}, InvalidRequestError, "compression needs engine=paged"),
            ([5], {"context_tokens": 1}, InvalidRequestError, "context_tokens needs engine=paged"),
            ([5], {"protect": [(0, 1)]}, InvalidRequestError, "protect needs engine=paged"),
        ],
    )
    def test_bad_requests(
        self, padded: LLM, tokens: list[int], params: dict[str, object], error: type, message: str
    ) -> None:
        with pytest.raises(error, match=message):
            padded.submit(tokens, SamplingParams(**params))
        assert not padded.has_unfinished

    def test_what_only_the_paged_engine_can_tell(self, padded: LLM) -> None:
        with pytest.raises(InvalidRequestError, match="inspect needs engine=paged"):
            padded.inspect([5, 6])

    def test_a_request_id_in_use(self, padded: LLM) -> None:
        padded.submit([5], request_id="mine")
        with pytest.raises(InvalidRequestError, match="request_id 'mine' is in use"):
            padded.submit([5], request_id="mine")
        padded.abort("mine")


def test_a_state_space_model_is_refused(tmp_path: Path) -> None:
    from transformers import MambaConfig

    MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2).save_pretrained(tmp_path)
    with pytest.raises(
        UnsupportedModelError, match="MambaForCausalLM is not supported: it has layers that keep a state"
    ):
        LLM(tmp_path, engine="padded", load_format="dummy", max_model_len=64)


def test_a_model_that_sees_padding_is_refused(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaForCausalLM

    forward = LlamaForCausalLM.forward

    def blind(self: object, *args: object, **kwargs: object) -> object:
        kwargs.pop("attention_mask")
        return forward(self, *args, **kwargs)

    blind.__signature__ = __import__("inspect").signature(forward)  # type: ignore[attr-defined]
    monkeypatch.setattr(LlamaForCausalLM, "forward", blind)
    with pytest.raises(
        UnsupportedModelError, match="LlamaForCausalLM is not supported: padding changes what"
    ):
        LLM(directory, engine="padded")


def test_an_engine_without_its_distribution_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("winnow.llm.entry_points", lambda group, name: ())
    with pytest.raises(ConfigError, match=r"got 'padded:mode=pd' \(padded is part of winnow-lab: in a che"):
        LLM(engine="padded:mode=pd")
