"""Service that the routes share: the engine, quotas, names, and the way from a body to the engine."""

import asyncio
import itertools
import json
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

from winnow.engine.counters import Occupancy
from winnow.engine.requests.new_request import NewRequest
from winnow.errors import ConfigError
from winnow.llm import LLM
from winnow.openai.answers import AnswerReader
from winnow.openai.errors import OVERLOADED, RATE_LIMIT, ApiError, invalid
from winnow.openai.request import CompletionRequest, Message
from winnow.openai.response_templates import TEMPLATES
from winnow.outputs import EngineStats, SessionStats
from winnow.process.extras import require_plugin
from winnow.prompt.chat import TemplateOptions, TokenizedPrompt
from winnow.prompt.messages import text_length
from winnow.prompt.prompts import Prompt
from winnow.server.access import Keys
from winnow.server.async_engine import AsyncEngine
from winnow.server.config import ServerConfig
from winnow.server.metrics import Metrics
from winnow.server.request_stream import RequestStream
from winnow.server.stored_responses import StoredResponses
from winnow.values.json_values import json_kind

T = TypeVar("T")

# Seconds that a reader of counters waits for the step in progress.
_STATS_WAIT = 1.0
# Tokenisers take one text at a time, so more threads would wait for each other.
_TOKENISING_THREADS = 2


