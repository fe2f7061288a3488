"""Checkpoints whose weights were quantized by others answer as transformers' own model does, or say what is missing."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tiny_llama import save_tiny_llama
from transformers import AutoModelForCausalLM

from winnow import LLM, SamplingParams
from winnow.config import ModelConfig
from winnow.errors import UnsupportedModelError
from winnow.models import load_model
from winnow.models.fast import optimize

pytestmark = pytest.mark.cpu
FORMS: dict[str, dict[str, Any]] = {
    "int-quantized": {"num_bits": 8, "type": "int", "strategy": "channel"},
    "pack-quantized": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32},
    "float-quantized": {"num_bits": 8, "type": "float", "strategy": "channel"},
}
LARGEST = {"int-quantized": 127, "pack-quantized": 7, "float-quantized": 448}


@pytest.fixture(params=FORMS)
def checkpoint(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A Llama with quantized weights, a scale for each output feature or group, as llm-compressor writes it."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )

    save_tiny_llama(tmp_path, seed=0, hidden_size=64, intermediate_size=64)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    scheme = QuantizationScheme(
        targets=["Linear"], weights=QuantizationArgs(symmetric=True, **FORMS[request.param])
    )
    apply_quantization_config(
        model,
        QuantizationConfig(
            config_groups={"all": scheme},
            ignore=["lm_head"],
            quantization_status="frozen",
            format=request.param,
        ),
    )
    for part in model.modules():
        if hasattr(part, "weight_scale"):
            features, scales = part.weight_scale.shape
            largest = part.weight.view(features, scales, -1).abs().amax(2)
            part.weight_scale.data = (largest / LARGEST[request.param]).to(part.weight_scale.dtype)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(tmp_path)
    compressor.update_config(tmp_path)
    return tmp_path


@pytest.mark.parametrize("on_a_gpu", [False, True])
def test_weights_of_compressed_tensors(
    checkpoint: Path, on_a_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if on_a_gpu:
        pytest.importorskip("triton")
        monkeypatch.setattr(optimize, "_passes_fit", lambda model: True)
    prompt, params = (
        [5, 6, 7, 8] * 4,
        SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False),
    )
    with torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=4, min_new_tokens=4, do_sample=False)
    with LLM(str(checkpoint), kv_memory="8MiB", device="cpu", model_cache=False) as llm:
        found = llm.generate([prompt], params)[0].outputs[0].token_ids
    assert list(found) == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("gptq", "(optimum|gptqmodel|GPU is required)"),
        ("awq", "gptqmodel"),
        ("hqq", "HQQ"),
        ("unheard-of", "quantization_config.quant_method 'unheard-of' is none that transformers reads"),
    ],
)
def test_what_reads_a_checkpoint_is_missing(method: str, message: str, tmp_path: Path) -> None:
    save_tiny_llama(tmp_path, seed=0)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "bits": 4, "group_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=f"model: cannot load .*{message}"):
        load_model(ModelConfig(tmp_path, device="cpu", model_cache=False))
