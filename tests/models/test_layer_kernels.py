"""The kernels around matrix products against torch's formulas: every number format, every instruction set."""

import inspect
from collections.abc import Callable, Iterator
from functools import update_wrapper
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

_native = pytest.importorskip("winnow._native")
from winnow.models.fast.fused.kernels import LayerKernels  # noqa: E402
from winnow.models.fast.fused.parts import Activation, NormWeight  # noqa: E402

pytestmark = pytest.mark.cpu

DTYPES = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
# Sizes with and without a rest after whole registers; many rows, so that threads share them.
SHAPES = [(1, 5), (3, 64), (7, 771), (1400, 48)]


def each_instruction_set(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test of `kernels` with those of every instruction set, on the same random numbers."""

    def run(**given: Any) -> None:
        for isa in _native.instruction_sets():
            torch.manual_seed(0)
            test(LayerKernels(_native.Kernels(isa)), **given)

    _, *given = inspect.signature(test).parameters.values()
    vars(run)["__signature__"] = inspect.Signature(given)
    return update_wrapper(run, test, updated=())


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def assert_close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Both rounded once to `dtype`: they may differ by its last bit."""
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), expected.float(), rtol=DTYPES[dtype], atol=DTYPES[dtype] / 10)


def plain_norm(x: Tensor, weight: Tensor, eps: float, one_plus: bool) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (weight.float() + one_plus)


