"""A model as it was published, by transformers: safetensors or GGUF, no code from its files, no network."""

import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING
from transformers.utils.logging import set_tqdm_hook

from winnow.config import ModelConfig
from winnow.errors import ConfigError, UnsupportedModelError
from winnow.models.bind.binding import (
    ATTENTION_NAME,
    attention_by_part,
    attention_of,
    bind_counted_positions,
    bind_positions,
    set_attention,
)
from winnow.models.bind.geometry_probe import probe_geometry
from winnow.models.fast.optimize import optimize_model
from winnow.models.fast.shards import shard_model
from winnow.models.load.adapter import merge_adapter
from winnow.models.load.automatic import keeps_blocks, open_published
from winnow.models.load.directory import sampling_defaults
from winnow.models.load.hub import locate_adapter, locate_tokenizer
from winnow.models.load.loaded import LoadedModel, PlainModel
from winnow.models.load.processor import Processor, load_processor
from winnow.models.load.verify import Trial
from winnow.models.model.blocks import (
    BlockWeights,
    LibraryLayers,
    attach_blocks,
    round_to_blocks,
    widen_for_good,
)
from winnow.models.model.context import ContextLimit, context_limit
from winnow.models.model.damage import cannot_load, check_numbers, check_sizes, check_vocabulary, first_line
from winnow.models.model.kinds import causal_class, has_tower, sparse_top_k, takes_attention
from winnow.models.model.tokens import end_tokens, load_tokenizer
from winnow.process.extras import find_plugin, require_plugin
from winnow.process.progress import report
from winnow.process.ranks import ALONE, Ranks

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from winnow.models.load.automatic import Published

# Prime, so that rows of a weight are cuts of the pattern at different places.
_PATTERN = 1_048_573
_RANDOM = (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default)


class RepeatedRandom(TorchDispatchMode):
    """Filler of large tensors, which repeats the random numbers of their first `_PATTERN` elements: billions of them
    would take a minute."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _RANDOM or args[0].numel() <= _PATTERN or not args[0].is_contiguous():
            return func(*args, **kwargs)
        whole: Tensor = args[0].view(-1)
        pattern = func(whole[:_PATTERN], *args[1:], **kwargs)
        for part in whole[_PATTERN:].split(_PATTERN):
            part.copy_(pattern[: len(part)])
        return args[0]


@contextmanager
def _reporting(path: Path) -> Iterator[None]:
    """Report bytes of safetensors as transformers puts them into the model, by the bar that it would draw."""

    def follow(bar: Callable[..., Any], items: Any, options: dict[str, Any]) -> Any:
        shown = bar(*items, **options)
        return counted(shown) if options.get("desc") == "Loading weights" else shown

    def counted(shown: Any) -> Iterator[tuple[str, Any]]:
        sizes, done = dict[str, int](), 0
        for each in path.glob("*.safetensors"):  # transformers has read the headers: they are sound
            with each.open("rb") as file:
                header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            header.pop("__metadata__", None)
            sizes |= {
                name: entry["data_offsets"][1] - entry["data_offsets"][0] for name, entry in header.items()
            }
        for name, mapping in shown:
            if sizes:
                report("reading weights", done, sum(sizes.values()), "B")
            done += sum(sizes.get(key, 0) for keys in mapping.layer_targets.values() for key in keys)
            yield name, mapping

    before = set_tqdm_hook(follow)
    try:
        yield
    finally:
        set_tqdm_hook(before)


def load_checkpoint(
    path: Path, config: ModelConfig, *, ranks: Ranks = ALONE
) -> tuple[LoadedModel, ContextLimit]:
    """Load as `load_model` does, from config.json and weights as published; with the model's own limit."""
    device = _device(config.device)
    codes = device.type == "cpu" or _holds_codes(config, device, ranks.size)
    images = not config.language_model_only and ranks.size == 1
    source = _Source.open(path, config, reads_codes=codes, images=images)
    model_config = source.model_config
    processor: Processor | str = f"models of type {model_config.model_type} have no vision tower"
    if has_tower(model_config):
        processor = _processor(source, ranks)
    model_class = causal_class(model_config, states=True, images=isinstance(processor, Processor))
    own = not takes_attention(model_class)
    if own and not {"cache", "past_key_values"} & set(inspect.signature(model_class.forward).parameters):
        raise UnsupportedModelError(
            f"model: {model_class.__name__} is not supported: its attention cannot be replaced "
            "(transformers' class takes none from AttentionInterface), and it keeps no cache"
        )
    wanted = config.max_model_len
    limit = context_limit(model_config)
    trained_len = limit.take(wanted)
    kept = codes and ranks.size == 1 and keeps_blocks(config, path, source.published)
    if device.type == "cuda" and path.is_file() and source.dtype != torch.float16:
        kept = False  # scales of GGUF's blocks are of float16
    blocks, library = _narrow_weights(config, device, source.dtype, kept=kept)
    report("reading weights")
    attention = "eager" if own else ATTENTION_NAME
    model = source.load(attention, kept=kept, tower=hasattr(model_class, "get_image_features"))
    for name, part in model.named_modules():
        if name.endswith("kv_b_proj"):  # its weight is read beside the layer
            widen_for_good(part)
    set_attention(model, ATTENTION_NAME)
    geometry = probe_geometry(model)
    bind_counted_positions(model)
    limit = limit.less(bind_positions(model, attention_of(model, "eager")))
    trained_len = limit.take(wanted)
    if blocks is not None and blocks.kind == "Q4_0":  # too far from the model's own to be compared with it
        widen_for_good(model)
        round_to_blocks(model, geometry.num_layers, blocks)
    tokenizer = source.tokenizer()
    # The model's own code runs before layers are replaced, and is compared with what will answer.
    trial = Trial.of(model, geometry, trained_len) if config.verify_model else None
    if ranks.size > 1:
        geometry = shard_model(model, geometry, ranks)
    decoder, unfused = None, dict[int, str]()
    if config.optimize:
        decoder, unfused = optimize_model(model, geometry, trained_len, blocks=blocks, library=library)
    elif blocks is not None:
        round_to_blocks(model, geometry.num_layers, blocks)
    loaded = LoadedModel(
        model=model,
        decoder=decoder,
        unfused=unfused,
        tokenizer=tokenizer,
        vocab_size=source.vocab_size,
        geometry=geometry,
        max_model_len=wanted or trained_len,
        trained_len=trained_len,
        eos_token_ids=source.end_tokens(tokenizer),
        sampling_defaults=sampling_defaults(path, config.generation_config),
        blocks=blocks,
        library=library,
        ranks=ranks,
        processor=processor,
        sparse_top_k=sparse_top_k(model_config.get_text_config()),
    )
    if trial is not None:
        loaded = replace(loaded, verified=trial.verify(loaded, config.attention_backend))
    return loaded, limit


