"""Admission of requests: nothing that passes these checks can fail for lack of room later."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product

from winnow.config import FULL, EngineConfig
from winnow.engine.executor import ServedModel
from winnow.engine.memory.memory import Memory
from winnow.engine.requests.request_limits import answer_limit, check_tokens
from winnow.engine.scheduling.accounts import TenantAccounts
from winnow.errors import CapacityError, ConfigError, ContextLengthError, InvalidRequestError
from winnow.eviction import (
    SEEN,
    SEEN_PD,
    SENTENCE,
    UNKNOWN_MODEL,
    EvictionPolicy,
    Instruction,
    ModelTraits,
    Replay,
    ReplayPass,
    ResolvedPolicy,
    SequenceEviction,
    replay_passes,
    resolve_policy,
)
from winnow.sampling import SamplingParams
from winnow.values.checks import require
from winnow.values.eviction_request import AUTO, OWN_AMOUNT
from winnow.values.images import PromptImage, cut_run, prefix_ids
from winnow.values.tenants import TenantName
from winnow.values.units import format_bytes


@dataclass(frozen=True)
class Admitted:
    """Terms on which a request was admitted."""

    max_tokens: int
    evictions: tuple[SequenceEviction | None, ...]
    """One for all samples, or one each; None: nothing will ever be evicted."""
    policy_name: str | None
    """None: no policy was asked for."""
    context_tokens: int | None = None
    """Tokens of a saved document, where the prompt begins with one: the policy acts on those alone."""
    reserved_tokens: int | None = None
    """Tokens for which each answer holds blocks from its start; None: it takes them as it grows."""
    replay_replaced: bool = False
    """A replay that was asked for does not fit, or cannot act on pictures: `policy_name` took its place."""


@contextmanager
def _requests_own() -> Iterator[None]:
    """Raise what is a setting of the engine elsewhere as the request's own."""
    try:
        yield
    except ConfigError as error:
        raise InvalidRequestError(str(error)) from None


