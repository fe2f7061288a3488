"""A packed model gives what the model gave that it was packed from, to the last bit, or is refused by name."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from architectures import ARCHITECTURES, save
from safetensors.torch import load_file, save_file
from test_parity import PROMPTS
from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

pytest.importorskip("winnow._native")
from winnow import LLM, SamplingParams
from winnow.config import ModelConfig
from winnow.errors import ConfigError, UnsupportedModelError
from winnow.models import load_model, load_plain_model, pack_model
from winnow.models.fast.fused.kernels import LayerKernels
from winnow.models.fast.packed import extract
from winnow.models.fast.packed.decoder import RotaryEmbedding
from winnow.models.fast.packed.description import DESCRIPTION, OTHERS, PACKED
from winnow.models.load.packed.write import write_packed

pytestmark = pytest.mark.cpu

PACKABLE = ["llama-gqa", "llama-mqa", "llama-mha", "mistral-window", "qwen2", "qwen3", "phi3", "gemma3"]
WIDE = {"hidden_size": 64, "intermediate_size": 160}
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=3)


def changed(config: PretrainedConfig, **values: Any) -> PretrainedConfig:
    return type(config)(**config.to_dict() | values)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Directories of a model and of the same packed."""
    path = tmp_path_factory.mktemp("llama")
    save(ARCHITECTURES["llama-gqa"], path / "model")
    pack_model(ModelConfig(path / "model"), path / "packed")
    return path / "model", path / "packed"


@pytest.fixture
def damaged(llama: tuple[Path, Path], tmp_path: Path) -> Path:
    """A copy of the packed model, to be damaged."""
    for file in llama[1].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def tell(path: Path, **values: Any) -> None:
    """Change what a packed model says of itself."""
    shown = json.loads((path / DESCRIPTION).read_text())
    (path / DESCRIPTION).write_text(json.dumps(shown | values))


def answers(path: Path, **options: Any) -> list[Any]:
    with LLM(path, kv_memory="4MiB", **options) as llm:
        outputs = llm.generate(PROMPTS, PARAMS)
        llm.check_integrity()
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


@pytest.fixture
def code_of_transformers(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """`answers` of a published model with everything that transformers computes between its parts."""

    def refuse(*_: Any) -> NoReturn:
        raise UnsupportedModelError("not taken apart")

    def compute(path: Path, **options: Any) -> list[Any]:
        with monkeypatch.context() as patch:
            patch.setattr(extract, "extract_parts", refuse)
            assert load_model(ModelConfig(path)).decoder is None
            return answers(path, **options)

    return compute


@pytest.mark.parametrize(
    ("architecture", "dtype", "tied"),
    [
        # With least in its layers and with most, in each dtype; and what else layers have.
        ("llama-gqa", "float32", False),
        ("llama-gqa", "bfloat16", True),
        ("llama-gqa", "float16", False),
        ("gemma3", "float32", True),
        ("gemma3", "bfloat16", False),
        ("gemma3", "float16", True),
        ("llama-mqa", "float32", True),
        ("mistral-window", "bfloat16", True),
        ("qwen2", "float16", True),
        ("qwen3", "bfloat16", False),
        ("phi3", "float32", False),
    ],
)
def test_answers_are_the_same(
    architecture: str, dtype: str, tied: bool, tmp_path: Path, code_of_transformers: Callable[..., list[Any]]
) -> None:
    config = changed(ARCHITECTURES[architecture], tie_word_embeddings=tied, **WIDE)
    save(config, tmp_path / "model")
    pack_model(ModelConfig(tmp_path / "model", dtype=dtype), tmp_path / "packed")
    expected = code_of_transformers(tmp_path / "model", dtype=dtype, prefill_chunk=32)
    assert answers(tmp_path / "packed", prefill_chunk=32) == expected
    assert answers(tmp_path / "model", dtype=dtype, prefill_chunk=32) == expected


@pytest.mark.parametrize(
    "options",
    [
        {"eviction": "kv-compress-pd", "compression": 3.0, "prefill_chunk": 32},
        {"attention_backend": "reference"},
    ],
    ids=lambda options: next(iter(options.values())),
)
def test_every_part_of_the_engine_takes_it(
    llama: tuple[Path, Path], options: dict[str, Any], code_of_transformers: Callable[..., list[Any]]
) -> None:
    plain, packed = llama
    expected = code_of_transformers(plain, **options)
    assert answers(packed, **options) == expected
    assert answers(plain, **options) == expected


def test_a_step_is_one_call(llama: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[int]] = []
    compute = LayerKernels.decode

    def count(self: LayerKernels, *args: Any) -> Tensor:
        asked.append(args[-2].tolist())
        return compute(self, *args)

    with LLM(llama[0], kv_memory="4MiB", max_num_seqs=4, max_num_batched_tokens=4) as llm:
        monkeypatch.setattr(LayerKernels, "decode", count)
        llm.generate([5, 6, 7, 8, 9], SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True))
    # No request wants a token of the prompt's first chunk, and of its second only the last one.
    assert asked == [[], [0], [0], [0]]


