"""Drafts as `speculative_config` says: what they are loaded from, their part of the memory, and those of assistants."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch

from winnow.cache import CacheLayout
from winnow.config import CacheConfig, EngineConfig, EvictionConfig, ModelConfig
from winnow.config.scheduler import SpeculativeConfig
from winnow.engine.requests.request import Sequence
from winnow.engine.scheduling.drafts import DraftSource
from winnow.errors import ConfigError
from winnow.executor.draft_model import DraftModel, HeadDrafts, without_form
from winnow.executor.hidden_states import HiddenStates, hidden_size
from winnow.executor.torch_executor import TorchExecutor
from winnow.models import LoadedModel, load_model
from winnow.models.load.damage import read_object
from winnow.models.load.hub import locate_model
from winnow.models.load.memory import weight_bytes
from winnow.sampling import Sampler

if TYPE_CHECKING:
    from winnow.models.load.drafts import Assistant, DraftHeads


class AssistantDrafts:
    """Source of what an assistant would sample, with the randomness of the target at the same positions. It stays at
    the last token's position, and continues from its own hidden state."""

    reads_cache = True
    price = 0.0  # a few small layers

    def __init__(
        self, assistant: "Assistant", target: LoadedModel, executor: TorchExecutor, hidden: HiddenStates
    ) -> None:
        self._assistant, self._target, self._executor, self._hidden = assistant, target, executor, hidden
        self.used_bytes = hidden.total_bytes
        seqs = executor.size.max_num_seqs
        self._sampler = Sampler(seqs, target.vocab_size, target.device, target.eos_token_ids)

    def rooms(self, most: Mapping[Sequence, int], context: int) -> Mapping[Sequence, int]:
        return {each: count for each, count in most.items() if self._hidden.holds(each)}

    @torch.inference_mode()
    def propose(self, counts: Mapping[Sequence, int]) -> dict[Sequence, list[int]]:
        if not counts:
            return {}
        sequences = list(counts)
        slots = [each.kv.running_slot for each in sequences]
        positions = [each.num_tokens - 1 for each in sequences]
        step, position = self._executor.read_step(slots, positions)
        places = zip(slots, positions, strict=True)
        hidden = torch.cat([self._hidden.read(slot, end - 1, end) for slot, end in places])
        tokens = [each.token_ids[-1] for each in sequences]
        for slot, each in zip(slots, sequences, strict=True):
            prompt, answer = each.token_ids[: each.prompt_len], each.token_ids[each.prompt_len :]
            self._sampler.add(slot, without_form(each), prompt, answer, each.index)
        try:
            found: list[list[int]] = [[] for _ in sequences]
            for _ in range(max(counts.values())):
                given = torch.tensor(tokens, device=self._target.device)
                logits, hidden = self._assistant.compute(given, hidden, position, step)
                tokens = self._sampler.sample(logits, slots).token_ids
                if not all(0 <= token < self._target.vocab_size for token in tokens):
                    break
                for drafts, token in zip(found, tokens, strict=True):
                    drafts.append(token)
        finally:
            for slot in slots:
                self._sampler.remove(slot)
        return {each: drafts[: counts[each]] for each, drafts in zip(sequences, found, strict=True)}


# Tokens of a text by which the memory of two caches is compared.
_COMPARED = 1024
# Hidden states of a sequence that are kept, at most and in any case, and the part of the memory that they take at most.
_MOST_STATES, _LEAST_STATES, _STATES_PART = 256, 8, 8


def needs_hidden_states(config: EngineConfig) -> bool:
    """Return whether drafts are made from the model's hidden states: by its own heads, or by an assistant."""
    options: SpeculativeConfig | None = config.scheduler.speculative_config
    return options is not None and (options.method == "mtp" or _is_assistant(config, options))


