"""Weights in blocks: kernels compute GGUF's numbers, and models of them answer as those of before."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from architectures import ARCHITECTURES, save
from test_parity import PROMPTS
from torch import Tensor
from transformers import PretrainedConfig

_native = pytest.importorskip("winnow._native")
gguf = pytest.importorskip("gguf")
from optimizing import MAX_POSITION, Step  # noqa: E402

from winnow import LLM, SamplingParams  # noqa: E402
from winnow.config import EngineConfig, ModelConfig  # noqa: E402
from winnow.errors import ConfigError, UnsupportedModelError  # noqa: E402
from winnow.executor.build import _identity  # noqa: E402
from winnow.models import load_model, pack_model  # noqa: E402
from winnow.models.fast.fused.build import run_model  # noqa: E402
from winnow.models.fast.fused.kernels import LayerKernels  # noqa: E402
from winnow.models.fast.packed.description import DESCRIPTION  # noqa: E402
from winnow.models.fast.packed_linear import linear_maker, linear_of  # noqa: E402
from winnow.models.model.blocks import BLOCK, RAW, Blocks, BlockWeights, _numbers, quantize  # noqa: E402

pytestmark = pytest.mark.cpu

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-3, torch.float16: 1e-3}
WIDE = {"hidden_size": 64, "intermediate_size": 128}
PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=1)
# Where a block's scale and minimum stand.
_HALVES = {
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
}
BYTE_SETS = ("avx2", "avx512_vnni", "avx2_vnni")
"""Instruction sets that multiply rows in bfloat16 as integers of 8 bits, but with `WIDE_KINDS`."""
WIDE_KINDS = ("IQ4_NL", "IQ4_XS", "MXFP4", "F8_E4M3")
KINDS = pytest.mark.parametrize("kind", RAW)


def own_set(blocks: str) -> str:
    """An instruction set beside which products of weights in blocks can stand."""
    return blocks if blocks in _native.instruction_sets() else "generic"


@pytest.fixture(params=_native.block_instruction_sets())
def blocks_set(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def kernels(blocks_set: str) -> LayerKernels:
    return LayerKernels(_native.Kernels(own_set(blocks_set), blocks_set))


def random(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def random_blocks(kind: str, out_features: int, in_features: int) -> Blocks:
    """Blocks of any bits, with scales that are numbers."""
    chance = np.random.default_rng(0)
    inputs, size = RAW[kind]
    data = chance.integers(0, 256, (out_features, in_features // inputs, size), dtype=np.uint8)
    if kind == "MXFP4":
        data[..., 0] = chance.integers(110, 130, data.shape[:-1])
    if kind == "F8_E4M3":
        data[..., 4:][data[..., 4:] & 127 == 127] = 0
        data[..., :4] = chance.normal(0, 0.01, (*data.shape[:-1], 1)).astype(np.float32).view(np.uint8)
    for at in () if kind in ("MXFP4", "F8_E4M3") else _HALVES.get(kind, (0,)):
        scale = chance.standard_normal((*data.shape[:-1], 1)) * 0.01
        data[..., at : at + 2] = scale.astype(np.float16).view(np.uint8)
    return Blocks(kind, torch.from_numpy(data.reshape(out_features, -1)))


def rounded_to_bytes(rows: Tensor) -> Tensor:
    """Codes from -127 to 127 with a scale for each 32 inputs, as numbers."""
    blocks = rows.float().unflatten(-1, (-1, BLOCK))
    largest = blocks.abs().amax(-1, keepdim=True)
    return ((blocks * (127 / largest)).round() * (largest.double() / 127)).flatten(-2)


def their_numbers(blocks: Blocks) -> Tensor:
    """By the package of llama.cpp, or torch."""
    if blocks.kind == "F8_E4M3":
        return _numbers(blocks)
    return torch.from_numpy(
        gguf.quants.dequantize(blocks.data.numpy(), gguf.GGMLQuantizationType[blocks.kind])
    )


@KINDS
def test_numbers_are_those_of_llama_cpp(kernels: LayerKernels, kind: str) -> None:
    blocks = random_blocks(kind, 130, 512)
    assert torch.equal(blocks.numbers(torch.float32, kernels._kernels), their_numbers(blocks))
    for dtype in DTYPES:
        rows = torch.randperm(130, generator=torch.Generator().manual_seed(0))
        packed = kernels.pack_blocks([blocks], dtype)
        assert packed.kinds == {kind}
        assert torch.equal(kernels.unpack_rows(packed, rows), their_numbers(blocks).to(dtype)[rows])


@KINDS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_are_of_these_numbers(
    kernels: LayerKernels, blocks_set: str, dtype: torch.dtype, kind: str
) -> None:
    """Rows in bfloat16 are rounded to 8 bits first where these are multiplied faster."""
    bytes_ = dtype == torch.bfloat16 and blocks_set in BYTE_SETS and kind not in WIDE_KINDS
    blocks = random_blocks(kind, 130, 768)
    weight, packed = their_numbers(blocks).double(), kernels.pack_blocks([blocks], dtype)
    for rows, biased in ((0, False), (1, True), (7, False), (197, True)):
        x = random(rows, 771, seed=rows).to(dtype)[:, :768]  # rows that do not follow each other
        bias = random(130, seed=1).to(dtype) if biased else None
        found, expected = (
            kernels.linear(x, packed, bias),
            (rounded_to_bytes(x) if bytes_ else x.double()) @ weight.T + (0 if bias is None else bias),
        )
        assert found.dtype == dtype
        tolerance = 2e-3 if bytes_ else TOLERANCE[dtype]
        assert float((found - expected).norm()) <= tolerance * float(expected.norm())
        if bytes_ and rows and not biased:
            exact = x.double() @ weight.T
            assert 3e-3 * float(exact.norm()) < float((found - exact).norm()) < 1e-2 * float(exact.norm())


@pytest.mark.parametrize("kind", ["Q4_1", "Q6_K", "Q8_0", "F8_E4M3"])
@pytest.mark.parametrize(("dtype", "rows"), [(torch.float32, 200), (torch.bfloat16, 32)])
def test_a_row_does_not_depend_on_those_beside_it(
    kernels: LayerKernels, dtype: torch.dtype, rows: int, kind: str
) -> None:
    """Of bf16 on matrix units: where rows are few, and the weight is not rounded."""
    packed, x = kernels.pack_blocks([random_blocks(kind, 64, 512)], dtype), random(rows, 512).to(dtype)
    whole = kernels.linear(x, packed, None)
    for first, count in ((0, 1), (3, 2), (rows // 3, rows // 2), (rows - 1, 1)):
        part = slice(first, first + count)
        assert torch.equal(whole[part], kernels.linear(x[part], packed, None))


def test_the_largest_codes_of_q8_0(kernels: LayerKernels) -> None:
    """-128 too, which no writer makes: sums of two such products are the largest that 16 bits hold."""
    blocks = quantize(torch.ones(64, 64), "Q8_0")
    blocks.data[:, 2:34], blocks.data[:, 36:] = 128, 127
    x = torch.ones(3, 64, dtype=torch.bfloat16)
    x[1, 32:], x[2] = -1, -1
    found = kernels.linear(x, kernels.pack_blocks([blocks], torch.bfloat16), None)
    assert torch.allclose(found.double(), x.double() @ their_numbers(blocks).double().T, rtol=5e-3)


def test_special_rows_in_kernels(kernels: LayerKernels) -> None:
    """One row's fault is not another's."""
    x = random(5, 64)
    x[0], x[1, 3], x[2, 63], x[3] = 0.0, float("nan"), float("-inf"), 1e-35
    found = kernels.linear(x, kernels.pack_blocks([quantize(random(64, 64), "Q8_0")], torch.float32), None)
    assert not found[[0, 3]].any() and found[4].isfinite().all() and not found[1:3].isfinite().any()


def test_parts_of_several_kinds(kernels: LayerKernels) -> None:
    """Side by side as they are where they fill panels, else all as Q8_0."""
    panel = kernels.block_panel
    parts = [random_blocks(kind, size * panel, 256) for kind, size in (("Q4_K", 2), ("Q6_K", 1))]
    x = random(3, 256)
    packed = kernels.pack_blocks(parts, torch.float32)
    assert packed.kinds == {"Q4_K", "Q6_K"}
    expected = torch.cat([x.double() @ their_numbers(part).double().T for part in parts], dim=1)
    found = kernels.linear(x, packed, None)
    assert float((found - expected).norm()) <= 1e-4 * float(expected.norm())
    odd = [random_blocks("Q4_K", panel - 1, 256), parts[1]]
    packed = kernels.pack_blocks(odd, torch.float32)
    assert packed.kinds == {"Q8_0"} and packed.out_features == 2 * panel - 1


def test_any_number_of_threads_gives_the_same_bits(kernels: LayerKernels) -> None:
    weight = kernels.pack_blocks([random_blocks("Q4_1", 300, 96)], torch.float32)
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


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_quantized_as_llama_cpp_does(kind: str) -> None:
    weight = random(9, 96) * torch.tensor([[1e-3], [1.0], [50.0]]).repeat(3, 1)
    weight[4, :BLOCK] = 0.0
    found = quantize(weight, kind)
    theirs = gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType[kind])
    assert np.array_equal(found.data.numpy(), theirs)
    assert torch.equal(_numbers(found), their_numbers(found))


def test_blocks_of_what_is_no_number() -> None:
    x = random(3, 64)
    x[0, 3], x[1, 50] = float("nan"), float("inf")
    numbers = _numbers(quantize(x, "Q8_0"))
    assert numbers[0, :32].isnan().all() and numbers[1, 32:].isnan().all()
    assert numbers[0, 32:].isfinite().all() and numbers[2].isfinite().all()


def test_weights_of_no_such_dtype_stay(kernels: LayerKernels) -> None:
    weight = torch.zeros(1, 32, dtype=torch.float64)
    made = linear_maker(kernels, torch.float64, blocks=BlockWeights(kind="Q8_0"))([linear_of(weight)])
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


@pytest.mark.parametrize(
    ("architecture", "dtype", "weight_dtype"),
    [
        ("llama-gqa", torch.bfloat16, "q4_0"),
        ("qwen2", torch.float32, "q8_0"),
        ("gemma2", torch.bfloat16, "q8_0"),
        ("gemma2", torch.float32, "q4_0"),
        ("gpt-oss", torch.bfloat16, "q4_0"),
        ("gpt-oss", torch.float32, "q8_0"),
    ],
    ids=str,
)
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
    assert 1e-3 < difference < (0.15 if weight_dtype == "q8_0" else 1.0), "the weights are rounded"


@pytest.mark.parametrize("weight_dtype", ["q4_0", "q8_0"])
def test_a_packed_model_in_blocks(tied: Path, weight_dtype: str, tmp_path: Path) -> None:
    options = {"dtype": "bfloat16", "weight_dtype": weight_dtype}
    pack_model(ModelConfig(tied, **options), tmp_path / "packed")
    expected = logits(tied, **options)
    assert torch.equal(logits(tmp_path / "packed"), expected)
    assert torch.equal(logits(tmp_path / "packed", **options), expected)
    assert (
        load_model(ModelConfig(tmp_path / "packed")).blocks == load_model(ModelConfig(tied, **options)).blocks
    )
    with pytest.raises(ConfigError, match=r"weight_dtype must be that in which .* is packed"):
        other = "q8_0" if weight_dtype == "q4_0" else "q4_0"
        load_model(ModelConfig(tmp_path / "packed", weight_dtype=other))
    shown = json.loads((tmp_path / "packed" / DESCRIPTION).read_text())
    for values, message in (
        ({"block_panel": 5}, "panels of 5, and this one's are"),
        ({"block_panel": None}, "block_panel must be a whole number above 0 where blocks are, got None"),
    ):
        (tmp_path / "packed" / DESCRIPTION).write_text(json.dumps(shown | values))
        with pytest.raises(UnsupportedModelError, match=message):
            load_model(ModelConfig(tmp_path / "packed"))


def test_a_model_in_blocks_is_another_model(tied: Path) -> None:
    """A prefix that was saved of one is not the other's."""
    configs = [
        EngineConfig(model=ModelConfig(tied, **options))
        for options in ({}, {"weight_dtype": "q4_0"}, {"weight_dtype": "q8_0"})
    ]
    found = {_identity(load_model(config.model), config) for config in configs}
    assert len(found) == len(configs)


def test_what_blocks_do_not_go_with(tied: Path) -> None:
    with pytest.raises(ConfigError, match="weight_dtype int8 needs device cpu or cuda, got meta"):
        load_model(ModelConfig(tied, weight_dtype="int8", device="meta"))