def test_a_last_layer_that_may_not_choose_computes_all(llama: tuple[Path, Path]) -> None:
    expected = answers(llama[1])
    description = llama[1] / DESCRIPTION
    shown = description.read_text()
    numbers = json.loads(shown)
    assert numbers["last_layer_only_wanted"] is True
    description.write_text(json.dumps(numbers | {"last_layer_only_wanted": False}))
    try:
        assert not load_model(ModelConfig(llama[1])).model.layers[-1].last_layer_only_wanted
        assert answers(llama[1]) == expected
    finally:
        description.write_text(shown)


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_who_computes_a_published_model(architecture: str, tmp_path: Path) -> None:
    save(ARCHITECTURES[architecture], tmp_path / "model")
    loaded = load_model(ModelConfig(tmp_path / "model"))
    assert (loaded.forward_model is loaded.model) == (architecture not in PACKABLE)
    if architecture == "llama-gqa":
        assert load_model(ModelConfig(tmp_path / "model", optimize=False)).decoder is None


def test_rotation_of_other_kinds(tmp_path: Path, code_of_transformers: Callable[..., list[Any]]) -> None:
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    save(changed(ARCHITECTURES["llama-gqa"], rope_parameters=rope), tmp_path / "model")
    pack_model(ModelConfig(tmp_path / "model"), tmp_path / "packed")
    assert load_model(ModelConfig(tmp_path / "packed")).model.rotaries[0].scale != 1
    assert answers(tmp_path / "packed") == code_of_transformers(tmp_path / "model")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_table_of_rotations_grows_with_the_positions(dtype: torch.dtype) -> None:
    rotary = RotaryEmbedding(torch.rand(8, generator=torch.Generator().manual_seed(0)), 0.7, dtype)
    for end in (1, 1000, 1025, 9, 5000):
        table = rotary.table(end)
        for found, expected in zip(table, rotary(torch.arange(end)[None]), strict=True):
            assert found.is_contiguous() and torch.equal(found[:end], expected[0])
        assert rotary.table(end)[0] is table[0], "made anew"


def test_weights_are_views_of_their_file_at_whole_cache_lines(llama: tuple[Path, Path]) -> None:
    model: Any = load_model(ModelConfig(llama[1])).model
    assert [layer.last_layer_only_wanted for layer in model.layers] == [False, False, True]
    products = [model.head, *(getattr(layer, name) for layer in model.layers for name in ("qkv", "down"))]
    maps = Path("/proc/self/maps")
    for product in products:
        address = product.packed.packed.data_ptr()
        assert address % 64 == 0
        if maps.is_file():
            [line] = [
                line
                for line in maps.read_text().splitlines()
                if int(line.split("-")[0], 16) <= address < int(line.split()[0].split("-")[1], 16)
            ]
            assert line.endswith(PACKED)


