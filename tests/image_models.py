"""Tiny random models that read pictures, of each class, saved with their processors as a user's directory would be."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForImageTextToText,
    Gemma3Config,
    Gemma4Config,
    Idefics3Config,
    InternVLConfig,
    Lfm2VlConfig,
    Mistral3Config,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
    SmolVLMConfig,
)

from winnow.models.load.processor import Processor, load_processor
from winnow.models.model.kinds import causal_class

WORDS = [f"w{number}" for number in range(60)]
NAMED = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}


@dataclass(frozen=True)
class Family:
    """A class, as small as it can be.

    Attributes:
        special: its tokens for pictures; `marks` is what a text has in a picture's place.
        config: makes the configuration from ids of tokens and the vocabulary's size.
        processor, tokenizer: what preprocessor_config.json and the tokenizer say.
        extra: what processor_config.json says.
        needs: a package that its processor takes beside Pillow.
    """

    special: tuple[str, ...]
    mark: str
    config: Callable[[dict[str, int], int], PretrainedConfig]
    processor: dict[str, Any]
    extra: dict[str, Any] = field(default_factory=dict)
    tokenizer: dict[str, Any] = field(default_factory=dict)
    needs: str = ""


def _qwen2_5_vl(ids: dict[str, int], size: int) -> PretrainedConfig:
    return Qwen2_5_VLConfig(
        text_config=TEXT
        | {"vocab_size": size, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}},
        vision_config=_QWEN_TOWER | {"depth": 2, "window_size": 16, "fullatt_block_indexes": [1]},
        **_qwen(ids),
    )


def _qwen3_vl(ids: dict[str, int], size: int) -> PretrainedConfig:
    return Qwen3VLConfig(**_qwen3_vl_parts(ids, size))


def _qwen3_vl_moe(ids: dict[str, int], size: int) -> PretrainedConfig:
    parts = _qwen3_vl_parts(ids, size)
    experts = {"num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2}
    return Qwen3VLMoeConfig(**parts | {"text_config": parts["text_config"] | experts})


def _qwen3_vl_parts(ids: dict[str, int], size: int) -> dict[str, Any]:
    return {
        "text_config": TEXT
        | {
            "vocab_size": size,
            "rope_parameters": {
                "rope_type": "default",
                "mrope_section": [2, 3, 3],
                "mrope_interleaved": True,
            },
        },
        "vision_config": _QWEN_TOWER
        | {"depth": 3, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
        **_qwen(ids),
    }


def _qwen(ids: dict[str, int]) -> dict[str, Any]:
    return {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "tie_word_embeddings": False,
    }


_QWEN_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 64,
}
_QWEN_SPECIAL = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
_QWEN_MARK = "<|vision_start|><|image_pad|><|vision_end|>"
_QWEN_PIXELS = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 64, "longest_edge": 4096},
}


def _qwen3_5(ids: dict[str, int], size: int) -> PretrainedConfig:
    return Qwen3_5Config(**_qwen3_5_parts(ids, size))


def _qwen3_5_moe(ids: dict[str, int], size: int) -> PretrainedConfig:
    parts = _qwen3_5_parts(ids, size)
    experts = {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    return Qwen3_5MoeConfig(
        **parts | {"text_config": parts["text_config"] | experts | {"num_experts_per_tok": 2}}
    )


def _qwen3_5_parts(ids: dict[str, int], size: int) -> dict[str, Any]:
    return {
        "text_config": TEXT
        | {
            "vocab_size": size,
            "layer_types": ["full_attention", "linear_attention", "full_attention"],
            "head_dim": 32,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "rope_parameters": {
                "rope_type": "default",
                "mrope_section": [2, 3, 3],
                "mrope_interleaved": True,
                "partial_rotary_factor": 0.5,
            },
        },
        "vision_config": _QWEN_TOWER | {"depth": 2, "num_position_embeddings": 16},
        **_qwen(ids),
    }


def _idefics3(ids: dict[str, int], size: int) -> PretrainedConfig:
    return Idefics3Config(**_idefics(ids, size))


def _smolvlm(ids: dict[str, int], size: int) -> PretrainedConfig:
    return SmolVLMConfig(**_idefics(ids, size))


def _idefics(ids: dict[str, int], size: int) -> dict[str, Any]:
    return {
        "text_config": TEXT | {"vocab_size": size, "model_type": "llama"},
        "vision_config": _TOWER,
        "image_token_id": ids["<image>"],
    }


def _mistral3(ids: dict[str, int], size: int) -> PretrainedConfig:
    return Mistral3Config(
        text_config=TEXT | {"vocab_size": size, "model_type": "mistral", "sliding_window": None},
        vision_config=_TOWER | {"model_type": "pixtral", "image_size": 32, "head_dim": 16},
        image_token_index=ids["[IMG]"],
        tie_word_embeddings=False,
    )


def _internvl(ids: dict[str, int], size: int) -> PretrainedConfig:
    return InternVLConfig(
        text_config={name: value for name, value in TEXT.items() if name != "head_dim"}
        | {"vocab_size": size, "model_type": "qwen2"},
        vision_config=_TOWER | {"image_size": [16, 16], "patch_size": [4, 4]},
        image_token_id=ids["<IMG_CONTEXT>"],
        image_seq_length=4,
        tie_word_embeddings=False,
    )


def _lfm2_vl(ids: dict[str, int], size: int) -> PretrainedConfig:
    return Lfm2VlConfig(
        text_config={name: value for name, value in TEXT.items() if name != "head_dim"}
        | {"vocab_size": size, "model_type": "lfm2", "layer_types": ["conv", "full_attention", "conv"]},
        vision_config=_TOWER | {"model_type": "siglip2_vision_model", "num_patches": 16},
        image_token_id=ids["<image>"],
        projector_hidden_size=32,
        tie_word_embeddings=False,
    )


def _gemma3(ids: dict[str, int], size: int) -> PretrainedConfig:
    return Gemma3Config(
        text_config=_GEMMA_TEXT | {"vocab_size": size},
        vision_config=_TOWER | {"model_type": "siglip_vision_model", "vision_use_head": False},
        image_token_id=ids["<image>"],
        boi_token_id=ids["<boi>"],
        eoi_token_id=ids["<eoi>"],
        mm_tokens_per_image=16,
        tie_word_embeddings=False,
    )


def _gemma4(ids: dict[str, int], size: int) -> PretrainedConfig:
    return Gemma4Config(
        text_config=_GEMMA_TEXT
        | {
            "vocab_size": size,
            "vocab_size_per_layer_input": size,
            "hidden_size_per_layer_input": 8,
            "global_head_dim": 32,
            "use_bidirectional_attention": "vision",
        },
        vision_config={name: value for name, value in _TOWER.items() if name != "image_size"}
        | {"num_key_value_heads": 2, "head_dim": 16, "pooling_kernel_size": 2, "position_embedding_size": 32},
        audio_config=None,
        image_token_id=ids["<image>"],
        boi_token_id=ids["<boi>"],
        eoi_token_id=ids["<eoi>"],
        video_token_id=ids["<|video|>"],
        audio_token_id=ids["<audio>"],
        tie_word_embeddings=False,
    )


# A window shorter than a picture.
_GEMMA_TEXT = TEXT | {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "num_hidden_layers": 4,
    "sliding_window": 6,
    "query_pre_attn_scalar": 1,
}
_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
_IDEFICS_SPECIAL = (
    *("<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>", "<video>"),
    *(f"<row_{row}_col_{col}>" for row in range(1, 5) for col in range(1, 5)),
)
_IDEFICS_PIXELS = {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}}
_INTERNVL = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}

FAMILIES = {
    "qwen2_5_vl": Family(
        _QWEN_SPECIAL, _QWEN_MARK, _qwen2_5_vl, _QWEN_PIXELS | {"processor_class": "Qwen2_5_VLProcessor"}
    ),
    **{
        name: Family(
            _QWEN_SPECIAL, _QWEN_MARK, config, _QWEN_PIXELS | {"processor_class": "Qwen3VLProcessor"}
        )
        for name, config in (("qwen3_vl", _qwen3_vl), ("qwen3_vl_moe", _qwen3_vl_moe))
    },
    **{
        name: Family(
            _QWEN_SPECIAL,
            _QWEN_MARK,
            config,
            _QWEN_PIXELS | {"processor_class": "Qwen3VLProcessor"},
            # transformers reads any tokenizer of these types as byte-level BPE, and keeps added tokens alone.
            tokenizer={"additional_special_tokens": [*_QWEN_SPECIAL, *WORDS]},
        )
        for name, config in (("qwen3_5", _qwen3_5), ("qwen3_5_moe", _qwen3_5_moe))
    },
    "gemma3": Family(
        ("<boi>", "<eoi>", "<image>"),
        "<boi>",
        _gemma3,
        {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 16, "width": 16}},
        {"processor_class": "Gemma3Processor", "image_seq_length": 16},
        {"extra_special_tokens": {"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<image>"}},
    ),
    "gemma4": Family(
        ("<boi>", "<eoi>", "<image>", "<|video|>", "<audio>", "<boa>", "<eoa>"),
        "<image>",
        _gemma4,
        {
            "image_processor_type": "Gemma4ImageProcessor",
            "patch_size": 4,
            "pooling_kernel_size": 2,
            "max_soft_tokens": 70,
        },
        {"processor_class": "Gemma4Processor", "image_seq_length": 70},
        {
            "extra_special_tokens": {
                "boi_token": "<boi>",
                "eoi_token": "<eoi>",
                "image_token": "<image>",
                "audio_token": "<audio>",
                "boa_token": "<boa>",
                "eoa_token": "<eoa>",
            }
        },
    ),
    "idefics3": Family(
        _IDEFICS_SPECIAL,
        "<image>",
        _idefics3,
        _IDEFICS_PIXELS | {"image_processor_type": "Idefics3ImageProcessor"},
        {"processor_class": "Idefics3Processor", "image_seq_len": 4},
    ),
    "smolvlm": Family(
        _IDEFICS_SPECIAL,
        "<image>",
        _smolvlm,
        _IDEFICS_PIXELS | {"image_processor_type": "SmolVLMImageProcessor"},
        {"processor_class": "SmolVLMProcessor", "image_seq_len": 4},
        needs="num2words",
    ),
    "mistral3": Family(
        ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        "[IMG]",
        _mistral3,
        {
            "image_processor_type": "PixtralImageProcessor",
            "patch_size": {"height": 4, "width": 4},
            "size": {"longest_edge": 32},
        },
        {"processor_class": "PixtralProcessor", "patch_size": 4, "spatial_merge_size": 2},
        needs="torchvision",
    ),
    "internvl": Family(
        (*_INTERNVL.values(),),
        "<IMG_CONTEXT>",
        _internvl,
        {
            "image_processor_type": "GotOcr2ImageProcessor",
            "size": {"height": 16, "width": 16},
            "max_patches": 3,
        },
        {"processor_class": "InternVLProcessor", "image_seq_length": 4},
        {"extra_special_tokens": _INTERNVL},
    ),
    "lfm2_vl": Family(
        (
            *("<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"),
            *(f"<|img_row_{row}_col_{col}|>" for row in range(1, 4) for col in range(1, 4)),
        ),
        "<image>",
        _lfm2_vl,
        {
            "image_processor_type": "Lfm2VlImageProcessor",
            "tile_size": 16,
            "encoder_patch_size": 4,
            "min_image_tokens": 2,
            "max_image_tokens": 4,
            "max_tiles": 4,
            "max_num_patches": 16,
        },
        {"processor_class": "Lfm2VlProcessor"},
        needs="torchvision",
    ),
}


def save(name: str, path: Path) -> Any:
    """Save a model with its processor, and return it: float32, and every weight matters."""
    family = FAMILIES[name]
    vocab = {word: number for number, word in enumerate([*NAMED.values(), *family.special, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=NAMED["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **NAMED,
        **{"additional_special_tokens": list(family.special)} | family.tokenizer,
    ).save_pretrained(path)
    (path / "preprocessor_config.json").write_text(json.dumps(family.processor))
    if family.extra:
        (path / "processor_config.json").write_text(json.dumps(family.extra))
    config = family.config(vocab, len(vocab))
    embedding = 0.125 if "gemma" in name else 1.0  # which Gemma multiplies by the root of 64
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        for each, weight in model.named_parameters():
            with torch.no_grad():
                if weight.ndim == 1:
                    weight.add_(0.3 * torch.randn_like(weight))
                else:
                    weight.normal_(0.0, embedding if "embed" in each else 0.25)
    model.save_pretrained(path)
    return model.eval()


def picture(seed: int, width: int = 24, height: int = 16) -> Image.Image:
    """A picture of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def processor_of(path: Path, model: Any) -> Processor:
    found = load_processor(path, model.config, causal_class(model.config, states=True, images=True))
    assert isinstance(found, Processor), found
    return found


def generate(
    model: Any, processor: Processor, text: str, images: Sequence[Image.Image], tokens: int
) -> list[int]:
    """transformers' own greedy answer, end of text ignored."""
    inputs = processor._own(text=[text], images=list(images) or None, return_tensors="pt")
    if images:
        inputs["pixel_values"] = inputs["pixel_values"].float()
    out = model.generate(**inputs, max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=2)
    found: list[int] = out[0, inputs["input_ids"].shape[1] :].tolist()
    return found