class Admission:
    """Checks requests against model and cache. `instruct` returns the words of a replay as tokens, for a prompt.

    Raises ConfigError: the KV memory does not have the blocks that one request reserves.
    """

    def __init__(
        self,
        memory: Memory,
        accounts: TenantAccounts,
        config: EngineConfig,
        model: ServedModel,
        instruct: Callable[[Replay, list[int]], Instruction],
    ) -> None:
        cache, ledger, longest = config.cache, memory.ledger, model.max_model_len
        blocks, there = memory.layout.blocks_for(longest), memory.size.num_blocks
        if cache.kv_reservation == "max" and blocks > there:
            raise ConfigError(
                f"kv_reservation=max holds {format_bytes(ledger.bytes_of(blocks))} of blocks for each request of up "
                f"to {longest} tokens (max_model_len), and kv_memory {format_bytes(cache.kv_memory)} has "
                f"{format_bytes(ledger.bytes_of(there))}"
            )
        self._layout, self._saved, self._accounts = memory.layout, memory.files.documents, accounts
        self._config, self._model, self._max_model_len = config, model, longest
        self._instruct = instruct

    @_requests_own()
    def admit(
        self,
        token_ids: list[int],
        params: SamplingParams,
        tenant: TenantName = None,
        *,
        cut_to_memory: bool = False,
        images: Sequence[PromptImage] = (),
    ) -> Admitted:
        """Check a request.

        `params.max_tokens` is cut to what the context leaves, and with `cut_to_memory` to what the KV memory holds.
        Without one, the answer may fill context and KV memory.

        Raises:
            InvalidRequestError: an empty prompt, token ids that the model does not have, no such policy, or one that
                does not go with the prompt, its pictures or the engine.
            ContextLengthError: the prompt leaves no room for an answer, or not for the tokens that it must begin with.
            CapacityError: prompt and answer could not fit into the KV memory, or what the tenant may hold of it, even
                alone.
        """
        check_tokens(token_ids, params, self._model.vocab_size)
        asked = self._resolve(params)
        replaced = False
        if images and (why := _image_refusal(asked[0].policy, images)) is not None:
            if params.eviction is not None:
                raise InvalidRequestError(f"eviction: {why}")
            asked = next(
                each for each in self._substitutes(asked) if _image_refusal(each[0].policy, images) is None
            )
            replaced = True
        policy = asked[0].policy
        prompt_len = len(token_ids)
        max_tokens = answer_limit(prompt_len, params, self._max_model_len)
        context_len, refuse = params.context_tokens, InvalidRequestError
        most = f"at most the prompt's {prompt_len} tokens"
        require((context_len or 0) <= prompt_len, "context_tokens", most, context_len, refuse)
        for field, of, limit in (
            ("template_tail", "the prompt's", prompt_len),
            ("answer_prefix", "template_tail's", params.template_tail or 0),
        ):
            given = getattr(params, field)
            require((given or 0) <= limit, field, f"at most {of} {limit} tokens", given, refuse)
        found = prefix_ids(token_ids, images)
        uncut = tuple(run for image in images for run in image.two_way)
        if context_len is not None and (run := cut_run(uncut, context_len)) is not None:
            raise InvalidRequestError(
                f"context_tokens must not cut the picture of tokens {run[0]}..{run[1]}, which see each other in both "
                f"directions, got {context_len}"
            )
        saved = self._saved_document(found, params, tenant, prompt_len + max_tokens - 1, uncut)
        if saved is not None:
            params = replace(params, context_tokens=saved)
            asked = self._resolve(params)
        refused: CapacityError | ContextLengthError | None = None
        whole = params.max_tokens is not None
        # Where a replay does not fit behind its context, a window on the question takes its place, and then every KV,
        # which needs less room than a replay.
        alternatives = [asked]
        if policy.score.replay is not None:
            alternatives += self._substitutes(asked)
        for all_tokens, each in product((True, False) if whole and cut_to_memory else (whole,), alternatives):
            try:
                evictions, left = self._grant(each, token_ids, params, max_tokens, tenant, all_tokens, uncut)
                break
            except (CapacityError, ContextLengthError) as error:
                refused = refused or error
        else:
            assert refused is not None, "what was asked for is the first alternative"
            raise refused
        # The last token of an answer is never computed, so it needs no KV.
        name = None if policy.when.never else each[0].name
        granted = min(max_tokens, left)
        reserved = {"prompt": prompt_len + granted - 1, "max": self._max_model_len}
        return Admitted(
            granted,
            tuple(evictions),
            name,
            saved,
            reserved.get(self._config.cache.kv_reservation),
            replay_replaced=replaced or each is not asked,
        )

    def _resolve(self, params: SamplingParams) -> list[ResolvedPolicy]:
        return requested_eviction(self._config, params, self._model.traits)

    def _substitutes(self, asked: list[ResolvedPolicy]) -> Iterator[list[ResolvedPolicy]]:
        for name in (SEEN, SENTENCE, FULL):
            [other] = self._resolve(SamplingParams(eviction=name))
            if other.policy.score.num_accumulators <= self._layout.num_accumulators:
                yield [replace(each, name=name, policy=other.policy) for each in asked]

    def _grant(
        self,
        asked: list[ResolvedPolicy],
        token_ids: list[int],
        params: SamplingParams,
        max_tokens: int,
        tenant: TenantName,
        all_tokens: bool,
        uncut: tuple[tuple[int, int], ...],
    ) -> tuple[list[SequenceEviction | None], int]:
        """Bind policies to a request. Returns one for all samples or one each, and most tokens of an answer."""
        prompt_len, layout, there = len(token_ids), self._layout, self._accounts.limit(tenant)
        total = prompt_len + max_tokens - 1
        evictions = self._bind(asked, token_ids, params, total, uncut)
        for eviction in evictions:
            if eviction is not None:
                self._check_policy(eviction)
        largest = max(evictions, key=lambda each: self._blocks(each, total))
        totals = range(prompt_len, self._max_model_len)
        left = bisect_left(totals, True, key=lambda num_tokens: self._blocks(largest, num_tokens) > there)
        if left < max(params.num_forced, 1) or (all_tokens and max_tokens > left):
            peak, memory = total, f"kv_memory {format_bytes(self._config.cache.kv_memory)}"
            if (limit := self._accounts.of(tenant).limit) < 1:
                memory = f"tenant {tenant}'s limit {limit:g} of {memory}"
            if largest is not None or layout.has_windows:
                peak = self._blocks(largest, total) * layout.block_size // layout.rows_per_seq
            within = any(each is not None and each.policy.when.in_prefill for each in evictions)
            raise CapacityError(
                f"prompt of {prompt_len} tokens with max_tokens {max_tokens} needs room for {peak} KVs a row, "
                f"{memory} holds {layout.block_size * (there // layout.rows_per_seq)}"
                + (
                    ""
                    if within
                    else f"; a policy with rounds within the prompt, such as {SEEN_PD}, needs less"
                )
            )
        return evictions, left

    def _bind(
        self,
        asked: list[ResolvedPolicy],
        token_ids: list[int],
        params: SamplingParams,
        total: int,
        uncut: tuple[tuple[int, int], ...],
    ) -> list[SequenceEviction | None]:
        # Samples with different budgets share the computing of the prompt, so each must be watched from its start.
        alone, length = len(asked) == 1, len(token_ids)
        bound = [each.for_prompt(length, total, params, may_idle=alone) for each in asked]
        return self._with_replay([each and replace(each, uncut=uncut) for each in bound], token_ids)

    def _saved_document(
        self,
        token_ids: list[int],
        params: SamplingParams,
        tenant: TenantName,
        total: int,
        uncut: tuple[tuple[int, int], ...],
    ) -> int | None:
        """Return tokens of the longest saved document that the request can start from; None: of none. A request that
        names `context_tokens` starts from a document of that many, or from none."""
        for document in self._saved.documents(token_ids, tenant):
            if params.context_tokens not in (None, document.num_tokens):
                self._saved.note_reason(
                    f"requests give context_tokens {params.context_tokens}, and it has {document.num_tokens}"
                )
                continue
            if params.prompt_logprobs is not None:
                self._saved.note_reason("requests want prompt_logprobs, for which all of it is computed")
                continue
            later = replace(params, context_tokens=document.num_tokens)
            try:
                evictions = self._bind(self._resolve(later), token_ids, later, total, uncut)
            except (ConfigError, InvalidRequestError) as error:
                self._saved.note_reason(str(error))
                continue
            if len(evictions) == 1 and self._saved.has(document, token_ids, tenant, evictions[0]):
                return document.num_tokens
        return None

    def _with_replay(
        self, evictions: list[SequenceEviction | None], token_ids: list[int]
    ) -> list[SequenceEviction | None]:
        """Say what is repeated before their rounds, where the score wants that and the context is cut at all."""

        @cache
        def passes(replay: Replay, context_len: int, sinks: int) -> tuple[ReplayPass, ...]:
            words = self._instruct(replay, token_ids)
            return replay_passes(replay, token_ids[:context_len], words, sinks, self._max_model_len)

        return [
            each
            if each is None or (replay := each.policy.score.replay) is None or each.context_len <= each.target
            else replace(each, passes=passes(replay, each.context_len, each.policy.keep.sinks))
            for each in evictions
        ]

    def _check_policy(self, eviction: SequenceEviction) -> None:
        policy, available = eviction.policy, self._layout.num_accumulators
        if policy.score.num_accumulators > available:
            raise InvalidRequestError(
                f"{type(policy.score).__name__} needs {policy.score.num_accumulators} accumulators per KV, and the "
                f"engine was opened with {available}: set num_accumulators"
            )
        scheduler, window = self._config.scheduler, policy.score.window
        # Whole prompts overdraw a step's budget.
        if window is not None and scheduler.prefill_chunk is not None:
            for name in ("prefill_chunk", "max_num_batched_tokens"):
                most = getattr(scheduler, name)
                if min(window, eviction.context_len) > most:
                    raise InvalidRequestError(
                        f"{type(policy.score).__name__} observes {window} queries in one step, so {name} must be at "
                        f"least {window}, got {most}"
                    )

    def _blocks(self, eviction: SequenceEviction | None, num_tokens: int) -> int:
        """Return the most blocks that a sequence holds while its first `num_tokens` tokens are computed."""
        layout = self._layout
        most = layout.blocks_seen(num_tokens)
        if eviction is not None:
            most = eviction.peak_blocks(layout, num_tokens)
        if self._config.cache.kv_reservation == "on-demand":
            return most
        return max(most, layout.blocks_for(num_tokens))