@pytest.mark.parametrize("architecture", sorted(set(ARCHITECTURES) - set(PACKABLE)))
def test_what_cannot_be_packed_is_named(architecture: str, tmp_path: Path) -> None:
    save(ARCHITECTURES[architecture], tmp_path / "model")
    with pytest.raises(UnsupportedModelError, match=r"(cannot be packed|is not supported): .+"):
        pack_model(ModelConfig(tmp_path / "model"), tmp_path / "packed")
    assert not (tmp_path / "packed").exists()


def test_a_model_that_does_more_is_not_packed(tmp_path: Path) -> None:
    path = tmp_path / "model"
    save(ARCHITECTURES["llama-gqa"], path)
    loaded = load_model(ModelConfig(path))
    inner: Any = loaded.model
    inner.model.rotary_emb.register_forward_hook(lambda module, args, out: (out[0] * 1.5, out[1]))
    with pytest.raises(UnsupportedModelError, match="its forward does more than its embedding, layers"):
        write_packed(loaded, path, tmp_path / "packed")
    assert not (tmp_path / "packed").exists()


class Sandwich(LlamaDecoderLayer):
    """A layer with norms before and after both of its parts, as Gemma's are."""

    def __init__(self, config: LlamaConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.pre_feedforward_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_feedforward_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        stream = hidden_states + self.post_attention_layernorm(attended)
        fed = self.mlp(self.pre_feedforward_layernorm(stream))
        return stream + self.post_feedforward_layernorm(fed)


def test_norms_of_what_a_part_adds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code_of_transformers: Callable[..., list[Any]]
) -> None:
    monkeypatch.setattr(modeling_llama, "LlamaDecoderLayer", Sandwich)
    save(ARCHITECTURES["llama-gqa"], tmp_path / "model")
    pack_model(ModelConfig(tmp_path / "model"), tmp_path / "packed")
    expected = code_of_transformers(tmp_path / "model")
    assert answers(tmp_path / "packed") == answers(tmp_path / "model") == expected
    unfused = answers(tmp_path / "model", optimize=False)
    assert [tokens for tokens, _ in unfused] == [tokens for tokens, _ in expected]


def test_a_description_of_before_there_were_such_norms(damaged: Path, llama: tuple[Path, Path]) -> None:
    shown = json.loads((damaged / DESCRIPTION).read_text())
    layers = [
        {n: v for n, v in layer.items() if n not in ("output_norm", "down_norm")} for layer in shown["layers"]
    ]
    tell(damaged, layers=layers)
    assert answers(damaged) == answers(llama[1])


def test_settled_options_cannot_be_asked_for_otherwise(llama: tuple[Path, Path], tmp_path: Path) -> None:
    plain, packed = llama
    config = ModelConfig(packed)
    for name, value in {
        "dtype": "bfloat16",
        "load_format": "dummy",
        "optimize": False,
        "device": "cuda",
    }.items():
        with pytest.raises(ConfigError, match=f"^{name} must be .*packed"):
            load_model(replace(config, **{name: value}))
    with pytest.raises(
        ConfigError, match="max_model_len must be at most 512, as the model was packed, got 513"
    ):
        load_model(replace(config, max_model_len=513))
    assert load_model(replace(config, max_model_len=100)).max_model_len == 100
    with pytest.raises(UnsupportedModelError, match="other engines run the model as it was published"):
        load_plain_model(ModelConfig(packed))
    with pytest.raises(ConfigError, match="is packed already"):
        pack_model(config, tmp_path / "again")
    with pytest.raises(ConfigError, match="must be new or empty"):
        pack_model(ModelConfig(plain), packed)


