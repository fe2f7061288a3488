"""A model in one GGUF file, read by transformers: blocks become plain weights when they are loaded."""

import struct
from collections import Counter
from collections.abc import Collection
from contextlib import AbstractContextManager
from functools import lru_cache
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from winnow.models.load.gguf.architectures import KEYS, REASONS
from winnow.models.model.damage import cannot_load, first_line
from winnow.process.digest import part_names
from winnow.process.extras import install_hint

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from winnow.models.load.gguf.header import GgufHeader
    from winnow.models.model.blocks import Blocks

_PACKAGES = ("gguf", "accelerate")
_MAGIC = b"GGUF"
# Lists that a tokenizer is made of, by its kind.
_NEEDED = {"gpt2": ("merges",), "llama": ("scores",)}
# Tokens that end an answer or a turn.
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Architectures by transformers' names, where they differ from llama.cpp's by more than a dash.
_THEIR_NAMES = {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe"}
# Architectures whose weights transformers turns, or reads in a way of its own.
_MIXED_ROWS = ("gpt2", "bloom", "gpt-oss", "gpt_oss", "lfm2", "qwen35", "qwen35moe")
_READ_WHOLE = ("lfm2", "qwen35", "qwen35moe")
# Layers of the models whose attention is scaled by the width of a head's share of the hidden state, and not by its own:
# no key says so, llama.cpp knows them by this number (Gemma 2 and 3 of 27 billion parameters).
_WIDE_SCALE = {"gemma2": 46, "gemma3": 62}
# Models of experts, and whether weights of the chosen ones add up to 1.
_OF_EXPERTS = {"qwen2moe": False, "qwen3moe": True}
# Positions of GPT-OSS, whose keys transformers takes for their lengths; what no key says is always so.
_GPT_OSS_ROPE = {"rope_type": "default", "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
_YARN = {
    "type": "rope_type",
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
}
_WIDTHS = {
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}


@lru_cache(maxsize=2)
def _read_header(paths: tuple[Path, ...], _states: tuple[tuple[int, int], ...]) -> "GgufHeader":
    from winnow.models.load.gguf.header import GgufHeader

    return GgufHeader.join(paths)


def _unusable_value(header: "GgufHeader") -> str | None:
    """Return what is wrong with a number that the model's shape, or its tokenizer, hangs on; None: nothing is."""
    from winnow.models.load.gguf.header import BY_LAYER

    tokens = header.values.get("tokenizer.ggml.tokens", ())
    for key in ("ggml.model", "ggml.pre", "chat_template"):
        if not isinstance(value := header.values.get(f"tokenizer.{key}", ""), str):
            return f"tokenizer.{key} must be a text, got {value!r:.80}"
    for key, kind in {"tokens": str, "merges": str, "token_type": int}.items():
        value = header.values.get(f"tokenizer.ggml.{key}", [])
        if not (isinstance(value, list) and all(isinstance(each, kind) for each in value)):
            listed = "texts" if kind is str else "numbers"
            return f"tokenizer.ggml.{key} must be a list of {listed}, got {value!r:.80}"
    for merge in header.values.get("tokenizer.ggml.merges", ()):
        if len(merge.split(" ")) != 2:
            return f"tokenizer.ggml.merges must hold two texts each, got {merge!r:.80}"
    one = {"block_count": len(header.tensors) or 2**16, "context_length": 2**40, "embedding_length": 2**31}
    for name, most in (one | dict.fromkeys(("vocab_size", *BY_LAYER), 2**31)).items():
        value = header.values.get(key := f"{header.architecture}.{name}", 1)
        least, entries = (0, value) if name in BY_LAYER and isinstance(value, list) else (1, [value])
        if not all(type(each) is int and least <= each <= most for each in entries):
            return f"{key} must be a whole number from 1 to {most}, got {value!r:.80}"
    for name in ("bos", "eos", "unknown", "padding", "cls", "mask"):
        value = header.values.get(key := f"tokenizer.ggml.{name}_token_id", 0)
        if tokens and (type(value) is not int or not 0 <= value < len(tokens)):
            return f"{key} must be a token's number below {len(tokens)}, got {value!r:.80}"
    return None


class GgufFile:
    def __init__(self, header: "GgufHeader") -> None:
        self.path = header.path
        self.header, self._values = header, header.values

    @classmethod
    def open(cls, path: Path, again: bool = False) -> "GgufFile":
        """Read what stands before the weights, and keep it where the file will be opened `again` at once; of a file of
        several parts `path` is any. Raises UnsupportedModelError: it is no GGUF file, a damaged one, a part of it is
        missing, or packages are."""
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise cannot_load(path, "it is neither a directory nor a GGUF file")
        missing = [name for name in _PACKAGES if find_spec(name) is None]
        if missing:
            absent = f"{' and '.join(missing)} is not installed: {install_hint('gguf')}"
            raise cannot_load(path, f"GGUF files are read with {' and '.join(_PACKAGES)}, and {absent}")
        parts = tuple(path.with_name(name) for name in part_names(path.name))
        try:
            found = [part.stat() for part in parts]
            header = _read_header(parts, tuple((each.st_mtime_ns, each.st_size) for each in found))
        except FileNotFoundError as error:
            raise cannot_load(path, f"it is of {len(parts)} parts, and {error.filename} is missing") from None
        except (ValueError, struct.error, LookupError, ArithmeticError, TypeError, MemoryError) as error:
            raise cannot_load(path, f"it is damaged: {first_line(error)}") from error
        if not again:
            _read_header.cache_clear()
        for part, size in zip(parts, (each.st_size for each in found), strict=True):
            if size < (end := header.end(part)):
                raise cannot_load(part, f"it is cut short: its tensors end at byte {end}, and it has {size}")
        if reason := _unusable_value(header):
            raise cannot_load(path, reason)
        count = header.values.get("split.count", 1)
        if type(count) is not int or count < 0:
            raise cannot_load(path, f"split.count must be a whole number, got {count!r:.80}")
        if max(count, 1) != len(parts):
            raise cannot_load(
                path, f"it is one of {count} parts, and must be named NAME-00001-of-{count:05}.gguf"
            )
        if count > 1 and header.architecture in _READ_WHOLE:
            reason = (
                f"transformers reads {header.architecture} from whole files alone: join its {count} parts"
            )
            raise cannot_load(path, f"{reason} (llama-gguf-split --merge)")
        return cls(header)

    def config_values(self) -> dict[str, Any]:
        from transformers import PretrainedConfig

        from winnow.models.load.gguf.keys import linear_factor

        if reason := REASONS.get(self.header.architecture):
            raise cannot_load(self.path, f"GGUF files of {self.header.architecture} are not read: {reason}")
        with self.reading():
            values: dict[str, Any]
            values, _ = PretrainedConfig.get_config_dict(self.path.parent, gguf_file=self._file)
        arch = self.header.architecture
        if (tokens := self._values.get("tokenizer.ggml.tokens")) is not None:
            values.setdefault("vocab_size", len(tokens))
        values.setdefault("pad_token_id", None)  # the class's own is of another vocabulary
        if arch == "gpt-oss":
            found = {ours: self._values.get(f"gpt-oss.rope.scaling.{key}") for key, ours in _YARN.items()}
            values["rope_scaling"] = {**_GPT_OSS_ROPE, **{name: each for name, each in found.items() if each}}
        base = self._values.get(f"{arch}.rope.freq_base")
        if base is not None and not {"rope_theta", "rope_parameters"} & values.keys():
            values["rope_theta"] = base  # transformers' tables leave it out for some architectures
        if arch in _OF_EXPERTS:
            # transformers' tables name neither widths of experts nor what llama.cpp knows by the name.
            values["norm_topk_prob"] = self._values.get(f"{arch}.expert_weights_norm", _OF_EXPERTS[arch])
            widths = {name: self._values.get(f"{arch}.{key}") for key, name in _WIDTHS.items()}
            values |= {name: width for name, width in widths.items() if width is not None}
        if values.get("num_hidden_layers") == _WIDE_SCALE.get(arch):
            values["query_pre_attn_scalar"] = values["hidden_size"] // values["num_attention_heads"]
        elif arch in _WIDE_SCALE:
            values["query_pre_attn_scalar"] = values.get("head_dim", 256)
        if {"rope_scaling", "rope_parameters"} & values.keys():
            return values
        try:
            factor = linear_factor(self._values)
        except ValueError as error:
            raise cannot_load(self.path, str(error)) from None
        if factor is not None:
            values["rope_scaling"] = {"rope_type": "linear", "factor": factor}
        return values

    def check_config(self, config: "PretrainedConfig") -> None:
        from transformers.integrations import GGUF_CONFIG_MAPPING

        from winnow.models.load.gguf.keys import refused_keys

        arch = self.header.architecture
        table = KEYS.get(arch) or GGUF_CONFIG_MAPPING.get(_THEIR_NAMES.get(arch, arch.replace("-", "_")))
        if table is None:
            return  # an architecture whose keys transformers reads one by one
        applied = {key for key, name in table.items() if name is not None}
        refused = "; ".join(refused_keys(self._values, applied, config.get_text_config()))
        if refused:
            raise cannot_load(self.path, f"nothing makes use of its {refused}, and answers would be wrong")

    @property
    def weight_kinds(self) -> dict[str, int]:
        """llama.cpp's types of the tensors, and how many numbers are of each, the most frequent first."""
        counts: Counter[str] = Counter()
        for tensor in self.header.tensors:
            counts[tensor.kind.name] += prod(tensor.shape)
        return dict(counts.most_common())

    def weights(self) -> dict[str, Any]:
        from transformers import GgufConfig

        return {
            "pretrained_model_name_or_path": self.path.parent,
            "gguf_file": self._file,
            "quantization_config": GgufConfig(dequantize=True),
        }

    @property
    def keeps_blocks(self) -> bool:
        """Return whether linear layers can keep the file's blocks: it has such, and transformers moves whole rows."""
        from winnow.models.model.blocks import RAW

        if self.header.architecture in _MIXED_ROWS or next(iter(self.weight_kinds), "") not in RAW:
            return False
        # Gates and what they gate become one parameter of experts.
        kinds = {tensor.name: tensor.kind for tensor in self.header.tensors}
        gates = [name for name in kinds if "_gate_exps" in name]
        return all(kinds.get(name.replace("_gate_exps", "_up_exps")) == kinds[name] for name in gates)

    def reading(self, *, keeps_blocks: bool = False) -> "AbstractContextManager[dict[str, Blocks]]":
        from winnow.models.load.gguf.transformers_reader import reading

        return reading(self.header, keeps_blocks=keeps_blocks)

    def check_weights(self, model: "PreTrainedModel", left_out: Collection[str]) -> None:
        """Refuse tensors that transformers' reader has no name for, and skips, such as factors of rotary positions."""
        held = sum(prod(tensor.shape) for tensor in self.header.tensors)
        taken = sum(parameter.numel() for parameter in model.parameters())
        if held > taken:
            factors = [each.name for each in self.header.tensors if each.name.startswith("rope_")]
            strange = ", ".join(factors or sorted(left_out))
            skipped = f" and leaves out {strange}" if strange else ""
            reason = f"transformers' reader takes {taken} of the {held} numbers in its tensors{skipped}"
            raise cannot_load(self.path, reason)

    def tokenizer(self) -> "PreTrainedTokenizerBase | None":
        if "tokenizer.ggml.model" not in self._values:
            return None
        from winnow.models.load.gguf.tokenizer import read_tokenizer

        needed = ["tokens", *_NEEDED.get(self._values["tokenizer.ggml.model"], ())]
        for key in (f"tokenizer.ggml.{name}" for name in needed):
            if not isinstance(self._values.get(key), list):
                raise cannot_load(self.path, f"its tokenizer is not usable: it lacks {key}")
        try:
            with self.reading():
                return read_tokenizer(self.path.parent, self._file, self._values)
        except Exception as error:  # tokenizers raises plain `Exception`
            raise cannot_load(self.path, f"its tokenizer is not usable: {first_line(error)}") from error

    def end_tokens(self, config: "PretrainedConfig | None" = None) -> list[int]:
        from winnow.models.load.gguf.tokenizer import turn_ends

        # Not the configuration's: the class's default stands there, which may be any token of this file.
        keys = [key for name in _ENDS if self._values.get(key := f"tokenizer.ggml.{name}") is not None]
        tokens = self._values.get("tokenizer.ggml.tokens", ())
        size = len(tokens) if config is None else config.get_text_config().vocab_size
        for key in keys:
            if type(self._values[key]) is not int or not 0 <= self._values[key] < size:
                reason = f"{key} must be a token's number below {size}, got {self._values[key]!r:.80}"
                raise cannot_load(self.path, reason)
        return [*(self._values[key] for key in keys), *turn_ends(self._values)]

    @property
    def _file(self) -> str:
        # In full: transformers looks for a name in the working directory first.
        return str(self.path.resolve())
