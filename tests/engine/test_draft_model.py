"""Drafts of a smaller model: its own KVs follow the sequences, and its randomness is the target's."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from draft_answers import answers
from tiny_llama import VOCAB, save_tiny_llama

from winnow import LLM, SamplingParams
from winnow.config.scheduler import parse_speculative
from winnow.errors import ConfigError
from winnow.models import DEMO_MODEL

OPTIONS: dict[str, Any] = {"kv_memory": "1MiB", "block_size": 4, "max_num_seqs": 8, "prefill_chunk": 32}
PROMPTS = [Random(seed).choices(range(4, VOCAB), k=10 + 9 * seed) for seed in range(5)]
SAMPLED = SamplingParams(temperature=0.7, top_p=0.95, max_tokens=20, n=2, seed=5, ignore_eos=True)
KINDS = [
    SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=1),
    SAMPLED,
    SamplingParams(temperature=0.8, max_tokens=30, seed=1, repetition_penalty=1.3, logit_bias={7: 2.0}),
]


def config(model: Path, **more: Any) -> dict[str, Any]:
    return {
        "method": "draft_model",
        "model": str(model),
        "num_speculative_tokens": 3,
        "adaptive": False,
    } | more


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("target"), seed=3)


@pytest.fixture(scope="module")
def smaller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(
        tmp_path_factory.mktemp("draft"), seed=4, num_hidden_layers=1, num_key_value_heads=1
    )


@pytest.fixture(scope="module")
def plain(target: Path) -> Iterator[LLM]:
    with LLM(target, **OPTIONS) as llm:
        yield llm


@pytest.mark.parametrize("params", KINDS)
def test_a_model_accepts_its_own_drafts(plain: LLM, target: Path, params: SamplingParams) -> None:
    with LLM(target, speculative_config=config(target), **OPTIONS) as llm:
        assert answers(llm, params, PROMPTS) == answers(plain, params, PROMPTS)
        stats = llm.stats()
    # Sampled ones too: both models draw by the same noise.
    assert stats.num_draft_tokens > 40 and stats.num_accepted_tokens > 0.98 * stats.num_draft_tokens


@pytest.mark.parametrize("params", KINDS)
def test_another_model_changes_no_answer(
    plain: LLM, target: Path, smaller: Path, params: SamplingParams
) -> None:
    with LLM(target, speculative_config=config(smaller), **OPTIONS) as llm:
        assert answers(llm, params, PROMPTS) == answers(plain, params, PROMPTS)
        assert 0 <= llm.stats().num_accepted_tokens < 0.7 * llm.stats().num_draft_tokens
        # What ended takes no room: the next answers find all of it.
        assert answers(llm, params, PROMPTS[::-1]) == answers(plain, params, PROMPTS[::-1])


def test_little_memory_is_shared(plain: LLM, target: Path) -> None:
    options = OPTIONS | {"kv_memory": "112KiB"}
    with LLM(target, speculative_config=config(target), **options) as llm:
        assert answers(llm, SAMPLED, PROMPTS) == answers(plain, SAMPLED, PROMPTS)
        stats = llm.stats()
        assert stats.num_preemptions > 0 < stats.num_accepted_tokens
        assert stats.kv_bytes_peak <= stats.kv_bytes_budget == 112 * 2**10


def test_other_vocabularies_and_states_are_refused(target: Path, tmp_path: Path) -> None:
    other = save_tiny_llama(tmp_path, seed=1, vocab_size=VOCAB + 1)
    with pytest.raises(
        ConfigError, match=f"model has {VOCAB + 1} tokens, and the model that answers {VOCAB}"
    ):
        LLM(target, speculative_config=config(other), **OPTIONS)
    swapped = shutil.copytree(DEMO_MODEL, tmp_path / "swapped")
    file = swapped / "tokenizer.json"
    text = json.loads(file.read_text(encoding="utf-8"))
    vocab = text["model"]["vocab"]
    first, second = [name for name, number in vocab.items() if number in (1000, 1001)]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    file.write_text(json.dumps(text), encoding="utf-8")
    with pytest.raises(
        ConfigError, match=r"model must have the vocabulary .* is token 1001 there, and 1000 here"
    ):
        LLM(speculative_config=config(swapped), **OPTIONS | {"kv_memory": "8MiB"})


def test_options(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_speculative({"method": "deepseek_mtp"}).method == "mtp"  # type: ignore[union-attr]
    monkeypatch.setattr("winnow.process.extras.entry_points", lambda **_: ())
    with pytest.raises(ConfigError, match="method mtp needs winnow-drafts: in a checkout"):
        LLM(target, speculative_config={"method": "mtp"}, **OPTIONS)
    assert parse_speculative({"model": "x", "num_speculative_tokens": 2}).method == "draft_model"  # type: ignore[union-attr]
    for wrong, message in (
        ({"method": "draft_model"}, "model must be given with method draft_model"),
        ({"method": "eagle3"}, "must be one of ngram, draft_model, mtp, got 'eagle3': its heads are trained"),
        ({"method": "ngram", "model": "x"}, "model must be left out with method ngram"),
        (
            {"method": "draft_model", "model": "x", "prompt_lookup_max": 3},
            "prompt_lookup_max must be left out",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_speculative(wrong)
