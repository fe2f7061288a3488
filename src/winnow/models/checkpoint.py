"""A model as it was published, by transformers: safetensors only, no code from the directory, no network."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from winnow.config import ModelConfig
from winnow.errors import ConfigError, UnsupportedModelError
from winnow.models.binding import ATTENTION_NAME
from winnow.models.context import ContextLimit
from winnow.models.geometry import probe_geometry
from winnow.models.loaded import LoadedModel, PlainModel
from winnow.models.optimize import optimize_model
from winnow.models.tokens import end_tokens, load_tokenizer

# RoPE kinds that choose their frequencies by the largest position of the whole forward pass. In a packed batch one
# long sequence would change the short ones, so they serve only lengths at which nothing is chosen.
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


def load_checkpoint(path: Path, config: ModelConfig, *, beyond_trained_len: bool) -> LoadedModel:
    """As `winnow.models.loader.load_model`, from config.json and weights as they were published."""
    model_config = _read_config(path)
    model_class = _causal_class(model_config)
    if not model_class.is_backend_compatible():
        raise UnsupportedModelError(
            f"{model_class.__name__} is not supported: its attention cannot be replaced "
            "(transformers' class takes none from AttentionInterface); engine=padded runs it as it is"
        )
    wanted = config.max_model_len
    trained_len = _context_limit(model_config).take(None if beyond_trained_len else wanted)
    device = _device(config.device)
    model = _load_weights(path, model_config, config, device, ATTENTION_NAME)
    geometry = probe_geometry(model)
    tokenizer = load_tokenizer(path)
    return LoadedModel(
        model=model,
        decoder=optimize_model(model, geometry, trained_len) if config.optimize else None,
        tokenizer=tokenizer,
        vocab_size=_vocab_size(model_config),
        geometry=geometry,
        max_model_len=wanted or trained_len,
        trained_len=trained_len,
        eos_token_ids=end_tokens(_told_end_tokens(path, model_config), tokenizer, _vocab_size(model_config)),
    )


def load_plain_checkpoint(path: Path, config: ModelConfig) -> PlainModel:
    """As `winnow.models.loader.load_plain_model`."""
    model_config = _read_config(path)
    _causal_class(model_config)
    tokenizer = load_tokenizer(path)
    return PlainModel(
        max_model_len=_context_limit(model_config).take(config.max_model_len),
        model=_load_weights(path, model_config, config, _device(config.device), None),
        tokenizer=tokenizer,
        vocab_size=_vocab_size(model_config),
        eos_token_ids=end_tokens(_told_end_tokens(path, model_config), tokenizer, _vocab_size(model_config)),
    )


def _read_config(path: Path) -> PretrainedConfig:
    if not path.is_dir():
        raise UnsupportedModelError(f"model: no such directory: {path}")
    file = path / "config.json"
    if not file.is_file():
        raise UnsupportedModelError(f"model: {path} holds no config.json")
    try:
        values: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise UnsupportedModelError(f"model: cannot read {file}: {error}") from None
    model_type = values.get("model_type")
    if model_type not in CONFIG_MAPPING:
        raise UnsupportedModelError(
            f"model: transformers knows no model_type {model_type!r}, named in {file}"
        )
    # auto_map would name code in the directory. It is dropped before anyone could follow it.
    values.pop("auto_map", None)
    try:
        return CONFIG_MAPPING[model_type].from_dict(values)
    except (ValueError, TypeError, KeyError) as error:
        raise UnsupportedModelError(f"model: {file} is not a usable configuration: {error}") from None


def _causal_class(model_config: PretrainedConfig) -> type[PreTrainedModel]:
    """The model's class, looked up before its weights are read.

    Raises:
        UnsupportedModelError: transformers has no causal model of this kind.
    """
    if type(model_config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModelError(
            f"{model_config.model_type} is not supported: it is not a causal language model"
        )
    model_class: type[PreTrainedModel] = MODEL_FOR_CAUSAL_LM_MAPPING[type(model_config)]
    return model_class


def _context_limit(config: PretrainedConfig) -> ContextLimit:
    text = config.get_text_config()
    named = (getattr(text, name, None) for name in ("max_position_embeddings", "max_seq_len"))
    limit = next((length for length in named if length), None)
    reason = "the model's max_position_embeddings"
    if limit is None:
        reason = f"{type(config).__name__} names no max_position_embeddings"
    rope = getattr(text, "rope_parameters", None) or {}
    # Models whose layers differ in kind have one set of parameters for each kind.
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if parameters.get("rope_type") in _LENGTH_DEPENDENT_ROPE:
            original = parameters.get("original_max_position_embeddings")
            limit = min(filter(None, (limit, original)), default=None)
            if limit is not None:
                reason = f"up to which its {parameters['rope_type']} RoPE does not depend on the batch"
    return ContextLimit(limit, reason)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {name!r} is not usable here: {str(error).splitlines()[0]}") from None
    return device


def _dtype(name: str, config: PretrainedConfig, device: torch.device) -> torch.dtype:
    if name != "auto":
        return getattr(torch, name)
    return torch.float32 if device.type == "cpu" else (config.dtype or torch.bfloat16)


def _load_weights(
    path: Path,
    model_config: PretrainedConfig,
    config: ModelConfig,
    device: torch.device,
    attention: str | None,
) -> PreTrainedModel:
    """The model on its device; `attention` is a name that transformers knows, None its own choice."""
    model = _make_model(path, model_config, config, _dtype(config.dtype, model_config, device), attention).to(
        device
    )
    return model.eval().requires_grad_(False)


def _make_model(
    path: Path, model_config: PretrainedConfig, config: ModelConfig, dtype: torch.dtype, attention: str | None
) -> Any:
    if config.load_format == "dummy":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            return AutoModelForCausalLM.from_config(
                model_config, dtype=dtype, attn_implementation=attention, trust_remote_code=False
            )
    if not any(path.glob("*.safetensors")):
        raise UnsupportedModelError(
            f"model: {path} holds no *.safetensors; other weight formats can carry code and are not read "
            "(load_format=dummy runs a configuration with random weights)"
        )
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            path,
            config=model_config,
            dtype=dtype,
            attn_implementation=attention,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        raise UnsupportedModelError(f"model: cannot load {path}: {str(error).splitlines()[0]}") from error
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise UnsupportedModelError(
            f"model: {path} lacks {len(missing)} of {type(model).__name__}'s weights, such as {missing[0]}"
        )
    return model


def _vocab_size(config: PretrainedConfig) -> int:
    return int(config.get_text_config().vocab_size)


def _told_end_tokens(path: Path, config: PretrainedConfig) -> list[int]:
    """Tokens that end an answer by generation_config.json, else by config.json."""
    eos = config.get_text_config().eos_token_id
    if (path / "generation_config.json").is_file():
        generation = GenerationConfig.from_pretrained(path, local_files_only=True)
        eos = generation.eos_token_id if generation.eos_token_id is not None else eos
    return [eos] if isinstance(eos, int) else eos or []