def plain_rotation(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, d]; cos and sin [T, rotary_dim]."""
    turned, rest = x.float().split([cos.shape[1], x.shape[2] - cos.shape[1]], dim=-1)
    a, b = turned.chunk(2, dim=-1)
    cos, sin = cos.float()[:, None], sin.float()[:, None]
    return torch.cat([turned * cos + torch.cat([-b, a], dim=-1) * sin, rest], dim=-1)


@pytest.mark.parametrize("one_plus", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@each_instruction_set
def test_norm(kernels: LayerKernels, dtype: torch.dtype, shape: tuple[int, int], one_plus: bool) -> None:
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[1]).to(dtype)
    before = x.clone()
    found = kernels.rms_norm(x, NormWeight(weight, 1e-5, one_plus=one_plus))
    assert_close(found, plain_norm(x, weight, 1e-5, one_plus), dtype)
    assert torch.equal(x, before)


@pytest.mark.parametrize("shape", SHAPES)
@each_instruction_set
def test_norm_after_adding(kernels: LayerKernels, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x, add, weight = (
        torch.randn(shape).to(dtype),
        torch.randn(shape).to(dtype),
        torch.randn(shape[1]).to(dtype),
    )
    total = x + add
    found = kernels.rms_norm(x, NormWeight(weight, 1e-6), add)
    assert torch.equal(x, total), "the residual stream is rounded as torch rounds it"
    assert_close(found, plain_norm(total, weight, 1e-6, False), dtype)


@pytest.mark.parametrize("one_plus", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@each_instruction_set
def test_adding_a_norm(
    kernels: LayerKernels, dtype: torch.dtype, shape: tuple[int, int], one_plus: bool
) -> None:
    x, stream, weight = (
        torch.randn(shape).to(dtype),
        torch.randn(shape).to(dtype),
        torch.randn(shape[1]).to(dtype),
    )
    before, normed = x.clone(), plain_norm(x, weight, 1e-5, one_plus)
    expected, larger = stream.float() + normed, stream.float().abs() + normed.abs()
    kernels.add_normed(x, NormWeight(weight, 1e-5, one_plus=one_plus), to=stream)
    # Where they cancel each other out, what is left of them is as exact as they were.
    assert bool(((stream.float() - expected).abs() <= 4 * torch.finfo(dtype).eps * larger).all())
    assert torch.equal(x, before)


@each_instruction_set
def test_a_row_of_zeros_stays_finite(kernels: LayerKernels, dtype: torch.dtype) -> None:
    found = kernels.rms_norm(torch.zeros(2, 48, dtype=dtype), NormWeight(torch.ones(48, dtype=dtype), 1e-6))
    assert torch.equal(found, torch.zeros_like(found))


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (16, 16), (20, 10), (48, 6), (8, 2)])
@pytest.mark.parametrize("normed", [False, True])
@each_instruction_set
def test_rotation(
    kernels: LayerKernels, dtype: torch.dtype, head_dim: int, rotary_dim: int, normed: bool
) -> None:
    tokens, query_heads, kv_heads = 37, 6, 2
    qkv = torch.randn(tokens, (query_heads + 2 * kv_heads) * head_dim).to(dtype)
    cos, sin = torch.randn(2, tokens, rotary_dim).to(dtype)
    weights = torch.randn(2, head_dim).to(dtype)
    q, k, v = (
        part.unflatten(1, (-1, head_dim))
        for part in qkv.clone().split([n * head_dim for n in (query_heads, kv_heads, kv_heads)], dim=1)
    )
    norms = [NormWeight(weight, 1e-6) for weight in weights] if normed else [None, None]
    kernels.rotate(qkv, query_heads, kv_heads, head_dim, cos, sin, *norms)
    if normed:  # rounded between norm and rotation, as in transformers
        q, k = (plain_norm(x, w, 1e-6, False).to(dtype) for x, w in zip((q, k), weights, strict=True))
    expected = torch.cat([plain_rotation(q, cos, sin), plain_rotation(k, cos, sin), v.float()], dim=1)
    found = qkv.unflatten(1, (-1, head_dim))
    assert found.dtype == dtype
    # A norm's last bit may round either way before the rotation mixes two of them.
    torch.testing.assert_close(
        found.float(), expected, rtol=DTYPES[dtype], atol=DTYPES[dtype] * (8 if normed else 1)
    )
    assert torch.equal(found[:, query_heads + kv_heads :], v)


@pytest.mark.parametrize("name", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("shape", SHAPES)
@each_instruction_set
def test_gate(kernels: LayerKernels, dtype: torch.dtype, shape: tuple[int, int], name: str) -> None:
    gate, up = (4 * torch.randn(2, *shape)).to(dtype)
    gate[0, :4] = torch.tensor([-100.0, 100.0, 0.0, -1e-3]).to(dtype)
    plain = F.silu if name == "silu" else lambda x: F.gelu(x, approximate="tanh")
    found = kernels.gate(torch.cat([gate, up], dim=1), Activation[name])
    expected = (plain(gate.double()) * up.double()).to(dtype)
    torch.testing.assert_close(found, expected, rtol=DTYPES[dtype] * 2, atol=1e-5)


# Features that fill panels and that do not; inputs of one piece and of two, even, as pairs of 16 bits need.
WEIGHTS = [(64, 64), (130, 70), (5, 2), (200, 2060)]


@pytest.mark.parametrize("size", WEIGHTS)
@pytest.mark.parametrize("biased", [False, True])
@each_instruction_set
def test_linear(kernels: LayerKernels, dtype: torch.dtype, size: tuple[int, int], biased: bool) -> None:
    weight = (torch.randn(size) / size[1] ** 0.5).to(dtype)
    bias = torch.randn(size[0]).to(dtype) if biased else None
    packed = kernels.pack(weight)
    for rows in (0, 1, 2, 5, 7, 24, 97, 200, 600):
        x = torch.randn(rows, size[1] + 3).to(dtype)[:, : size[1]]  # rows that do not follow each other
        found = kernels.linear(x, packed, bias)
        expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        assert found.dtype == dtype
        torch.testing.assert_close(
            found.double(), expected, rtol=DTYPES[dtype], atol=max(DTYPES[dtype] / 2, 1e-5)
        )


@each_instruction_set
def test_a_row_of_a_product_does_not_depend_on_the_others(kernels: LayerKernels, dtype: torch.dtype) -> None:
    weight, x = torch.randn(150, 2100).to(dtype), torch.randn(130, 2100).to(dtype)
    packed = kernels.pack(weight)
    together = kernels.linear(x, packed, None)
    alone = torch.cat([kernels.linear(row[None], packed, None) for row in x])
    assert torch.equal(together, alone)


@each_instruction_set
def test_any_number_of_threads_gives_the_same_bits(kernels: LayerKernels, dtype: torch.dtype) -> None:
    x, add = torch.randn(2, 1500, 96).to(dtype)
    weight = NormWeight(torch.randn(96).to(dtype), 1e-6)
    cos, sin = torch.randn(2, 1500, 16).to(dtype)
    packed = kernels.pack(torch.randn(300, 96).to(dtype))

    def run(threads: int) -> list[Tensor]:
        torch.set_num_threads(threads)
        residual, heads, total = x.clone(), add.clone(), x.clone()
        kernels.rotate(heads, 3, 2, 16, cos, sin)
        kernels.add_normed(add, weight, to=total)
        return [
            kernels.rms_norm(residual, weight, add),
            residual,
            total,
            heads,
            kernels.gate(x, Activation.silu),
            kernels.linear(x, packed, None),
        ]

    before = torch.get_num_threads()
    try:
        runs = [run(threads) for threads in (1, 2, 4)]
    finally:
        torch.set_num_threads(before)
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))
