"""A model in one GGUF file, read by transformers: blocks become plain weights when they are loaded."""

import struct
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, redirect_stderr
from importlib.util import find_spec
from io import StringIO
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoTokenizer, GgufConfig, PretrainedConfig
from transformers.utils.logging import is_progress_bar_enabled

from winnow.errors import UnsupportedModelError
from winnow.models.damage import first_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_PACKAGES = ("gguf", "accelerate")
_MAGIC = b"GGUF"
# Of llama.cpp's ways to cut text, those that part digits before they do as GPT-2: transformers' reader leaves that out.
_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
# Tokens that end an answer or a turn.
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")


class GgufFile:
    """Configuration, weights, tokenizer and chat template in a file."""

    def __init__(self, path: Path, values: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Make one of what `open` reads.

        Args:
            values: the file's metadata; of lists of text their lengths alone.
            shapes: the tensors' shapes by name.
        """
        self.path = path
        self._values = values
        self._shapes = shapes

    @classmethod
    def open(cls, path: Path) -> "GgufFile":
        """Read what stands before the weights.

        Raises:
            UnsupportedModelError: it is no GGUF file, a damaged one or one of several, or packages are missing.
        """
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise _refused(path, "it is neither a directory nor a GGUF file")
        missing = [name for name in _PACKAGES if find_spec(name) is None]
        if missing:
            raise _refused(
                path,
                f"GGUF files are read with {' and '.join(_PACKAGES)}, and {' and '.join(missing)} is not installed: "
                "pip install 'winnow-llm[gguf]'",
            )
        from transformers.integrations.gguf import read_gguf_metadata

        try:
            values, _ = read_gguf_metadata(str(path))
            shapes, needed = _tensors(str(path))
        except (struct.error, LookupError, ArithmeticError, TypeError) as error:
            raise _refused(path, f"it is damaged: {first_line(error)}") from error
        size = path.stat().st_size
        if size < needed:
            raise _refused(path, f"it is cut short: its tensors end at byte {needed}, and it has {size}")
        parts = values.get("split.count", 1)
        if parts > 1:
            raise _refused(path, f"it is one of {parts} parts, and transformers reads whole files alone")
        return cls(path, values, shapes)

    def config_values(self) -> dict[str, Any]:
        values: dict[str, Any] = PretrainedConfig.get_config_dict(self.path.parent, gguf_file=self._file)[0]
        scaling = self._values.get(f"{self._values['general.architecture']}.rope.scaling.type", "none")
        if scaling != "none" and not {"rope_scaling", "rope_parameters"} & values.keys():
            raise _refused(
                self.path,
                f"transformers' reader leaves out its scaling of positions ({scaling}), and would answer wrong",
            )
        return values

    def weights(self) -> dict[str, Any]:
        return {
            "pretrained_model_name_or_path": self.path.parent,
            "gguf_file": self._file,
            "quantization_config": GgufConfig(dequantize=True),
        }

    def reading(self) -> AbstractContextManager[object]:
        # The reader draws a progress bar that does not ask whether transformers may draw any.
        return nullcontext() if is_progress_bar_enabled() else redirect_stderr(StringIO())

    def check_weights(self, model: "PreTrainedModel") -> None:
        """transformers' reader passes over tensors that it has no name for, such as factors of rotary positions."""
        held = sum(map(prod, self._shapes.values()))
        taken = sum(parameter.numel() for parameter in model.parameters())
        if held > taken:
            strange = [name for name in self._shapes if name.startswith("rope_")]
            raise _refused(
                self.path,
                f"transformers' reader takes {taken} of the {held} numbers in its tensors"
                + (f" and leaves out {', '.join(strange)}" if strange else ""),
            )

    def tokenizer(self) -> "PreTrainedTokenizerBase | None":
        if "tokenizer.ggml.model" not in self._values:
            return None
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                self.path.parent, gguf_file=self._file, trust_remote_code=False, local_files_only=True
            )
            if self._values.get("tokenizer.ggml.pre") in _SINGLE_DIGITS:
                digits = Digits(individual_digits=True)
                tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
                    [digits, ByteLevel(add_prefix_space=False)]
                )
        except Exception as error:  # tokenizers raises plain `Exception`
            raise _refused(self.path, f"its tokenizer is not usable: {first_line(error)}") from error
        return tokenizer

    def end_tokens(self, config: PretrainedConfig) -> list[int]:
        ends_named = getattr(config.get_text_config(), "eos_token_id", None) or []
        ends = (self._values.get(f"tokenizer.ggml.{name}") for name in _ENDS)
        return [
            *([ends_named] if isinstance(ends_named, int) else ends_named),
            *(end for end in ends if end is not None),
        ]

    @property
    def _file(self) -> str:
        # In full: transformers looks for a name in the working directory first.
        return str(self.path.resolve())


def _tensors(file: str) -> tuple[dict[str, tuple[int, ...]], int]:
    """The tensors' shapes by name, and where in the file the last of them ends."""
    from transformers.integrations.gguf import GgufHeader

    try:
        header = GgufHeader.from_file(file)
    except ValueError:
        # transformers lists few kinds of blocks in older versions, and reads others with the package gguf, whose own
        # reader takes seconds over a large vocabulary.
        from gguf import GGUFReader

        found = GGUFReader(file).tensors
        shapes = {each.name: tuple(map(int, each.shape)) for each in found}
        return shapes, max((int(each.data_offset + each.n_bytes) for each in found), default=0)
    ends = (header.data_start + each.offset + each.nbytes for each in header.tensors)
    return {each.name: each.shape for each in header.tensors}, max(ends, default=0)


def _refused(path: Path, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"model: cannot load {path}: {reason}")
