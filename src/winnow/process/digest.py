"""A digest of files that may be as large as a model's weights."""

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

from winnow.errors import UnsupportedModelError

_SAMPLES = 16
_SAMPLE_BYTES = 64 * 2**10

BESIDE_WEIGHTS = ("*.json", "*.jinja", "additional_chat_templates/*.jinja", "*.model", "*.txt", "tokenizer*")
"""Files of a model's directory that make its answers what they are, the weights aside."""

BY_TOKENIZER = (
    "tokenizer*", "*.model", "*.txt", "*.jinja", "vocab.json", "added_tokens.json", "special_tokens_map.json",
    "chat_template.json", "additional_chat_templates/*.jinja",
)  # fmt: skip
"""Those of them that a tokenizer is made of."""
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


_PART = re.compile(r"(.*-)\d{5}(-of-(\d{5})\.gguf)", re.DOTALL)


def part_names(name: str) -> list[str]:
    """Return the names of all parts of a GGUF file, given that of any part; of a whole file its own."""
    found = _PART.fullmatch(name)
    return [f"{found[1]}{n + 1:05}{found[2]}" for n in range(int(found[3]))] if found else [name]


def model_files(path: Path) -> set[Path]:
    """Return the files of a published model: all parts of a GGUF file; or in its directory those beside its weights,
    and *.safetensors."""
    if path.is_file():
        return {path.with_name(name) for name in part_names(path.name)}
    kinds = (*BESIDE_WEIGHTS, "*.safetensors")
    return {found for kind in kinds for found in path.glob(kind) if found.is_file()}


def sampled_digest(files: Iterable[Path]) -> str:
    """Return SHA-256 over the names, sizes and contents of files, in the order of their paths. Raises OSError.

    Of files above 1 MiB only 16 pieces are read, evenly spread: retrained weights differ everywhere.
    """
    digest = hashlib.sha256()
    for path in sorted(files):
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            if size <= _SAMPLES * _SAMPLE_BYTES:
                digest.update(file.read())
                continue
            for sample in range(_SAMPLES):
                file.seek((size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def model_digest(model: Path, *beside: Path | None) -> str:
    """Return SHA-256 over the names, sizes and contents of a model's files, and of an adapter's or a tower's beside it.
    Raises UnsupportedModelError: `model` is neither a directory with a config.json nor a file, or cannot be read."""
    if not model.is_file() and not (model / "config.json").is_file():
        raise UnsupportedModelError(
            f"model must be a directory with a config.json, or a GGUF file, got {str(model)!r}"
        )
    try:
        return sampled_digest(model_files(model).union(*map(model_files, filter(None, beside))))
    except OSError as error:
        raise UnsupportedModelError(
            f"model: cannot load {model}: cannot read {error.filename}: {error.strerror}"
        ) from None
