"""A tiny Llama of random weights in a GGUF file, with tokenizer and chat template, as llama.cpp writes them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import (
    GGML_QUANT_SIZES,
    MODEL_ARCH,
    GGMLQuantizationType,
    GGUFReader,
    GGUFWriter,
    get_tensor_name_map,
    quants,
)
from tokenizer_kinds import EOS, UNKNOWN, byte_level
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from winnow_lab.peers.to_gguf import in_llama_cpp_order, write_shape

SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
_CONTROL, _NORMAL = 3, 1


def tiny_llama(seed: int = 0) -> LlamaForCausalLM:
    """The model itself, in float32, with weights large enough for its answers to vary."""
    vocab = len(byte_level())
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**SHAPE, vocab_size=vocab, tie_word_embeddings=False))
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.data.normal_(0, 0.3)
    return model.eval()


def tiny_moe() -> Qwen3MoeForCausalLM:
    """One of experts."""
    experts: dict[str, Any] = {
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "head_dim": 16,
        "norm_topk_prob": True,
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = Qwen3MoeConfig(**SHAPE, **experts, vocab_size=len(byte_level()), tie_word_embeddings=False)
        model = Qwen3MoeForCausalLM(config)
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.data.normal_(0, 0.3)
    return model.eval()


def _moe_tensors(model: Qwen3MoeForCausalLM) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    names = get_tensor_name_map(MODEL_ARCH.QWEN3MOE, SHAPE["num_hidden_layers"])
    for name, weight in model.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            layer = name.split(".")[2]
            for part, half in zip(("gate", "up"), weight.chunk(2, dim=1), strict=True):
                yield f"blk.{layer}.ffn_{part}_exps.weight", half.contiguous().numpy()
        else:
            stem = name.removesuffix(".weight")
            yield f"{names.get_name(stem)}.weight", weight.numpy()


def save_gguf(
    path: Path,
    model: Any,
    kind: str = "F32",
    *,
    architecture: str = "llama",
    values: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray[Any, Any]] | None = None,
    tokenizer: str | None = "gpt-2",
    last: tuple[tuple[str, int], ...] = (),
    other: dict[str, str] | None = None,
) -> Path:
    """Write `model` to `path`.

    Args:
        kind: a type of llama.cpp's for the layers' matrices; embedding and head are Q8_0 then, and norms stay float32.
        values: more metadata.
        extra: more tensors.
        tokenizer: by what rule of llama.cpp's it cuts text; None: there is none.
        other: types of tensors whose names hold a part.
        last: texts and types in place of those of the last tokens.
    """
    writer = GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_rope_freq_base(10000.0)
    write_shape(writer, SHAPE | {"rms_norm_eps": 1e-6, "vocab_size": model.config.vocab_size})
    if tokenizer is not None:
        add_tokenizer(writer, tokenizer, last)
    for name, value in (values or {}).items():
        writer.kv_data[0].pop(name, None)
        kinds = {
            str: writer.add_string,
            float: writer.add_float32,
            int: writer.add_uint32,
            list: writer.add_array,
        }
        kinds[type(value)](name, value)
    if isinstance(model, Qwen3MoeForCausalLM):
        tensors = list(_moe_tensors(model))
    else:
        known = MODEL_ARCH.__members__.get(architecture.upper(), MODEL_ARCH.LLAMA)
        names = get_tensor_name_map(known, SHAPE["num_hidden_layers"])
        tied = model.config.tie_word_embeddings
        tensors = [
            (
                str(names.get_name(name, (".weight", ".bias"))),
                in_llama_cpp_order(name, weight.numpy(), SHAPE)
                if architecture == "llama"
                else weight.numpy(),
            )
            for name, weight in model.state_dict().items()
            if not (tied and name == "lm_head.weight")
        ]
    for name, weight in tensors:
        own = next((own for part, own in (other or {}).items() if part in name), kind)
        add_tensor(writer, name, weight, own)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def in_parts(path: Path, count: int) -> list[Path]:
    """Write a file again in several, as llama.cpp's gguf-split does: the keys are in the first."""
    reader = GGUFReader(path)
    size = -(-len(reader.tensors) // count)
    architecture = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(path, architecture, split_max_tensors=size)
    for key, each in reader.fields.items():
        if not key.startswith(("GGUF.", "general.architecture")):
            inner = each.types[-1] if len(each.types) > 1 else None
            writer.add_key_value(key, each.contents(), each.types[0], inner)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    path.unlink()
    return sorted(path.parent.glob(f"{path.stem}-*-of-{count:05}.gguf"))


def add_tokenizer(
    writer: GGUFWriter, rule: str, last: tuple[tuple[str, int], ...], template: str = CHAT_TEMPLATE
) -> None:
    tokenizer = byte_level()
    described = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    special = set(tokenizer.all_special_ids)
    vocab = sorted(described["vocab"], key=described["vocab"].__getitem__)
    types = [_CONTROL if index in special else _NORMAL for index in range(len(vocab))]
    if last:
        vocab[-len(last) :], types[-len(last) :] = (list(each) for each in zip(*last, strict=True))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(rule)
    writer.add_token_list(vocab)
    writer.add_token_types(types)
    known = set(vocab)
    writer.add_token_merges(
        [" ".join(merge) for merge in described["merges"] if {*merge, "".join(merge)} <= known]
    )
    # transformers 5.17 reads no tokenizer without a first token, also where none is put in front.
    writer.add_bos_token_id(tokenizer.convert_tokens_to_ids(UNKNOWN))
    writer.add_eos_token_id(tokenizer.convert_tokens_to_ids(EOS))
    writer.add_unk_token_id(tokenizer.convert_tokens_to_ids(UNKNOWN))
    writer.add_add_bos_token(False)
    writer.add_chat_template(template)


def add_tensor(writer: GGUFWriter, name: str, weight: np.ndarray[Any, Any], kind: str) -> None:
    if kind == "F32" or weight.ndim == 1 or "ffn_gate_inp" in name:
        writer.add_tensor(name, weight)
        return
    stored = GGMLQuantizationType[kind if name.startswith("blk.") else "Q8_0"]
    if weight.shape[-1] % GGML_QUANT_SIZES[stored][0]:
        stored = GGMLQuantizationType.Q8_0
    try:
        data = quants.quantize(weight, stored)
    except NotImplementedError:  # the package gguf reads this kind alone
        data = random_blocks(stored, weight)
    writer.add_tensor(name, data, raw_dtype=stored)


def random_blocks(kind: GGMLQuantizationType, weight: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Blocks of any codes in a weight's shape, whose numbers are about as large as its own."""
    inputs, size = GGML_QUANT_SIZES[kind]
    chance = np.random.default_rng(weight.size)
    data = chance.integers(0, 256, (*weight.shape[:-1], weight.shape[-1] // inputs, size), dtype=np.uint8)
    halves = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
    scale = 1.0
    for _ in range(2):
        for at in halves.get(kind.name, (0,)):
            data[..., at : at + 2] = np.array([scale], np.float16).view(np.uint8)
        scale = float(weight.std() / quants.dequantize(data.reshape(*weight.shape[:-1], -1), kind).std())
    return data.reshape(*weight.shape[:-1], -1)
