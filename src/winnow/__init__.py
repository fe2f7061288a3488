"""Winnow runs large language models on little memory."""

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from winnow.llm import LLM
    from winnow.outputs import CompletionOutput, RequestOutput
    from winnow.sampling import SamplingParams

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams"]

_HOMES = {
    "LLM": "winnow.llm",
    "SamplingParams": "winnow.sampling",
    "RequestOutput": "winnow.outputs",
    "CompletionOutput": "winnow.outputs",
}

try:
    __version__ = version("winnow-llm")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"


def __getattr__(name: str) -> Any:
    # Importing torch and transformers takes seconds: `winnow --help` does without them.
    if name not in _HOMES:
        raise AttributeError(f"module 'winnow' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
