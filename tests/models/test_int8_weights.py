"""Linear layers of int8 weights: kernels give the bits of plain torch, and models of them answer as those of before."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, save
from test_parity import PROMPTS
from torch import Tensor
from transformers import PretrainedConfig

_native = pytest.importorskip("winnow._native")
from optimizing import MAX_POSITION, Step  # noqa: E402

from winnow import LLM, SamplingParams  # noqa: E402
from winnow.config import EngineConfig, ModelConfig  # noqa: E402
from winnow.errors import ConfigError, UnsupportedModelError  # noqa: E402
from winnow.executor.build import _identity  # noqa: E402
from winnow.models import load_model, pack_model  # noqa: E402
from winnow.models.fast.fused.kernels import LayerKernels  # noqa: E402
from winnow.models.fast.fused.layer import FusedLayer  # noqa: E402
from winnow.models.fast.fused.probe import run_model  # noqa: E402
from winnow.models.fast.int8_linear import (  # noqa: E402
    BLOCK,
    GROUP,
    Int8Linear,
    Int8Weights,
    int8_product,
    quantize_blocks,
    quantize_rows,
    quantize_weight,
)
from winnow.models.fast.packed.description import DESCRIPTION  # noqa: E402
from winnow.models.fast.packed_embedding import PackedEmbedding  # noqa: E402
from winnow.models.fast.packed_linear import linear_maker, linear_of  # noqa: E402

pytestmark = pytest.mark.cpu

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Features that fill panels and that do not, inputs that lie together and a rest of them, pieces of several passes.
SIZES = [(64, 64), (130, 71), (5, 1), (70, 4200)]
WIDE = {"hidden_size": 64, "intermediate_size": 128}
PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=1)


def own_set(int8: str) -> str:
    """An instruction set beside which products of int8 weights can stand."""
    return int8 if int8 in _native.instruction_sets() else "generic"


@pytest.fixture(params=_native.int8_instruction_sets())
def kernels(request: pytest.FixtureRequest) -> LayerKernels:
    return LayerKernels(_native.Kernels(own_set(request.param), request.param))


BLOCKS = pytest.mark.parametrize("blocks", [False, True], ids=["features", "blocks"])


def random(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def test_codes_are_as_near_as_they_can_be() -> None:
    x = random(5, 40) * torch.tensor([[1e-20], [1e-3], [1.0], [50.0], [1e20]])
    codes, scale = quantize_rows(x)
    assert codes.dtype == torch.int8 and bool((codes.abs().amax(dim=1) == 127).all()), (
        "the largest takes all bits"
    )
    away = (codes * scale[:, None] - x).abs()
    assert bool((away <= scale[:, None] * 0.50001).all())


def test_rows_of_zeros_and_of_what_is_no_number() -> None:
    x = random(4, 16)
    x[0], x[1, 3], x[2, 5] = 0.0, float("nan"), float("inf")
    codes, scale = quantize_rows(x)
    assert scale[0] == 0 and scale[1:3].isnan().all() and scale[3] > 0
    assert not codes[:3].any() and codes[3].any()


@BLOCKS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_kernels_give_the_bits_of_torch(
    kernels: LayerKernels, dtype: torch.dtype, size: tuple[int, int], blocks: bool
) -> None:
    weight = (random(*size) / size[1] ** 0.5).to(dtype)
    codes, scale = quantize_weight(weight, blocks=blocks)
    packed = kernels.pack_int8(weight, blocks=blocks)
    for rows, biased in ((0, False), (1, True), (2, False), (7, True), (40, False), (197, True)):
        x = (3 * random(rows, size[1] + 3, seed=rows)).to(dtype)[
            :, : size[1]
        ]  # rows that do not follow each other
        bias = random(size[0], seed=1).to(dtype) if biased else None
        found = kernels.linear(x, packed, bias)
        assert found.dtype == dtype and torch.equal(found, int8_product(x, codes, scale, bias))
    features = torch.randperm(size[0], generator=torch.Generator().manual_seed(0))
    rows = Int8Linear(codes, scale, None).rows(dtype)
    assert torch.equal(kernels.unpack_rows(packed, features), rows[features])


@BLOCKS
def test_special_rows_in_kernels(kernels: LayerKernels, blocks: bool) -> None:
    """One row's fault is not another's."""
    weight, x = random(64, 64), random(5, 64)
    x[0], x[1, 3], x[2, 63], x[3] = 0.0, float("nan"), float("-inf"), 1e-35
    found = kernels.linear(x, kernels.pack_int8(weight, blocks=blocks), None)
    expected = int8_product(x, *quantize_weight(weight, blocks=blocks), None)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert not found[[0, 3]].any() and found[4].isfinite().all()


@BLOCKS
def test_any_number_of_threads_gives_the_same_bits(kernels: LayerKernels, blocks: bool) -> None:
    weight = kernels.pack_int8(random(300, 96), blocks=blocks)
    before = torch.get_num_threads()
    try:
        for rows in (1, 3, 400):
            x, found = random(rows, 96), []
            for threads in (1, 2, 4):
                torch.set_num_threads(threads)
                found.append(kernels.linear(x, weight, None))
            assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    finally:
        torch.set_num_threads(before)


def test_what_panels_look_like(kernels: LayerKernels) -> None:
    rows, together = kernels.int8_panel_shape
    packed = kernels.pack_int8(torch.tensor([[127.0, 127.0], [127.0, -127.0]])).packed
    assert packed.numel() == rows * -(-2 // together) * together
    assert packed[0] == packed[1] != packed[together + 1], "inputs of a feature lie side by side"


def test_blocks_stay_as_they_are() -> None:
    """Also in the smallest scales, and beside a block that is not full."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-127, 128, (7, 70), generator=generator, dtype=torch.int8)
    codes[:, [3, 40, 69]] = 127
    codes[5, 32:64] = 0
    scale = torch.rand(7, 3, generator=generator).half()
    scale[0], scale[1], scale[5, 1] = 2.0**-24, 65504.0, 0.0
    wide = scale.float().repeat_interleave(BLOCK, dim=1)[:, :70]
    found = quantize_blocks(codes * wide)
    assert torch.equal(found[0], codes) and torch.equal(found[1], scale)


