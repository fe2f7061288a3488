"""Winnow runs large language models on little memory."""

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from winnow.lazy import lazy_exports

if TYPE_CHECKING:
    from winnow.llm import LLM
    from winnow.outputs import BeamSearchOutput, BeamSearchSequence, CompletionOutput, RequestOutput
    from winnow.sampling import BeamSearchParams, SamplingParams

__all__ = [
    "LLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "RequestOutput",
    "SamplingParams",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "LLM": "winnow.llm",
        "BeamSearchOutput": "winnow.outputs",
        "BeamSearchParams": "winnow.sampling.beam_params",
        "BeamSearchSequence": "winnow.outputs",
        "CompletionOutput": "winnow.outputs",
        "RequestOutput": "winnow.outputs",
        "SamplingParams": "winnow.sampling.params",
    },
)

try:
    __version__ = version("winnow-llm")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"
