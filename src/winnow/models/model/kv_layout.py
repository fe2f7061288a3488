"""The layout that a configuration gives a model's cache: host arithmetic, which engine and planner share. No torch."""

from collections.abc import Sequence
from dataclasses import replace

from winnow.cache.codec import PairCodec, make_codec
from winnow.cache.layout import CacheLayout
from winnow.config import CacheConfig
from winnow.errors import ConfigError
from winnow.values.checks import require
from winnow.values.kv_dtype import PLAIN_FORMATS
from winnow.values.value_tier import ValueTier


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
    latent: bool = False,
) -> CacheLayout:
    """Return the shape of the cache of a model with these numbers. Raises ConfigError: KVs of this head_dim cannot be
    stored as `config` says.

    Args:
        dtype: of activations, in which `kv_cache_dtype=auto` stores KVs.
        windows, chunk, state_bytes, shapes: as `CacheLayout` has them.
        bias: whether KVs have a bias, though `config` does not ask for one.
        latent: values are parts of their keys, which are latents.
    """
    kind = config.kv_dtype.resolved(dtype)
    wide = replace(config.wide_parts, dtype="float16" if dtype == "float32" else dtype)
    fewer = f"fewer layers than the model's {num_layers}"
    require(wide.layers < num_layers, "kv_wide", fewer, config.kv_wide)
    if wide.any and {kind.k, kind.v} <= set(PLAIN_FORMATS):
        raise ConfigError(f"kv_wide={wide} keeps KVs in 16 bits beside a kv_cache_dtype of fewer, got {kind}")
    tier = config.tier
    if tier is not None:
        require(tier.layers < num_layers, "value_tier: L", fewer, tier.layers)
    bias = bias or config.kv_bias
    codec = make_codec(kind, config.kv_group, config.kv_rotate, bias)
    if bias and (wide.any or tier is not None):
        option, value = ("kv_wide", wide) if wide.any else ("value_tier", tier)
        raise ConfigError(
            f"{option} does not go with kv_bias, or a policy with compact, whose values are fitted in blocks on the "
            f"device, got {option}={value}: leave one out"
        )
    if latent:
        codec = _of_latents(codec, tier)
    sizes = num_layers, num_kv_heads, head_dim, config.block_size
    layout = CacheLayout.even(*sizes, codec, num_accumulators, windows, chunk, tier, shapes, latent)
    for each in layout.kinds:
        _ = each.form
    return replace(layout, wide=wide, state_bytes=state_bytes)


def _of_latents(codec: PairCodec, tier: ValueTier | None) -> PairCodec:
    """Return a codec by which the same bytes are a key and its value."""
    if tier is not None:
        raise ConfigError("value_tier does not go with latents, whose values are parts of keys: leave it out")
    if codec.further_fields:
        raise ConfigError(
            "kv_bias, or a policy with compact, fits values apart from their keys, which latents do not have: leave it "
            "out"
        )
    if codec.key != codec.value:
        raise ConfigError(
            "kv_cache_dtype must store keys and values alike for latents, whose values are parts of keys, "
            f"got {codec.name}"
        )
    rotated = codec.rotate_keys or codec.rotate_values
    return replace(codec, rotate_keys=True, rotate_values=True) if rotated else codec