def test_blocks_are_as_near_as_they_can_be() -> None:
    x = random(5, 96) * torch.tensor([[1e-3], [1e-2], [1.0], [50.0], [1e6]])
    codes, scale = quantize_blocks(x)
    wide = scale.float().repeat_interleave(BLOCK, dim=1)
    # Half a step, and what the largest of a block loses where its scale was rounded down to 11 bits.
    assert bool(((codes * wide - x).abs() <= wide * (0.5 + 127 * 2.0**-11)).all())


def test_blocks_of_zeros_and_of_what_is_no_number() -> None:
    x = random(4, 64)
    x[0, :32], x[1, 3], x[2, 50], x[3] = 0.0, float("nan"), float("inf"), 1e-9
    codes, scale = quantize_blocks(x)
    assert scale.isnan().tolist() == [[False, False], [True, False], [False, True], [False, False]]
    assert scale[0, 0] == 0 and not scale[3].any() and not codes[3].any()
    assert not codes[0, :32].any() and not codes[1, :32].any() and not codes[2, 32:].any()
    assert codes[0, 32:].any() and codes[1, 32:].any()


def test_an_outlier_costs_its_own_group_alone() -> None:
    weight, x = random(20, 3 * GROUP), random(2, 3 * GROUP)
    x[:, :GROUP], weight[:, 5] = 0.0, 0.0
    x[:, 5] = 1000.0  # times a weight of 0
    found, expected = int8_product(x, *quantize_weight(weight), None), x @ weight.T
    assert float((found - expected).norm()) < 0.03 * float(expected.norm())


def test_weights_of_no_such_dtype_stay(kernels: LayerKernels) -> None:
    weight = torch.zeros(1, 4, dtype=torch.float64)
    made = linear_maker(kernels, torch.float64, int8=Int8Weights())([linear_of(weight)])
    assert isinstance(made, torch.nn.Linear) and made.weight.data_ptr() == weight.data_ptr()


def changed(config: PretrainedConfig, **values: Any) -> PretrainedConfig:
    return type(config)(**config.to_dict() | values)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tied")
    save(changed(ARCHITECTURES["llama-gqa"], tie_word_embeddings=True, **WIDE), path)
    return path


def logits(path: Path, **options: Any) -> Tensor:
    """Log probabilities of every token of the prompts' answers."""
    with LLM(path, kv_memory="4MiB", **options) as llm:
        outputs = llm.generate(PROMPTS[:2], PARAMS)
    values = [
        entry[token].logprob
        for output in outputs
        for token, entry in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True)
    ]
    return torch.tensor(values)


