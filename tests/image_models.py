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
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen3VLConfig,
)

from winnow.models.load.kinds import causal_class
from winnow.models.load.processor import Processor, load_processor

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
    """

    special: tuple[str, ...]
    mark: str
    config: Callable[[dict[str, int], int], PretrainedConfig]
    processor: dict[str, Any]
    extra: dict[str, Any] = field(default_factory=dict)
    tokenizer: dict[str, Any] = field(default_factory=dict)


def _qwen2_5_vl(ids: dict[str, int], size: int) -> PretrainedConfig:
    return Qwen2_5_VLConfig(
        text_config=TEXT
        | {"vocab_size": size, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}},
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "patch_size": 4,
            "out_hidden_size": 64,
            "window_size": 16,
            "fullatt_block_indexes": [1],
        },
        **_qwen(ids),
    )


def _qwen3_vl(ids: dict[str, int], size: int) -> PretrainedConfig:
    return Qwen3VLConfig(
        text_config=TEXT
        | {
            "vocab_size": size,
            "rope_parameters": {
                "rope_type": "default",
                "mrope_section": [2, 3, 3],
                "mrope_interleaved": True,
            },
        },
        vision_config={
            "depth": 3,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "patch_size": 4,
            "out_hidden_size": 64,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0, 1],
        },
        **_qwen(ids),
    )


def _qwen(ids: dict[str, int]) -> dict[str, Any]:
    return {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "tie_word_embeddings": False,
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

FAMILIES = {
    "qwen2_5_vl": Family(
        _QWEN_SPECIAL, _QWEN_MARK, _qwen2_5_vl, _QWEN_PIXELS | {"processor_class": "Qwen2_5_VLProcessor"}
    ),
    "qwen3_vl": Family(
        _QWEN_SPECIAL, _QWEN_MARK, _qwen3_vl, _QWEN_PIXELS | {"processor_class": "Qwen3VLProcessor"}
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
        additional_special_tokens=list(family.special),
        **family.tokenizer,
    ).save_pretrained(path)
    (path / "preprocessor_config.json").write_text(json.dumps(family.processor))
    if family.extra:
        (path / "processor_config.json").write_text(json.dumps(family.extra))
    config = family.config(vocab, len(vocab))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        for each, weight in model.named_parameters():
            with torch.no_grad():
                if weight.ndim == 1:
                    weight.add_(0.3 * torch.randn_like(weight))
                else:
                    weight.normal_(0.0, 1.0 if "embed" in each else 0.25)
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
    out = model.generate(**inputs, max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=2)
    found: list[int] = out[0, inputs["input_ids"].shape[1] :].tolist()
    return found
