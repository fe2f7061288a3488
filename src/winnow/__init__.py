"""Winnow runs large language models on little memory."""

from typing import TYPE_CHECKING

from winnow.process.lazy import lazy_exports
from winnow.version import __version__ as __version__
from winnow.vllm.modules import VllmModules, absent

if TYPE_CHECKING:
    from winnow.llm import LLM
    from winnow.outputs import CompletionOutput, RequestOutput
    from winnow.prompt.prompts import Document, PromptType, TextPrompt, TokensPrompt
    from winnow.sampling import SamplingParams
    from winnow.sampling.structured import GuidedDecodingParams, StructuredOutputsParams
    from winnow_vllm import AsyncEngineArgs, AsyncLLMEngine, EngineArgs, LLMEngine

__all__ = [
    "LLM", "AsyncEngineArgs", "AsyncLLMEngine", "CompletionOutput", "Document", "EngineArgs",
    "GuidedDecodingParams", "LLMEngine", "PromptType", "RequestOutput", "SamplingParams",
    "StructuredOutputsParams", "TextPrompt", "TokensPrompt",
]  # fmt: skip


_HOMES = {
    "winnow.llm": ["LLM"],
    "winnow.outputs": ["CompletionOutput", "RequestOutput"],
    "winnow.prompt.prompts": ["Document", "PromptType", "TextPrompt", "TokensPrompt"],
    "winnow.sampling.params": ["SamplingParams"],
    "winnow.sampling.structured": ["GuidedDecodingParams", "StructuredOutputsParams"],
    "winnow_vllm": ["AsyncEngineArgs", "AsyncLLMEngine", "EngineArgs", "LLMEngine"],
}
__getattr__ = lazy_exports(__name__, {name: home for home, names in _HOMES.items() for name in names}, absent)
VllmModules.install()


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