@pytest.mark.parametrize("weight_dtype", ["int8", "q8_0"])
@pytest.mark.parametrize("architecture", ["llama-gqa", "qwen2", "gemma2", "gpt-oss"])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_models_compute_what_plain_torch_does(
    architecture: str, dtype: torch.dtype, weight_dtype: str, tmp_path: Path
) -> None:
    """Fused layers, layers whose parts alone are replaced, biases, and panels of gates."""
    save(changed(ARCHITECTURES[architecture], **WIDE), tmp_path)
    config = ModelConfig(tmp_path, dtype=str(dtype).removeprefix("torch."), weight_dtype=weight_dtype)
    ours, plain, wide = (
        run_model(load_model(each).model, MAX_POSITION, Step())
        for each in (config, replace(config, optimize=False), ModelConfig(tmp_path, dtype=config.dtype))
    )
    # A code next to the middle between two may become either, for the last digit of a norm.
    assert float((ours - plain).norm()) <= (0.03 if dtype == torch.float32 else 0.08) * float(plain.norm())
    difference = float((plain - wide).norm()) / float(wide.norm())
    assert 1e-3 < difference < 0.15, "the weights are of 8 bits"


@pytest.mark.parametrize("wide", ["none", "head", "ends", "head-and-ends"])
def test_what_stays_wide(tied: Path, wide: str) -> None:
    config = ModelConfig(tied, dtype="bfloat16", weight_dtype="int8", weight_wide=wide)
    loaded = load_model(config)
    assert loaded.decoder is not None and loaded.dtype == torch.bfloat16 and loaded.verified is not None
    layers: list[Any] = list(loaded.decoder.layers)
    assert all(isinstance(layer, FusedLayer) and layer.is_native for layer in layers)
    ends = "ends" not in wide
    assert [layer.down.is_int8 for layer in layers] == [ends, True, ends]
    head = loaded.decoder.head
    assert head.is_int8 == ("head" not in wide) and isinstance(loaded.decoder.embedding, PackedEmbedding)
    plain = load_model(replace(config, optimize=False))
    tokens = torch.arange(97)
    expected = plain.model.get_input_embeddings()(tokens)
    assert torch.equal(loaded.decoder.embedding(tokens), expected)
    assert isinstance(plain.model.get_output_embeddings(), Int8Linear) == head.is_int8


@pytest.mark.parametrize("weight_dtype", ["int8", "q8_0"])
@pytest.mark.parametrize("wide", ["none", "head-and-ends"])
def test_a_packed_model_of_int8_weights(tied: Path, wide: str, weight_dtype: str, tmp_path: Path) -> None:
    options = {"dtype": "bfloat16", "weight_dtype": weight_dtype, "weight_wide": wide}
    pack_model(ModelConfig(tied, **options), tmp_path / "packed")
    expected = logits(tied, **options)
    assert torch.equal(logits(tmp_path / "packed"), expected)
    assert torch.equal(logits(tmp_path / "packed", **options), expected)
    assert load_model(ModelConfig(tmp_path / "packed")).int8 == load_model(ModelConfig(tied, **options)).int8
    with pytest.raises(
        ConfigError, match=r"weight_dtype and weight_wide must be those in which .* is packed"
    ):
        load_model(ModelConfig(tmp_path / "packed", weight_dtype=weight_dtype, weight_wide="head"))
    shown = json.loads((tmp_path / "packed" / DESCRIPTION).read_text())
    for values, message in (
        ({"int8_panel": [4, 1]}, r"panels of \(4, 1\), and this one's are"),
        ({"int8_panel": None}, "int8_panel must be there where int8 is, got None"),
    ):
        (tmp_path / "packed" / DESCRIPTION).write_text(json.dumps(shown | values))
        with pytest.raises(UnsupportedModelError, match=message):
            load_model(ModelConfig(tmp_path / "packed"))


def test_an_int8_model_is_another_model(tied: Path) -> None:
    """A prefix that was saved of one is not the other's."""
    configs = [
        EngineConfig(model=ModelConfig(tied, **options))
        for options in (
            {},
            {"weight_dtype": "int8"},
            {"weight_dtype": "q8_0"},
            {"weight_dtype": "int8", "weight_wide": "head"},
        )
    ]
    found = {_identity(load_model(config.model), config) for config in configs}
    assert len(found) == len(configs)


def test_what_int8_weights_do_not_go_with(tied: Path) -> None:
    with pytest.raises(
        ConfigError, match="weight_wide=head needs weight_dtype int8, q8_0, fp8, int4, got auto"
    ):
        ModelConfig(tied, weight_wide="head")
    with pytest.raises(ConfigError, match="weight_dtype needs engine=paged"):
        EngineConfig(model=ModelConfig(tied, weight_dtype="int8", engine="padded"))
    with pytest.raises(ConfigError, match="weight_dtype int8 needs device cpu or cuda, got meta"):
        load_model(ModelConfig(tied, weight_dtype="int8", device="meta"))
