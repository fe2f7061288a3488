"""Winnow runs large language models on little memory."""

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from winnow.lazy import lazy_exports
from winnow.vllm.modules import VllmModules, absent

if TYPE_CHECKING:
    from winnow.llm import LLM
    from winnow.outputs import CompletionOutput, RequestOutput
    from winnow.prompts import PromptType, TextPrompt, TokensPrompt
    from winnow.sampling import SamplingParams
    from winnow.sampling.structured import GuidedDecodingParams, StructuredOutputsParams
    from winnow.vllm.engines import AsyncEngineArgs, AsyncLLMEngine, EngineArgs, LLMEngine

__all__ = [
    "LLM", "AsyncEngineArgs", "AsyncLLMEngine", "CompletionOutput", "EngineArgs", "GuidedDecodingParams",
    "LLMEngine", "PromptType", "RequestOutput", "SamplingParams", "StructuredOutputsParams", "TextPrompt",
    "TokensPrompt",
]  # fmt: skip


__getattr__ = lazy_exports(
    __name__,
    {
        "LLM": "winnow.llm",
        "CompletionOutput": "winnow.outputs",
        "AsyncEngineArgs": "winnow.vllm.engines",
        "AsyncLLMEngine": "winnow.vllm.engines",
        "EngineArgs": "winnow.vllm.engines",
        "LLMEngine": "winnow.vllm.engines",
        "PromptType": "winnow.prompts",
        "GuidedDecodingParams": "winnow.sampling.structured",
        "RequestOutput": "winnow.outputs",
        "SamplingParams": "winnow.sampling.params",
        "StructuredOutputsParams": "winnow.sampling.structured",
        "TextPrompt": "winnow.prompts",
        "TokensPrompt": "winnow.prompts",
    },
    absent,
)
VllmModules.install()


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


try:
    __version__ = version("winnow-llm")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"
