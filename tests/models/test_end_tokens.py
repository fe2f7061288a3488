"""Which tokens end an answer: those of the configurations, and the tokenizer's own."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from tiny_llama import save_tiny_llama
from tokenizer_kinds import BYTE_LEVEL
from transformers import PretrainedConfig

from winnow import LLM, SamplingParams
from winnow.models.load.directory import ModelDirectory

CONFIGURED, OWN = 1, 2  # the configuration's end token, and the tokenizer's
OPTIONS: dict[str, Any] = {"kv_memory": "1MiB", "max_model_len": 128}


@pytest.fixture(scope="module")
def fine_tune(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chat fine-tune: its tokenizer ends turns with a token that no configuration names."""
    path = save_tiny_llama(tmp_path_factory.mktemp("chat"), seed=1, vocab_size=len(BYTE_LEVEL) + 5)
    BYTE_LEVEL.save_pretrained(path)
    file = path / "tokenizer_config.json"
    text = BYTE_LEVEL.convert_ids_to_tokens(OWN)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token": text}))
    (path / "generation_config.json").unlink()
    return path


def params(say: int, **others: Any) -> SamplingParams:
    """The model says one token again and again."""
    return SamplingParams(**{"temperature": 0, "max_tokens": 6, "logit_bias": {say: 100.0}, **others})


def test_the_tokenizers_end_token_ends_an_answer(fine_tune: Path, engine_name: str) -> None:
    with LLM(fine_tune, engine=engine_name, **OPTIONS) as llm:
        assert llm.tokenizer is not None and llm.tokenizer.eos_token_id == OWN
        cases = [
            params(OWN),
            params(CONFIGURED),
            params(OWN, ignore_eos=True),
            params(5),
            params(OWN, min_tokens=3, n=1),
            params(OWN, logprobs=0),
        ]
        answers = [output.outputs[0] for output in llm.generate([[7, 8]] * len(cases), cases)]
    assert [(answer.finish_reason, answer.stop_reason) for answer in answers] == [
        ("stop", None),
        ("stop", None),
        ("length", None),
        ("length", None),
        ("stop", None),
        ("stop", None),
    ]
    assert [len(answer.token_ids) for answer in answers] == [1, 1, 6, 6, 4, 1]
    assert OWN not in answers[4].token_ids[:3]
    logprobs = answers[5].logprobs
    assert answers[5].text == "" and logprobs is not None and logprobs[0] is not None
    assert logprobs[0][OWN].token_bytes == b""


def test_a_special_tokens_text_is_a_stop_string(fine_tune: Path, engine_name: str) -> None:
    """Whether or not the token ends answers by itself, and though the text leaves it out."""
    with LLM(fine_tune, engine=engine_name, **OPTIONS) as llm:
        assert llm.tokenizer is not None
        own = llm.tokenizer.convert_ids_to_tokens(OWN)
        cases = [
            params(OWN, ignore_eos=True, stop=[own]),
            params(OWN, ignore_eos=True, stop=[own], include_stop_str_in_output=True),
            params(OWN, ignore_eos=True, stop=[own], skip_special_tokens=False),
            params(OWN, ignore_eos=True, stop=[own], min_tokens=4),
            params(OWN, ignore_eos=True, stop=[own + own]),
        ]
        answers = [output.outputs[0] for output in llm.generate([[7, 8]] * len(cases), cases)]
    assert [answer.text for answer in answers] == ["", own, "", "", ""]
    assert [answer.stop_reason for answer in answers] == [own, own, own, own, own + own]
    assert [len(answer.token_ids) for answer in answers] == [1, 1, 1, 4, 2]
    assert {answer.finish_reason for answer in answers} == {"stop"}


@pytest.mark.parametrize(
    ("said", "ends"),
    [(0, {0}), ([0], {0}), ([0, 5], {0, 5}), (5, {5}), (None, {CONFIGURED}), ([], {CONFIGURED})],
)
def test_token_0_is_a_token(said: Any, ends: set[int], fine_tune: Path) -> None:
    """generation_config.json comes before config.json wherever it says something, 0 as well."""
    file = fine_tune / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": said}))
    try:
        config = PretrainedConfig(eos_token_id=CONFIGURED)
        assert set(ModelDirectory(fine_tune).end_tokens(config)) == ends
    finally:
        file.unlink()
    assert ModelDirectory(fine_tune).end_tokens(PretrainedConfig(eos_token_id=0)) == [0]


def test_an_end_token_that_the_model_cannot_say(tmp_path: Path) -> None:
    """A token added to the tokenizer after training, for which the model has no logit."""
    path = save_tiny_llama(tmp_path, seed=1, vocab_size=len(BYTE_LEVEL))
    tokenizer = copy.deepcopy(BYTE_LEVEL)
    tokenizer.add_special_tokens({"eos_token": "<|added|>"})
    tokenizer.save_pretrained(path)
    with LLM(path, **OPTIONS) as llm:
        [output] = llm.generate([7, 8], params(CONFIGURED))
    assert output.outputs[0].finish_reason == "stop"
