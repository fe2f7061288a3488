"""Towers for pictures in GGUF files (`mmproj`) beside their text models: transformers' own answers in float32."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from image_models import picture
from local_hub import REPOSITORY, LocalHub, serving
from transformers import (
    AutoImageProcessor,
    AutoModelForImageTextToText,
    Gemma3Config,
    Qwen2_5_VLConfig,
    Qwen3VLConfig,
)

from winnow import LLM, SamplingParams
from winnow.config import EngineConfig, ModelConfig
from winnow.errors import InvalidRequestError, UnsupportedModelError
from winnow.executor.build import _identity
from winnow.models import load_model

pytest.importorskip("gguf")
from gguf import GGUFWriter
from gguf_architectures import WIDTH, save, tiny
from tiny_gguf import in_parts
from tokenizer_kinds import byte_level

TOWER = {"hidden_size": 32, "intermediate_size": 64, "patch_size": 4}
QWEN = {"depth": 4, "num_heads": 2, "out_hidden_size": WIDTH, **TOWER}
PIXELS = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.6, 0.7]}
MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
GEMMA_MARKS = ("<start_of_image>", "<end_of_image>", "<unused0>")
KINDS = {"gemma3": "gemma3", "qwen2vl": "qwen2.5vl_merger", "qwen3vl": "qwen3vl_merger"}
# What llama.cpp's converter calls parts of transformers' classes.
NAMES = {
    r"patch_embed(ding|\.proj)": "patch_embd", r"embeddings\.": "", r"pos(ition)?_embed(ding)?$": "position_embd",
    r"post_layernorm": "post_ln", r"(encoder\.layers|blocks)\.": "blk.", r"(layer_norm|norm)([12])$": r"ln\2",
    r"self_attn\.([qkv])_proj": r"attn_\1", r"self_attn.out_proj|attn\.proj": "attn_out", r"attn\.qkv": "attn_qkv",
    r"mlp\.(linear_)?fc1|mlp\.up_proj": "ffn_up", r"mlp\.(linear_)?fc2|mlp\.down_proj": "ffn_down",
    r"mlp\.gate_proj": "ffn_gate", r"^v\.merger\.(ln_q|norm)": "v.post_ln", r"^v\.merger\.mlp": "mm",
    r"^v\.merger\.linear_fc1": "mm.0", r"^v\.merger\.linear_fc2": "mm.2",
    r"deepstack_merger_list\.0": "deepstack.1", r"deepstack_merger_list\.1": "deepstack.3", r"linear_fc": "fc",
}  # fmt: skip


def ids_of(arch: str) -> dict[str, int]:
    marks = GEMMA_MARKS if arch == "gemma3" else MARKS
    return {text: len(byte_level()) - len(marks) + n for n, text in enumerate(marks)}


def with_tower(arch: str, text: Any) -> Any:
    """transformers' class of a text model's weights behind a random tower."""
    ids, values = ids_of(arch), text.config.to_dict()
    if arch == "gemma3":
        siglip = {"model_type": "siglip_vision_model", "num_hidden_layers": 2, "num_attention_heads": 2}
        vision = {**TOWER, **siglip, "image_size": 32, "vision_use_head": False}
        marks = dict(zip(("boi_token_id", "eoi_token_id", "image_token_id"), ids.values(), strict=True))
        config: Any = Gemma3Config(text_config=values, vision_config=vision, mm_tokens_per_image=4, **marks)
    else:
        two, rope = arch == "qwen2vl", {"rope_type": "default", "rope_theta": 10000.0}
        rope |= (
            {"mrope_section": [2, 3, 3]} if two else {"mrope_section": [6, 5, 5], "mrope_interleaved": True}
        )
        values |= {"model_type": "qwen2_5_vl_text" if two else "qwen3_vl_text", "rope_parameters": rope}
        own = {"window_size": 16, "fullatt_block_indexes": [1, 3]} if two else {
            "num_position_embeddings": 16, "deepstack_visual_indexes": [1, 3]}  # fmt: skip
        names = ("vision_start", "vision_end", "image", "video")
        marks = {f"{name}_token_id": n for name, n in zip(names, ids.values(), strict=True)}
        kind = Qwen2_5_VLConfig if two else Qwen3VLConfig
        config = kind(text_config=values, vision_config=QWEN | own, tie_word_embeddings=False, **marks)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        for weight in model.parameters():
            weight.data.normal_(0, 0.2) if weight.ndim > 1 else weight.data.add_(torch.randn_like(weight) / 8)
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.lm_head.load_state_dict(text.lm_head.state_dict())
    return model.eval()


def tensors(arch: str, model: Any, *, legacy: bool) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    for own, weight in model.state_dict().items():
        if "language_model" in own or own == "lm_head.weight":
            continue
        if own.endswith("mm_input_projection_weight"):
            yield "mm.input_projection.weight", weight.numpy()
            continue
        name, _, end = re.sub(r"^model\.(visual|vision_tower)", "v", own).rpartition(".")
        if "soft_emb_norm" in name:
            yield "mm.soft_emb_norm.weight", weight.numpy() + 1
            continue
        for part, theirs in NAMES.items():
            name = re.sub(part, theirs, name)
        if legacy:
            name = re.sub("ffn_(up|down)", lambda x: {"up": "ffn_down", "down": "ffn_up"}[x[1]], name)
        if "patch_embd" in name and weight.ndim == 5:
            yield f"{name}.weight", weight[:, :, 0].numpy()
            yield f"{name}.weight.1", weight[:, :, 1].numpy()
        elif "attn_qkv" in name and arch == "qwen2vl":
            for part, rows in zip("qkv", weight.chunk(3), strict=True):
                yield f"{name.replace('qkv', part)}.{end}", rows.numpy()
        else:
            yield f"{name}.{end}", weight.numpy()


def save_tower(path: Path, arch: str, model: Any, *, legacy: bool = False, kind: str = "") -> Path:
    vision = model.config.vision_config
    writer, key = GGUFWriter(path, "clip"), "clip.vision.{}".format
    writer.add_string("clip.projector_type", kind or KINDS[arch])
    numbers = {"embedding_length": 32, "feed_forward_length": 64, "patch_size": 4, "attention.head_count": 2}
    numbers |= {"projection_dim": WIDTH, "image_size": 32, "block_count": 2 if arch == "gemma3" else 4}
    numbers |= {"projector.scale_factor": 4} if arch == "gemma3" else {"spatial_merge_size": 2}
    numbers |= {"n_wa_pattern": 2, "window_size": 16} if arch == "qwen2vl" else {}
    for name, number in numbers.items():
        writer.add_uint32(key(name), number)
    writer.add_float32(key("attention.layer_norm_epsilon"), getattr(vision, "layer_norm_eps", 1e-6))
    for name, entries in PIXELS.items():
        writer.add_array(key(name), entries)
    if arch != "gemma3":
        writer.add_uint32(key("image_min_pixels"), 64)
        writer.add_uint32(key("image_max_pixels"), 4096)
    if arch == "qwen3vl":
        writer.add_array(key("is_deepstack_layers"), [False, True, False, True])
    for name, array in tensors(arch, model, legacy=legacy):
        writer.add_tensor(name, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write(folder: Path, arch: str, kind: str = "F32", *, legacy: bool = False) -> tuple[Path, Any]:
    """Write a text model and its tower; return the former's path, and transformers' whole model."""
    text = tiny(arch)
    if arch == "gemma3":
        text.model.embed_tokens.weight.data /= 8  # else each token is followed by itself
    model = with_tower(arch, text)
    save_tower(folder / "mmproj-tiny-F32.gguf", arch, model, legacy=legacy)
    last = tuple((name, 3) for name in ids_of(arch))
    return save(folder / "tiny.gguf", arch, text, kind, last), model


def asked(arch: str, folder: Path, llm: LLM) -> tuple[str, dict[str, Any]]:
    """A prompt, and what transformers' class takes for it: made by hand, and by its image processor."""
    image = picture(1)
    if arch == "gemma3":
        own: dict[str, Any] = {
            "image_processor_type": "Gemma3ImageProcessor",
            "size": {"height": 32, "width": 32},
        }
    else:
        own = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4, "merge_size": 2,
               "temporal_patch_size": 2, "size": {"shortest_edge": 64, "longest_edge": 4096}}  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps({**own, **PIXELS}))
    inputs = dict(AutoImageProcessor.from_pretrained(folder)([image], return_tensors="pt"))
    (folder / "preprocessor_config.json").unlink()
    if arch == "gemma3":
        mark, run = "<start_of_image>", "\n\n<start_of_image>" + "<unused0>" * 4 + "<end_of_image>\n\n"
    else:
        count = int(inputs["image_grid_thw"].prod()) // 4
        mark = "<|vision_start|><|image_pad|><|vision_end|>"
        run = mark.replace("<|image_pad|>", "<|image_pad|>" * count)
    assert llm.tokenizer is not None
    tokens = torch.tensor([llm.tokenizer.encode(f"the {run} sees")])
    shown = (tokens == ids_of(arch)["<unused0>" if arch == "gemma3" else "<|image_pad|>"]).int()
    kinds = {"token_type_ids" if arch == "gemma3" else "mm_token_type_ids": shown}
    inputs.pop("num_crops", None)
    return f"the {mark} sees", {"input_ids": tokens, **kinds, **inputs}


