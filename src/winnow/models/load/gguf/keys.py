"""Meaning of a GGUF file's keys for answers: each is applied, agrees with what is computed, or is refused.

transformers applies those that its table of the architecture names (GGUF_CONFIG_MAPPING), and passes over all others in
silence. Here it is said of the others which value changes nothing; one in no table is refused where llama.cpp reads it
(`gguf.constants.Keys`), or where its name says that it belongs to attention, to positions, or to how text is cut.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_ALWAYS_READ = ("attention.", "rope.")
# What transformers, or `winnow.models.load.gguf.tokenizer`, makes use of.
_TOKENIZER_APPLIED = (
    "model", "pre", "tokens", "scores", "token_type", "merges", "add_space_prefix", "add_bos_token",
    "add_eos_token", "bos_token_id", "eos_token_id", "unknown_token_id", "padding_token_id", "eot_token_id",
    "eom_token_id",
)  # fmt: skip
# Names of tokens that text never makes by itself, and what other kinds of tokenizers than those served read.
_TOKENIZER_HARMLESS = (
    "seperator_token_id", "cls_token_id", "mask_token_id", "prefix_token_id", "suffix_token_id",
    "middle_token_id", "fim_pre_token_id", "fim_suf_token_id", "fim_mid_token_id", "fim_pad_token_id",
    "fim_rep_token_id", "fim_sep_token_id", "token_type_count", "remove_extra_whitespaces", "eog_token_ids",
)  # fmt: skip
_TOKENIZER_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_sep_token": (False,),
    "precompiled_charsmap": ([],),
    "normalizer.lowercase": (False,),
    "escape_whitespaces": (True,),
    "suppress_tokens": ([],),
}
# Of an architecture: what says nothing about a single answer, or only goes with what is refused itself.
_HARMLESS = (
    *("tensor_data_layout", "pooling_type", "rope.scaling.original_context_length", "rope.scaling.finetuned"),
    *("rope.scaling.yarn_ext_factor", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"),
    *("rope.scaling.yarn_attn_factor", "rope.scaling.type", "rope.scaling.factor", "rope.scale_linear"),
    *("rope.dimension_sections", "n_deepstack_layers"),  # a text's positions are the same along all axes
)
# Of an architecture: what the configuration calls it, and values that change nothing where it does not know it.
_AGREES: dict[str, tuple[tuple[str, ...], tuple[Any, ...]]] = {
    "vocab_size": (("vocab_size",), ()),
    "context_length": (("max_position_embeddings", "n_positions"), ()),
    "feed_forward_length": (("intermediate_size", "n_inner", "ffn_hidden_size"), ()),
    "attention.head_count_kv": (("num_key_value_heads", "num_attention_heads", "n_head"), ()),
    "attention.layer_norm_epsilon": (
        ("layer_norm_epsilon", "layer_norm_eps", "norm_eps", "rms_norm_eps"),
        (),
    ),
    "attention.layer_norm_rms_epsilon": (("rms_norm_eps", "norm_eps"), ()),
    "attention.sliding_window": (("sliding_window",), (0,)),
    "attention.sliding_window_pattern": (("_sliding_window_pattern", "sliding_window_pattern"), (0, 1)),
    "attn_logit_softcapping": (("attn_logit_softcapping",), (0,)),
    "final_logit_softcapping": (("final_logit_softcapping",), (0,)),
    "expert_count": (("num_experts", "num_local_experts"), (0,)),
    "expert_used_count": (("num_experts_per_tok",), (0,)),
    "expert_feed_forward_length": (("moe_intermediate_size", "intermediate_size"), ()),
    "expert_shared_feed_forward_length": (("shared_expert_intermediate_size",), (0,)),
    "expert_weights_norm": (("norm_topk_prob",), ()),
    "use_parallel_residual": (("use_parallel_residual", "parallel_attn"), ()),
    "logit_scale": (("logit_scale",), (0, 1)),
    "residual_scale": (("residual_multiplier",), (0, 1)),
    "embedding_scale": (("embedding_multiplier",), (0, 1)),
    "attention.clamp_kqv": (("clip_qkv",), (0,)),
    "attention.max_alibi_bias": ((), (0,)),
    "attention.causal": ((), (True,)),
    "rope.scaling.attn_factor": ((), (1,)),
    "rope.scaling.yarn_log_multiplier": ((), (0,)),
    "rope.scaling.alpha": ((), (0, 1)),
}
# Of an architecture: what must be what the configuration computes.
_COMPUTED: dict[str, Callable[["PretrainedConfig"], Any]] = {
    **{
        f"{name}{layers}": lambda config: _head_dim(config)
        for name in ("attention.key_length", "attention.value_length")
        for layers in ("", "_swa")
    },
    "attention.scale": lambda config: getattr(config, "query_pre_attn_scalar", _head_dim(config)) ** -0.5,
    "rope.dimension_count": lambda c: int(_head_dim(c) * _rope(c, "partial_rotary_factor", 1.0)),
    "rope.dimension_count_swa": lambda config: _head_dim(config),
    "rope.freq_base": lambda config: _rope(config, "rope_theta", None),
    "rope.freq_base_swa": lambda config: _rope(config, "rope_theta", None, layers="sliding_attention"),
}


def linear_factor(values: Mapping[str, Any]) -> float | None:
    """Return the factor that divides positions, as llama.cpp reads it; None: by nothing. Raises ValueError: positions
    are scaled in another way, which transformers' reader leaves out."""
    arch = values["general.architecture"]
    scaling = values.get(f"{arch}.rope.scaling.type", "linear")
    if scaling == "none":
        return None
    if scaling != "linear":
        raise ValueError(
            f"transformers' reader leaves out its scaling of positions ({scaling}), and would answer wrong"
        )
    key = next((k for k in ("rope.scaling.factor", "rope.scale_linear") if f"{arch}.{k}" in values), None)
    factor = 1.0 if key is None else values[f"{arch}.{key}"]
    if type(factor) not in (int, float) or not math.isfinite(factor) or factor < 0:
        raise ValueError(f"{arch}.{key} must be a number above 0, got {factor!r}")
    return None if factor in (0, 1) else float(factor)


