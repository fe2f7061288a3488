"""Models that read pictures in GGUF files: the text model's file, and beside it that of its tower, `mmproj`."""

import json
import re
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from winnow.models.load.gguf.file import GgufFile
from winnow.models.model.damage import cannot_load

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from winnow.models.load.gguf.header import GgufHeader
    from winnow.models.model.blocks import Blocks

# Of llama.cpp's architectures: the name of their projector, and transformers' model type.
_KINDS = {
    "gemma3": ("gemma3", "gemma3"),
    "qwen2vl": ("qwen2.5vl_merger", "qwen2_5_vl"), "qwen3vl": ("qwen3vl_merger", "qwen3_vl"),
}  # fmt: skip
# Pixels of a picture, least and most, as the models' own processors have them.
_PIXELS = {"qwen2_5_vl": (3136, 12_845_056), "qwen3_vl": (65_536, 16_777_216)}
# Parts that the package gguf's table of names does not have.
_NAMES = {
    "visual.merger.linear_fc1": "mm.0", "visual.merger.linear_fc2": "mm.2", "visual.merger.norm": "v.post_ln",
}  # fmt: skip
_OTHER = {"up": "ffn_down", "down": "ffn_up"}
_WINDOW = 112
"""Pixels of a side of Qwen2.5-VL's windows, where the file does not say."""


def has_kind_of_tower(path: Path) -> bool:
    """Return whether a GGUF file is of an architecture whose towers are read."""
    return GgufFile.open(path, again=True).header.architecture in _KINDS


def find_tower(path: Path) -> "GgufHeader | None":
    """Return the tower that goes with a text model's file: a `*mmproj*.gguf` in its folder, or the one above."""
    if path.suffix != ".gguf":
        return None
    candidates = [
        each for folder in path.absolute().parents[:2] for each in sorted(folder.glob("*mmproj*.gguf"))
    ]
    if not candidates or not has_kind_of_tower(path):
        return None
    text = GgufFile.open(path, again=True).header
    wanted = _KINDS[text.architecture][0], text.values.get(f"{text.architecture}.embedding_length")
    for each in candidates:
        header = GgufFile.open(each, again=True).header
        kind, dim = (
            header.values.get(f"clip.{name}") for name in ("projector_type", "vision.projection_dim")
        )
        if (header.values.get("clip.vision.projector_type", kind), dim) == wanted:
            return header
    return None


