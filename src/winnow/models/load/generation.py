"""Sampling parameters that a model's makers recommend: its generation_config.json, read by vLLM's rule."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from winnow.errors import InvalidRequestError, UnsupportedModelError
from winnow.models.load.json_files import read_object
from winnow.sampling import SamplingParams

GENERATION = "generation_config.json"
OWN = "winnow"
"""Value in place of a directory: no recommendation is taken."""
# By transformers' name: ours. These are the ones that vLLM takes.
_TAKEN = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
# What transformers leaves out of account where it does not sample.
_OF_SAMPLING = ("temperature", "top_k", "top_p", "min_p")


def sampling_defaults(path: Path, source: str) -> Mapping[str, Any]:
    """Return fields of `SamplingParams` as a model's makers set them.

    Args:
        path: the model's directory.
        source: "auto": of this directory, if it has any; "winnow": none; else another directory.

    Raises:
        UnsupportedModelError: the file is missing where it was named, unreadable, or recommends what cannot be.
    """
    if source in (OWN, "vllm"):
        return {}
    directory = path if source == "auto" else Path(source)
    if not (directory / GENERATION).exists():
        if source == "auto":
            return {}
        raise UnsupportedModelError(
            f"model: generation_config must be auto, {OWN} or a directory with a {GENERATION}, got {source!r}"
        )
    values = read_object(directory / GENERATION)
    found = {ours: values[theirs] for theirs, ours in _TAKEN.items() if values.get(theirs) is not None}
    if values.get("do_sample") is False:
        found = {name: value for name, value in found.items() if name not in _OF_SAMPLING}
        found["temperature"] = 0.0
    try:
        SamplingParams.from_mapping(found)
    except InvalidRequestError as error:
        raise UnsupportedModelError(f"model: cannot load {directory}: {GENERATION}: {error}") from None
    return found
