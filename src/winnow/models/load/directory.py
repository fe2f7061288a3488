"""A model's directory as it was published: config.json, safetensors and a tokenizer's files."""

import re
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open

from winnow.errors import InvalidRequestError, UnsupportedModelError
from winnow.models.model.damage import cannot_load, read_object
from winnow.models.model.tokens import load_tokenizer, token_list
from winnow.sampling import SamplingParams

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from winnow.models.model.blocks import Blocks

GENERATION = "generation_config.json"
OWN = "winnow"
"""Value in place of a directory: no recommendation is taken."""
# What transformers leaves out of account where it does not sample.
_OF_SAMPLING = ("temperature", "top_k", "top_p", "min_p")
# By transformers' name: ours. These are the ones that vLLM takes.
_TAKEN = {name: name for name in (*_OF_SAMPLING, "repetition_penalty")} | {"max_new_tokens": "max_tokens"}


def sampling_defaults(path: Path, source: str) -> Mapping[str, Any]:
    """Return fields of `SamplingParams` as a model's makers set them.

    Args:
        source: "auto": of the model's directory `path`, if it has any; "winnow": none; else another directory.

    Raises:
        UnsupportedModelError: the file is missing where it was named, unreadable, or recommends what cannot be.
    """
    if source in (OWN, "vllm"):
        return {}
    directory = path if source == "auto" else Path(source)
    if not (directory / GENERATION).exists():
        if source == "auto":
            return {}
        raise UnsupportedModelError(
            f"model: generation_config must be auto, {OWN} or a directory with a {GENERATION}, got {source!r}"
        )
    values = read_object(directory / GENERATION)
    found = {ours: values[theirs] for theirs, ours in _TAKEN.items() if values.get(theirs) is not None}
    if values.get("do_sample") is False:
        found = {name: value for name, value in found.items() if name not in _OF_SAMPLING}
        found["temperature"] = 0.0
    try:
        SamplingParams.from_mapping(found)
    except InvalidRequestError as error:
        raise cannot_load(directory, f"{GENERATION}: {error}") from None
    return found


# Tensors that a class may have no use for: tables that follow from the configuration, scales of a KV cache and of
# activations in 8 bits, which Winnow stores by scales of its own, further heads, and what reads pictures and sound.
_CHANGES_NOTHING = re.compile(
    r"inv_freq$|(cos|sin)_cached$|position_ids$|att(entio)?n\.(masked_)?bias$|[._](k|v|kv|q|prob|input|output)_scale$"
    r"|^(model\.)?(mtp|v_head|vision_tower|vision_model|visual|multi_modal_projector|audio_tower|embed_(vision|audio))\."
)


class ModelDirectory:
    """A model's configuration, weights and tokenizer; `GgufFile` has the same face."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def config_values(self) -> dict[str, Any]:
        """Return what transformers' configuration is made from, `model_type` among it."""
        if (self.path / "adapter_config.json").exists():
            raise cannot_load(
                self.path,
                "it holds an adapter (adapter_config.json): give its base as the model, and the adapter as lora",
            )
        file = self.path / "config.json"
        if not file.exists():
            inside = sorted(self.path.glob("*.gguf"))
            hint = f"; name the file itself: {inside[0]}" if inside else ""
            raise cannot_load(self.path, f"it holds no config.json{hint}")
        return read_object(file)

    def check_config(self, config: "PretrainedConfig") -> None:
        """Refuse a configuration that leaves some of what the files say out."""

    def weights(self) -> dict[str, Any]:
        """Return keyword arguments of `from_pretrained` that name the weights."""
        if not any(self.path.glob("*.safetensors")):
            raise cannot_load(
                self.path,
                "it holds no *.safetensors; other weight formats can carry code and are not read (load_format=dummy "
                "runs a configuration with random weights)",
            )
        return {"pretrained_model_name_or_path": self.path, "use_safetensors": True}

    def reading(self, *, keeps_blocks: bool = False) -> "AbstractContextManager[dict[str, Blocks]]":
        """Surround `from_pretrained`. Weights that kept their blocks, whose numbers the model lacks, come by name."""
        return nullcontext({})

    def check_weights(self, model: "PreTrainedModel", left_out: Collection[str]) -> None:
        """Refuse a model that left some of the weights out which the files hold: `left_out`, as transformers says."""
        self._check_unused(model, left_out, scaled=hasattr(model.config, "quantization_config"))

    def _check_unused(self, model: "PreTrainedModel", left_out: Collection[str], *, scaled: bool) -> None:
        from winnow.models.model.kinds import head_patterns  # transformers

        heads = re.compile("|".join(head_patterns(model.config)))
        unused = sorted(
            name for name in left_out if not (_CHANGES_NOTHING.search(name) or heads.search(name))
        )
        zeros = set[str]()
        for file in self.path.glob("*.safetensors") if unused or not scaled else ():
            with safe_open(file, framework="pt") as tensors:
                for name in () if scaled else tensors.keys():
                    if name.endswith(".weight") and (kind := tensors.get_slice(name).get_dtype())[0] in "IU":
                        absent = "config.json names no quantization_config that says their scales"
                        raise cannot_load(self.path, f"{name} holds integers ({kind}), and {absent}")
                held = [name for name in unused if name.endswith(".bias") and name in tensors.keys()]  # noqa: SIM118
                zeros |= {name for name in held if not tensors.get_tensor(name).any()}
        if unused := [name for name in unused if name not in zeros]:
            raise cannot_load(
                self.path,
                f"{type(model).__name__} makes no use of {len(unused)} of its tensors, such as {unused[0]}, and would "
                "answer wrong: its config.json leaves out what they are for",
            )

    def tokenizer(self) -> "PreTrainedTokenizerBase | None":
        return load_tokenizer(self.path)

    def end_tokens(self, config: "PretrainedConfig") -> list[int]:
        values = read_object(self.path / GENERATION) if (self.path / GENERATION).exists() else {}
        return token_list(values.get("eos_token_id")) or token_list(
            getattr(config.get_text_config(), "eos_token_id", None)
        )