def refused_keys(values: Mapping[str, Any], applied: set[str], config: "PretrainedConfig") -> Iterator[str]:
    """Yield keys that would change answers, and are neither applied nor agree with `config`; with what they say.

    Args:
        applied: of the architecture's keys, without its name, those that `config` was made from.
        config: of the text model.
    """
    arch, of_tokenizer = f"{values['general.architecture']}.", "tokenizer.ggml."
    known = (*_TOKENIZER_APPLIED, *_TOKENIZER_HARMLESS)
    for key, value in values.items():
        if key.startswith(of_tokenizer):
            name = key.removeprefix(of_tokenizer)
            if name not in known and not _is_among(value, _TOKENIZER_NEUTRAL.get(name, ())):
                yield f"{key} = {_shown(value)}"
        elif key.startswith(arch):
            name = key.removeprefix(arch)
            is_read = name.startswith(_ALWAYS_READ) or _is_llama_cpps(name)
            if name in applied or name in _HARMLESS or not is_read:
                continue
            wanted = _wanted(name, config)
            if not _is_among(value, wanted):
                said = f", where {' or '.join(map(_shown, wanted))} is computed" if wanted else ""
                yield f"{key} = {_shown(value)}{said}"


def _wanted(name: str, config: "PretrainedConfig") -> tuple[Any, ...]:
    """Return the values of a key that go with a configuration; none: nothing is known of the key."""
    if name in _COMPUTED:
        return (_COMPUTED[name](config),)
    attributes, neutral = _AGREES.get(name, ((), ()))
    found = next((getattr(config, each) for each in attributes if hasattr(config, each)), None)
    return neutral if found is None else (found,)


def _is_llama_cpps(name: str) -> bool:
    from gguf.constants import Keys

    return f"{{arch}}.{name}" in vars(Keys.LLM).values()


def _is_among(value: Any, wanted: tuple[Any, ...]) -> bool:
    entries = value if isinstance(value, list) and value else [value]  # a list has one for each layer
    return all(any(_equal(entry, each) for each in wanted) for entry in entries)


def _equal(value: Any, other: Any) -> bool:
    numbers = isinstance(value, int | float) and isinstance(other, int | float)
    return math.isclose(value, other, rel_tol=1e-6) if numbers else value == other


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else repr(value)[:60]


def _head_dim(config: "PretrainedConfig") -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _rope(config: "PretrainedConfig", name: str, default: Any, layers: str = "full_attention") -> Any:
    """Return a number of the rotary embedding, in configurations that have one for each kind of layers or for all."""
    rope: Any = getattr(config, "rope_parameters", None) or {}
    rope = rope.get(layers, rope)
    return rope.get(name, getattr(config, name, default) or default)
