"""Drafts as `speculative_config` says: what they are loaded from, and their part of the memory."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from winnow.cache import CacheLayout
from winnow.config import CacheConfig, EngineConfig, EvictionConfig, ModelConfig
from winnow.config.scheduler import SpeculativeConfig
from winnow.engine.scheduling.drafts import DraftSource
from winnow.errors import ConfigError
from winnow.executor.draft_model import DraftModel
from winnow.executor.torch_executor import TorchExecutor
from winnow.models import LoadedModel, load_model
from winnow.models.load.hub import locate_model
from winnow.models.model.damage import read_object
from winnow.models.model.memory import weight_bytes
from winnow.process.extras import require_plugin

# Tokens of a text by which the memory of two caches is compared.
_COMPARED = 1024


def needs_hidden_states(config: EngineConfig) -> bool:
    """Return whether drafts are made from the model's hidden states: by its own heads, or by an assistant."""
    options: SpeculativeConfig | None = config.scheduler.speculative_config
    return options is not None and (options.method == "mtp" or is_assistant(config, options))


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
        config = less(config, config.scheduler.max_num_seqs * layout.state_bytes)
    if options is None or options.method == "ngram":
        return config, None
    if config.model.tensor_parallel_size > 1:
        raise ConfigError(f"speculative_config: method {options.method} needs tensor_parallel_size 1")
    if not needs_hidden_states(config):
        model = _load_draft_model(config, options, target)
        own, of_draft = split_memory(config, layout, model)
        return own, lambda _: DraftModel(model, of_draft, price_of(target, model.forward_model))
    opened: tuple[EngineConfig, Callable[[TorchExecutor], DraftSource]]
    opened = require_plugin("drafts", "speculative_config: method mtp")(config, target, layout)
    return opened


def less(config: EngineConfig, nbytes: int) -> EngineConfig:
    return replace(config, cache=replace(config.cache, kv_memory=config.cache.kv_memory - nbytes))


def price_of(target: LoadedModel, *parts: Any) -> float:
    return sum(map(weight_bytes, parts)) / max(weight_bytes(cast(Any, target.forward_model)), 1)


def config_of(config: EngineConfig, options: SpeculativeConfig) -> ModelConfig:
    return replace(config.model, model=options.model, revision=None, tokenizer=None, max_model_len=None)


def is_assistant(config: EngineConfig, options: SpeculativeConfig) -> bool:
    if options.model is None:
        return False
    file = locate_model(config_of(config, options)) / "config.json"
    # A GGUF file has none, and is no assistant.
    return file.is_file() and str(read_object(file).get("model_type")).endswith("assistant")


def _load_draft_model(config: EngineConfig, options: SpeculativeConfig, target: LoadedModel) -> LoadedModel:
    loaded = load_model(config_of(config, options))
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


def split_memory(
    config: EngineConfig, target: CacheLayout, draft: LoadedModel, aside: int = 0
) -> tuple[EngineConfig, EngineConfig]:
    """Return the configurations of the target and of its draft model, which share kv_memory, less what is set `aside`,
    as a text takes it."""
    model = replace(config.model, weight_dtype="auto")
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
