"""A GGUF file answers as the model that it was made from, and one that cannot is refused in a line."""

import argparse
import json
import random
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GgufConfig

from winnow import LLM, SamplingParams
from winnow.cli.main import main
from winnow.config import ModelConfig
from winnow.errors import UnsupportedModelError
from winnow.models import load_model, load_plain_model, pack_model
from winnow.models.fast.fused.kernels import LayerKernels
from winnow.models.load import automatic
from winnow.models.load.automatic import settle_formats
from winnow.models.load.gguf.file import GgufFile
from winnow.models.model.experts import GroupedExperts
from winnow.process.digest import model_digest
from winnow_lab.cli.plan import DeviceOptions, deployments

pytest.importorskip("gguf")
from tiny_gguf import save_gguf, tiny_llama, tiny_moe
from tokenizer_kinds import byte_level

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
TEXT = "The quick brown fox 123 456"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The model in float32."""
    yield save_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", tiny_llama())


def answer(model: Any, prompt: list[int]) -> list[int]:
    tokens = model.generate(
        torch.tensor([prompt]), max_new_tokens=12, min_new_tokens=12, do_sample=False, use_cache=True
    )
    return tokens[0, len(prompt) :].tolist()


def winnow_answer(path: Path, prompt: list[int], **options: Any) -> list[int]:
    llm = LLM(path, kv_memory="16MiB", **options)
    return list(llm.generate([prompt], GREEDY)[0].outputs[0].token_ids)


def test_answers_as_the_model_that_was_written(plain: Path) -> None:
    prompt = byte_level().encode(TEXT)
    assert winnow_answer(plain, prompt) == answer(tiny_llama(), prompt)


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_blocks_stay_as_they_are(kind: str, tmp_path: Path) -> None:
    """Numbers of the packed weights are those of the file, and answers those of its numbers in float32."""
    pytest.importorskip("winnow._native")
    path = save_gguf(tmp_path / "tiny.gguf", tiny_llama(), kind)
    theirs: Any = load_plain_model(ModelConfig(path, dtype="float32")).model
    loaded = load_model(ModelConfig(path, dtype="float32"), own_code=True)
    assert loaded.decoder is not None and loaded.verified is not None
    last: Any = loaded.decoder.layers[-1]
    assert last.down.packed.kinds == {kind} and loaded.decoder.head.packed.kinds == {"Q8_0"}
    rows = last.kernels.unpack_rows(last.down.packed, torch.arange(64))
    assert torch.equal(rows, theirs.model.layers[-1].mlp.down_proj.weight)
    tokens = torch.arange(50)
    assert torch.equal(loaded.decoder.embedding(tokens), theirs.get_input_embeddings()(tokens))
    prompt = byte_level().encode(TEXT)
    expected = answer(theirs, prompt)
    assert winnow_answer(path, prompt, dtype="float32") == expected
    pack_model(ModelConfig(path, dtype="float32"), tmp_path / "packed")
    assert winnow_answer(tmp_path / "packed", prompt) == expected


@pytest.mark.parametrize(("kind", "other"), [("Q4_1", "Q4_1"), ("Q4_1", "Q5_0"), ("F32", "F32")])
def test_blocks_of_experts(kind: str, other: str, tmp_path: Path) -> None:
    """They stay as they are, but where gates and what they gate are of different kinds."""
    pytest.importorskip("winnow._native")
    values = {"expert_count": 8, "expert_used_count": 3, "expert_feed_forward_length": 32}
    values |= {"attention.key_length": 16, "attention.value_length": 16}
    path = save_gguf(
        tmp_path / "tiny.gguf",
        tiny_moe(),
        kind,
        architecture="qwen3moe",
        values={f"qwen3moe.{key}": value for key, value in values.items()},
        other={"ffn_up_exps": other},
    )
    if kind != other:
        assert not GgufFile.open(path).keeps_blocks
        return
    loaded = load_model(ModelConfig(path, dtype="float32"))
    parts = [module for module in loaded.model.modules() if isinstance(module, GroupedExperts)]
    packed = {getattr(each, "packed", None) for part in parts for each in (*part.up, *part.down)}
    kinds = {"".join(weight.kinds) for weight in packed if weight is not None}
    assert len(parts) == 2 and kinds == ({kind} if kind != "F32" else {""})
    theirs: Any = load_plain_model(ModelConfig(path, dtype="float32")).model if kind != "F32" else tiny_moe()
    prompt = byte_level().encode(TEXT)
    assert winnow_answer(path, prompt, dtype="float32") == answer(theirs, prompt)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_answers_as_transformers_reads_quantized_files(tmp_path: Path, kind: str) -> None:
    path = save_gguf(tmp_path / "tiny.gguf", tiny_llama(), kind)
    theirs = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    prompt = byte_level().encode(TEXT)
    assert winnow_answer(path, prompt) == answer(theirs, prompt)


def test_text_and_chat_by_the_files_own_tokenizer(plain: Path) -> None:
    llm = LLM(str(plain), kv_memory="16MiB")
    assert llm.config.model.model == str(plain)
    tokenizer = byte_level()
    asked = llm.generate([TEXT], GREEDY)[0]
    assert asked.prompt_token_ids == tokenizer.encode(TEXT)
    assert asked.outputs[0].text == tokenizer.decode(asked.outputs[0].token_ids)
    chatted = llm.chat([{"role": "user", "content": "hello"}], GREEDY)[0]
    assert llm.tokenizer is not None
    assert llm.tokenizer.decode(chatted.prompt_token_ids) == "user: hello\nassistant:"


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        # As the tokenizer that SmolLM publishes does; transformers' reader takes "  6" for " " and " 6".
        ("smollm", ["it", "'s", "ĠĠ", "6", "6", "6", "6"]),
        ("glm4", ["it", "'s", "Ġ", "Ġ", "666", "6"]),
        ("exaone4", ["it", "'s", "Ġ", "Ġ6666"]),
    ],
)
def test_text_is_cut_as_the_file_says(rule: str, expected: list[str], tmp_path: Path) -> None:
    path = save_gguf(tmp_path / "tiny.gguf", tiny_llama(), tokenizer=rule)
    loaded = load_model(ModelConfig(path))
    assert loaded.tokenizer is not None
    parts = loaded.tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("it's  6666")
    assert [text for text, _ in parts] == expected


def test_ends_where_the_file_says(tmp_path: Path) -> None:
    path = save_gguf(tmp_path / "tiny.gguf", tiny_llama(), values={"tokenizer.ggml.eot_token_id": 77})
    eos = byte_level().eos_token_id
    assert {eos, 77} <= load_model(ModelConfig(path)).eos_token_ids
    assert {eos, 77} <= load_plain_model(ModelConfig(path)).eos_token_ids


def test_turns_end_at_control_tokens_that_llama_cpp_knows_by_their_text(tmp_path: Path) -> None:
    control, user, normal = 3, 4, 1
    last = [("<|end|>", control), ("<end_of_turn>", user), ("<|eot_id|>", normal), ("<|plain|>", control)]
    path = save_gguf(tmp_path / "tiny.gguf", tiny_llama(), last=tuple(last))
    vocab = len(byte_level())
    assert load_model(ModelConfig(path)).eos_token_ids == {byte_level().eos_token_id, vocab - 4, vocab - 3}
    harmony = [("<|return|>", control), ("<|call|>", control), ("<|end|>", control)]
    path = save_gguf(tmp_path / "harmony.gguf", tiny_llama(), last=tuple(harmony))
    assert load_model(ModelConfig(path)).eos_token_ids == {byte_level().eos_token_id, vocab - 3, vocab - 2}


def test_two_tokens_of_one_text_are_refused(tmp_path: Path) -> None:
    path = save_gguf(tmp_path / "tiny.gguf", tiny_llama(), last=(("zq", 1), ("zq", 1), ("xyz", 1)))
    lost = len(byte_level()) - 3
    with pytest.raises(UnsupportedModelError, match=f"names 'zq' twice, so that token {lost} would be lost"):
        load_model(ModelConfig(path))


def test_no_text_makes_a_token_that_the_file_does_not_have(plain: Path, tmp_path: Path) -> None:
    """transformers' class brings special texts of its own."""
    path = save_gguf(tmp_path / "tiny.gguf", tiny_llama(), last=(("zq", 1),))
    tokenizer = load_model(ModelConfig(path)).tokenizer
    assert tokenizer is not None
    ids = tokenizer.encode("a<|endoftext|>b</s><s><pad>")
    assert max(ids) < len(byte_level()) == len(tokenizer)


