"""Checkpoints whose weights were quantized by others answer as transformers' own model does, or say what is missing."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.tiny_llama import save_tiny_llama
from transformers import AutoModelForCausalLM, DeepseekV3Config

from winnow import LLM, SamplingParams
from winnow.config import ModelConfig
from winnow.errors import UnsupportedModelError
from winnow.models import load_model
from winnow.models.fast import optimize
from winnow.models.fast.fused import build
from winnow.models.model.experts import GroupedExperts, is_experts
from winnow.process import native

pytestmark = pytest.mark.cpu
FORMS: dict[str, dict[str, Any]] = {
    "int-quantized": {"num_bits": 8, "type": "int", "strategy": "channel"},
    "pack-quantized": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32},
    "float-quantized": {"num_bits": 8, "type": "float", "strategy": "channel"},
}
LARGEST = {"int-quantized": 127, "pack-quantized": 7, "float-quantized": 448}


@pytest.fixture
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


@pytest.mark.parametrize(
    ("checkpoint", "on_a_gpu"),
    # Integers are kept in blocks, which stay on the processor.
    [*((form, False) for form in FORMS), ("float-quantized", True)],
    indirect=["checkpoint"],
)
def test_weights_of_compressed_tensors(
    checkpoint: Path, on_a_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if on_a_gpu:
        pytest.importorskip("triton")
        monkeypatch.setattr(optimize, "_passes_fit", lambda model: True)
        monkeypatch.setattr(build, "_POSITIONS", (7,))  # the interpreter takes long for each token
    prompt, params = (
        [5, 6, 7, 8],
        SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, detokenize=False),
    )
    with torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=3, min_new_tokens=3, do_sample=False)
    options: dict[str, Any] = {"device": "cpu", "model_cache": False, "verify_model": not on_a_gpu}
    with LLM(str(checkpoint), kv_memory="8MiB", **options) as llm:
        found = llm.generate([prompt], params)[0].outputs[0].token_ids
    assert list(found) == expected[0, len(prompt) :].tolist()


def _words(codes: np.ndarray, bits: int, order: Sequence[int] | None = None) -> torch.Tensor:
    """Codes [rows, n] as 32-bit words [rows, n * bits / 32]: the i-th place of a word holds its order[i]-th code."""
    each = 32 // bits
    order = order or range(each)
    words = np.zeros((len(codes), codes.shape[1] // each), np.uint32)
    for place in range(each):
        words |= codes[:, order[place] :: each].astype(np.uint32) << np.uint32(bits * place)
    return torch.from_numpy(words.view(np.int32))


PACKINGS: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "bits": 4},
    "gptq-symmetric": {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2", "sym": True},
    "gptq-8": {"quant_method": "gptq", "bits": 8, "sym": True},
    "gptq-out-of-order": {"quant_method": "gptq", "bits": 4, "desc_act": True},
    "awq": {"quant_method": "awq", "bits": 4, "version": "gemm"},
    "fp8": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [48, 32]},
    "fp8-one": {"quant_method": "modelopt", "quant_algo": "FP8"},
    "fp8-features": {"quant_method": "fbgemm_fp8"},
    "fp8-experts": {"quant_method": "fp8", "weight_block_size": [16, 32]},
}
EXPERTS: dict[str, Any] = {
    "kind": DeepseekV3Config,
    **{
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    },
    **{"num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "n_group": 1, "topk_group": 1},
    **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
}


def _fp8(
    values: dict[str, Any], out: int, inputs: int, seed: int
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A weight, and what a checkpoint holds of it: codes and scales of tiles, of features, or of all."""
    chance = torch.Generator().manual_seed(seed)
    codes = torch.randn(out, inputs, generator=chance).mul(100).to(torch.float8_e4m3fn)
    codes[0, :8] = torch.arange(8, dtype=torch.uint8).view(torch.float8_e4m3fn)  # the smallest
    rows, columns = values.get("weight_block_size") or (
        1 if "fbgemm" in values["quant_method"] else out,
        inputs,
    )
    scales = torch.rand(-(-out // rows), -(-inputs // columns), generator=chance) / 500
    wide = scales.repeat_interleave(rows, 0)[:out].repeat_interleave(columns, 1)[:, :inputs]
    tensors = {
        "weight": codes,
        "weight_scale_inv" if "weight_block_size" in values else "weight_scale": scales,
    }
    if values["quant_method"] == "modelopt":
        tensors |= {"weight_scale": scales[0, 0], "input_scale": torch.tensor(0.5)}
    return codes.float() * wide, tensors


@pytest.mark.parametrize("packing", PACKINGS)
def test_codes_are_multiplied_as_they_are(packing: str, tmp_path: Path) -> None:
    values = PACKINGS[packing]
    bits, group_size = values.get("bits", 8), 32
    kind = EXPERTS if packing == "fp8-experts" else {}
    save_tiny_llama(tmp_path, seed=0, hidden_size=64, intermediate_size=96, **kind)
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    tensors, rng = dict(model.state_dict()), np.random.default_rng(1)
    for name, part in model.model.named_modules():
        if is_experts(part):
            for index in range(len(part.down_proj)):
                gate, up = part.gate_up_proj.data[index].chunk(2)
                halves = {"gate_proj": gate, "up_proj": up, "down_proj": part.down_proj.data[index]}
                for which, weight in halves.items():
                    numbers, made = _fp8(values, *weight.shape, seed=index)
                    weight.copy_(numbers)
                    tensors |= {f"model.{name}.{index}.{which}.{end}": x for end, x in made.items()}
            for both in ("gate_up_proj", "down_proj"):
                del tensors[f"model.{name}.{both}"]
        if not isinstance(part, torch.nn.Linear):
            continue
        out, inputs = part.weight.shape
        if "bits" not in values:
            part.weight.data, made = _fp8(values, out, inputs, len(name))
            tensors |= {f"model.{name}.{end}": tensor for end, tensor in made.items()}
            continue
        codes = rng.integers(0, 1 << bits, (out, inputs))
        shape = (out, inputs // group_size)
        zeros = np.full(shape, 1 << (bits - 1)) if values.get("sym") else rng.integers(1, 1 << bits, shape)
        scales = rng.uniform(0.5, 1, shape).astype(np.float16) / (1 << bits)
        group = np.arange(inputs) // group_size
        if values.get("desc_act"):
            rng.shuffle(group)
        weight = scales.astype(np.float32)[:, group] * (codes - zeros[:, group])
        part.weight.data = torch.from_numpy(weight.astype(np.float32))
        layer = f"model.{name}"
        del tensors[f"{layer}.weight"]
        tensors[f"{layer}.scales"] = torch.from_numpy(scales.T.copy())
        if values["quant_method"] == "awq":
            order = [0, 2, 4, 6, 1, 3, 5, 7]
            tensors[f"{layer}.qweight"] = _words(codes.T, bits, order)
            tensors[f"{layer}.qzeros"] = _words(zeros.T, bits, order)
        else:
            less = 0 if values.get("checkpoint_format") == "gptq_v2" else 1
            tensors[f"{layer}.qweight"] = _words(codes, bits).T.contiguous()
            tensors[f"{layer}.qzeros"] = _words(zeros.T - less, bits)
            tensors[f"{layer}.g_idx"] = torch.from_numpy(group.astype(np.int32))
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = values | {"group_size": group_size}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ids = torch.tensor([[5, 6, 7, 8] * 4])
    with torch.inference_mode():
        expected = model(ids).logits[0, -1].log_softmax(-1)
    for options in ({}, {"optimize": False}):
        with LLM(str(tmp_path), kv_memory="8MiB", device="cpu", model_cache=False, **options) as llm:
            params = SamplingParams(temperature=0, max_tokens=1, logprobs=5, detokenize=False)
            found = llm.generate(ids.tolist(), params)[0].outputs[0].logprobs[0]
        # Minima of codes about a free zero are rounded to float16.
        allowed = 1e-4 if options else 0.02 if packing in ("gptq", "awq") else 1e-3
        assert {token: each.logprob for token, each in found.items()} == {
            token: pytest.approx(float(expected[token]), abs=allowed)
            for token in expected.topk(5).indices.tolist()
        }
    loaded = load_model(ModelConfig(tmp_path, device="cpu", model_cache=False))
    assert (loaded.blocks is not None) == native.is_installed()
    if kind and native.is_installed():
        experts = [each for each in loaded.model.modules() if isinstance(each, GroupedExperts)]
        assert {name for each in experts for part in each.up for name in part.packed.kinds} == {"F8_E4M3"}


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
    config["quantization_config"] = {"quant_method": method, "bits": 3, "group_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=f"model: cannot load .*{message}"):
        load_model(ModelConfig(tmp_path, device="cpu", model_cache=False))
