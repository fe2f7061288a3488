"""Models whose tables of positions begin behind places for padding, and layers that drop keyword arguments."""

from pathlib import Path

import pytest
import torch
from architectures import _COMMON, VOCAB, save
from transformers import NemotronConfig, PretrainedConfig, RobertaConfig, StableLmConfig

from winnow import LLM, SamplingParams
from winnow.config import ModelConfig
from winnow.errors import UnsupportedModelError
from winnow.models import load_model
from winnow.models.bind.geometry_probe import Carrier

PROMPTS = [list(range(3, 3 + length)) for length in (1, 17, 40)]
PADDING = 2
CASES: dict[str, PretrainedConfig] = {
    "nemotron": NemotronConfig(**_COMMON, num_key_value_heads=2),
    "roberta": RobertaConfig(**_COMMON, is_decoder=True),
    "stablelm": StableLmConfig(**_COMMON, num_key_value_heads=2),
}


@pytest.mark.parametrize("kind", CASES)
def test_logprobs_equal_those_without_a_cache(kind: str, engine_name: str, tmp_path: Path) -> None:
    """Tokens alone would not tell: RoBERTa's differ little at the position beside."""
    model = save(CASES[kind], tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=1)
    with LLM(tmp_path, engine=engine_name, kv_memory="4MiB", max_model_len=128, max_num_seqs=4) as llm:
        outputs = [output.outputs[0] for output in llm.generate(PROMPTS, params)]
    compared = 0
    for prompt, answer in zip(PROMPTS, outputs, strict=True):
        tokens = list(prompt)
        for token, logprobs in zip(answer.token_ids, answer.logprobs or (), strict=True):
            if PADDING in tokens:  # RoBERTa does not count these
                break
            with torch.inference_mode():
                own = model(input_ids=torch.tensor([tokens])).logits[0, -1].log_softmax(dim=-1)
            assert logprobs is not None
            assert logprobs[token].logprob == pytest.approx(float(own[token]), abs=1e-4)
            tokens.append(token)
            compared += 1
    assert compared > len(PROMPTS)


def test_places_for_padding_are_no_room(tmp_path: Path) -> None:
    save(CASES["roberta"], tmp_path)
    loaded = load_model(ModelConfig(tmp_path))
    assert loaded.trained_len == _COMMON["max_position_embeddings"] - PADDING - 1
    assert loaded.vocab_size == VOCAB


def test_without_a_carrier_attention_lacks_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(CASES["nemotron"], tmp_path)
    monkeypatch.setattr(Carrier, "bind", lambda *_: None)
    with pytest.raises(UnsupportedModelError, match="does not pass keyword arguments to its attention"):
        load_model(ModelConfig(tmp_path))
