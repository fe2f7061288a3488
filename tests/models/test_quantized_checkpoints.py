"""Checkpoints whose weights were quantized by others answer as transformers' own model does."""

from pathlib import Path

import pytest
import torch
from tests.tiny_llama import save_tiny_llama
from transformers import AutoModelForCausalLM

from winnow import LLM, SamplingParams

pytest.importorskip("compressed_tensors")
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A Llama with int8 weights, a scale for each output feature, as llm-compressor writes it."""
    save_tiny_llama(tmp_path, seed=0, hidden_size=64, intermediate_size=64)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    weights = QuantizationArgs(num_bits=8, type="int", strategy="channel", symmetric=True)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    apply_quantization_config(
        model,
        QuantizationConfig(
            config_groups={"all": scheme},
            ignore=["lm_head"],
            quantization_status="frozen",
            format="int-quantized",
        ),
    )
    for part in model.modules():
        if hasattr(part, "weight_scale"):
            part.weight_scale.data = (part.weight.abs().amax(1, keepdim=True) / 127).to(
                part.weight_scale.dtype
            )
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(tmp_path)
    compressor.update_config(tmp_path)
    return tmp_path


@pytest.mark.cpu
def test_int8_weights_of_compressed_tensors(checkpoint: Path) -> None:
    prompt, params = (
        [5, 6, 7, 8] * 4,
        SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False),
    )
    with torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=8, min_new_tokens=8, do_sample=False)
    with LLM(str(checkpoint), kv_memory="8MiB", device="cpu") as llm:
        found = llm.generate([prompt], params)[0].outputs[0].token_ids
    assert list(found) == expected[0, len(prompt) :].tolist()
