"""KV memory where its size was left out: what a GPU has left beside the model."""

import logging
from dataclasses import replace
from typing import Any, cast

import torch

from winnow.cache.memory import release_cached
from winnow.config import EngineConfig
from winnow.config.engine import GPU_PART
from winnow.errors import ConfigError
from winnow.executor.step_graphs import MOST_CHUNK_TOKENS
from winnow.models import PlainModel
from winnow.values.units import format_bytes

_log = logging.getLogger("winnow")
# Of activations that live at the same time within a layer, and float32 copies of logits while they are sampled from.
_LIVE_ACTIVATIONS = 4
_LOGITS_COPIES = 3


def with_device_memory(config: EngineConfig, loaded: PlainModel) -> EngineConfig:
    """Return the configuration with the KV memory that `gpu_memory_utilization` leaves on the model's GPU.

    What is in use now counts, by this process and others, and a step's activations as far as they are foreseen.

    Raises:
        ConfigError: nothing is left; names total, use and what a step needs.
    """
    part = config.cache.gpu_memory_utilization
    if loaded.device.type != "cuda" or part is None:
        if part not in (None, GPU_PART):
            _log.warning(
                "winnow: gpu_memory_utilization=%g has no effect on a CPU, where kv_memory is %s",
                part,
                format_bytes(config.cache.kv_memory),
            )
        return config
    release_cached(loaded.device)
    free, total = torch.cuda.mem_get_info(loaded.device)
    step = _step_bytes(config, loaded)
    room = int(total * part) - (total - free) - step
    if room <= 0:
        raise ConfigError(
            f"gpu_memory_utilization {part:g} of {format_bytes(total)} leaves no memory for KVs: "
            f"{format_bytes(total - free)} are in use with the model, and a step of max_num_batched_tokens="
            f"{config.scheduler.max_num_batched_tokens} may need {format_bytes(step)}"
        )
    ranks = config.model.tensor_parallel_size  # one on each GPU
    return replace(config, cache=replace(config.cache, kv_memory=room * ranks))


def _step_bytes(config: EngineConfig, loaded: PlainModel) -> int:
    """Return an upper estimate of a step's activations and logits."""
    scheduler, sizes = config.scheduler, cast(Any, loaded.model).config.get_text_config()
    widest = max(getattr(sizes, name, None) or 0 for name in ("hidden_size", "intermediate_size"))
    activations = scheduler.max_num_batched_tokens * widest * _LIVE_ACTIVATIONS * loaded.dtype.itemsize
    # CUDA graphs share a pool of activations, and one buffer of logits.
    tokens = scheduler.max_num_seqs + MOST_CHUNK_TOKENS
    graphs = tokens * widest * _LIVE_ACTIVATIONS + scheduler.max_num_seqs * loaded.vocab_size
    return (
        activations
        + graphs * loaded.dtype.itemsize
        + scheduler.max_num_seqs * loaded.vocab_size * _LOGITS_COPIES * 4
    )
