"""A directory that a model cannot be loaded from: whatever is wrong with it, one line says so."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from winnow.errors import UnsupportedModelError, WinnowError
from winnow.values.units import format_bytes

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

# Fields that libraries read without a look at what they hold: in words, and the types.
_TEXT, _OBJECT, _LIST = ("a text", str), ("an object", dict), ("a list", list)
_TOKENS, _NUMBER = ("a token's number or a list of them", int, list[int]), ("a number", int, float)
_KINDS: dict[str, dict[str, tuple[Any, ...]]] = {
    "config.json": {
        **dict.fromkeys(("quantization_config", "text_config", "rope_scaling", "rope_parameters"), _OBJECT),
        **dict.fromkeys(("model_type", "dtype", "torch_dtype"), _TEXT),
        **{"layer_types": _LIST, "eos_token_id": _TOKENS, "max_position_embeddings": _NUMBER},
    },
    "generation_config.json": {
        **dict.fromkeys(("eos_token_id", "pad_token_id", "bos_token_id"), _TOKENS),
        **{"max_new_tokens": ("a whole number", int)},
    },
    "tokenizer_config.json": {
        **{"added_tokens_decoder": _OBJECT, "tokenizer_class": _TEXT, "model_max_length": _NUMBER},
        **{"chat_template": ("a text, an object or a list of objects", str, dict, list)},
    },
}
_FLOAT = "__float__"
_FLOATS = ("Infinity", "-Infinity", "NaN")


def read_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file, `{"__float__": "Infinity"}` read as a number, as transformers writes it. Raises
    UnsupportedModelError: the file cannot be read, or holds something else."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"), object_hook=_special_float)
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise cannot_load(file.parent, f"cannot read {file.name}: {reason}") from None
    if not isinstance(values, dict):
        shown = f"{json.dumps(values):.40}"
        raise cannot_load(file.parent, f"{file.name} must hold a JSON object, got {shown}")
    for name, (wanted, *kinds) in _KINDS.get(file.name, {}).items():
        value = values.get(name)
        of_list = isinstance(value, list) and all(type(each) is int for each in value) and list[int] in kinds
        if value is not None and type(value) not in kinds and not of_list:
            reason = f"{file.name}: {name} must be {wanted}, got {json.dumps(value):.80}"
            raise cannot_load(file.parent, reason)
    return values


def cannot_load(path: Path, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"model: cannot load {path}: {reason}")


def _special_float(values: dict[str, Any]) -> Any:
    return float(values[_FLOAT]) if set(values) == {_FLOAT} and values[_FLOAT] in _FLOATS else values


_COUNTS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings",
)  # fmt: skip
"""Counts of a configuration; those that it names must be whole numbers above 0."""
_EPSILONS = (
    "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon", "norm_epsilon", "norm_eps",
)  # fmt: skip
_ROPE = ("rope_theta", "factor", "partial_rotary_factor", "original_max_position_embeddings")


@contextmanager
def loading(path: Path) -> Iterator[None]:
    """Turn what the libraries raise over a stranger's files into one error. Raises UnsupportedModelError: names the
    directory and the first line of what was wrong."""
    try:
        yield
    except (WinnowError, MemoryError):
        raise
    except torch.OutOfMemoryError as error:
        raise UnsupportedModelError(_too_large(path, error)) from None
    # safetensors, tokenizers and transformers each raise what they like, down to plain `Exception`.
    except Exception as error:
        raise cannot_load(path, first_line(error)) from error


def _too_large(path: Path, error: Exception) -> str:
    asked = re.search(r"Tried to allocate ([\d.]+ \w+)", str(error))
    said = f"asked for {asked[1]} more" if asked else first_line(error)
    free, total = torch.cuda.mem_get_info()
    return (
        f"model: {path} does not fit the memory of the device: {said}, and {format_bytes(free)} of "
        f"{format_bytes(total)} are free; close what else uses the device, or give dtype bfloat16 or a smaller model"
    )


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = lines[0] if lines else ""
    # The first line of a report may only announce it.
    said = f"{said} {lines[1]}" if said.endswith(":") and len(lines) > 1 else said
    plain = isinstance(error, OSError | ValueError | RuntimeError) and said
    return said if plain else f"{type(error).__name__}: {said}".removesuffix(": ")


def check_sizes(config: "PretrainedConfig") -> None:
    """Raise ValueError if a configuration's sizes make no model; transformers would find that out late, or never."""
    text = config.get_text_config()
    sizes: dict[str, Any] = {}
    for name in _COUNTS:
        try:
            sizes[name] = getattr(text, name, None)
        except RuntimeError:  # it has another for some layers, and says no other
            sizes[name] = [getattr(each, name, None) for each in text.per_layer_config]
    for name, size in sizes.items():
        values = size if isinstance(size, list) else [size]  # some have one for each layer
        for value in values:
            least = int(name != "max_position_embeddings")  # where 0 says that no length is known
            if value is not None and (type(value) is not int or value < least):
                raise ValueError(f"{name} must be a whole number above 0, got {value!r}")
    heads, kv_heads = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    if isinstance(heads, int) and isinstance(kv_heads, int) and heads % kv_heads:
        raise ValueError(
            f"num_attention_heads must be a multiple of num_key_value_heads, got {heads} and {kv_heads}"
        )


def check_numbers(config: "PretrainedConfig") -> None:
    """Raise ValueError if a number of a configuration makes no model; transformers would name no field, or compute."""
    if config.is_encoder_decoder:  # refused for that
        return
    values = vars(config.get_text_config())
    padding, size = values.get("pad_token_id"), values.get("vocab_size")
    if isinstance(padding, int) and isinstance(size, int) and not -size <= padding < size:
        raise ValueError(f"pad_token_id must be below vocab_size ({size}), got {padding}")
    rope = values.get("rope_parameters") or {}
    found = [(name, values[name], True) for name in _EPSILONS if name in values]
    by_kind = [each for each in rope.values() if isinstance(each, dict)]  # some have one by kind of layer
    for part in (rope, *by_kind):
        found += [(name, part[name], False) for name in _ROPE if name in part]
    for name, value, zero in found:
        number = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
        if value is not None and not (number and (value > 0 or (zero and value == 0))):
            raise ValueError(f"{name} must be a number {'of at least' if zero else 'above'} 0, got {value!r}")


def check_vocabulary(path: Path, tokenizer: "PreTrainedTokenizerBase | None", vocab_size: int) -> None:
    """Refuse a tokenizer of another model, whose tokens this one does not know. Tokens that were added to a vocabulary
    do not count: some tokenizers name a few that text never makes."""
    if tokenizer is not None and tokenizer.vocab_size > vocab_size:
        raise cannot_load(
            path, f"its tokenizer has {tokenizer.vocab_size} tokens, and the model knows {vocab_size}"
        )