@dataclass
class Service:
    """One engine, served.

    Attributes:
        names: what clients may call the model; the first is its name in responses.
        created: Unix seconds.
        exit: set when the engine has failed.
        ending: set when nothing more is answered; streams that have no end of their own end then.
    """

    llm: LLM
    config: ServerConfig
    keys: Keys
    names: tuple[str, ...]
    reader: AnswerReader = field(default_factory=AnswerReader)
    created: int = field(default_factory=lambda: int(time.time()))
    exit: asyncio.Event = field(default_factory=asyncio.Event)
    ending: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        cache = self.llm.config.cache
        blocks = self.llm.stats().kv_bytes_budget // self.llm.kv_bytes(cache.block_size)
        about = {
            "block_size": str(cache.block_size),
            "num_gpu_blocks": str(blocks),
            "cache_dtype": str(cache.kv_dtype),
            "enable_prefix_caching": str(cache.enable_prefix_caching),
        }
        self.metrics = Metrics(self.names[0], self.config.metrics_compat == "vllm", about)
        self.engine = AsyncEngine(
            self.llm.driver,
            self.metrics.observe,
            self.metrics.discard,
            self.exit.set,
            self.metrics.count_tokens,
            self._publish_prefixes,
        )
        self._kv_events: Any = None
        if self.config.kv_events_endpoint is not None:
            publisher = require_plugin("events", "kv_events_endpoint")
            self.llm.record_prefixes()
            self._kv_events = publisher(
                self.config.kv_events_endpoint,
                self.config.kv_events_replay_endpoint,
                self.config.kv_events_topic,
                None if cache.kv_cache_dtype in (None, "auto") else cache.kv_cache_dtype,
            )
        self.responses: dict[str | None, StoredResponses] = defaultdict(
            lambda: StoredResponses(self.config.response_memory)
        )
        self._tokenising = ThreadPoolExecutor(_TOKENISING_THREADS, "winnow-tokenise")
        self._numbers = itertools.count()
        self._admitting: dict[str | None, int] = {}  # answers on their way to the engine, by tenant
        self._read: dict[Any, Any] = {}  # what the engine said last, by name

    async def close(self) -> None:
        await self.engine.stop()
        if self._kv_events is not None:
            await asyncio.to_thread(self._kv_events.close)
        self._tokenising.shutdown(wait=False, cancel_futures=True)

    def check_model(self, name: str | None, *, strict: bool = False) -> str:
        """Return the name that the response gives the model. Raises ApiError: a strict server has another."""
        if name is None or (name not in self.names and not (strict or self.config.strict_model)):
            return self.names[0]
        if name not in self.names:
            fault = f"model {name!r:.200} is not served here; {self.names[0]!r} is"
            raise ApiError("model_not_found", fault, "model")
        return name

    def require_room(self, tenant: str | None, answers: int) -> None:
        """Raise ApiError where the server is full (503), or the tenant has its share (429)."""
        self.engine.require_usable()
        share = self.config.max_reqs_per_tenant
        own = sum(self.engine.by_tenant().get(tenant, ())) + self._admitting.get(tenant, 0)
        if share is not None and own + answers > share:
            said = f"answers of a tenant in progress must be at most {share}, got {answers} more"
            raise invalid("n", said) if answers > share else self._refusal("tenant", said, code=RATE_LIMIT)
        queue = self.config.max_num_queued_reqs
        if queue is None:
            return
        most = queue + self.llm.config.scheduler.max_num_seqs
        if answers > most:
            raise invalid("prompts times n", f"must be at most {most}, got {answers}", "n")
        if self.engine.num_unfinished + sum(self._admitting.values()) + answers > most:
            raise self._refusal("queue", f"the queue is full: {queue} answers wait already")

    def _check_room(self, requests: Sequence[NewRequest], clients: Collection[str]) -> None:
        """Raise ApiError (503) where queued requests would wait behind more, or longer, than they may. On the engine's
        thread."""
        queue, most = self.config.max_num_queued_reqs, self.config.max_ttft
        outlook = getattr(self.llm.driver.engine.scheduler, "first_tokens", None)
        if outlook is None:  # an engine that computes steps in another way
            return
        if queue is not None and (waiting := outlook.num_held_up(clients)) > queue:
            waiting -= sum(each.params.n for each in requests)
            said = f"the queue is full: {max(waiting, 0)} answers wait already"
            raise self._refusal("queue", said, outlook.seconds())
        if most is not None and (expected := outlook.seconds(requests[-1].request_id)) > most:
            said = f"the first token is expected after {expected:.1f} seconds, and max_ttft is {most:g}"
            raise self._refusal("ttft", said, expected - most)

    def _refusal(self, reason: str, message: str, retry_after: float = 1, code: str = OVERLOADED) -> ApiError:
        self.metrics.refused[reason] += 1
        return ApiError(code, message, retry_after=retry_after)

    async def tokenize(self, prompt: Prompt, *, special: bool = True) -> TokenizedPrompt:
        self._require_short(len(prompt) if isinstance(prompt, str) else 0)
        return await self.off_loop(lambda: self.llm.tokenize(prompt, add_special_tokens=special))

    async def tokenize_chat(
        self, messages: Sequence[Message], template: TemplateOptions, tenant: str | None
    ) -> TokenizedPrompt:
        self._require_short(sum(map(text_length, messages)))
        messages = await self.llm.fetch_images(messages)
        return await self.off_loop(lambda: self.llm.tokenize_chat(messages, template, tenant))

    async def off_loop(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._tokenising, work)

    def _require_short(self, num_chars: int) -> None:
        """Refuse text that cannot fit into the context, however it is cut, before it costs any time."""
        most = self.llm.max_model_len
        if num_chars > most * self._longest_token:
            what = f"shorter than the context of {most} tokens (max_model_len), got {num_chars} characters"
            raise ApiError("context_length_exceeded", f"prompt must be {what}")

    @cached_property
    def _longest_token(self) -> int:
        """Characters of the longest token, at least 16."""
        tokenizer = self.llm.tokenizer
        return max(16, *(len(token) for token in tokenizer.get_vocab())) if tokenizer is not None else 16

    async def submit(
        self, asked: CompletionRequest, tenant: str | None, request_id: str, *, deltas: bool
    ) -> RequestStream:
        """Tokenise what a body asks and hand it to the engine: all of it, or nothing."""
        answers = max(len(asked.prompts), 1) * asked.params.n
        self.require_room(tenant, answers)
        # Counted from here on: others may come while this one is tokenised.
        self._admitting[tenant] = self._admitting.get(tenant, 0) + answers
        try:
            requests = await self.new_requests(asked, tenant, request_id, deltas=deltas)
        finally:
            self._admitting[tenant] -= answers
            if not self._admitting[tenant]:
                del self._admitting[tenant]
        return await self.engine.submit(requests, check=partial(self._check_room, requests))

    async def new_requests(
        self, asked: CompletionRequest, tenant: str | None, request_id: str, *, deltas: bool
    ) -> list[NewRequest]:
        if asked.messages is not None:
            prompts = [await self.tokenize_chat(asked.messages, asked.template, tenant)]
        else:
            prompts = [await self.tokenize(prompt) for prompt in asked.prompts]
        params = asked.params
        if asked.messages:
            params = self.reader.bind(params, prompts[0].text, asked.template.tools, asked.calls)
        if params.structured_outputs is not None:
            await self.off_loop(lambda: self.llm.check_structured(params))
        stem = f"{request_id}-{next(self._numbers)}"
        return [
            self.llm.new_request(
                prompt,
                params,
                f"{stem}-{index}",
                priority=asked.priority,
                tenant=tenant,
                session=asked.session,
                final_only=not deltas,
                deltas=deltas,
                cut_to_memory=True,  # agents ask for 32,000 tokens, whatever the server
            )
            for index, prompt in enumerate(prompts)
        ]

    async def stats(self) -> EngineStats:
        """Return the engine's counters; where a step takes long, as they were before it. The next two do so too."""
        return await self._latest("stats", EngineStats(), self.llm.stats)

    async def occupancy(self) -> Occupancy:
        return await self._latest("occupancy", Occupancy({}, []), self.llm.occupancy)

    async def sessions(self, tenant: str | None) -> list[SessionStats]:
        return await self._latest(("sessions", tenant), [], lambda: self.llm.sessions(tenant))

    async def _latest(self, name: Any, first: T, read: Callable[[], T]) -> T:
        with suppress(TimeoutError):
            self._read[name] = await asyncio.wait_for(self.engine.call(read), _STATS_WAIT)
        found: T = self._read.get(name, first)
        return found

    def _publish_prefixes(self) -> None:
        if self._kv_events is not None:
            self._kv_events.publish(self.llm.take_prefix_events())


def model_names(model: str | Path | None, served: Sequence[str]) -> tuple[str, ...]:
    if served:
        return tuple(served)
    if model is None:
        return ("winnow-demo",)
    return tuple(dict.fromkeys((Path(model).resolve().name, str(model))))


def load_reader(response_template: str | None, tokenizer: Any) -> AnswerReader:
    """Return what reads the model's answers. Raises ConfigError: the template cannot be used.

    `response_template` is a name or the path of a JSON file; None: the tokenizer's, or what its chat template shows.
    """
    if response_template is None or response_template in TEMPLATES:
        return AnswerReader.of(tokenizer, TEMPLATES[response_template] if response_template else None)
    try:
        template = json.loads(Path(response_template).read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"response_template {response_template} cannot be read: {error}") from None
    if not isinstance(template, dict):
        raise ConfigError(f"response_template must hold an object, got {json_kind(template)}")
    return AnswerReader.of(tokenizer, template)
