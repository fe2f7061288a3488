"""Which run an output belongs to: the prompts, the model's files and every setting.

An unfinished output may only be continued by the run that began it; else its halves would answer different questions.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from winnow.errors import UnsupportedModelError

_SAMPLES = 16
_SAMPLE_BYTES = 64 * 2**10
_MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model")

Fingerprint = dict[str, Any]
"""JSON values by name: `input`, `model`, and the settings."""


def fingerprint(input_sha256: str, model: Path, settings: Mapping[str, Any]) -> Fingerprint:
    """The identity of a run.

    Raises:
        UnsupportedModelError: `model` is no directory with a config.json.
    """
    return {"input": input_sha256, "model": model_digest(model), **settings}


def model_digest(directory: Path) -> str:
    """SHA-256 over the names, sizes and contents of a model's files.

    Of files above 1 MiB only 16 pieces are read, evenly spread: retrained weights differ everywhere, and tens of
    gigabytes need not be read twice.
    """
    if not (directory / "config.json").is_file():
        raise UnsupportedModelError(f"model must be a directory with a config.json, got {str(directory)!r}")
    digest = hashlib.sha256()
    try:
        for path in sorted(path for pattern in _MODEL_FILES for path in directory.glob(pattern)):
            size = path.stat().st_size
            digest.update(f"{path.name}\0{size}\0".encode())
            with path.open("rb") as file:
                if size <= _SAMPLES * _SAMPLE_BYTES:
                    digest.update(file.read())
                    continue
                for sample in range(_SAMPLES):
                    file.seek((size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
                    digest.update(file.read(_SAMPLE_BYTES))
    except OSError as error:
        raise UnsupportedModelError(
            f"model: cannot load {directory}: cannot read {error.filename}: {error.strerror}"
        ) from None
    return digest.hexdigest()


def differences(theirs: Fingerprint, ours: Fingerprint) -> list[str]:
    """What two runs disagree on, in words."""
    told = []
    for name in sorted(theirs.keys() | ours.keys()):
        before, now = theirs.get(name), ours.get(name)
        if before == now:
            continue
        if name in ("input", "model"):
            told.append({"input": "the prompts have changed", "model": "the model's files differ"}[name])
        else:
            told.append(f"{name} was {before!r} and is {now!r}")
    return told
