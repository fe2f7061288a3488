"""Tiny random models of many architectures, and GGUF files of them as llama.cpp's converter writes them."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH_NAMES, GGUFWriter, get_tensor_name_map
from tiny_gguf import add_tensor, add_tokenizer
from tokenizer_kinds import byte_level
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from winnow import LLM, SamplingParams
from winnow.config import ModelConfig
from winnow.models import load_model
from winnow.models.load.automatic import keeps_blocks
from winnow_lab.peers.to_gguf import interleaved

Array = np.ndarray[Any, Any]
LAYERS, HEADS, KV_HEADS, WIDTH = 4, 16, 8, 256  # rows of whole super-blocks
SHAPE: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 256,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
PROMPT = list(range(5, 25))
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
RMS = "attention.layer_norm_rms_epsilon"


def _same(name: str, weight: Array) -> Mapping[str, Array]:
    return {name: weight}


def _turned(name: str, weight: Array) -> Mapping[str, Array]:
    heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name.split(".")[-2])
    return {name: weight if heads is None else interleaved(weight, heads)}


def _plus_one(name: str, weight: Array) -> Mapping[str, Array]:
    return {name: weight + 1 if "norm" in name else weight}


def _experts(name: str, weight: Array) -> Mapping[str, Array]:
    if name.endswith("ffn_gate_up_exps.weight"):
        gate, up = np.split(weight, 2, axis=1)
        start = name.removesuffix("ffn_gate_up_exps.weight")
        return {f"{start}ffn_gate_exps.weight": gate, f"{start}ffn_up_exps.weight": up}
    return {name: weight}


def _gpt_oss(name: str, weight: Array) -> Mapping[str, Array]:
    weight = weight.swapaxes(1, 2) if "_exps.weight" in name else weight
    if "ffn_gate_up_exps" in name:
        halves = {"gate": weight[:, ::2], "up": weight[:, 1::2]}
        return {name.replace("gate_up", part): half for part, half in halves.items()}
    return {name: weight}


def _convolution(name: str, weight: Array) -> Mapping[str, Array]:
    return {name: weight.squeeze(1) if name.endswith("shortconv.conv.weight") else weight}


@dataclass(frozen=True)
class Architecture:
    """An architecture of llama.cpp's: transformers' type and options, further keys, and how tensors are stored."""

    model_type: str
    options: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, Any] = field(default_factory=dict)
    stored: Callable[[str, Array], Mapping[str, Array]] = _same


_HEADS_OF_32 = {"head_dim": 32}
_KEYS_OF_32 = {"attention.key_length": 32, "attention.value_length": 32}
_SLIDING = [True, False] * (LAYERS // 2)
_KINDS = ["sliding_attention" if each else "full_attention" for each in _SLIDING]
_WINDOW = {"sliding_window": 8, "layer_types": _KINDS}
_WINDOW_KEYS = {"attention.sliding_window": 8, "attention.sliding_window_pattern": _SLIDING}
_LAYER_NORM = {"attention.layer_norm_epsilon": 1e-5}
_MOE = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": True}
_MOE_KEYS = {"expert_count": 8, "expert_used_count": 3, "expert_feed_forward_length": 32}

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", {"rms_norm_eps": 1e-5}, {RMS: 1e-5, "rope.dimension_count": 16}, _turned),
    "qwen2": Architecture("qwen2", {"rms_norm_eps": 1e-6}, {RMS: 1e-6}),
    "qwen3": Architecture("qwen3", {"rms_norm_eps": 1e-6, "head_dim": 32}, {RMS: 1e-6, **_KEYS_OF_32}),
    "qwen3moe": Architecture(
        "qwen3_moe",
        {"rms_norm_eps": 1e-6, "head_dim": 16, **_MOE},
        {RMS: 1e-6, "attention.key_length": 16, "attention.value_length": 16, **_MOE_KEYS},
        _experts,
    ),
    "qwen2vl": Architecture(
        "qwen2", {"rms_norm_eps": 1e-6}, {RMS: 1e-6, "rope.dimension_sections": [2, 3, 3, 0]}
    ),
    "qwen3vl": Architecture(
        "qwen3",
        {"rms_norm_eps": 1e-6, "head_dim": 32},
        {RMS: 1e-6, **_KEYS_OF_32, "rope.dimension_sections": [6, 5, 5, 0], "n_deepstack_layers": 2},
    ),
    "phi3": Architecture("phi3", {"rms_norm_eps": 1e-5}, {RMS: 1e-5}),
    "gemma2": Architecture(
        "gemma2",
        {"rms_norm_eps": 1e-6, **_HEADS_OF_32, "query_pre_attn_scalar": 32, "tie_word_embeddings": True, **_WINDOW},
        {RMS: 1e-6, **_KEYS_OF_32, "attention.sliding_window": 8, "attn_logit_softcapping": 50.0,
         "final_logit_softcapping": 30.0},
        _plus_one,
    ),
    "gemma3": Architecture(
        "gemma3_text",
        {"rms_norm_eps": 1e-6, **_HEADS_OF_32, "query_pre_attn_scalar": 32, "sliding_window": 8,
         "tie_word_embeddings": True, "layer_types": ["sliding_attention"] * LAYERS,
         "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 10000.0}
                             for kind in ("sliding_attention", "full_attention")}},
        {RMS: 1e-6, **_KEYS_OF_32, "attention.sliding_window": 8},
        _plus_one,
    ),
    "starcoder2": Architecture("starcoder2", {"norm_epsilon": 1e-5, "sliding_window": None}, _LAYER_NORM),
    "lfm2": Architecture(
        "lfm2",
        {"norm_eps": 1e-5, "layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False,
         "conv_L_cache": 3, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        {RMS: 1e-5, "attention.head_count_kv": [0, KV_HEADS] * 2, "shortconv.l_cache": 3},
        _convolution,
    ),
    "gpt-oss": Architecture(
        "gpt_oss",
        {"rms_norm_eps": 1e-5, "head_dim": 64, "intermediate_size": 32, "num_local_experts": 8,
         "num_experts_per_tok": 3, "rope_parameters": {
             "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128,
             "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}},
        {RMS: 1e-5, "attention.key_length": 64, "attention.value_length": 64, "feed_forward_length": 32,
         "attention.sliding_window": 128, "expert_count": 8,
         "expert_used_count": 3, "expert_feed_forward_length": 32, "rope.scaling.type": "yarn",
         "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128},
        _gpt_oss,
    ),
    "granite": Architecture(
        "granite",
        {"rms_norm_eps": 1e-5, "attention_multiplier": 0.3, "embedding_multiplier": 2.0,
         "residual_multiplier": 0.5, "logits_scaling": 3.0},
        {RMS: 1e-5, "attention.scale": 0.3, "embedding_scale": 2.0, "residual_scale": 0.5, "logit_scale": 3.0,
         "rope.dimension_count": 16},
        _turned,
    ),
    "olmo2": Architecture("olmo2", {"rms_norm_eps": 1e-6}, {RMS: 1e-6}),
    "smollm3": Architecture("smollm3", {"rms_norm_eps": 1e-6}, {RMS: 1e-6, "rope.dimension_count": 16}, _turned),
    "exaone4": Architecture("exaone4", {"rms_norm_eps": 1e-5, **_WINDOW}, {RMS: 1e-5, **_WINDOW_KEYS}),
    "glm4": Architecture(
        "glm4",
        {"rms_norm_eps": 1e-5, **_HEADS_OF_32, "attention_bias": True,
         "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
        {RMS: 1e-5, **_KEYS_OF_32, "rope.dimension_count": 16},
    ),
    "command-r": Architecture(
        "cohere",
        {"layer_norm_eps": 1e-5, "use_qk_norm": True, "logit_scale": 0.25, "tie_word_embeddings": True},
        {**_LAYER_NORM, "logit_scale": 0.25, "rope.scaling.type": "none"},
    ),
    "cohere2": Architecture(
        "cohere2",
        {"layer_norm_eps": 1e-5, "logit_scale": 0.25, "tie_word_embeddings": True, **_WINDOW},
        {**_LAYER_NORM, "logit_scale": 0.25, "rope.dimension_count": 16, **_WINDOW_KEYS},
    ),
}  # fmt: skip


def tiny(name: str) -> Any:
    """A model of an architecture, in float32, with weights large enough for its answers to vary."""
    arch, vocab = ARCHITECTURES[name], len(byte_level())
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    config = CONFIG_MAPPING[arch.model_type](**{**SHAPE, **rope, **arch.options, "vocab_size": vocab})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        for weight in model.parameters():
            (
                weight.data.normal_(0, 0.15)
                if weight.ndim > 1
                else weight.data.add_(torch.randn_like(weight) / 8)
            )
    model.config.dtype = torch.float32
    return model.eval()


def answer(model: Any, prompt: Sequence[int] = PROMPT) -> list[int]:
    tokens = model.generate(torch.tensor([prompt]), max_new_tokens=12, min_new_tokens=12, do_sample=False)
    return list(tokens[0, len(prompt) :].tolist())


def winnow_answer(path: Path, **options: Any) -> list[int]:
    with LLM(path, kv_memory="16MiB", model_cache=False, **options) as llm:
        return list(llm.generate([PROMPT], GREEDY)[0].outputs[0].token_ids)


def add_keys(writer: GGUFWriter, name: str, vocab_size: int) -> None:
    """Write what an architecture's keys say of its tiny model."""
    arch = ARCHITECTURES[name]
    keys = {
        "context_length": SHAPE["max_position_embeddings"],
        "block_count": LAYERS,
        "embedding_length": WIDTH,
        "feed_forward_length": SHAPE["intermediate_size"],
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "rope.freq_base": 10000.0,
        "vocab_size": vocab_size,
    }
    for key, value in {**keys, **arch.keys}.items():
        add = {
            str: writer.add_string,
            float: writer.add_float32,
            int: writer.add_uint32,
            list: writer.add_array,
        }
        add[type(value)](f"{name}.{key}", value)