def test_a_place_that_cannot_be_written(llama: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write"):
        pack_model(ModelConfig(llama[0]), tmp_path / "file" / "packed")


def test_what_goes_with_a_model_comes_along(tmp_path: Path) -> None:
    path = tmp_path / "model"
    save(ARCHITECTURES["llama-gqa"], path)
    for name in ("LICENSE", "chat_template.jinja", "model.safetensors.index.json"):
        (path / name).write_text("{}")
    named = Path("additional_chat_templates", "tool_use.jinja")
    (path / named).parent.mkdir()
    (path / named).write_text("named")
    pack_model(ModelConfig(path), tmp_path / "packed")
    assert (tmp_path / "packed" / named).read_text() == "named"
    found = {file.name for file in (tmp_path / "packed").iterdir()}
    assert found == {
        *("LICENSE", "additional_chat_templates", "chat_template.jinja", "config.json"),
        *("generation_config.json", DESCRIPTION, OTHERS, PACKED),
    }


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"format": 99}, "of format 99, and this version reads 5; pack the model again"),
        ({"panel": [4, 1]}, r"panels of \(4, 1\), and this one's are .*; pack model again here"),
        ({"panel": [4, 0]}, r"panel must be two whole numbers above 0, got \(4, 0\)"),
        ({"norm": {"eps": "1", "one_plus": False}}, "eps must be a number, got '1'"),
        ({"hidden_size": 64}, "head in .* must be .* of shape"),
        ({"layers": [{}]}, "does not describe a packed model"),
        ({"unknown": 1}, "does not describe a packed model"),
        ({"dtype": "load"}, "dtype must be one of .*, got 'load'"),
        ({"rotaries": [{"frequencies": [1.0] * 20, "scale": 1.0}]}, "frequencies must be at most 4, got 20"),
        ({"eos_token_ids": [97]}, "eos_token_ids must be below 97, got 97"),
        ({"vocab_size": -97}, "vocab_size must be a whole number above 0, got -97"),
        ({"tokenizer_class": "AutoModel"}, "transformers has no tokenizer called 'AutoModel'"),
    ],
)
def test_a_description_that_does_not_fit(damaged: Path, values: dict[str, Any], message: str) -> None:
    (damaged / "tokenizer.json").write_text("{}")
    tell(damaged, **values)
    with pytest.raises(UnsupportedModelError, match=message):
        load_model(ModelConfig(damaged))


@pytest.mark.parametrize("name", ["input_norm", "query_norm", "key_norm", "post_norm"])
def test_a_layer_whose_norm_is_not_told(damaged: Path, name: str) -> None:
    """Left out it is not taken for a norm that the layer does not have."""
    shown = json.loads((damaged / DESCRIPTION).read_text())
    del shown["layers"][1][name]
    tell(damaged, layers=shown["layers"])
    with pytest.raises(UnsupportedModelError, match=f"does not describe a packed model: '{name}'"):
        load_model(ModelConfig(damaged))


def test_a_layer_without_a_norm_that_every_layer_has(damaged: Path) -> None:
    shown = json.loads((damaged / DESCRIPTION).read_text())
    shown["layers"][1]["post_norm"] = None
    tell(damaged, layers=shown["layers"])
    with pytest.raises(UnsupportedModelError, match="post_norm must be in every layer, got None"):
        load_model(ModelConfig(damaged))


def test_damaged_weights(damaged: Path) -> None:
    whole = (damaged / PACKED).read_bytes()
    for damage in (b"", whole[: len(whole) // 2]):
        (damaged / PACKED).write_bytes(damage)
        with pytest.raises(UnsupportedModelError, match="cannot read"):
            load_model(ModelConfig(damaged))
    (damaged / PACKED).write_bytes(whole)
    others = load_file(damaged / OTHERS)
    save_file({name: tensor for name, tensor in others.items() if name != "norm"}, damaged / OTHERS)
    with pytest.raises(UnsupportedModelError, match="lacks the tensor norm"):
        load_model(ModelConfig(damaged))
    save_file(others | {"norm": others["norm"].bfloat16()}, damaged / OTHERS)
    with pytest.raises(UnsupportedModelError, match=r"norm in .* must be torch\.float32 of shape"):
        load_model(ModelConfig(damaged))


def test_without_a_description_it_is_no_packed_model(damaged: Path) -> None:
    (damaged / DESCRIPTION).unlink()  # written last: the directory is not whole
    with pytest.raises(UnsupportedModelError, match="cannot load"):
        load_model(ModelConfig(damaged))
