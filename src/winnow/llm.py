"""`LLM`: a model, its KV memory, and requests to it."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import entry_points
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

from torch import get_num_threads

from winnow.config import EngineConfig
from winnow.config.model import PAGED
from winnow.engine.driver import EngineDriver, Mailbox, OutputStream
from winnow.engine.engine import Engine
from winnow.engine_client import EngineClient
from winnow.errors import ClosedError, ConfigError, InvalidRequestError
from winnow.eviction import EvictionPolicy, resolve_policy
from winnow.executor.build import build_engine, load_ranks, open_team, with_device_memory, with_fewer_bytes
from winnow.executor.rank_team import RankTeam
from winnow.media import MediaLoader
from winnow.models import LoadedModel, PlainModel
from winnow.models.model.memory import release_cached, stored_kind, weight_bytes
from winnow.outputs import RequestOutput
from winnow.process.extras import GET_THE_LAB, require_plugin
from winnow.process.fork import require_usable_torch
from winnow.process.progress import is_shown, progress_bar
from winnow.process.resources import resident_bytes
from winnow.process.threads import TeamWait, release_team, set_threads
from winnow.prompt.chat import TemplateOptions, TokenizedPrompt
from winnow.prompt.messages import Message
from winnow.prompt.prompts import Prompt, list_conversations, list_prompts
from winnow.sampling import SamplingParams
from winnow.values.foreign_names import accept_arguments
from winnow.values.reuse import ANYWHERE
from winnow.values.session_request import SessionRequest
from winnow.vllm import names as vllm_names
from winnow.vllm.metrics import Metric, read_metrics

# Loading changes torch's default dtype, which is global to the process; so is this lock.
_LOADING = Lock()

_SAMPLED_BY = ("temperature", "top_k", "top_p", "min_p")
# SmolLM2-135M answers .89 of 16 short questions right at 0.3, .81 at 0.7; greedily .94, but long answers loop.
_CONVERSATION: Mapping[str, Any] = MappingProxyType({"temperature": 0.3, "top_p": 0.95, "min_p": 0.05})


class LLM(EngineClient):
    """A language model that serves many requests at once within a fixed KV memory. Thread-safe.

    Example:
        >>> from winnow import LLM, SamplingParams
        >>> llm = LLM(kv_memory="64MiB")
        >>> [output] = llm.generate(["Question: ..."], SamplingParams(temperature=0, max_tokens=16))
        >>> output.outputs[0].text

    Args:
        model: directory with config.json, safetensors and (for text prompts) a tokenizer, a GGUF file, or org/name on
            the Hugging Face Hub; None: the demo model.
        options: the fields of `ModelConfig`, `CacheConfig`, `SchedulerConfig`, `EvictionConfig` and `MediaConfig`
            in `winnow.config`.

    Raises:
        ConfigError: an option is unknown or out of range.
        UnsupportedModelError: the model cannot be loaded or served; the message says why.
    """

    def __init__(self, model: str | Path | None = None, **options: Any) -> None:
        self.config = EngineConfig.from_options({"model": model, **options})
        require_usable_torch(self.config.model.device)
        set_threads(self.config.model.threads, self.config.model.tensor_parallel_size)
        self._team_wait = TeamWait()
        before = resident_bytes() or 0
        try:
            with _LOADING:
                loaded, engine, self.config = _open_engine(self.config)
        except BaseException:
            self._team_wait.stop()
            raise
        release_team()  # the threads that will step may be others
        driver = EngineDriver(engine, get_num_threads, release_team)
        super().__init__(driver, loaded, MediaLoader(self.config.media), self.config.cache.reuse_separator)
        self.dtype, self.device = loaded.dtype, loaded.device
        narrow = getattr(loaded, "blocks", None) or getattr(loaded, "library", None)
        self.weight_dtype: str = "auto" if narrow is None else narrow.weight_dtype
        computes = getattr(loaded, "forward_model", loaded.model)
        self.decoder, self.weight_bytes = type(computes).__name__, weight_bytes(computes)
        self.stored_kind = stored_kind(computes)
        # What the process takes beside weights and KVs; weights that lie in a mapped file are not all there yet.
        self.program_bytes = max(before, (resident_bytes() or 0) - self.weight_bytes)
        # Imports made while loading keep the frames that they passed, and their locals, until garbage is collected:
        # `close` would free nothing before.
        del loaded, computes, engine

    if not TYPE_CHECKING:  # where it would hide misspelt names

        def __getattr__(self, name: str) -> Any:
            """Refuse vLLM's methods that Winnow does not have, by what it has instead."""
            has = f": {vllm_names.METHODS[name].note}" if name in vllm_names.METHODS else ""
            raise AttributeError(f"LLM has no {name!r}{has}", name=name, obj=self)

    @property
    def conversation_defaults(self) -> Mapping[str, Any]:
        """Sampling parameters of questions that do not say, to commands and the server: what the model's makers
        recommend; where they say nothing of sampling 0.3, unless `generation_config` is "vllm"."""
        source = self.config.model.generation_config
        if source == "vllm" or any(name in self.sampling_defaults for name in _SAMPLED_BY):
            return self.sampling_defaults
        return {**_CONVERSATION, **self.sampling_defaults}

    @accept_arguments(vllm_names.CALL, InvalidRequestError)
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int = 0,
        tenant: str | None = None,
        session_id: str | None = None,
    ) -> list[RequestOutput]:
        """Answer prompts. Returns their outputs in the same order.

        A request that fails while it is computed, for example by logits that are not finite, does not affect others:
        its output has `finish_reason` "error" and the reason in `error`; `output.raise_for_error()` raises it.

        Args:
            prompts: one text or list of token ids, or a list of such.
            sampling_params: one for all prompts, or one each; None: `get_default_sampling_params()`.
            use_tqdm: show a progress bar on stderr where that is a terminal.
            priority: of all of them, as in `submit`.
            tenant: on whose account they run, as in `submit`.
            session_id: of the conversation that the one prompt continues. A turn begins with all that the turns before
                it have in common with its prompt, to the last token, also where a policy has compressed them.

        Raises:
            InvalidRequestError (or a subclass): a prompt or its parameters are invalid; the message names the prompt.
                Nothing has been computed.
        """
        self.driver.require_open()
        tokenized = [self.tokenize(prompt) for prompt in list_prompts(prompts)]
        options = {"priority": priority, "tenant": tenant, "session": _session(session_id, len(tokenized))}
        return self._answer(tokenized, sampling_params, use_tqdm, options)

    @accept_arguments(vllm_names.CALL, InvalidRequestError)
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int = 0,
        tenant: str | None = None,
        session_id: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of them, with the model's chat template; otherwise as `generate`.

        Args:
            add_generation_prompt: see `TemplateOptions`.
            continue_final_message: see there.
            tools: see there.
            chat_template: its `template`.
            chat_template_kwargs: its `variables`.
        """
        self.driver.require_open()
        variables = chat_template_kwargs or {}
        template = TemplateOptions(
            tools or (), add_generation_prompt, continue_final_message, variables, chat_template
        )
        tokenized = [self.tokenize_chat(each, template, tenant) for each in list_conversations(messages)]
        options = {"priority": priority, "tenant": tenant, "session": _session(session_id, len(tokenized))}
        return self._answer(tokenized, sampling_params, use_tqdm, options)

    def session(self, session_id: str, *, tenant: str | None = None) -> "ChatSession":
        """Return a conversation that earlier calls with `session_id` have begun, to take tokens out of it."""
        return ChatSession(self, session_id, tenant)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        tenant: str | None = None,
    ) -> Iterator[RequestOutput]:
        """Answer one prompt, yielding the output so far after every token. Raises as `generate`."""
        self.driver.require_open()
        return self._stream(self.tokenize(prompt), sampling_params, priority=priority, tenant=tenant)

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        tenant: str | None = None,
        session_id: str | None = None,
    ) -> Iterator[RequestOutput]:
        """Do as `stream` does, for a conversation."""
        self.driver.require_open()
        prompt = self.tokenize_chat(messages, tenant=tenant)
        session = _session(session_id)
        return self._stream(prompt, sampling_params, priority=priority, tenant=tenant, session=session)

    def inspect(
        self, prompt: Prompt | Sequence[Message], sampling_params: SamplingParams | None = None
    ) -> Any:
        """Answer a prompt; return which tokens survived eviction, by layer and head (`winnow_inspect.inspect_prompt`).
        Raises ConfigError: winnow-inspect is not installed."""
        self.driver.require_open()
        params = sampling_params or self.get_default_sampling_params()
        return require_plugin("inspect", "LLM.inspect")(self, self._prompts, prompt, params)

    def save_prefix(
        self,
        prompt: Prompt,
        directory: str | Path,
        sampling_params: SamplingParams | None = None,
        *,
        tenant: str | None = None,
    ) -> Path:
        """Compress a document as if questions followed it, and write what is left to a directory.

        Another `LLM` of the same model with `prefix_store=directory` starts from there wherever a prompt begins with
        these tokens, under the same policy and amount. It then runs as with `context_tokens` their number.

        Args:
            sampling_params: policy, amount and what is protected; the rest does not matter. None: the
                engine's.
            tenant: whose requests alone may find it; None: those of no tenant.

        Returns:
            The path of the file, whose name follows from model, tokens and policy.

        Raises:
            InvalidRequestError: as `generate`.
            PrefixStoreError: the policy leaves everything, or what it leaves cannot be saved; or the disk refuses the
                file, of which nothing is left then.
        """
        self.driver.require_open()
        prompt_tokens = self.tokenize(prompt)
        token_ids = prompt_tokens.token_ids
        asked = sampling_params or SamplingParams()
        named = ("eviction", "compression", "kv_budget", "protect")
        kept = {name: getattr(asked, name) for name in named}
        params = SamplingParams(temperature=0.0, seed=0, max_tokens=1, context_tokens=len(token_ids), **kept)
        # Some token must follow the document; what it is changes nothing.
        followed = prompt_tokens._replace(text=None, token_ids=[*token_ids, *token_ids[-1:]])
        request = self.new_request(followed, params, tenant=tenant, final_only=True)
        [output] = self.driver.finish([request])
        output.raise_for_error()
        return self.driver.call(self._engine.save_prefix, request, Path(directory))

    def get_metrics(self) -> list[Metric]:
        """Return counters and gauges under vLLM's names; `stats` has all."""
        return read_metrics(self.stats(), str(self.config.model.model or "demo"))

    def implementation(self) -> dict[str, str]:
        """Return what computes and how numbers are stored, by the part of a step: layers, dtype, attention, KVs."""
        dtype = str(self.dtype).removeprefix("torch.")
        parts = {"layers": self.decoder, "dtype": dtype, "device": str(self.device)}
        return parts | self._engine.implementation()

    def close(self) -> None:
        """Free model and cache. Requests in progress are lost; threads that wait for them get a `ClosedError`."""
        self._team_wait.stop()
        self.driver.close()
        release_cached(self.device)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(
        self,
        prompts: list[TokenizedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        options: Mapping[str, Any],
    ) -> list[RequestOutput]:
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params or self.get_default_sampling_params()] * len(prompts)
        if len(sampling_params) != len(prompts):
            raise InvalidRequestError(
                f"sampling_params must be one, or one for each of the {len(prompts)} prompts, "
                f"got {len(sampling_params)}"
            )
        requests = [
            self.new_request(prompt, params, final_only=True, **options)
            for prompt, params in zip(prompts, sampling_params, strict=True)
        ]
        if not (use_tqdm and is_shown()):
            outputs = self.driver.finish(requests, "prompts")
        else:
            with progress_bar(len(requests), lambda: self.stats().generated_tokens) as show:
                outputs = self.driver.finish(requests, "prompts", show)
        if len(requests) > 1:
            with suppress(ClosedError):
                self.check_answers()
        return outputs

    def _stream(
        self, prompt: TokenizedPrompt, params: SamplingParams | None, **options: Any
    ) -> Iterator[RequestOutput]:
        box = Mailbox()
        request = self.new_request(prompt, params or self.get_default_sampling_params(), **options)
        self.driver.submit([request], box)
        return OutputStream(self.driver, box)