def test_named_templates_are_read_and_packed(tmp_path: Path) -> None:
    path = save_gguf(
        tmp_path / "tiny.gguf",
        tiny_llama(),
        values={"tokenizer.chat_template.tool_use": "with {{ tools | length }}"},
    )
    tools = [{"type": "function", "function": {"name": "clock", "parameters": {}}}]
    with LLM(path, kv_memory="4MiB") as llm:
        [output] = llm.chat([{"role": "user", "content": "Hi"}], GREEDY, tools=tools)
    assert output.prompt == "with 1"
    pytest.importorskip("winnow._native")
    pack_model(ModelConfig(path), tmp_path / "packed")
    with LLM(tmp_path / "packed", kv_memory="4MiB") as llm:
        [packed] = llm.chat([{"role": "user", "content": "Hi"}], GREEDY, tools=tools)
    assert packed.prompt == "with 1"


def test_what_auto_means_on_a_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wide, blocks = tmp_path / "wide.gguf", tmp_path / "blocks.gguf"
    save_gguf(wide, tiny_llama())
    save_gguf(blocks, tiny_llama(), "Q8_0")
    directory = tmp_path / "directory"
    tiny_llama().save_pretrained(directory)

    def settled(path: Path, **options: Any) -> tuple[str, str]:
        config = settle_formats(ModelConfig(path, device="cpu", **options), path)
        return config.dtype, config.weight_dtype

    def planned(path: Path) -> tuple[str, str]:
        """As `winnow plan` has it."""
        arguments = argparse.Namespace(model=str(path), calibrate=None)
        [found] = deployments(arguments, DeviceOptions(gpu=("desktop-ddr5",)))
        return found.weight_dtype, found.linear_dtype

    monkeypatch.setattr(automatic, "instruction_set", lambda: "avx2")
    monkeypatch.setattr(automatic, "is_installed", lambda: True)
    assert settled(wide) == settled(blocks) == ("float32", "auto"), "small models"
    assert planned(blocks) == ("float32", "auto")
    monkeypatch.setattr(automatic, "SMALL", 0)
    assert settled(wide) == ("bfloat16", "auto")
    assert settled(blocks) == ("bfloat16", "auto")
    assert planned(blocks) == ("bfloat16", "q8_0")
    assert planned(wide) == ("bfloat16", "auto")
    assert settled(blocks, weight_dtype="int8") == ("bfloat16", "int8")
    assert settled(blocks, dtype="float32") == ("float32", "auto")
    assert settled(directory) == ("float32", "auto"), "its own weights are of float32"
    values = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(values | {"dtype": "bfloat16"}))
    assert settled(directory) == ("bfloat16", "auto")
    monkeypatch.setattr(automatic, "instruction_set", lambda: None)  # no kernels
    assert settled(directory) == ("float32", "auto")