def check_answers(named: Path | str, arch: str, folder: Path, model: Any, read: Path | None = None) -> None:
    """Compare greedy answers to a picture with transformers', whose class gets the numbers of a file to be `read`."""
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    with LLM(named, kv_memory="16MiB", dtype="float32", model_cache=True) as llm:
        text, inputs = asked(arch, folder, llm)
        images = [{"prompt": text, "multi_modal_data": {"image": picture(seed)}} for seed in (1, 7)]
        found, other = (each.outputs[0].token_ids for each in llm.generate(images, greedy))
        assert llm.generate(images[:1], greedy)[0].prompt_token_ids == inputs["input_ids"][0].tolist()
    if read is not None:
        config = ModelConfig(read, dtype="float32", optimize=False)
        model.load_state_dict(load_model(config).model.state_dict())
    out = model.generate(**inputs, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert found == out[0, inputs["input_ids"].shape[1] :].tolist() != other


@pytest.mark.parametrize("arch", KINDS)
def test_pictures_answer_as_transformers(arch: str, tmp_path: Path) -> None:
    path, model = write(tmp_path, arch, legacy=arch == "gemma3")
    check_answers(path, arch, tmp_path, model)


def test_a_repository_of_parts_and_a_tower(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As repositories have them: parts of IQ4_XS in a folder of their own, and one tower for all, found by name."""
    path, model = write(tmp_path, "qwen3vl", "IQ4_XS")
    parts = in_parts(path.rename(tmp_path / "tiny-IQ4_XS.gguf"), 3)
    files = {f"IQ4_XS/{part.name}": part for part in parts}
    files |= {name: tmp_path / "mmproj-tiny-F32.gguf" for name in ("mmproj-F32.gguf", "mmproj-Q8_0.gguf")}
    caplog.set_level("INFO", "winnow.models")
    with serving(LocalHub(files), tmp_path / "cache") as hub:
        check_answers(f"{REPOSITORY}:IQ4_XS", "qwen3vl", tmp_path, model, parts[0])
        assert "mmproj-F32.gguf" in hub.fetched and "mmproj-Q8_0.gguf" not in hub.fetched
    assert any("pictures are read by mmproj-F32.gguf" in line for line in caplog.messages)
    decoder: Any = load_model(ModelConfig(parts[0], dtype="float32")).decoder
    assert decoder.layers[-1].down.packed.kinds == {"IQ4_XS"}


def test_another_tower_makes_other_kvs(tmp_path: Path) -> None:
    """What is saved beside one is of no use beside another."""
    path, model = write(tmp_path, "qwen2vl")
    config = EngineConfig.from_options({"model": path, "dtype": "float32"})
    loaded = load_model(config.model)
    before = _identity(loaded, config)
    assert _identity(loaded, config) == before
    next(model.model.visual.blocks[0].parameters()).data += 1
    save_tower(tmp_path / "mmproj-tiny-F32.gguf", "qwen2vl", model)
    assert _identity(loaded, config) != before


def test_towers_that_do_not_fit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Text alone is read then, as without; a tower of the kind that lacks tensors is refused."""
    path, model = write(tmp_path, "qwen2vl")
    save_tower(tmp_path / "mmproj-tiny-F32.gguf", "qwen2vl", model, kind="qwen2vl_merger")
    with LLM(path, kv_memory="16MiB", dtype="float32") as llm:
        assert type(llm.generate(["the"], SamplingParams(max_tokens=1))[0].outputs[0].text) is str
        with pytest.raises(InvalidRequestError, match="have no vision tower"):
            llm.generate([{"prompt": "the", "multi_modal_data": {"image": picture(1)}}])
    del model.model.visual.blocks[3]
    save_tower(tmp_path / "mmproj-tiny-F32.gguf", "qwen2vl", model)
    with pytest.raises(UnsupportedModelError, match=r"it lacks v\.blk\.3\.ln1\.weight"):
        load_model(ModelConfig(path))