def requested_eviction(
    engine: EngineConfig, params: SamplingParams, traits: ModelTraits = UNKNOWN_MODEL
) -> list[ResolvedPolicy]:
    """Resolve the policies of a request: the engine's options, overridden by its own. One for all samples, or one each.

    Raises:
        ConfigError: there is no such policy, or an amount is out of range or given for a policy that takes none.
        InvalidRequestError: several amounts, for a policy whose samples share its rounds.
    """
    config, codec_factor = engine.eviction, engine.codec_factor if params.eviction is None else 1.0
    resolve = partial(resolve_policy, traits=traits, asked_later=params.context_tokens is not None)
    if params.eviction is not None:
        own = resolve(config.for_policy(params.eviction, pools=False, amount=OWN_AMOUNT))
        # What the engine was opened with means nothing to a policy that takes none of it.
        amount = None if own.takes_amount else OWN_AMOUNT
        config = config.for_policy(params.eviction, pools=own.policy.pool is not None, amount=amount)
    if params.compression == AUTO:
        return [resolve(replace(config, compression=AUTO, kv_budget=None))]
    if not params.amounts:
        return [resolve(config)]
    asked = [resolve(replace(config, **vars(each.over(codec_factor)))) for each in params.amounts]
    if len(asked) > 1 and asked[0].policy.when.in_prefill:
        name = "compression" if params.kv_budget is None else "kv_budget"
        raise InvalidRequestError(
            f"{name} must be one number for a policy with rounds within the prompt, which samples share; "
            f"got {getattr(params, name)}"
        )
    return asked


def _image_refusal(policy: EvictionPolicy, images: Sequence[PromptImage]) -> str | None:
    """Return why a policy cannot act on KVs of pictures; None: it can."""
    score, name = policy.score, type(policy.score).__name__
    if score.replay is not None:
        return f"{name} repeats a context as token ids, which does not repeat its pictures"
    if images[0].positions is not None and score.needs.rotation:
        return (
            f"{name} compares keys before rotation, and does not know positions of three axes (M-RoPE), by which "
            "pictures turn keys of this model"
        )
    return None
