"""Requests to an engine, step by step: what an `LLM` is beside the model that it opens."""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from winnow.cache.accounting.prefix_chain import PrefixEvent
from winnow.engine.counters import Occupancy
from winnow.engine.driver import EngineDriver
from winnow.engine.engine import Engine
from winnow.engine.memory.memory import Memory
from winnow.engine.requests.new_request import NewRequest
from winnow.errors import InvalidRequestError
from winnow.media import MediaLoader
from winnow.models import PlainModel
from winnow.models.model.backend_tokenizer import full_tokenizer
from winnow.outputs import AgreementRecord, EngineStats, RequestOutput, SessionStats
from winnow.prompt.chat import PLAIN, TemplateOptions, TokenizedPrompt, Tokenizer, warn_about_ends
from winnow.prompt.messages import Message
from winnow.prompt.prompts import Prompt, PromptTokenizer
from winnow.sampling import SamplingParams
from winnow.sampling.params import RequestOutputKind
from winnow.values.session_request import SessionRequest

T = TypeVar("T")


class EngineClient:
    """Client of an engine's driver: makes requests of prompts, queues them and takes their outputs. Thread-safe."""

    def __init__(
        self, driver: EngineDriver, loaded: PlainModel, media: MediaLoader, separator: str | None = None
    ) -> None:
        self.driver = driver
        self._tokenizer = loaded.tokenizer
        self.max_model_len = loaded.max_model_len
        self.vocab_size = loaded.vocab_size
        self.eos_token_ids = loaded.eos_token_ids
        self._grammars = loaded.grammars
        self.sampling_defaults = loaded.sampling_defaults
        self._prompts = PromptTokenizer(
            self._tokenizer, driver.engine.requests.turns, loaded.processor, media, separator
        )
        # What the chat template ends turns with is looked at when it is first used: reading it takes transformers.
        self._unchecked_ends: frozenset[int] | None = loaded.eos_token_ids
        if not loaded.eos_token_ids:
            self._check_ends()

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, of transformers; None: it has none."""
        return full_tokenizer(self._tokenizer)

    def get_tokenizer(self) -> Tokenizer | None:
        """Return `tokenizer`, as vLLM does."""
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of a prompt without any: `SamplingParams()`, updated from the model's
        generation_config.json (see the option `generation_config`).
        """
        return SamplingParams.from_mapping(self.sampling_defaults)

    def submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        tenant: str | None = None,
        final_only: bool = False,
    ) -> str:
        """Queue a prompt and return its request id. Raises as `generate`.

        Args:
            request_id: unique among unfinished requests; None: one is generated.
            priority: under scheduling_policy=priority, the default, greater is served first; ties go to the earlier
                request. A request that does not fit beside running ones of lower priority parks them, the lowest first,
                and they continue later. When memory runs out, the lowest is preempted, ties go to the latest.
            tenant: on whose account it runs: what the option `tenants` says of the name holds, and prefixes are shared
                within one tenant alone. None: those of no tenant.
            final_only: `step` returns the request once, when it is finished, instead of after every token.
        """
        self.driver.require_open()
        options = {"priority": priority, "tenant": tenant, "final_only": final_only}
        return self._submit(self.tokenize(prompt), sampling_params, request_id, options)

    def submit_chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        tenant: str | None = None,
        final_only: bool = False,
    ) -> str:
        """Do as `submit` does, for a conversation."""
        self.driver.require_open()
        options = {"priority": priority, "tenant": tenant, "final_only": final_only}
        return self._submit(self.tokenize_chat(messages, tenant=tenant), sampling_params, request_id, options)

    def tokenize(self, prompt: Prompt, *, add_special_tokens: bool = True) -> TokenizedPrompt:
        """Return a prompt as the engine takes it. Raises as `generate`; any thread may call it during a step.

        Args:
            add_special_tokens: let the tokenizer add to a text what its model expects before it.
        """
        return self._prompts.tokenize(prompt, add_special_tokens=add_special_tokens)

    def tokenize_chat(
        self, messages: Sequence[Message], template: TemplateOptions = PLAIN, tenant: str | None = None
    ) -> TokenizedPrompt:
        """Do as `tokenize` does, for a conversation of a tenant. Its earlier answers, if unchanged, are the model's own
        tokens.

        Parts of its messages may be images: OpenAI's {"type": "image_url", "image_url": {"url": URL}}, vLLM's {"type":
        "image_pil", "image_pil": image} or transformers' {"type": "image", "image": URL, path, bytes or PIL image}.
        """
        self._check_ends()
        return self._prompts.tokenize_chat(messages, template, tenant)

    async def fetch_images(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Return messages with the bytes of images in place of their http(s) URLs, for which `tokenize_chat` would
        wait.

        Raises:
            InvalidRequestError: the model reads no images, or one cannot be fetched; see `allowed_media_domains`.
        """
        return await self._prompts.fetch_images(messages)

    def _check_ends(self) -> None:
        ends, self._unchecked_ends = self._unchecked_ends, None
        if ends is not None:
            warn_about_ends(self._tokenizer, ends)

    def new_request(
        self, prompt: TokenizedPrompt, params: SamplingParams, request_id: str | None = None, **options: Any
    ) -> NewRequest:
        """Return a request for `submit_all`; `options` are the other fields of `NewRequest`."""
        if isinstance(session := options.get("session"), SessionRequest):
            options["session"] = replace(session, system=prompt.system_tokens)
        if prompt.template_tail and params.template_tail is None:
            params = replace(params, template_tail=prompt.template_tail)
        if prompt.context_tokens:
            if params.context_tokens is not None:
                raise InvalidRequestError("context_tokens and a mark of the context mean the same, give one")
            params = replace(params, context_tokens=prompt.context_tokens)
        self.check_structured(params)
        if params.bad_words:
            if self._tokenizer is None:
                raise InvalidRequestError("bad_words need a tokenizer, and the model's directory has none")
            params = params.with_bad_tokens(partial(self._tokenizer.encode, add_special_tokens=False))
        if not options.get("final_only"):
            options["final_only"] = params.output_kind == RequestOutputKind.FINAL_ONLY
            options.setdefault("deltas", params.output_kind == RequestOutputKind.DELTA)
        if request_id is None:
            request_id = self.driver.new_id()
        if prompt.images:
            options["images"] = prompt.images
        if prompt.documents:
            options["documents"] = prompt.documents
        # A copy: the caller may assign to theirs.
        return NewRequest(request_id, prompt.text, prompt.token_ids, copy(params), **options)

    def check_structured(self, params: SamplingParams) -> None:
        """Compile the form that parameters ask for, if they do; later requests find it compiled.

        Raises:
            InvalidRequestError: the form cannot be compiled, or only with more work than is allowed.
        """
        if params.form is not None:
            self._grammars.check(params.form)

    def submit_all(self, requests: Sequence[NewRequest]) -> None:
        """Queue requests, all of them or none; `step` returns their outputs. Raises as `generate`."""
        self.driver.submit(requests)

    def step(self) -> list[RequestOutput]:
        """Compute one step for all requests. Returns outputs so far of submitted requests that got tokens or finished.

        Requests submitted with `final_only` are returned once, when they are finished. Those of `generate` and `stream`
        calls in progress advance too; their outputs go to those calls. Each output is returned once, to the first
        caller.
        """
        return self.driver.step()

    def fork(
        self,
        request_id: str,
        sampling_params: SamplingParams | None = None,
        *,
        new_request_id: str | None = None,
        index: int = 0,
        final_only: bool = False,
    ) -> str:
        """Queue a request that continues from where an unfinished one is, and return its id.

        It has the same prompt and the answer so far, and shares the KVs: both copy a block only when they write into
        it, or a policy changes it. Limits such as `max_tokens` count the whole answer. Paged engine only.

        Args:
            sampling_params: for the tokens to come; None: those of the other request, its seed included, so both
                answers are the same. What its KVs depend on (`eviction`, `compression` and the like) cannot change.
                `forced_tokens` begin with the answer so far; the token sampled last, which no KV knows yet, may differ.
            new_request_id: unique among unfinished requests; None: one is generated.
            index: which of the other request's samples.
            final_only: see `submit`.

        Raises:
            InvalidRequestError (or a subclass): no such request or sample is unfinished, or the parameters do not fit
                what is computed; names field, value and limit.
        """
        self.driver.require_open()
        new_id = self.driver.new_id() if new_request_id is None else new_request_id
        self.driver.call(self._engine.fork, request_id, new_id, sampling_params, index, final_only)
        return new_id

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request at once. Returns its output so far; None: there is no such unfinished request."""
        return self.driver.abort(request_id)

    @property
    def has_unfinished(self) -> bool:
        return self.driver.call(lambda: self._engine.has_unfinished)

    def check_answers(self) -> AgreementRecord:
        """Compare some of the compressed answers with the full cache's, as many and as long as `check` allows, and
        return what came of all so far. `LLM.generate` and `chat` do so after several prompts, a server in idle time."""
        while self.driver.call(self._engine.check_step):
            pass
        return self.stats().agreement

    def stats(self) -> EngineStats:
        return self.driver.call(self._engine.stats)

    def occupancy(self) -> Occupancy:
        """Return who holds the KV memory now, and how much of each layer and head stays."""
        return self.driver.call(self._engine.occupancy)

    def sessions(self, tenant: str | None = None, *, all_tenants: bool = False) -> list[SessionStats]:
        """Return the conversations of a tenant that are remembered, or of all; the most recently used first."""
        return self._of_memory(lambda memory: memory.sessions.list(tenant, all_tenants=all_tenants))

    def drop_session(self, session_id: str, *, tenant: str | None = None) -> bool:
        """Forget a conversation, and free what only it begins with. False: there is none of that name."""
        return self._of_memory(lambda memory: memory.sessions.drop(session_id, tenant))

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = True) -> bool:
        """Forget all cached prefixes, but for those of a `prefix_store`. Returns True, as vLLM does where it succeeds.

        Args:
            reset_running_requests: running requests compute the KVs of their tokens again; else they keep them.
            reset_connector: forget prefixes on disk too.
        """
        self.driver.call(self._engine.reset_prefix_cache, reset_running_requests, reset_connector)
        return True

    def record_prefixes(self) -> None:
        """Begin to record what the prefix cache learns and forgets, for `take_prefix_events`."""
        self._of_memory(lambda memory: memory.record_prefixes())

    def take_prefix_events(self) -> list[PrefixEvent]:
        """Return what the prefix cache has learnt and forgotten since the last call."""
        return self._of_memory(lambda memory: memory.take_prefix_events())

    def holds_on_disk(self, token_ids: list[int], *, tenant: str | None = None) -> bool:
        """Return whether the KVs of a prompt lie in `prefix_cache_dir`, to its last token."""
        return self._of_memory(lambda memory: memory.holds_on_disk(token_ids, tenant))

    def write_prefixes(self) -> None:
        """Write to `prefix_cache_dir` what ended requests have left, and wait until it is there."""
        self._of_memory(lambda memory: memory.files.write_all())

    def kv_bytes(self, num_kvs: int) -> int:
        """Return the bytes of a sequence of `num_kvs` tokens that keeps all that its layers see, in whole blocks."""
        return self._engine.kv_bytes(num_kvs)

    def check_integrity(self) -> None:
        """Assert the invariants of cache and scheduler; for tests and debugging. Slow."""
        self.driver.call(self._engine.check_integrity)

    @property
    def _engine(self) -> Engine:
        return self.driver.engine

    def _of_memory(self, action: Callable[[Memory], T]) -> T:
        return self.driver.call(lambda: action(self._engine.memory))

    def _submit(
        self,
        prompt: TokenizedPrompt,
        params: SamplingParams | None,
        request_id: str | None,
        options: Mapping[str, Any],
    ) -> str:
        params = params or self.get_default_sampling_params()
        request = self.new_request(prompt, params, request_id, **options)
        self.driver.submit([request])
        return request.request_id
