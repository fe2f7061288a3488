"""Winnow as a worker of NVIDIA Dynamo: token ids in, token ids out (`pip install ./plugins/dynamo`).

    python -m winnow_dynamo model --kv-memory 8GiB --discovery-backend file

Dynamo's frontend does what texts need. Its interface, `dynamo.common.backend.LLMEngine`, is implemented here over the
engine thread of Winnow's server. A worker whose role is prefill leaves what it computed, compressed if the policy says
so, in the folder or object store of `--prefix-cache-dir`, where the one that decodes finds it.
"""

import argparse
import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from dynamo.common.backend import EngineConfig, GenerateChunk, GenerateRequest, LLMEngine, WorkerConfig
from dynamo.common.backend.disagg import enforce_prefill_max_tokens, require_prefill_result
from dynamo.common.backend.engine import LlmRegistration
from dynamo.common.backend.health_check import build_health_check_payload, is_probe
from dynamo.common.backend.publisher import ComponentSnapshot, KvEventSource, PushSource
from dynamo.common.configuration.groups import DynamoRuntimeArgGroup, DynamoRuntimeConfig
from dynamo.common.constants import DisaggregationMode
from dynamo.common.utils.token_ids import normalize_request_token_ids

from winnow.cache.accounting.prefix_chain import PrefixEvent, PrefixStored
from winnow.cli.flags.engine import add_engine_flags, engine_options
from winnow.cli.flags.options import add_model_argument
from winnow.cli.main import Parser
from winnow.errors import ConfigError
from winnow.llm import LLM
from winnow.models import DEMO_MODEL
from winnow.prompt.chat import TokenizedPrompt
from winnow.sampling import SamplingParams
from winnow.server.async_engine import AsyncEngine
from winnow.server.request_stream import RequestStream

