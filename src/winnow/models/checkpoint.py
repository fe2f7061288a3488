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
from winnow.models.context import context_limit
from winnow.models.geometry import probe_geometry
from winnow.models.loaded import LoadedModel, PlainModel
from winnow.models.optimize import optimize_model
from winnow.models.tokens import load_tokenizer


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
    trained_len = context_limit(model_config).take(None if beyond_trained_len else wanted)
    device = _device(config.device)
    model = _load_weights(path, model_config, config, device, ATTENTION_NAME)
    geometry = probe_geometry(model)
    return LoadedModel(
        model=model,
        decoder=optimize_model(model, geometry, trained_len) if config.optimize else None,
        tokenizer=load_tokenizer(path),
        vocab_size=_vocab_size(model_config),
        geometry=geometry,
        max_model_len=wanted or trained_len,
        trained_len=trained_len,
        eos_token_ids=_eos_token_ids(path, model_config),
    )


def load_plain_checkpoint(path: Path, config: ModelConfig) -> PlainModel:
    """As `winnow.models.loader.load_plain_model`."""
    model_config = _read_config(path)
    _causal_class(model_config)
    return PlainModel(
        max_model_len=context_limit(model_config).take(config.max_model_len),
        model=_load_weights(path, model_config, config, _device(config.device), None),
        tokenizer=load_tokenizer(path),
        vocab_size=_vocab_size(model_config),
        eos_token_ids=_eos_token_ids(path, model_config),
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


def _eos_token_ids(path: Path, config: PretrainedConfig) -> frozenset[int]:
    """Tokens that end an answer: those of generation_config.json, else of config.json."""
    eos = config.get_text_config().eos_token_id
    if (path / "generation_config.json").is_file():
        generation = GenerationConfig.from_pretrained(path, local_files_only=True)
        eos = generation.eos_token_id if generation.eos_token_id is not None else eos
    ids = [eos] if isinstance(eos, int) else eos or []
    # What the model cannot say cannot end its answer; default configurations name such tokens.
    return frozenset(token for token in ids if 0 <= token < _vocab_size(config))