class GgufVision(GgufFile):
    """A text model's file with its tower's."""

    def __init__(self, header: "GgufHeader", tower: "GgufHeader") -> None:
        super().__init__(header)
        self._tower, self._type = tower, _KINDS[header.architecture][1]
        self._kept: dict[str, Blocks] = {}
        self._of = {each.name: each for each in tower.tensors}
        self.tokenizer = cache(self.tokenizer)  # type: ignore[method-assign]

    def _said(self, name: str, default: Any = None) -> Any:
        value = self._tower.values.get(f"clip.vision.{name}", default)
        if value is None:
            raise cannot_load(self._tower.path, f"it lacks clip.vision.{name}")
        return value

    def _id(self, *texts: str) -> int:
        tokens = self._values["tokenizer.ggml.tokens"]
        for text in texts:
            if text in tokens:
                return int(tokens.index(text))
        raise cannot_load(self.path, f"its tokens lack {texts[0]}, which stands for pictures")

    def config_values(self) -> dict[str, Any]:
        self._text = text = super().config_values()
        gemma = self._type == "gemma3"
        depth, heads = ("num_hidden_layers", "num_attention_heads") if gemma else ("depth", "num_heads")
        vision: dict[str, Any] = {
            "hidden_size": self._said("embedding_length"), "intermediate_size": self._said("feed_forward_length"),
            depth: self._said("block_count"), heads: self._said("attention.head_count"),
            "patch_size": self._said("patch_size"),
        }  # fmt: skip
        values: dict[str, Any] = {"model_type": self._type, "vision_config": vision, "text_config": text}
        values["tie_word_embeddings"] = text["tie_word_embeddings"]
        # A vocabulary may end before the token that stands for a part of a picture; any that texts lack will do.
        names: tuple[tuple[str, ...], ...]
        names = (
            ("image", "<image_soft_token>", "<unused0>"),
            ("boi", "<start_of_image>"),
            ("eoi", "<end_of_image>"),
        )
        if not gemma:
            names = tuple((name, f"<|{name}_pad|>") for name in ("image", "video"))
            names += tuple((name, f"<|{name}|>") for name in ("vision_start", "vision_end"))
        values |= {f"{name}_token_id": self._id(*texts) for name, *texts in names}
        if gemma:
            eps = self._said("attention.layer_norm_epsilon")
            more = {"image_size": self._said("image_size"), "layer_norm_eps": eps, "vision_use_head": False}
            vision |= {"model_type": "siglip_vision_model", **more}
            side = vision["image_size"] // vision["patch_size"] // self._said("projector.scale_factor", 4)
            return values | {"mm_tokens_per_image": side**2}
        sections = self._values.get(f"{self.header.architecture}.rope.dimension_sections") or (16, 24, 24)
        rope = {"rope_type": "default", "rope_theta": text["rope_theta"], "mrope_section": [*sections[:3]]}
        if text.pop("rope_scaling", None):
            raise cannot_load(self.path, "its positions are scaled, which no model that reads pictures does")
        vision["out_hidden_size"] = self._said("projection_dim")
        vision["spatial_merge_size"] = self._said("spatial_merge_size", 2)
        if self._type == "qwen2_5_vl":
            every = self._said("n_wa_pattern")
            vision["fullatt_block_indexes"] = [*range(every - 1, vision[depth], every)]
            vision["window_size"] = self._said("window_size", _WINDOW)
        else:
            rope["mrope_interleaved"] = True
            vision["num_position_embeddings"] = self._of["v.position_embd.weight"].shape[0]
            deep = self._said("is_deepstack_layers", [])
            vision["deepstack_visual_indexes"] = [index for index, own in enumerate(deep) if own]
        return values | {"text_config": text | {"model_type": f"{self._type}_text", "rope_parameters": rope}}

    def check_config(self, config: "PretrainedConfig") -> None:
        super().check_config(config)
        self._config = config

    @contextmanager
    def reading(self, *, keeps_blocks: bool = False) -> Iterator[dict[str, "Blocks"]]:
        with super().reading(keeps_blocks=keeps_blocks) as self._kept:
            yield self._kept

    def weights(self) -> dict[str, Any]:
        import transformers

        with torch.device("meta"):
            config = transformers.CONFIG_MAPPING[self._text["model_type"]].from_dict(self._text)
            text = transformers.AutoModelForCausalLM.from_config(config)
            whole = transformers.AutoModelForImageTextToText.from_config(self._config)
        load = transformers.modeling_gguf_pytorch_utils.load_gguf_checkpoint
        read = load(self._file, return_tensors=True, model_to_load=text, torch_dtype=torch.float32)
        found = read["tensors"]
        for tensors in (found, self._kept):
            for name in [name for name in tensors if name.startswith("model.")]:
                tensors[f"model.language_model.{name.removeprefix('model.')}"] = tensors.pop(name)
        found |= self._tower_weights(whole)
        return {"pretrained_model_name_or_path": None, "state_dict": found}

    def _tower_weights(self, whole: "PreTrainedModel") -> dict[str, Tensor]:
        """Return the tower's weights by their names in transformers' class. Raises UnsupportedModelError: it lacks some
        or has others."""
        from gguf import MODEL_ARCH, get_tensor_name_map

        from winnow.models.load.gguf.transformers_reader import read_numbers

        taken: set[str] = set()
        # Files of earlier converters name what widens "down".
        first = self._of.get("v.blk.0.ffn_down.weight")
        widens = first is not None and first.shape[1] == self._said("embedding_length") != first.shape[0]

        def take(name: str) -> Tensor:
            if widens:
                name = re.sub("ffn_(up|down)", lambda found: _OTHER[found[1]], name)
            if name not in self._of:
                raise cannot_load(self._tower.path, f"it lacks {name}")
            taken.add(name)
            return read_numbers(self._tower, self._of[name])

        names = get_tensor_name_map(MODEL_ARCH.MMPROJ, self._said("block_count"))
        deep = getattr(whole.config.vision_config, "deepstack_visual_indexes", None) or ()
        found = {}
        for own in whole.state_dict():
            if own.startswith("model.language_model.") or own == "lm_head.weight":
                continue
            name = own.removeprefix("model.").replace("projection_weight", "projection.weight")
            stem, _, end = name.replace("vision_tower.", "vision_tower.vision_model.").rpartition(".")
            theirs = _NAMES.get(stem) or names.get_name(stem)
            if "deepstack_merger_list" in stem:
                index, part = stem.split(".")[-2:]
                theirs = f"v.deepstack.{deep[int(index)]}.{part.removeprefix('linear_')}"
            theirs = f"{theirs}.{end}"
            if "attn_qkv" in theirs and theirs not in self._of:
                weight = torch.cat([take(theirs.replace("qkv", part)) for part in "qkv"])
            elif own.endswith("patch_embed.proj.weight"):
                weight = torch.stack([take(theirs), take(f"{theirs}.1")], dim=2)  # of two frames
            else:
                weight = take(theirs) - (1 if stem.endswith("soft_emb_norm") else 0)
            found[own] = weight
        if left := sorted(self._of.keys() - taken):
            raise cannot_load(self._tower.path, f"nothing takes {len(left)} tensors, such as {left[0]}")
        return found

    def check_weights(self, model: "PreTrainedModel", left_out: Collection[str]) -> None:
        parts: Any = nn.ModuleList([model.model.language_model, model.lm_head])
        super().check_weights(parts, left_out)

    def processor(self, config: Any) -> Callable[[Any], Any]:
        """Return what makes a processor, given its class."""
        values: dict[str, Any] = {name: self._said(name) for name in ("image_mean", "image_std")}
        vision, more = config.vision_config, dict[str, Any]()
        if self._type == "gemma3":
            values |= {"image_processor_type": "Gemma3ImageProcessor"}
            values["size"] = {"height": vision.image_size, "width": vision.image_size}
            more["image_seq_length"] = config.mm_tokens_per_image
        else:
            least, most = _PIXELS[self._type]
            more["video_processor"] = None
            values |= {"image_processor_type": "Qwen2VLImageProcessor", "temporal_patch_size": 2}
            values |= {"patch_size": vision.patch_size, "merge_size": vision.spatial_merge_size}
            pixels = self._said("image_min_pixels", least), self._said("image_max_pixels", most)
            values["size"] = dict(zip(("shortest_edge", "longest_edge"), pixels, strict=True))
        return partial(self._processor, values, more, config)

    def _processor(self, values: Mapping[str, Any], more: Mapping[str, Any], config: Any, kind: Any) -> Any:
        from transformers import AutoImageProcessor

        tokenizer: Any = self.tokenizer()
        for name in ("image", "boi", "eoi") if self._type == "gemma3" else ():
            token = getattr(config, f"{name}_token_id")
            setattr(tokenizer, f"{name}_token_id", token)
            setattr(tokenizer, f"{name}_token", tokenizer.convert_ids_to_tokens(token))
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "preprocessor_config.json").write_text(json.dumps(values), encoding="utf-8")
            images = AutoImageProcessor.from_pretrained(folder)
        more = {"chat_template": tokenizer.chat_template, **more}
        return kind(image_processor=images, tokenizer=tokenizer, **more)