def test_auto_is_the_fastest_format_that_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With each instruction set that runs here, within a tenth, of the formats that keep a file's bytes."""
    native = pytest.importorskip("winnow.process.native")
    monkeypatch.setattr(automatic, "SMALL", 0)
    rates = json.loads(automatic.MEASURED.read_text())["rates"]
    save_gguf(tmp_path / "blocks", tiny_llama(), "Q8_0")
    tiny_llama().to(torch.bfloat16).save_pretrained(tmp_path / "bfloat16")
    for isa in native.instruction_sets():
        monkeypatch.setenv("WINNOW_ISA", isa)
        for weights in ("blocks", "bfloat16"):
            measured = rates["avx512_bf16" if isa.startswith("amx") else isa][weights]
            speed = {form: statistics.geometric_mean(rates) for form, rates in measured.items()}
            config = settle_formats(ModelConfig(tmp_path / weights, device="cpu"), tmp_path / weights)
            assert config.weight_dtype == "auto"
            if weights == "bfloat16" and isa != "amx_emulated" and config.dtype == "bfloat16":
                packed = LayerKernels(native.Kernels(isa)).pack(torch.zeros(64, 64, dtype=torch.bfloat16))
                assert packed.packed.nbytes == 2 * 64 * 64, "two bytes of a file stay two"
            assert speed[config.dtype] >= 0.9 * max(speed["float32"], speed["bfloat16"])
            # Numbers in place of blocks are faster with `generic` alone, and take seven times the memory there.
            if isa != "generic":
                assert speed[config.dtype] >= 0.9 * max(speed.values())


