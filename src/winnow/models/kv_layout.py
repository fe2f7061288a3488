"""The layout that a configuration gives a model's cache: host arithmetic, which engine and planner share. No torch."""

from collections.abc import Sequence
from dataclasses import replace

from winnow.cache.codec import make_codec
from winnow.cache.layout import CacheLayout
from winnow.checks import require
from winnow.config import CacheConfig
from winnow.errors import ConfigError
from winnow.kv_dtype import BY_BLOCK, PLAIN_FORMATS, KVDtype, WideParts
from winnow.value_tier import ValueTier

_KIVI_RECENT = 128
"""KVs that KIVI leaves in 16 bits (its R), unless kv_wide says it."""


def configured_layout(
    config: CacheConfig,
    *,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: str,
    num_accumulators: int = 0,
    windows: tuple[int | None, ...] = (),
    chunk: int | None = None,
    bias: bool = False,
    state_bytes: int = 0,
    shapes: Sequence[tuple[int, int]] = (),
) -> CacheLayout:
    """Return the shape of the cache of a model with these numbers.

    Args:
        dtype: of activations, in which `kv_cache_dtype=auto` stores KVs.
        windows, chunk, state_bytes, shapes: as `CacheLayout` has them.
        bias: whether KVs have a bias, though `config` does not ask for one.

    Raises:
        ConfigError: KVs of this head_dim cannot be stored as `config` says.
    """
    kind = KVDtype.parse(config.kv_cache_dtype).resolved(dtype)
    wide = WideParts.parse(config.kv_wide, dtype="float16" if dtype == "float32" else dtype)
    if kind.k in BY_BLOCK:
        wide = replace(wide, recent=wide.recent or _KIVI_RECENT)
        what = f"at least block_size ({config.block_size}) recent KVs for {kind}"
        require(wide.recent >= config.block_size, "kv_wide", what, config.kv_wide)
    require(
        wide.layers < num_layers, "kv_wide", f"fewer layers than the model's {num_layers}", config.kv_wide
    )
    if wide.any and {kind.k, kind.v} <= set(PLAIN_FORMATS):
        raise ConfigError(
            f"kv_wide={wide} keeps KVs in 16 bits beside a kv_cache_dtype of fewer, got {kind}: leave it out"
        )
    tier = ValueTier.parse(config.value_tier)
    if tier is not None:
        what = f"fewer layers than the model's {num_layers}"
        require(tier.layers < num_layers, "value_tier: L", what, tier.layers)
        if kind.k in BY_BLOCK:
            raise ConfigError(
                f"value_tier does not go with kv_cache_dtype={kind}, which keeps recent KVs wide: give another"
            )
    bias = bias or config.kv_bias
    codec = make_codec(kind, config.kv_group, config.kv_rotate, config.block_size, bias)
    if bias and (wide.any or tier is not None):
        option, value = ("kv_wide", wide) if wide.any else ("value_tier", tier)
        raise ConfigError(
            f"{option} does not go with kv_bias, or a policy with compact, whose values are fitted in blocks on the "
            f"device, got {option}={value}: leave one out"
        )
    layout = CacheLayout.even(
        num_layers,
        num_kv_heads,
        head_dim,
        config.block_size,
        codec,
        num_accumulators,
        windows,
        chunk,
        wide,
        tier,
        shapes,
    )
    for each in layout.kinds:
        _ = each.form
    return replace(layout, state_bytes=state_bytes)