def load_plain_checkpoint(path: Path, config: ModelConfig) -> PlainModel:
    source = _Source.open(path, config, reads_codes=_device(config.device).type == "cpu")
    causal_class(source.model_config)
    tokenizer = source.tokenizer()
    model = source.load(None)
    first = bind_positions(model, nullcontext())
    return PlainModel(
        processor="engines other than engine=paged read text alone",
        max_model_len=context_limit(source.model_config).less(first).take(config.max_model_len),
        model=model,
        tokenizer=tokenizer,
        vocab_size=source.vocab_size,
        eos_token_ids=source.end_tokens(tokenizer),
        sampling_defaults=sampling_defaults(path, config.generation_config),
    )


@dataclass(frozen=True)
class _Source:
    path: Path
    config: ModelConfig
    device: torch.device
    published: "Published"
    model_config: PretrainedConfig

    @classmethod
    def open(cls, path: Path, config: ModelConfig, *, reads_codes: bool, images: bool = False) -> "_Source":
        published = open_published(path, reads_codes=reads_codes, images=images)
        return cls(path, config, _device(config.device), published, _read_config(path, published))

    @property
    def dtype(self) -> torch.dtype:
        if self.config.dtype != "auto":
            return getattr(torch, self.config.dtype)
        return torch.float32 if self.device.type == "cpu" else (self.model_config.dtype or torch.bfloat16)

    @property
    def vocab_size(self) -> int:
        return int(self.model_config.get_text_config().vocab_size)

    def tokenizer(self) -> "PreTrainedTokenizerBase | None":
        report("reading the tokenizer")
        own = locate_tokenizer(self.config)
        tokenizer = self.published.tokenizer() if own is None else load_tokenizer(own)
        check_vocabulary(self.path if own is None else own, tokenizer, self.vocab_size)
        return tokenizer

    def end_tokens(self, tokenizer: "PreTrainedTokenizerBase | None") -> frozenset[int]:
        return end_tokens(self.published.end_tokens(self.model_config), tokenizer, self.vocab_size)

    def load(self, attention: str | None, *, kept: bool = False, tower: bool = False) -> PreTrainedModel:
        """Return the model on its device. `attention` is a name that transformers knows; None: its own choice. Where
        `kept`, linear layers and the embedding keep a file's blocks: see `winnow.models.model.blocks.keep_blocks`."""
        try:
            model = self._make(attention, kept=kept, tower=tower).to(self.device)
        except KeyError as error:  # of a table of transformers: of activations, of kinds of rotation
            field = _field_of(error.args[0], self.model_config.get_text_config().to_dict())
            if field is None:
                raise
            reason = f"transformers knows no {field} {error.args[0]!r}, named in its configuration"
            raise cannot_load(self.path, reason) from error
        if (adapter := locate_adapter(self.config)) is not None:
            merge_adapter(model, adapter)
        return model.eval().requires_grad_(False)

    def _make(self, attention: str | None, *, kept: bool, tower: bool) -> Any:
        automatic = AutoModelForImageTextToText if tower else AutoModelForCausalLM
        options = {
            "dtype": self.dtype,
            "attn_implementation": attention and attention_by_part(self.model_config, attention),
        }
        if self.config.load_format == "dummy":
            on_gpu = [self.device] if self.device.type == "cuda" else []
            with torch.random.fork_rng(on_gpu), self.device, RepeatedRandom():
                torch.manual_seed(self.config.seed)
                return automatic.from_config(self.model_config, **options, trust_remote_code=False)
        with self.published.reading(keeps_blocks=kept) as blocks, _reporting(self.path):
            weights = self.published.weights()  # which makes blocks on the way
            for name, own in blocks.items():
                zero = torch.zeros((), dtype=self.dtype, device="cpu")
                weights["state_dict"][name] = zero.expand(own.shape)
            of_states = "state_dict" in weights
            kind = causal_class(self.model_config, states=True, images=tower) if of_states else automatic
            model, found = kind.from_pretrained(
                **weights,
                **options,
                config=self.model_config,
                **({} if of_states else {"trust_remote_code": False}),
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # transformers would refuse them without a name
            )
        for name, held, wanted in sorted(found["mismatched_keys"]):
            reason = f"{name} is of shape {list(held)}, and by its configuration of {list(wanted)}"
            raise cannot_load(self.path, reason)
        if missing := sorted(found["missing_keys"]):
            reason = f"it lacks {len(missing)} of {type(model).__name__}'s weights, such as {missing[0]}"
            raise cannot_load(self.path, reason)
        self.published.check_weights(model, found["unexpected_keys"])
        if blocks.keys() - dict(model.named_parameters()).keys():  # the class has other names for them
            return self._make(attention, kept=False, tower=tower)
        if blocks:
            attach_blocks(model, blocks, self.device)
        return model