def test_auto_is_float32_on_the_processor(plain: Path) -> None:
    assert load_model(ModelConfig(plain, device="cpu")).dtype == torch.float32
    assert load_model(ModelConfig(plain, device="cpu", dtype="bfloat16")).dtype == torch.bfloat16


def test_without_a_tokenizer_prompts_are_tokens(tmp_path: Path) -> None:
    path = save_gguf(tmp_path / "tiny.gguf", tiny_llama(), tokenizer=None)
    assert load_model(ModelConfig(path)).tokenizer is None
    assert winnow_answer(path, [5, 6, 7]) == answer(tiny_llama(), [5, 6, 7])


def test_random_weights_by_the_files_configuration(plain: Path) -> None:
    loaded = load_model(ModelConfig(plain, load_format="dummy"))
    assert loaded.geometry.num_layers == 2


def test_a_name_in_the_working_directory_is_not_taken_for_it(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / plain.name).write_bytes(b"GGUF, but of something else")
    monkeypatch.chdir(tmp_path)
    assert winnow_answer(plain, [5, 6, 7]) == answer(tiny_llama(), [5, 6, 7])


def test_packed_answers_the_same(tmp_path: Path) -> None:
    pytest.importorskip("winnow._native")
    path = save_gguf(tmp_path / "tiny.gguf", tiny_llama(), tokenizer="smollm")
    pack_model(ModelConfig(path), tmp_path / "packed")
    packed = LLM(tmp_path / "packed", kv_memory="16MiB")
    theirs = LLM(path, kv_memory="16MiB")
    messages = [{"role": "user", "content": TEXT}]
    ours = packed.chat(messages, GREEDY)[0]
    assert ours.prompt_token_ids == theirs.chat(messages, GREEDY)[0].prompt_token_ids
    assert ours.outputs[0].token_ids == theirs.chat(messages, GREEDY)[0].outputs[0].token_ids
    assert model_digest(tmp_path / "packed") != model_digest(path)


def test_digest_tells_files_apart(plain: Path, tmp_path: Path) -> None:
    other = save_gguf(tmp_path / plain.name, tiny_llama(seed=1))
    assert model_digest(plain) != model_digest(other)
    assert model_digest(plain) == model_digest(save_gguf(tmp_path / plain.name, tiny_llama()))


def test_unknown_architecture_is_named(tmp_path: Path) -> None:
    path = save_gguf(tmp_path / "tiny.gguf", tiny_llama(), architecture="abacus")
    with pytest.raises(UnsupportedModelError, match=r"cannot load .*tiny\.gguf: .*abacus"):
        load_model(ModelConfig(path))


def test_tensors_that_the_reader_passes_over_are_refused(tmp_path: Path) -> None:
    # Llama 3.1 stretches its positions by these; without them it answers, and wrongly.
    extra = {"rope_freqs.weight": np.ones(8, np.float32)}
    path = save_gguf(tmp_path / "tiny.gguf", tiny_llama(), extra=extra)
    with pytest.raises(UnsupportedModelError, match=r"leaves out rope_freqs\.weight"):
        load_model(ModelConfig(path))


def test_scaling_of_positions_that_the_reader_passes_over_is_refused(tmp_path: Path) -> None:
    path = save_gguf(tmp_path / "tiny.gguf", tiny_llama(), values={"llama.rope.scaling.type": "yarn"})
    with pytest.raises(UnsupportedModelError, match=r"leaves out its scaling of positions \(yarn\)"):
        load_model(ModelConfig(path))


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"split.count": 3}, "it is one of 3 parts"),
        ({"split.count": "x"}, "split.count must be a whole number, got 'x'"),
        (
            {"llama.context_length": [512, 512]},
            r"llama.context_length must be a whole number .*, got \[512, 512\]",
        ),
        (
            {"llama.attention.head_count": "x"},
            "llama.attention.head_count must be a whole number .*, got 'x'",
        ),
        (
            {"tokenizer.ggml.padding_token_id": 10**6},
            r"padding_token_id must be a token's number below \d+, got 1000000",
        ),
        (
            {"tokenizer.ggml.eos_token_id": [1, 1]},
            r"eos_token_id must be a token's number below \d+, got \[1, 1\]",
        ),
        ({"tokenizer.ggml.tokens": [1, 2]}, "tokenizer.ggml.tokens must be a list of texts"),
        ({"tokenizer.ggml.merges": ["a b c"]}, "tokenizer.ggml.merges must hold two texts each, got 'a b c'"),
        ({"tokenizer.ggml.pre": 3}, "tokenizer.ggml.pre must be a text, got 3"),
        ({"llama.embedding_length": "x"}, "llama.embedding_length must be a whole number .*, got 'x'"),
        (
            {"llama.block_count": 10**9},
            "llama.block_count must be a whole number from 1 to 21, got 1000000000",
        ),
        (
            {"tokenizer.ggml.eot_token_id": 10**6},
            r"eot_token_id must be a token's number below \d+, got 1000000",
        ),
    ],
)
def test_metadata_that_makes_no_model_is_named(tmp_path: Path, values: Any, named: str) -> None:
    path = save_gguf(tmp_path / "tiny.gguf", tiny_llama(), values=values)
    with pytest.raises(UnsupportedModelError, match=named):
        load_model(ModelConfig(path))


