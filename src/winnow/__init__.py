"""Winnow runs large language models on little memory."""

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from winnow.lazy import lazy_exports

if TYPE_CHECKING:
    from winnow.llm import LLM
    from winnow.options import EngineArgs
    from winnow.outputs import BeamSearchOutput, BeamSearchSequence, CompletionOutput, RequestOutput
    from winnow.prompts import TextPrompt, TokensPrompt
    from winnow.sampling import BeamSearchParams, SamplingParams
    from winnow.sampling.structured import GuidedDecodingParams, StructuredOutputsParams

__all__ = [
    "LLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "EngineArgs",
    "GuidedDecodingParams",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
]


def _absent(name: str) -> str | None:
    from winnow.vllm_names import CLASSES

    return CLASSES[name].note if name in CLASSES else None


__getattr__ = lazy_exports(
    __name__,
    {
        "LLM": "winnow.llm",
        "BeamSearchOutput": "winnow.outputs",
        "BeamSearchParams": "winnow.sampling.beam_params",
        "BeamSearchSequence": "winnow.outputs",
        "CompletionOutput": "winnow.outputs",
        "EngineArgs": "winnow.options",
        "GuidedDecodingParams": "winnow.sampling.structured",
        "RequestOutput": "winnow.outputs",
        "SamplingParams": "winnow.sampling.params",
        "StructuredOutputsParams": "winnow.sampling.structured",
        "TextPrompt": "winnow.prompts",
        "TokensPrompt": "winnow.prompts",
    },
    _absent,
)

try:
    __version__ = version("winnow-llm")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"