def _read_config(path: Path, published: "Published") -> PretrainedConfig:
    values = published.config_values()
    model_type = values.get("model_type")
    if model_type is None:
        raise cannot_load(path, "config.json names no model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise cannot_load(path, f"transformers knows no model_type {model_type!r}, named in config.json")
    method = (values.get("quantization_config") or {}).get("quant_method", "bitsandbytes")
    if method not in (*AUTO_QUANTIZATION_CONFIG_MAPPING, "bitsandbytes"):
        # transformers would skip it with a warning.
        reason = f"quantization_config.quant_method {method!r} is none that transformers reads"
        raise cannot_load(path, reason)
    # auto_map would name code in the directory. It is dropped before anyone could follow it.
    values.pop("auto_map", None)
    try:
        config = CONFIG_MAPPING[model_type].from_dict(values)
        check_sizes(config)
        check_numbers(config)
    except Exception as error:  # each configuration checks itself in its own way
        reason = f"config.json is not a usable configuration: {first_line(error)}"
        raise cannot_load(path, reason) from error
    published.check_config(config)
    return config


def _processor(source: _Source, ranks: Ranks) -> Processor | str:
    if source.config.language_model_only:
        return "language_model_only is set"
    if ranks.size > 1:
        return f"tensor_parallel_size is {ranks.size}, and a vision tower is not cut"
    config, own = source.model_config, getattr(source.published, "processor", None)
    model_class = causal_class(config, states=True, images=True)
    return load_processor(source.path, config, model_class, None if own is None else own(config))


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {name!r} is not usable here: {str(error).splitlines()[0]}") from None
    return device


def _narrow_weights(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, *, kept: bool = False
) -> tuple[BlockWeights | None, LibraryLayers | None]:
    """Return which weights are quantized: by Winnow on a CPU, by a library on a GPU."""
    config.check_weight_device(device.type)
    if device.type == "cuda":
        form = f"weight_dtype {config.weight_dtype} on {device}"
        asked = config.weight_dtype != "auto"
        library = require_plugin("weights", form, "humming") if asked else find_plugin("weights")
        return None, None if library is None else library.of(config, device, dtype, kept=kept)
    return BlockWeights.of(config, kept=kept), None


def _holds_codes(config: ModelConfig, device: torch.device, num_ranks: int) -> bool:
    """Return whether a library may keep blocks of a checkpoint on a GPU."""
    library = find_plugin("weights") if device.type == "cuda" and num_ranks == 1 else None
    return library is not None and library.holds_codes(config, device)


def _field_of(value: object, fields: Mapping[str, Any]) -> str | None:
    for name, found in fields.items():
        if found == value:
            return name
        if isinstance(found, Mapping) and (inner := _field_of(value, found)) is not None:
            return f"{name}.{inner}"
    return None