def open_drafts(
    config: EngineConfig, target: LoadedModel, layout: CacheLayout
) -> tuple[EngineConfig, Callable[[TorchExecutor], DraftSource] | None]:
    """Load what drafts come from. Returns the target's configuration, less the memory that drafts take, and what opens
    their source beside the target's executor; None: they come from the prompt, or there are none.

    Raises:
        ConfigError: the model's vocabulary is another, it cannot take KVs back, or there are no heads.
    """
    options: SpeculativeConfig | None = config.scheduler.speculative_config
    if options is not None and layout.state_bytes:  # states before drafts, which may come back
        config = _less(config, config.scheduler.max_num_seqs * layout.state_bytes)
    if options is None or options.method == "ngram":
        return config, None
    if config.model.tensor_parallel_size > 1:
        raise ConfigError(f"speculative_config: method {options.method} needs tensor_parallel_size 1")
    seqs = config.scheduler.max_num_seqs
    if not needs_hidden_states(config):
        model = _load_draft_model(config, options, target)
        own, of_draft = _split_memory(config, layout, model)
        return own, lambda _: DraftModel(model, of_draft, _price(target, model.forward_model))
    # They import transformers' classes.
    if options.model is None:
        from winnow.models.load.drafts import load_heads

        heads = load_heads(config.model, target)
        parts = cast("DraftHeads", heads.model)
        price = _price(target, parts.layers, parts.shared_head)
        window, nbytes = _window(config, target)
        own, of_draft = _split_memory(config, layout, heads, nbytes)
        return own, lambda executor: HeadDrafts(
            heads, of_draft, price, executor.keep_hidden(HiddenStates(target, seqs, window))
        )
    from winnow.models.load.drafts import Assistant

    if not _is_assistant(config, options):
        raise ConfigError(
            f"speculative_config: model must be an assistant with method mtp, got {options.model}: with method "
            "draft_model any model of the same vocabulary can draft"
        )
    assistant = Assistant(locate_model(_config_of(config, options)), target)
    window = 2 + options.num_speculative_tokens  # all that a step may take back, and one
    nbytes = window * seqs * hidden_size(target) * target.dtype.itemsize
    return _less(config, nbytes), lambda executor: AssistantDrafts(
        assistant, target, executor, executor.keep_hidden(HiddenStates(target, seqs, window))
    )


def _less(config: EngineConfig, nbytes: int) -> EngineConfig:
    return replace(config, cache=replace(config.cache, kv_memory=config.cache.kv_memory - nbytes))


def _price(target: LoadedModel, *parts: Any) -> float:
    return sum(map(weight_bytes, parts)) / max(weight_bytes(cast(Any, target.forward_model)), 1)


def _config_of(config: EngineConfig, options: SpeculativeConfig) -> ModelConfig:
    return replace(config.model, model=options.model, revision=None, tokenizer=None, max_model_len=None)


def _is_assistant(config: EngineConfig, options: SpeculativeConfig) -> bool:
    if options.model is None:
        return False
    file = locate_model(_config_of(config, options)) / "config.json"
    # A GGUF file has none, and is no assistant.
    return file.is_file() and str(read_object(file).get("model_type")).endswith("assistant")


def _window(config: EngineConfig, target: LoadedModel) -> tuple[int, int]:
    """Return how many hidden states of each sequence are kept, and the bytes of all."""
    token = config.scheduler.max_num_seqs * hidden_size(target) * target.dtype.itemsize
    window = max(min(_MOST_STATES, config.cache.kv_memory // (_STATES_PART * token)), _LEAST_STATES)
    return window, window * token


def _load_draft_model(config: EngineConfig, options: SpeculativeConfig, target: LoadedModel) -> LoadedModel:
    loaded = load_model(_config_of(config, options))
    if loaded.geometry.states:
        raise ConfigError(
            f"speculative_config: model {options.model} has layers that keep recurrent states, which cannot take "
            "tokens back"
        )
    _check_vocabulary(loaded, target)
    return loaded


def _check_vocabulary(draft: LoadedModel, target: LoadedModel) -> None:
    if draft.tokenizer is None or target.tokenizer is None:
        if draft.vocab_size != target.vocab_size:
            raise ConfigError(
                f"speculative_config: model has {draft.vocab_size} tokens, and the model that answers "
                f"{target.vocab_size}: they must be the same"
            )
        return
    own, others = draft.tokenizer.get_vocab(), target.tokenizer.get_vocab()
    for token in sorted(set(own) | set(others), key=lambda each: (others.get(each, -1), each)):
        if own.get(token) != others.get(token):
            raise ConfigError(
                f"speculative_config: model must have the vocabulary of the model that answers: {token!r} is token "
                f"{own.get(token)} there, and {others.get(token)} here"
            )


def _split_memory(
    config: EngineConfig, target: CacheLayout, draft: LoadedModel, aside: int = 0
) -> tuple[EngineConfig, EngineConfig]:
    """Return the configurations of the target and of its draft model, which share kv_memory, less what is set `aside`,
    as a text takes it."""
    model = replace(config.model, weight_dtype="auto", weight_wide="none")
    cache = CacheConfig(block_size=config.cache.block_size, enable_prefix_caching=False)
    own = draft.kv_layout(cache, 1)
    needs = [each.device_bytes(each.by_kind(each.row_blocks_seen(_COMPARED))) for each in (target, own)]
    whole = config.cache.kv_memory - aside
    if draft.device.type == "cuda" and config.cache.gpu_memory_utilization is not None:
        # It was what the GPU had left beside the target.
        whole -= sum(each.nbytes for each in cast(Any, draft.model).parameters())
    memory = whole * needs[1] // sum(needs)
    scheduler = replace(config.scheduler, speculative_config=None)
    of_draft = EngineConfig(model, replace(cache, kv_memory=memory), scheduler, EvictionConfig())
    return replace(config, cache=replace(config.cache, kv_memory=whole - memory)), of_draft
