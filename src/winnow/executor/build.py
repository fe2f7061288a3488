"""Construction of a paged engine from a configuration."""

from collections.abc import Callable
from dataclasses import asdict

from winnow.attention import open_backend
from winnow.config import EngineConfig
from winnow.engine.assemble import assemble
from winnow.engine.engine import Engine
from winnow.engine.residency.prefix_cipher import PrefixCipher
from winnow.engine.residency.prefix_format import PrefixFormat
from winnow.engine.served_model import ServedModel
from winnow.eviction import EvictionPolicy, ModelTraits
from winnow.eviction.predictor import predictor_path
from winnow.executor.torch_executor import TorchExecutor
from winnow.json_values import dump_json
from winnow.models import LoadedModel
from winnow.models.hub import locate_model
from winnow.models.paged_trial import verify_codec
from winnow.models.text_pool import text_pool
from winnow.report.fingerprint import model_digest


def build_engine(
    loaded: LoadedModel, config: EngineConfig, policy: EvictionPolicy, clock: Callable[[], float]
) -> Engine:
    """Set up cache and engine around a model.

    Args:
        policy: the engine's own, which decides how many accumulators there are if the configuration does not say it.
    """
    num_accumulators = config.eviction.num_accumulators
    if num_accumulators is None:
        num_accumulators = max(policy.score.num_accumulators, 1)
    layout = loaded.kv_layout(
        config.cache, num_accumulators, config.scheduler.chunk, bias=policy.compact is not None
    )
    policy.check_layout(layout)
    backend = open_backend(config.model.attention_backend, loaded.device, layout)
    if config.model.verify_model:
        verify_codec(loaded, layout, config.model.attention_backend)
    executor = TorchExecutor(loaded, config, backend, layout)

    def prefix_format(cipher: PrefixCipher | None) -> PrefixFormat:
        return PrefixFormat(_identity(loaded, config), layout, cipher)

    model = ServedModel(
        loaded.vocab_size,
        loaded.max_model_len,
        loaded.trained_len,
        loaded.tokenizer,
        loaded.eos_token_ids,
        ModelTraits(text_pool(loaded.tokenizer), predictor_path(locate_model(config.model)).is_file()),
        prefix_format,
    )
    return assemble(executor, model, config, clock)


def _identity(loaded: LoadedModel, config: EngineConfig) -> str:
    """Return what identifies a model whose KVs are the same: its files, and the format in which it computes."""
    weights = config.model.load_format, config.model.seed if config.model.load_format == "dummy" else None
    narrow = [asdict(each) for each in (loaded.int8, loaded.library) if each is not None]
    return dump_json([model_digest(locate_model(config.model)), str(loaded.dtype), weights, *narrow])
