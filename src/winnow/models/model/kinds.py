"""Kind of the model that a configuration describes, known before its weights are read."""

import sys

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    PretrainedConfig,
    PreTrainedModel,
)

from winnow.errors import UnsupportedModelError

# Kinds of layers that keep keys and values by token, under transformers' names.
_ATTENTION = ("attention", "full_attention", "sliding_attention", "chunked_attention")
# Those that choose among them by an index, which takes all while they are few, and model types where that was compared.
_INDEXED, _INDEXED_TYPES = ("indexed_attention",), ("deepseek_v32", "glm_moe_dsa", "axk2")
# Those that keep both, those that keep a state alone, and those that keep nothing.
_BOTH = ("hybrid", "hybrid_sliding")
_STATES = ("linear_attention", "conv", "mamba")
_NEITHER = ("mlp", "moe")
# Under what names configurations list their layers' kinds.
_LAYER_KINDS = ("layer_types", "layers_block_type", "block_types")
# What they call the number of heads for drafts.
_HEADS = ("num_mtp_layers", "num_nextn_predict_layers", "mtp_num_hidden_layers")
# What a configuration of several parts calls those that Winnow does not run.
_OTHER_PARTS = ("vision_config", "audio_config", "encoder_config", "encoder", "speech_config")


def causal_class(
    config: PretrainedConfig, *, states: bool = False, images: bool = False
) -> type[PreTrainedModel]:
    """Return the model's class.

    Args:
        states: layers may keep states beside or in place of KVs, as long as some keep KVs.
        images: the class with a vision tower, where there is one; else only where there is no other.

    Raises:
        UnsupportedModelError: it is no decoder that generates text from the keys and values of earlier tokens alone.
    """
    name = config.model_type
    # Their decoders keep a cache of their own kind, also where a configuration uses them alone.
    alone = getattr(type(config), "is_encoder_decoder", False) or hasattr(config, "decoder_layers")
    if config.is_encoder_decoder or alone:
        raise _refused(name, "is an encoder-decoder, or a part of one", "generation from an encoder's output")
    mapping = MODEL_FOR_CAUSAL_LM_MAPPING
    if has_tower(config) and (images or (states and type(config) not in mapping)):
        mapping = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    if type(config) not in mapping:
        parts = [part for part in _OTHER_PARTS if getattr(config, part, None) is not None]
        if parts:
            found = f"is a model of several parts ({', '.join(parts)})"
            raise _refused(name, found, "inputs other than text")
        raise UnsupportedModelError(
            f"model: {name} is not supported: it is not a causal language model, and Winnow generates text"
        )
    model_class: type[PreTrainedModel] = mapping[type(config)]
    shown = model_class.__name__
    text = config.get_text_config()
    if _is_encoder(text):
        raise _refused(shown, "is an encoder, by its configuration", "attention to later tokens")
    allowed = (*_ATTENTION, *_BOTH, *_STATES, *_NEITHER) if states and attending_layers(text) else _ATTENTION
    allowed = (*allowed, *_INDEXED) if states and name in _INDEXED_TYPES else allowed
    stateful = [kind for kind in sorted(set(_listed(text))) if kind not in allowed]
    if stateful or (getattr(model_class, "_is_stateful", False) and not (states and has_states(text))):
        listed = f" ({', '.join(stateful)})" if stateful else ""
        found = f"has layers that keep a state in place of keys and values by token{listed}"
        raise _refused(shown, found, "such a state: recurrent, convolutional or compressed")
    return model_class


def has_tower(config: PretrainedConfig) -> bool:
    """Return whether transformers has a class for a configuration that answers to text with pictures."""
    return type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and hasattr(config, "vision_config")


def text_part(model: PreTrainedModel) -> PreTrainedModel:
    """Return the part of a model that has the decoder's layers: its base model, but beside a vision tower."""
    base: PreTrainedModel = model.base_model
    found: PreTrainedModel = base.get_decoder() if has_tower(model.config) else base
    return found


def takes_attention(model_class: type[PreTrainedModel]) -> bool:
    """Return whether a class takes its attention from transformers' registry; those with states do not say so."""
    module = sys.modules[model_class.__module__]
    return model_class.is_backend_compatible() or hasattr(module, "ALL_ATTENTION_FUNCTIONS")


def attending_layers(config: PretrainedConfig) -> list[str]:
    """Return the kinds of the layers that keep KVs, in order. Where a configuration lists no kinds, all do."""
    listed = _listed(config) or ["full_attention"] * config.num_hidden_layers
    return [kind for kind in listed if kind in (*_ATTENTION, *_INDEXED, *_BOTH)]


def sparse_top_k(config: PretrainedConfig) -> int | None:
    """Return how many keys each token attends to where layers choose among them by an index; None: none do."""
    indexed = any(kind in _INDEXED for kind in _listed(config))
    return int(config.index_topk) if indexed and getattr(config, "index_topk", None) else None


def has_states(config: PretrainedConfig) -> bool:
    return any(kind in (*_STATES, *_BOTH) for kind in _listed(config))


def num_draft_heads(config: PretrainedConfig) -> int:
    text = config.get_text_config()
    return next((int(count) for name in _HEADS if (count := getattr(text, name, None))), 0)


def head_patterns(config: PretrainedConfig) -> list[str]:
    """Return what names of such heads' weights match: they go by "mtp", or stand as layers behind the last."""
    last = config.get_text_config().num_hidden_layers
    layers = [rf"layers\.{number}\." for number in range(last, last + num_draft_heads(config))]
    return [r"(^|\.)mtp(_layers)?\.", *layers]


def _listed(config: PretrainedConfig) -> list[str]:
    listed = next((getattr(config, name) for name in _LAYER_KINDS if getattr(config, name, None)), ())
    return [str(kind) for kind in listed]


def _is_encoder(config: PretrainedConfig) -> bool:
    """Return whether attention looks both ways: BERT's kind is a decoder only where its configuration says so."""
    says_so = [getattr(config, name, True) is False for name in ("is_causal", "causal")]
    if any(says_so) or getattr(config, "use_bidirectional_attention", None) is True:
        return True
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING

    return type(config) in MODEL_FOR_MASKED_LM_MAPPING and getattr(config, "is_decoder", None) is False


def _refused(name: str, kind: str, missing: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"model: {name} is not supported: it {kind}; Winnow lacks {missing}")
