"""How keys are rotated, as it is found by trying: turned back they are the keys at position 0, for every class."""

from pathlib import Path

import pytest
import torch
from architectures import ARCHITECTURES, save
from hybrids import HYBRIDS
from transformers import CohereConfig, MiniCPM3Config, PhiConfig

from winnow import LLM, SamplingParams
from winnow.config import ModelConfig
from winnow.models import load_model
from winnow.models.bind.rotation import LayerRotation, _keys_at

_SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128}
_LATENT = {
    n: v for n, v in HYBRIDS["deepseek-v3"].to_dict().items() if n not in ("model_type", "architectures")
}
# GPT-2 adds positions to embeddings, so that no rotation gives its keys.
CONFIGS = {name: each for name, each in ARCHITECTURES.items() if name != "gpt2"} | {
    "latents": HYBRIDS["deepseek-v3"],
    "latents, halves": MiniCPM3Config(**{n: v for n, v in _LATENT.items() if n != "transformers_version"}),
    "interleaved": CohereConfig(**_SIZES, intermediate_size=96, num_key_value_heads=2),
    "a part of each key": PhiConfig(**_SIZES, intermediate_size=96, partial_rotary_factor=0.5),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_keys_turned_back_are_those_at_the_beginning(name: str, tmp_path: Path) -> None:
    save(CONFIGS[name], tmp_path)
    loaded = load_model(ModelConfig(tmp_path, dtype="float32", device="cpu"))
    rotation = loaded.rotation
    assert rotation is not None
    first = _keys_at(loaded.model, 0)
    for position in (7, 90):  # not those by which it was found
        for layer, keys in _keys_at(loaded.model, position).items():
            back = torch.full(keys.shape[:-1], -position)
            torch.testing.assert_close(rotation.turn(layer, keys, back), first[layer], rtol=1e-4, atol=1e-4)
            table = rotation.table(layer, position + 1)
            pairs = table.pairs
            exact = LayerRotation(torch.zeros(pairs), table.interleaved, table.first)
            turned = exact._turned(first[layer], table.cos[position, :pairs], table.sin[position, :pairs])
            torch.testing.assert_close(turned, keys, rtol=1e-4, atol=1e-4)
    with LLM(tmp_path, dtype="float32", kv_memory="4MiB", kv_floor=1) as llm:
        asked = [
            SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, kv_budget=40, eviction=each)
            for each in ("winnow-keys", "winnow-keys-pd")
        ]
        outputs = llm.generate([[3 + i % 90 for i in range(100)]] * 2, asked)
        llm.check_integrity()
    assert all(report.compression > 1.2 for output in outputs if (report := output.outputs[0].eviction))
