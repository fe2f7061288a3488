"""Bytes that hold K whole sequences of a model."""

from winnow.cache import CacheSize
from winnow.config import EngineConfig
from winnow.errors import ConfigError
from winnow.models import load_model
from winnow.values.checks import require

# What the engine keeps for each KV while nothing is evicted.
_NUM_ACCUMULATORS = 1


def kv_memory_for(config: EngineConfig, sequences: int, num_kvs: int) -> int:
    """Return the least `kv_memory` in which `sequences` sequences of `num_kvs` KVs a row lie side by side, none
    evicted.

    It is the same for every eviction policy, so that all can be compared within the same bytes. The model is loaded
    to be asked for its shape.

    Raises:
        ConfigError: KVs cannot be stored as the configuration says; the sequences are more than `max_num_seqs` lets
            run, or longer than the model's limit.
        UnsupportedModelError: the model cannot be loaded.
    """
    limit = config.scheduler.max_num_seqs
    require(1 <= sequences <= limit, "kv_seqs", f"between 1 and max_num_seqs ({limit})", sequences)
    model = load_model(config.model)
    if num_kvs > model.max_model_len:
        raise ConfigError(
            f"prompt_tokens + new_tokens must be at most the model's {model.max_model_len}, got {num_kvs}"
        )
    layout = model.kv_layout(config.cache, _NUM_ACCUMULATORS)
    blocks = sequences * layout.blocks_for(num_kvs)
    size = CacheSize.of_blocks(layout, blocks, config.scheduler.max_num_seqs, model.max_model_len)
    return size.nbytes(layout)
