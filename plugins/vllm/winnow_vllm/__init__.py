"""vLLM's engines and what its scripts import beside them, thin over `LLM`."""

import argparse
import asyncio
import gc
import logging
import sys
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import field, fields, make_dataclass
from enum import Enum
from typing import Any, Self

from winnow.cli.flags.engine import add_engine_flags, foreign_values
from winnow.config import PARTS
from winnow.errors import ConfigError, InvalidRequestError
from winnow.llm import LLM
from winnow.outputs import RequestOutput
from winnow.prompt.prompts import Prompt
from winnow.sampling import SamplingParams
from winnow.server.async_engine import AsyncEngine
from winnow.values.foreign_names import accept_arguments, accept_fields
from winnow.vllm import names as vllm_names

_FIELDS = [
    # None, as what is left out on a GPU is no size that could be written here.
    (each.name, each.type, field(default=None, metadata=each.metadata) if each.name == "kv_memory" else each)
    for part in PARTS.values()
    for each in fields(part)
]
_Options: Any = make_dataclass("_Options", _FIELDS, namespace={"__module__": __name__})
accept_fields(vllm_names.ENGINE, ConfigError, "option")(_Options)


class EngineArgs(_Options):
    """Options to open an `LLM` with, also from a command line: `LLM(**vars(EngineArgs(model=...)))`."""

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add a flag for each option, vLLM's too; those that are not typed are left out of the namespace."""
        add_engine_flags(parser)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        typed = {each.name: getattr(args, each.name) for each in fields(cls) if hasattr(args, each.name)}
        found: Self = cls(**typed, **foreign_values(args, vllm_names.ENGINE))
        return found


class AsyncEngineArgs(EngineArgs):
    pass


class _Engine:
    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    @classmethod
    def from_engine_args(cls, engine_args: Any, *_: Any, **__: Any) -> Self:
        """Open the model; what vLLM takes beside its options changes no answer."""
        return cls(LLM(**vars(engine_args)))

    def get_tokenizer(self) -> Any:
        return self.llm.get_tokenizer()


class LLMEngine(_Engine):
    """Engine that is stepped by its caller."""

    @accept_arguments(vllm_names.CALL, InvalidRequestError)
    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        arrival_time: float | None = None,
        *,
        priority: int = 0,
    ) -> str:
        """Queue a prompt; a smaller `priority` is served first, as in vLLM. Returns its id."""
        return self.llm.submit(prompt, params, request_id=request_id, priority=-priority)

    def step(self) -> list[RequestOutput]:
        return self.llm.step() if self.llm.has_unfinished else []

    def has_unfinished_requests(self) -> bool:
        return self.llm.has_unfinished

    def get_num_unfinished_requests(self) -> int:
        """Return answers that run or wait."""
        stats = self.llm.stats()
        return stats.num_running + stats.num_waiting

    def abort_request(self, request_ids: str | Sequence[str]) -> None:
        for name in [request_ids] if isinstance(request_ids, str) else request_ids:
            self.llm.abort(name)

    def get_metrics(self) -> list[Any]:
        return self.llm.get_metrics()

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = True) -> bool:
        return self.llm.reset_prefix_cache(reset_running_requests, reset_connector)

    def shutdown(self) -> None:
        self.llm.close()


class AsyncLLMEngine(_Engine):
    """Engine that serves the tasks of one event loop, from a thread of its own that the first request starts."""

    def __init__(self, llm: LLM) -> None:
        super().__init__(llm)
        self._serving: AsyncEngine | None = None
        self._going = asyncio.Event()
        self._going.set()

    @accept_arguments(vllm_names.CALL, InvalidRequestError)
    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams, request_id: str, *, priority: int = 0
    ) -> AsyncIterator[RequestOutput]:
        """Answer a prompt, yielding its outputs as `sampling_params.output_kind` says. Who leaves early ends it."""
        tokenized = self.llm.tokenize(prompt)
        request = self.llm.new_request(tokenized, sampling_params, request_id, priority=-priority)
        await self._going.wait()
        engine = self._running()
        stream = await engine.submit([request])
        try:
            async for output in stream:
                yield output
        finally:
            engine.abandon(stream)

    async def abort(self, request_id: str | Sequence[str]) -> None:
        """End requests at once; their streams end with what they have."""
        for name in [request_id] if isinstance(request_id, str) else request_id:
            await self._running().call(self.llm.abort, name)

    async def get_tokenizer(self) -> Any:
        return self.llm.get_tokenizer()

    async def reset_prefix_cache(self, *args: bool, **kwargs: bool) -> bool:
        return await self._running().call(self.llm.reset_prefix_cache, *args, **kwargs)

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        """Let no request compute until `resume_generation`; calls of `generate` wait for it.

        Args:
            mode: abort: end requests in progress with what they have; wait: let them end; keep: resume them later.
            clear_cache: forget cached prefixes; requests that are kept compute their tokens' KVs again.
        """
        if mode not in ("abort", "wait", "keep"):
            raise InvalidRequestError(f"mode must be abort, wait or keep, got {mode!r:.80}")
        engine = self._running()
        self._going.clear()
        if mode == "abort":
            await self.abort(engine.unfinished())
        elif mode == "keep":
            await engine.call(engine.pause)
        while mode != "keep" and engine.num_unfinished:
            await asyncio.sleep(0.005)
        if clear_cache:
            await self.reset_prefix_cache(reset_running_requests=mode == "keep")

    async def resume_generation(self) -> None:
        await self._running().call(self._running().resume)
        self._going.set()

    async def is_paused(self) -> bool:
        return not self._going.is_set()

    async def check_health(self) -> None:
        """Raise ApiError if the engine has failed."""
        self._running().require_usable()

    def shutdown(self) -> None:
        """Free the model and its cache; requests in progress are lost."""
        if self._serving is not None:
            self._serving.end()
        self.llm.close()

    def _running(self) -> AsyncEngine:
        if self._serving is None:
            self._serving = AsyncEngine(self.llm.driver)
            self._serving.start()
        return self._serving


AsyncLLM = AsyncLLMEngine


class FlexibleArgumentParser(argparse.ArgumentParser):
    """Parser whose flags may be written with underscores too."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        for index, word in enumerate(words):
            name, equals, value = word.partition("=")
            if name.startswith("--"):
                words[index] = "--" + name[2:].replace("_", "-") + equals + value
        return super().parse_known_args(words, namespace)


class UsageContext(Enum):
    """Kind of a script, which vLLM reports to its makers; Winnow reports nothing."""

    UNKNOWN_CONTEXT = "UNKNOWN_CONTEXT"
    LLM_CLASS = "LLM_CLASS"
    API_SERVER = "API_SERVER"
    OPENAI_API_SERVER = "OPENAI_API_SERVER"
    OPENAI_BATCH_RUNNER = "OPENAI_BATCH_RUNNER"
    ENGINE_CONTEXT = "ENGINE_CONTEXT"


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Collect what closed engines have left."""
    gc.collect()


def random_uuid() -> str:
    return uuid.uuid4().hex


def init_logger(name: str) -> logging.Logger:
    return logging.getLogger(name)
