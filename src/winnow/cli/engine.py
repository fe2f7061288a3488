"""The engine behind a command: its flags, its options, and opening it late.

Loading a model brings libraries that take seconds to import, so that waits until everything typed has been checked.
"""

import argparse
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from winnow.batch.journal import OF_REQUESTS
from winnow.cli.options import add_flags, given
from winnow.cli.paths import require_distinct
from winnow.config import PARTS, EngineConfig, ModelConfig
from winnow.errors import UsageError
from winnow.models.hub import is_repository, locate_model
from winnow.sampling import SamplingParams

if TYPE_CHECKING:
    from winnow.llm import LLM

UNFLAGGED = ("seed", *OF_REQUESTS)
"""Sampling parameters without a flag; requests that bring no seed take the engine's."""


def add_engine_flags(
    parser: argparse.ArgumentParser,
    skip: Collection[str] = (),
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """One flag per option of the engine, except those of `skip`; `defaults` are the command's own."""
    for title, config in PARTS.items():
        add_flags(parser, config, title, skip, defaults)


def engine_options(namespace: argparse.Namespace) -> dict[str, Any]:
    """The engine's options as typed, checked.

    Raises:
        ConfigError: a value is out of range.
        UsageError: the model is neither a directory or file nor named as on the Hub.
    """
    options = given(namespace, *PARTS.values())
    EngineConfig.from_options(options)
    model_exists(options.get("model"))
    return options


def model_exists(model: str | Path | None) -> None:
    """Check the name of a model before anything slow is done.

    Raises:
        UsageError: it is neither a directory or file nor a name as on the Hub.
    """
    if model is not None and not Path(model).exists() and not is_repository(model):
        raise UsageError(
            "model must be a directory with config.json and weights, a GGUF file, or org/name on the Hugging Face "
            f"Hub, got {str(model)!r}"
        )


def model_files(options: Mapping[str, Any]) -> list[tuple[str, Path]]:
    """What nothing may be written over, for `require_distinct`: a model's directory and the files in it."""
    model = options.get("model")
    if model is None or not Path(model).is_dir():
        return []
    files = [("a file of --model", path) for path in sorted(Path(model).iterdir()) if path.is_file()]
    return [("--model", Path(model)), *files]


def check_written(written: Mapping[str, Path | None], options: Mapping[str, Any]) -> None:
    """Refuse files that would be written over by one another, or over the model's.

    Args:
        written: what the user calls each path that will be written, and the path; None: it was not given.
        options: the engine's, as typed.

    Raises:
        UsageError: names both paths.
    """
    named = [(name, path) for name, path in written.items() if path is not None]
    require_distinct(named, model_files(options))


def add_sampling_flags(
    parser: argparse.ArgumentParser,
    title: str,
    skip: Collection[str] = (),
    defaults: Mapping[str, Any] = MappingProxyType({}),
    also: Collection[str] = (),
) -> None:
    """One flag per sampling parameter, except those of `skip`; `defaults` are the command's own.

    Args:
        also: parameters of a single request, for a command that has one.
    """
    without = [name for name in UNFLAGGED if name not in also]
    add_flags(parser, SamplingParams, title, (*without, *skip), defaults)


def sampling_options(namespace: argparse.Namespace, also: Collection[str] = ()) -> dict[str, Any]:
    """The sampling parameters as typed, checked; `also` as in `add_sampling_flags`.

    Raises:
        InvalidRequestError: a value is out of range.
    """
    typed = given(namespace, SamplingParams)
    options = {name: value for name, value in typed.items() if name not in UNFLAGGED or name in also}
    SamplingParams.from_mapping(options)
    return options


def evaluation_options(namespace: argparse.Namespace) -> dict[str, Any]:
    """As `engine_options`, without the prefix cache unless it is asked for.

    With it, the last bits of a prompt's logits depend on which prompts came before, and an evaluation that was stopped
    must go on to the same numbers.
    """
    return {"enable_prefix_caching": False} | engine_options(namespace)


def open_llm(options: dict[str, Any]) -> "LLM":
    """Load the model and set up its cache."""
    from winnow.llm import LLM

    silence_transformers()
    return LLM(**options)


def silence_transformers() -> None:
    """Standard error is for our own progress and messages."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def model_path(options: Mapping[str, Any]) -> Path:
    """Where the model lies that the engine's options name, fetched where it is a repository of the Hub."""
    named = {name: options[name] for name in ("model", "revision") if name in options}
    return locate_model(ModelConfig(**named))


def demo_model() -> Path:
    """The directory of the model that ships with Winnow."""
    from winnow.models.loader import DEMO_MODEL

    return DEMO_MODEL