_SAMPLING = (
    *("n", "temperature", "top_p", "top_k", "min_p", "seed"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
_REASONS = {"abort": "cancelled"}


class WinnowEngine(LLMEngine):
    """Engine of one worker, as the clients' model `name`; it prefills, decodes, or both."""

    def __init__(self, options: Mapping[str, Any], name: str, role: DisaggregationMode) -> None:
        self._options, self._name, self._role = dict(options), name, role
        self._llm: LLM | None = None
        self._engine: AsyncEngine | None = None
        self._streams: dict[str, RequestStream] = {}
        self._events: Any = None
        self._snapshots: Any = None

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple["WinnowEngine", WorkerConfig]:
        """Return the engine and Dynamo's configuration: its runtime's flags, and those of `winnow run` for an engine.
        Raises ConfigError: a role that is not both needs `prefix_cache_dir`."""
        parser = argparse.ArgumentParser(prog="python -m winnow_dynamo", allow_abbrev=False, add_help=False)
        DynamoRuntimeArgGroup().add_arguments(parser)
        roles = [DisaggregationMode.AGGREGATED, DisaggregationMode.PREFILL, DisaggregationMode.DECODE]
        parser.add_argument("--disaggregation-mode", choices=[each.value for each in roles], default="agg")
        parser.add_argument("--component", default="backend")
        parser.add_argument("--served-model-name")
        asked, rest = parser.parse_known_args(argv)
        own = Parser(prog=parser.prog, description=f"Flags of Dynamo's runtime:\n{parser.format_usage()}")
        add_model_argument(own)
        add_engine_flags(own)
        options = engine_options(own.parse_args(rest))
        role = DisaggregationMode(asked.disaggregation_mode)
        if role is not DisaggregationMode.AGGREGATED and options.get("prefix_cache_dir") is None:
            raise ConfigError(
                f"disaggregation_mode {role.value} needs prefix_cache_dir, which all roles share"
            )
        model = str(options.get("model") or DEMO_MODEL)
        name = asked.served_model_name or model
        config = WorkerConfig.from_runtime_config(
            DynamoRuntimeConfig.from_cli_args(asked),
            model,
            name,
            component=asked.component,
            disaggregation_mode=role,
        )
        return cls(options, name, role), config

    async def start(self, worker_id: int) -> EngineConfig:
        self._llm = llm = await asyncio.to_thread(lambda: LLM(**self._options))
        llm.record_prefixes()
        self._engine = AsyncEngine(llm.driver, after_step=self._publish)
        self._engine.start()
        cache, scheduler = llm.config.cache, llm.config.scheduler
        return EngineConfig(
            model=str(self._options.get("model") or DEMO_MODEL),
            served_model_name=self._name,
            llm=LlmRegistration(
                context_length=llm.max_model_len,
                kv_cache_block_size=cache.block_size,
                total_kv_blocks=self._num_blocks(),
                max_num_seqs=scheduler.max_num_seqs,
                max_num_batched_tokens=scheduler.max_num_batched_tokens,
            ),
        )

    async def generate(self, request: GenerateRequest, context: Any) -> AsyncGenerator[GenerateChunk, None]:
        """Yield tokens as they come. Raises InvalidRequestError: parameters are out of range, or the prompt does not
        fit; ValueError: a request to decode comes from no prefill."""
        llm, engine = self._llm, self._engine
        assert llm is not None and engine is not None, "Dynamo calls `start` first"
        normalize_request_token_ids(request)
        if self._role is DisaggregationMode.DECODE and not is_probe(request):
            require_prefill_result(request, self._role)
        if self._role is DisaggregationMode.PREFILL:
            enforce_prefill_max_tokens(request)
        prompt = list(request["token_ids"])
        new = llm.new_request(TokenizedPrompt(None, prompt), _params(request, llm), deltas=True)
        stream = await engine.submit([new])
        self._streams[context.id()] = stream
        generated = 0
        try:
            async for output in stream:
                ended = [answer.finish_reason is not None for answer in output.outputs]
                generated += sum(len(answer.token_ids) for answer in output.outputs)
                for answer in output.outputs:
                    chunk: GenerateChunk = {"token_ids": list(answer.token_ids), "index": answer.index}
                    if answer.finish_reason is not None:
                        chunk["finish_reason"] = _REASONS.get(answer.finish_reason, answer.finish_reason)
                        chunk["completion_usage"] = {
                            "prompt_tokens": len(prompt),
                            "completion_tokens": generated,
                            "total_tokens": len(prompt) + generated,
                            "prompt_tokens_details": {"cached_tokens": output.num_cached_tokens},
                        }
                        if self._role is DisaggregationMode.PREFILL and all(ended):
                            await engine.call(llm.write_prefixes)
                            chunk["disaggregated_params"] = {"prompt_tokens": len(prompt)}
                    if answer.token_ids or answer.finish_reason is not None:
                        yield chunk
        finally:
            self._streams.pop(context.id(), None)
            engine.abandon(stream)

    async def abort(self, context: Any) -> None:
        stream = self._streams.get(context.id())
        if stream is not None and self._engine is not None:
            self._engine.abandon(stream)

    async def cleanup(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.stop()
        llm, self._llm = self._llm, None
        if llm is not None:
            await asyncio.to_thread(llm.close)

    async def health_check_payload(self) -> dict[str, Any]:
        return build_health_check_payload(1)

    async def kv_event_sources(self) -> list[KvEventSource]:
        def keep(publisher: Any) -> None:
            self._events = publisher

        return [PushSource(on_ready=keep)]

    def component_metrics_dp_ranks(self) -> list[int]:
        return [0]

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        self._snapshots = publisher

    def _num_blocks(self) -> int:
        assert self._llm is not None, "after `start`"
        return self._llm.stats().kv_bytes_budget // self._llm.kv_bytes(self._llm.config.cache.block_size)

    def _publish(self) -> None:
        llm = self._llm
        if llm is None:
            return
        events = llm.take_prefix_events()
        if self._events is not None:
            _publish_events(self._events, events)
        if self._snapshots is not None:
            stats, blocks = llm.stats(), self._num_blocks()
            share = stats.kv_bytes_used / stats.kv_bytes_budget
            asked = stats.cached_tokens + stats.prompt_tokens
            hits = stats.cached_tokens / asked if asked else None
            self._snapshots.publish(0, ComponentSnapshot(round(share * blocks), blocks, share, 0, hits))


def _publish_events(publisher: Any, events: Sequence[PrefixEvent]) -> None:
    """Send blocks that all requests may find; what eviction has shortened is no block of a full prefix."""
    for event in events:
        if not isinstance(event, PrefixStored):
            publisher.publish_removed([_number(event.key)])
        elif event.rule is None and not event.salt:
            parent = None if event.before is None else _number(event.before)
            tokens = list(event.token_ids)
            publisher.publish_stored(tokens, [len(tokens)], [_number(event.key)], parent)


def _number(key: bytes) -> int:
    return int.from_bytes(key[:8], "big", signed=True)


def _params(request: Mapping[str, Any], llm: LLM) -> SamplingParams:
    """Return parameters of a request. Stop strings are the frontend's: it has the text."""
    sampling, stop = request.get("sampling_options") or {}, request.get("stop_conditions") or {}
    found: dict[str, Any] = {**llm.conversation_defaults, "detokenize": False}
    found |= {name: sampling[name] for name in _SAMPLING if sampling.get(name) is not None}
    found["max_tokens"] = stop.get("max_tokens")
    found |= {name: stop[name] for name in ("min_tokens", "ignore_eos") if stop.get(name)}
    ids = [*(stop.get("stop_token_ids") or ()), *(stop.get("stop_token_ids_hidden") or ())]
    found |= {"stop_token_ids": ids} if ids else {}
    return SamplingParams(**found)
