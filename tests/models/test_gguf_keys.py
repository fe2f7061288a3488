"""Every key of a GGUF file that changes answers is applied, agrees with what is computed, or is refused by name."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from winnow import LLM, SamplingParams
from winnow.config import ModelConfig
from winnow.errors import UnsupportedModelError
from winnow.models import load_model
from winnow.models.load.hub import locate_model

pytest.importorskip("gguf")
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFWriter, dequantize
from tiny_gguf import SHAPE, save_gguf, tiny_llama

from winnow.models.load.gguf.file import GgufFile
from winnow.models.load.gguf.header import GgufHeader
from winnow.models.load.gguf.keys import linear_factor, refused_keys

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
PROMPT = list(range(3, 90))
PIECES = {"▁": -50, "x": -44, "h": -40, "i": -41, "▁h": -5, "▁hi": -2, "hi": -3, "▁▁": -7}


def answer(path: Path) -> list[int]:
    with LLM(path, kv_memory="4MiB") as llm:
        return list(llm.generate([PROMPT], GREEDY)[0].outputs[0].token_ids)


def stretched(factor: float) -> LlamaForCausalLM:
    """The tiny model with positions divided by a factor."""
    model = tiny_llama()
    rope = {"rope_type": "linear", "factor": factor, "rope_theta": 10000.0}
    values = {name: value for name, value in model.config.to_dict().items() if name != "rope_parameters"}
    other = LlamaForCausalLM(LlamaConfig(**values | {"rope_parameters": rope}))
    other.load_state_dict(model.state_dict())
    return other.eval()


@pytest.mark.parametrize(
    "values",
    [
        {"llama.rope.scale_linear": 4.0},
        {"llama.rope.scaling.factor": 4.0},
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
        {"llama.rope.scaling.factor": 4.0, "llama.rope.scale_linear": 2.0},
    ],
)
def test_positions_are_divided_however_the_file_says_so(values: dict[str, Any], tmp_path: Path) -> None:
    found = answer(save_gguf(tmp_path / "tiny.gguf", tiny_llama(), values=values))
    model, tokens = stretched(4.0), list(PROMPT)
    while len(tokens) < len(PROMPT) + len(found):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    assert found == tokens[len(PROMPT) :]


@pytest.mark.parametrize(
    ("values", "factor"),
    [
        ({}, None),
        ({"a.rope.scale_linear": 1.0}, None),
        ({"a.rope.scaling.factor": 0.0}, None),
        ({"a.rope.scaling.type": "none", "a.rope.scaling.factor": 4.0}, None),
        ({"a.rope.scaling.type": "linear", "a.rope.scaling.factor": 2}, 2.0),
    ],
)
def test_what_divides_positions(values: dict[str, Any], factor: float | None) -> None:
    assert linear_factor({"general.architecture": "a", **values}) == factor


@pytest.mark.parametrize("factor", [-1.0, float("nan"), float("inf"), "4", [4.0]])
def test_factors_that_are_none(factor: Any) -> None:
    with pytest.raises(ValueError, match=r"a\.rope\.scaling\.factor must be a number above 0"):
        linear_factor({"general.architecture": "a", "a.rope.scaling.factor": factor})


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("llama.attention.scale", 0.5, "0.25 is computed"),
        ("llama.attention.key_length", 32, "16 is computed"),
        ("llama.attention.sliding_window", 128, "0 is computed"),
        ("llama.attention.clamp_kqv", 8.0, "0 is computed"),
        ("llama.attention.max_alibi_bias", 8.0, "0 is computed"),
        ("llama.attention.causal", False, "True is computed"),
        ("llama.rope.scaling.attn_factor", 1.2, "1 is computed"),
        ("llama.rope.scaling.yarn_log_multiplier", 0.1, "0 is computed"),
        ("llama.rope.of_another_kind", 1, ""),
        ("llama.attention.of_another_kind", 1, ""),
        ("llama.attn_logit_softcapping", 50.0, "0 is computed"),
        ("llama.final_logit_softcapping", 30.0, "0 is computed"),
        ("llama.logit_scale", 0.25, "0 or 1 is computed"),
        ("llama.expert_count", 8, "0 is computed"),
        ("llama.swin_norm", True, ""),
        ("tokenizer.ggml.normalizer.lowercase", True, ""),
        ("tokenizer.ggml.add_sep_token", True, ""),
        ("tokenizer.ggml.of_another_kind", 1, ""),
    ],
)
def test_keys_that_nothing_makes_use_of_are_refused(key: str, value: Any, said: str) -> None:
    config = LlamaConfig(**SHAPE)
    [refused] = refused_keys({"general.architecture": "llama", key: value}, set(), config)
    assert refused.startswith(f"{key} = ") and refused.endswith(said)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.attention.scale", 0.25),
        ("llama.attention.key_length", 16),
        ("llama.attention.value_length", 16),
        ("llama.attention.sliding_window", 0),
        ("llama.attention.causal", True),
        ("llama.rope.dimension_count", 16),
        ("llama.rope.freq_base", 10000.0),
        ("llama.rope.scaling.original_context_length", 4096),
        ("llama.logit_scale", 1.0),
        ("llama.expert_count", 0),
        ("llama.tensor_data_layout", "Meta AI original pth"),
        ("llama.a_note_of_somebody", 7),
        ("tokenizer.ggml.fim_pre_token_id", 7),
        ("tokenizer.ggml.add_sep_token", False),
        ("tokenizer.chat_template.tool_use", "{{ messages }}"),
        ("general.author", "somebody"),
        ("quantize.imatrix.file", "somewhere"),
    ],
)
def test_keys_that_change_nothing(key: str, value: Any) -> None:
    assert not list(refused_keys({"general.architecture": "llama", key: value}, set(), LlamaConfig(**SHAPE)))


def test_a_refusal_names_the_key_and_the_file(tmp_path: Path) -> None:
    path = save_gguf(tmp_path / "tiny.gguf", tiny_llama(), values={"llama.attention.sliding_window": 64})
    with pytest.raises(
        UnsupportedModelError, match=r"tiny\.gguf: nothing makes use of its llama\.attention\.sliding"
    ):
        load_model(ModelConfig(path))


def test_an_end_that_is_no_number_is_named(tmp_path: Path) -> None:
    path = save_gguf(tmp_path / "tiny.gguf", tiny_llama(), values={"tokenizer.ggml.eot_token_id": "<end>"})
    with pytest.raises(
        UnsupportedModelError, match="eot_token_id must be a token's number below 400, got '<end>'"
    ):
        load_model(ModelConfig(path))


@pytest.mark.parametrize("rule", ["gpt-4o-of-tomorrow", "superbpe"])
def test_ways_to_cut_text_that_are_not_known_are_refused(rule: str, tmp_path: Path) -> None:
    path = save_gguf(tmp_path / "tiny.gguf", tiny_llama(), tokenizer=rule)
    with pytest.raises(UnsupportedModelError, match=rf"tokenizer\.ggml\.pre = '{rule}'"):
        load_model(ModelConfig(path))


@pytest.mark.parametrize(
    ("rule", "pieces"),
    [
        ("default", ["is", "Ġ", "123", "4", "?!", "Ġa"]),
        ("gpt-2", ["is", "Ġ1234", "?!", "Ġa"]),
        ("llama-bpe", ["is", "Ġ", "123", "4", "?!", "Ġa"]),
        ("qwen2", ["is", "Ġ", "1", "2", "3", "4", "?!", "Ġa"]),
    ],
)
def test_text_is_cut_as_the_rule_says(rule: str, pieces: list[str], tmp_path: Path) -> None:
    path = save_gguf(tmp_path / "tiny.gguf", tiny_llama(), tokenizer=rule)
    tokenizer = load_model(ModelConfig(path)).tokenizer
    assert tokenizer is not None
    found = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("is 1234?! a")
    assert [text for text, _ in found] == pieces
    assert tokenizer.backend_tokenizer.model.ignore_merges == (rule == "llama-bpe")


@pytest.mark.parametrize("prefix", [None, True, False])
@pytest.mark.parametrize("bos", [None, True, False])
def test_sentencepiece_puts_in_front_what_the_file_says(
    prefix: bool | None, bos: bool | None, tmp_path: Path
) -> None:
    """A space, and the first token, unless it says otherwise: as llama.cpp reads it."""
    tokenizer = load_model(
        ModelConfig(_with_pieces(tmp_path / "spm.gguf", prefix, bos), load_format="dummy")
    ).tokenizer
    assert tokenizer is not None
    first = [] if bos is False else ["<s>"]
    spaced = prefix is not False
    cut = {
        "hi": ["▁hi"] if spaced else ["hi"],
        "x hi": ["▁", "x", "▁hi"] if spaced else ["x", "▁hi"],
        " hi": ["▁", "▁hi"] if spaced else ["▁hi"],
        "<s>hi": ["<s>", "▁hi"] if spaced else ["<s>", "hi"],
    }
    for text, pieces in cut.items():
        ids = tokenizer.encode(text)
        assert tokenizer.convert_ids_to_tokens(ids) == first + pieces, text
        assert tokenizer.decode(ids, skip_special_tokens=True) == text.removeprefix("<s>")


def _with_pieces(path: Path, prefix: bool | None, bos: bool | None) -> Path:
    writer = GGUFWriter(path, "llama")
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(8)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(pieces)
    writer.add_token_scores([0.0] * 259 + [float(score) for score in PIECES.values()])
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * len(PIECES))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    if bos is not None:
        writer.add_add_bos_token(bos)
    if prefix is not None:
        writer.add_add_space_prefix(prefix)
    writer.add_tensor("token_embd.weight", np.zeros((len(pieces), 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _kinds() -> Iterator[str]:
    """Types that the package gguf turns into numbers."""
    for kind, (block, size) in GGML_QUANT_SIZES.items():
        try:
            dequantize(np.zeros((1, size), np.uint8), kind)
        except NotImplementedError:
            continue
        if block > 1 or kind.name == "BF16":
            yield kind.name


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # random bytes are also scales that are no numbers
@pytest.mark.parametrize("name", sorted(_kinds()))
def test_tensors_of_every_type_are_read(name: str, tmp_path: Path) -> None:
    """As `gguf.dequantize` reads them: random blocks, in a model that is as wide as the largest of them."""
    kind = GGMLQuantizationType[name]
    block, size = GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(0)
    width = 256
    writer = GGUFWriter(tmp_path / "tiny.gguf", "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(width)
    writer.add_block_count(1)
    writer.add_feed_forward_length(width)
    writer.add_head_count(4)
    writer.add_head_count_kv(4)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(width // 4)
    writer.add_vocab_size(32)
    stored = {}
    for tensor in ("attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        data = rng.integers(0, 256, (width, width // block * size), dtype=np.uint8)
        stored[tensor] = dequantize(data, kind)
        writer.add_tensor(f"blk.0.{tensor}.weight", data, raw_dtype=kind)
    for tensor in ("blk.0.attn_q", "blk.0.attn_k"):
        writer.add_tensor(f"{tensor}.weight", np.zeros((width, width), np.float16))
    for tensor in ("token_embd", "output"):
        writer.add_tensor(f"{tensor}.weight", rng.normal(size=(32, width)).astype(np.float32))
    for tensor in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{tensor}.weight", np.ones(width, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    config = ModelConfig(tmp_path / "tiny.gguf", optimize=False, verify_model=False)
    model: Any = load_model(config).model
    layer = model.model.layers[0]
    found = {
        "attn_v": layer.self_attn.v_proj,
        "attn_output": layer.self_attn.o_proj,
        "ffn_gate": layer.mlp.gate_proj,
        "ffn_up": layer.mlp.up_proj,
        "ffn_down": layer.mlp.down_proj,
    }
    for tensor, linear in found.items():
        assert np.array_equal(linear.weight.numpy(), stored[tensor], equal_nan=True), tensor
    assert GgufFile.open(locate_model(config)).weight_kinds[name] == 5 * width * width


def test_the_header_is_that_of_the_packages_own_reader(tmp_path: Path) -> None:
    path = save_gguf(tmp_path / "tiny.gguf", tiny_llama(), "Q8_0", values={"general.alignment": 64})
    theirs, ours = GGUFReader(path), GgufHeader.read(path)
    fields = {key: field for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert list(ours.values) == list(fields)
    for key, field in fields.items():
        assert ours.values[key] == field.contents(), key
        assert list(ours.kinds[key]) == [int(kind) for kind in field.types], key
    assert len(ours.tensors) == len(theirs.tensors)
    for our, their in zip(ours.tensors, theirs.tensors, strict=True):
        assert (our.name, our.kind, our.offset, our.nbytes) == (
            their.name, their.tensor_type, their.data_offset, their.n_bytes
        )  # fmt: skip
        assert our.shape == tuple(reversed(their.shape))
        assert np.array_equal(ours.array(our), their.data)


def test_a_file_is_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large vocabularies take seconds each time, and so does the table of names for each module."""
    import gguf

    path = save_gguf(tmp_path / "tiny.gguf", tiny_llama())
    calls: list[str] = []
    read, name_map = GgufHeader.read.__func__, gguf.get_tensor_name_map  # type: ignore[attr-defined]

    def count_read(cls: Any, path: Path) -> GgufHeader:
        calls.append("header")
        return read(cls, path)  # type: ignore[no-any-return]

    def count_names(*args: Any) -> Any:
        calls.append("names")
        return name_map(*args)

    monkeypatch.setattr(GgufHeader, "read", classmethod(count_read))
    monkeypatch.setattr(gguf, "get_tensor_name_map", count_names)
    monkeypatch.setattr(gguf, "GGUFReader", lambda path: pytest.fail("parsed by the package"))
    load_model(ModelConfig(path))
    assert sorted(calls) == ["header", "names"]