class ChatSession:
    """A conversation of an `LLM` by its `session_id`, out of whose middle tokens may leave.

    The KVs of what leaves are freed in all heads, and those of what stands behind it are kept at their new positions,
    as under reuse="anywhere": approximate, but for the share that is computed again. The next turn begins with what is
    left if its prompt does. Methods raise InvalidRequestError: there is no such session, or it shows pictures.
    """

    def __init__(self, llm: LLM, session_id: str, tenant: str | None) -> None:
        self._llm, self._name, self._tenant = llm, session_id, tenant

    @property
    def token_ids(self) -> list[int]:
        """All tokens that its turns have computed."""
        found = self._llm.driver.call(
            lambda: self._llm.driver.engine.memory.sessions.find(self._name, self._tenant)
        )
        if found is None or found.images:
            raise InvalidRequestError(
                f"session_id must be of a conversation of tokens that is remembered, got {self._name!r:.80}"
            )
        return found.token_ids.tolist()

    def drop(self, span: tuple[int, int]) -> RequestOutput:
        """Let tokens start..end - 1 leave. See `replace`."""
        return self.replace(span, [])

    def replace(self, span: tuple[int, int], text: str | list[int]) -> RequestOutput:
        """Put a text or tokens in place of tokens start..end - 1. Returns how many tokens behind them were reused, and
        repaired, as the counts of an output whose answer is of no use. Raises InvalidRequestError: the span is empty or
        reaches beyond `token_ids`, or all leave."""
        token_ids, (start, end) = self.token_ids, span
        if isinstance(text, str):
            text = self._llm.tokenize(text, add_special_tokens=False).token_ids if text else []
        left = token_ids[:start] + text + token_ids[end:]
        if not (0 <= start < end <= len(token_ids) and left):
            raise InvalidRequestError(
                f"span must be some of the session's {len(token_ids)} tokens, got {span!r:.80}"
            )
        params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False, reuse=ANYWHERE)
        [output] = self._llm.generate(
            [left], params, use_tqdm=False, session_id=self._name, tenant=self._tenant
        )
        output.raise_for_error()
        return output


