"""Pictures in a random model of Qwen3-VL-2B's shape: the tower, the first token and what others notice.

    python -m winnow_lab.speed.images -o docs/results

Width, heads and the whole vision tower are those of Qwen3-VL-2B; layers of the decoder and the vocabulary are fewer
(`--layers`, 32,768). Weights are random, so answers mean nothing; only times do. transformers' generate reads the same
weights in the same process, and computes each picture each time.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForImageTextToText, PreTrainedTokenizerFast, Qwen3VLConfig, Qwen3VLProcessor

from winnow import LLM, SamplingParams
from winnow.models.load.processor import load_processor
from winnow_lab.report.tables import TextTable
from winnow_lab.study import PageOptions, Result, flag, in_turn, run_study

SPECIAL = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
MARK = "<|vision_start|><|image_pad|><|vision_end|>"
QUESTION = " w1" * 32
TOGETHER = 4
SHAPE = """{"tie_word_embeddings": true,
"text_config": {"vocab_size": 32768, "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 32768, "rope_parameters":
    {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20], "mrope_interleaved": true}},
"vision_config": {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "patch_size": 16,
    "out_hidden_size": 2048, "num_position_embeddings": 2304, "deepstack_visual_indexes": [5, 11, 17]}}"""
UNKNOWN = {"unk_token": "<s>"}


@dataclass(frozen=True)
class Options(PageOptions):
    layers: int = flag(8, "of the decoder, of 28", least=3)
    side: int = flag(448, "of the picture, in pixels", least=64)
    rounds: int = flag(3, "over all cells", least=1)


def save_model(path: Path, layers: int) -> Any:
    """Save a random model with its processor's files. Returns it, in bfloat16."""
    vocab = {
        word: number for number, word in enumerate(("<s>", "</s>", *SPECIAL, *(f"w{i}" for i in range(64))))
    }
    words = Tokenizer(models.WordLevel(vocab, **UNKNOWN))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=words, **UNKNOWN, additional_special_tokens=list(SPECIAL))
    fast.save_pretrained(path)
    (path / "preprocessor_config.json").write_text(
        '{"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen3VLProcessor", "patch_size": 16,'
        ' "merge_size": 2, "temporal_patch_size": 2, "size": {"shortest_edge": 65536, "longest_edge": 16777216}}'
    )
    shape = json.loads(SHAPE)
    shape["text_config"]["num_hidden_layers"] = layers
    ids = dict(zip(("vision_start", "image", "vision_end", "video"), map(vocab.get, SPECIAL), strict=True))
    config = Qwen3VLConfig(**shape, **{f"{name}_token_id": number for name, number in ids.items()})
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16).eval()
    model.save_pretrained(path)
    return model


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def longest_wait(llm: LLM, disturb: Callable[[], object]) -> float:
    """Return the longest time between two tokens of an answer; `disturb` is called after its eighth."""
    answer = llm.stream("w1 w2 w3", SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True))
    times = []
    for _ in answer:
        times.append(time.perf_counter())
        if len(times) == 8:
            disturb()
    return max(later - earlier for earlier, later in pairwise(times[8:]))


def study(options: Options) -> Any:
    """Time cells in turn, each over new pictures."""
    seeds = count()

    def picture() -> Image.Image:
        pixels = np.random.default_rng(next(seeds)).integers(
            0, 256, (options.side, options.side, 3), dtype=np.uint8
        )
        return Image.fromarray(pixels)

    with tempfile.TemporaryDirectory() as folder:
        plain = save_model(Path(folder), options.layers)
        found: Any = load_processor(Path(folder), plain.config, type(plain))
        own: Qwen3VLProcessor = found._own
        tower_bytes = sum(each.nbytes for each in plain.model.visual.parameters())
        with LLM(folder, dtype="bfloat16", kv_memory="256MiB", max_model_len=4096) as llm:
            one = SamplingParams(temperature=0.0, max_tokens=1)

            def prompt(image: Image.Image) -> dict[str, Any]:
                return {"prompt": MARK + QUESTION, "multi_modal_data": {"image": image}}

            def ask(*images: Image.Image) -> None:
                llm.generate([prompt(image) for image in images], one, use_tqdm=False)

            def peer(image: Image.Image) -> None:
                inputs = own(text=[MARK + QUESTION], images=[image], return_tensors="pt")
                inputs["pixel_values"] = inputs["pixel_values"].bfloat16()
                plain.generate(**inputs, max_new_tokens=1, do_sample=False)

            def disturb(number: int) -> float:
                requests = [
                    llm.new_request(llm.tokenize(prompt(picture())), one, final_only=True)
                    for _ in range(number)
                ]
                waited = longest_wait(llm, lambda: llm.submit_all(requests))
                while llm.has_unfinished:
                    llm.step()
                return waited

            ask(first := picture())
            tokens = len(llm.tokenize(prompt(first)).images[0].tokens)
            features = llm.stats().image_bytes

            def timed(work: Callable[..., object], number: int = 1) -> Callable[[], float]:
                def measure() -> float:
                    images = [picture() for _ in range(number)]
                    return seconds(lambda: work(*images))

                return measure

            def asked_again() -> float:
                ask(image := picture())
                return seconds(lambda: ask(image))

            def tower() -> float:
                inputs = own(text=[MARK], images=[picture()], return_tensors="pt")
                pixels = inputs["pixel_values"].bfloat16()
                with torch.inference_mode():
                    return seconds(lambda: plain.model.visual(pixels, grid_thw=inputs["image_grid_thw"]))

            cells = {
                "the tower, one picture": tower,
                "first token, transformers": timed(peer),
                "first token": timed(ask),
                "first token, asked again": asked_again,
                f"first tokens of {TOGETHER} prompts, a picture each": timed(ask, TOGETHER),
                "longest wait between tokens of an answer": lambda: disturb(0),
                f"longest wait while {TOGETHER} pictures come": lambda: disturb(TOGETHER),
            }
            kvs = llm.kv_bytes(tokens)
            for rows in in_turn(cells, options.rounds, lambda cell: cell()):
                middle = {name: median(values) for name, values in rows.items()}
                columns: dict[str, Callable[[float], str]] = {"seconds": lambda value: f"{value:.3f}"}
                yield Result(
                    "Pictures: times of a random model",
                    [TextTable.of("Medians", "work", middle, columns)],
                    [
                        f"Qwen3-VL-2B's shape with {options.layers} of 28 layers and a vocabulary of 32,768, random "
                        f"weights in bfloat16; a picture of {options.side} x {options.side} pixels is {tokens} tokens, "
                        f"the question 32. Medians of {len(rows['first token'])} rounds.",
                        f"Bytes: the tower's weights {tower_bytes:,}; what stays of a picture, its features "
                        f"{features:,} and its KVs {kvs:,}.",
                    ],
                    "First tokens include the processor. No answer of a real model was looked at.\n",
                    {"seconds": rows, "tokens": tokens, "layers": options.layers},
                    (),
                )


if __name__ == "__main__":
    sys.exit(run_study(Options, study))