def save(
    path: Path, name: str, model: Any, kind: str = "F32", last: tuple[tuple[str, int], ...] = ()
) -> Path:
    """Write `model` to `path`, with the layers' matrices of a type of llama.cpp's; `last` as in `save_gguf`."""
    arch, writer = ARCHITECTURES[name], GGUFWriter(path, name)
    names = get_tensor_name_map(next(x for x, text in MODEL_ARCH_NAMES.items() if text == name), LAYERS)
    add_keys(writer, name, model.config.vocab_size)
    add_tokenizer(writer, "gpt-2", last)
    writer.add_pad_token_id(0)
    for own, weight in model.state_dict().items():
        if own == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        stem, _, end = own.rpartition(".") if own.endswith((".weight", ".bias")) else (own, "", "weight")
        theirs = names.get_name(stem) or names.get_name(own)
        if "experts.gate_up_proj" in own:
            theirs = f"blk.{own.split('.')[2]}.ffn_gate_up_exps"
            end = "bias" if own.endswith("_bias") else "weight"
        elif own.endswith("experts.down_proj_bias"):
            theirs, end = names.get_name(own.removesuffix("_bias")), "bias"
        assert theirs is not None, f"{name}: no tensor of llama.cpp's for {own}"
        for each, array in arch.stored(f"{theirs}.{end}", weight.float().numpy()).items():
            matrix = array.shape[-1] % 32 == 0 and "norm" not in each
            add_tensor(writer, each, np.ascontiguousarray(array), kind if matrix else "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


KINDS = ("F32", "Q8_0", "Q4_K", "IQ4_XS", "IQ3_S")
"""Numbers, blocks of 32 and of 256 inputs, and blocks whose kinds are widened."""


def compare(path: Path, name: str, kind: str) -> str:
    """Return how answers of a file of a kind compare with those of its numbers in transformers' own model."""
    theirs = tiny(name)
    save(path, name, theirs, kind)
    if kind != "F32":
        read = load_model(ModelConfig(path, dtype="float32", optimize=False, model_cache=False)).model
        theirs.load_state_dict(read.state_dict())
    if winnow_answer(path, dtype="float32") != answer(theirs):
        return "DIFFERENT"
    kept = kind != "F32" and keeps_blocks(ModelConfig(path), path)
    return "equal" if kind == "F32" else "equal, own bits" if kept else "equal, widened"


def main() -> None:
    """Print the table of docs/architectures.md."""
    from winnow.models.load.gguf.architectures import REASONS

    print(f"| architecture | class | {' | '.join(KINDS)} |\n|---|---|" + "---|" * len(KINDS))
    with tempfile.TemporaryDirectory() as folder:
        for name in ARCHITECTURES:
            cells = [compare(Path(folder) / "tiny.gguf", name, kind) for kind in KINDS]
            print(f"| {name} | {type(tiny(name)).__name__} | {' | '.join(cells)} |", flush=True)
    for name, reason in REASONS.items():
        print(f"| {name} | refused | {reason} |" + " |" * (len(KINDS) - 1))


if __name__ == "__main__":
    main()