def _session(name: str | None, num_prompts: int = 1) -> SessionRequest | None:
    if name is not None and num_prompts != 1:
        raise InvalidRequestError(f"session_id goes with one prompt, got {name!r:.80} with {num_prompts}")
    return None if name is None else SessionRequest(name)


def _open_engine(config: EngineConfig) -> tuple[PlainModel, Engine, EngineConfig]:
    # No model is kept in a local; see `LLM.__init__`.
    name = config.model.engine.partition(":")[0]
    if name != PAGED:
        found = entry_points(group="winnow.engines", name=name)
        if not found:
            raise ConfigError(
                f"engine must be {PAGED} or one of an installed package, got {config.model.engine!r} (padded is part "
                f"of winnow-lab: {GET_THE_LAB})"
            )
        opened: tuple[PlainModel, Engine, EngineConfig] = found[name].load()(config, time.monotonic)
        return opened
    policy = resolve_policy(config.eviction).policy
    team = open_team(config)
    try:
        return _with_engine(load_ranks(config, team), config, policy, team)
    except BaseException:
        if team is not None:
            team.close()
        raise


def _with_engine(
    loaded: LoadedModel, config: EngineConfig, policy: EvictionPolicy, team: RankTeam | None
) -> tuple[PlainModel, Engine, EngineConfig]:
    config = with_fewer_bytes(with_device_memory(config, loaded), loaded)
    return loaded, build_engine(loaded, config, policy, time.monotonic, team), config