def test_forms_that_other_writers_give_a_file(tmp_path: Path, plain: Path) -> None:
    """A number for each layer where all have the same; a list that is missing; bytes in the other order."""
    prompt, data = byte_level().encode(TEXT), plain.read_bytes()
    values = {"llama.attention.head_count_kv": [2, 2]}
    path = save_gguf(tmp_path / "other.gguf", tiny_llama(), values=values)
    assert winnow_answer(path, prompt) == answer(tiny_llama(), prompt)
    path.write_bytes(data.replace(b"tokenizer.ggml.merges", b"general.merges.absent"))
    with pytest.raises(UnsupportedModelError, match=r"it lacks tokenizer\.ggml\.merges"):
        load_model(ModelConfig(path))
    path.write_bytes(data[:4] + data[4:8][::-1] + data[8:])
    with pytest.raises(UnsupportedModelError, match="big-endian"):
        load_model(ModelConfig(path))


def test_a_plain_head_beside_an_embedding_in_blocks(tmp_path: Path) -> None:
    prompt = byte_level().encode(TEXT)
    whole = save_gguf(tmp_path / "whole.gguf", tiny_llama(), "Q8_0")
    half = save_gguf(tmp_path / "half.gguf", tiny_llama(), "Q8_0", other={"output.weight": "F32"})
    loaded = load_model(ModelConfig(half, dtype="float32"))
    assert loaded.decoder is not None
    theirs = load_plain_model(ModelConfig(half, dtype="float32")).model
    assert winnow_answer(half, prompt, dtype="float32") == answer(theirs, prompt)
    assert whole.stat().st_size < half.stat().st_size


def test_missing_packages_are_told_with_the_command(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("winnow.models.load.gguf.file.find_spec", lambda name: None)
    with pytest.raises(UnsupportedModelError, match=r"gguf and accelerate is not .*'\.\[gguf\]'"):
        load_model(ModelConfig(plain))


def test_a_directory_tells_of_the_file_in_it(plain: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"no config\.json; name the file itself: .*tiny\.gguf"):
        load_model(ModelConfig(plain.parent))


@pytest.mark.parametrize("size", [0, 3, 4, 20, 100, 3000, -100_000, -1])
def test_cut_short(plain: Path, tmp_path: Path, size: int) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(plain.read_bytes()[:size])
    with pytest.raises(UnsupportedModelError) as refused:
        load_model(ModelConfig(path))
    assert str(refused.value).startswith(f"model: cannot load {path}: ")
    assert "\n" not in str(refused.value)


def test_damaged_head(plain: Path, tmp_path: Path) -> None:
    """Bytes before the tensors changed at random: refused in one line, or harmless; never another error."""
    whole = plain.read_bytes()
    head = whole.index(b"output_norm.weight")
    chance = random.Random(0)
    path = tmp_path / "damaged.gguf"
    refused = 0
    for _ in range(25):
        data = bytearray(whole)
        for _ in range(4):
            data[chance.randrange(head)] = chance.randrange(256)
        path.write_bytes(data)
        try:
            load_model(ModelConfig(path, verify_model=False, max_model_len=64))
        except UnsupportedModelError as error:
            refused += 1
            assert str(error).startswith("model: ") and "\n" not in str(error)
    assert refused


def test_damaged_file_ends_the_command_with_a_line(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(plain.read_bytes()[:-100])
    assert main(["generate", "hello", "--model", str(path)]) == 2
    [said] = capsys.readouterr().err.splitlines()
    assert said.startswith(f"winnow: error: model: cannot load {path}: it is cut short")
