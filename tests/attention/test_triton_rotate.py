"""Rotation with storing in one pass, against rotation in torch's formulas and storing by the reference."""

from types import SimpleNamespace

import pytest
import torch
from paged import PagedBatch, contents_of
from torch import Tensor
from triton_case import DEVICE, SMALL, build, compare

from winnow.attention import AttentionSpec, HeadRotation, ReferenceBackend
from winnow.attention.interface import HeadNorm
from winnow.attention.triton import TritonBackend
from winnow.cache.codec import make_codec
from winnow.values.kv_dtype import KVDtype

GROUP, KV_HEADS = 5, 3


def norm_of(head_dim: int, one_plus: bool) -> HeadNorm:
    weight = torch.randn(head_dim).to(DEVICE)
    found: HeadNorm = SimpleNamespace(weight=weight, eps=1e-3, one_plus=one_plus)  # type: ignore[assignment]
    return found


def rotated(x: Tensor, rotation: HeadRotation, norm: HeadNorm | None) -> Tensor:
    """The formula for x, [T, heads, d], in float64."""
    x, cos, sin = x.double(), rotation.cos.double()[:, None], rotation.sin.double()[:, None]
    if norm is not None:
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.eps)
        x = x * (norm.weight.double() + norm.one_plus)
    size = cos.shape[-1]
    first, second = x[..., : size // 2], x[..., size // 2 : size]
    turned = torch.cat([-second, first], dim=-1)
    return torch.cat([x[..., :size] * cos + turned * sin, x[..., size:]], dim=-1)


def heads_of(case: PagedBatch) -> Tensor:
    """Queries, keys and values of the case's tokens side by side."""
    return torch.cat([case.q, case.k, case.v], dim=1).flatten(1).contiguous()


def rotation_of(tokens: int, head_dim: int, rotary: int, *norms: HeadNorm | None) -> HeadRotation:
    cos, sin = (torch.randn(tokens, rotary).to(DEVICE) for _ in range(2))
    return HeadRotation(cos, sin, *norms)


@pytest.mark.parametrize("counts", [[1, 1], [3, 1]], ids=str)
@pytest.mark.parametrize(("head_dim", "rotary"), [(8, 8), (20, 12)])
@pytest.mark.parametrize("normed", [False, True])
def test_equals_the_formula_and_the_reference(
    counts: list[int], head_dim: int, rotary: int, normed: bool
) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        case = build(1, counts, kv_heads=KV_HEADS, group=GROUP, head_dim=head_dim)
        norms = [norm_of(head_dim, False), norm_of(head_dim, True)] if normed else [None, None]
        rotation = rotation_of(len(case.q), head_dim, rotary, *norms)
    expected_q = rotated(case.q, rotation, norms[0])
    expected_k = rotated(case.k, rotation, norms[1]).float()
    ours, theirs, heads = case.with_own_pool(), case.with_own_pool(), heads_of(case)
    step = TritonBackend(SMALL).prepare(ours, case.spans)
    assert step.rotate_and_write(case.layer, heads, KV_HEADS * GROUP, rotation)
    ReferenceBackend().prepare(theirs, case.spans).write(case.layer, expected_k, case.v)
    for found, expected in zip(contents_of(ours.pool), contents_of(theirs.pool), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    q, k, v = heads.view(len(heads), -1, head_dim).split([KV_HEADS * GROUP, KV_HEADS, KV_HEADS], dim=1)
    torch.testing.assert_close(q.double(), expected_q, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(k, expected_k, rtol=1e-5, atol=1e-5)
    assert torch.equal(v, case.v)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, in the interpreter
@pytest.mark.parametrize("name", ["int8", "fp8_e4m3", "int4-outlier", "k=bfloat16,v=int3"])
def test_codes_are_of_the_rotated_keys(name: str) -> None:
    """Bit for bit those which the reference makes of them, as they stand in the batch afterwards."""
    codec = make_codec(KVDtype.parse(name), None, "none")
    case = build(2, [1, 2], longest=9, kv_heads=KV_HEADS, group=GROUP, head_dim=24, kv_dtype=codec)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        rotation = rotation_of(len(case.q), 24, 24)
    ours, theirs, heads = case.with_own_pool(), case.with_own_pool(), heads_of(case)
    step = TritonBackend(SMALL).prepare(ours, case.spans)
    assert step.rotate_and_write(case.layer, heads, KV_HEADS * GROUP, rotation)
    k = heads.view(len(heads), -1, 24)[:, KV_HEADS * GROUP : KV_HEADS * (GROUP + 1)]
    assert not torch.equal(k, case.k)
    ReferenceBackend().prepare(theirs, case.spans).write(case.layer, k, case.v)
    for found, expected in zip(contents_of(ours.pool), contents_of(theirs.pool), strict=True):
        torch.testing.assert_close(
            found, expected, rtol=2**-7 * (found.dtype == torch.bfloat16), atol=0, equal_nan=True
        )


def test_caches_without_such_a_pass_are_left_alone() -> None:
    """Vectors that are turned before they are coded, and backends without kernels."""
    codec = make_codec(KVDtype.parse("int4"), None, "kv")
    for backend, options in (
        (TritonBackend(SMALL), {"kv_dtype": codec, "head_dim": 16}),
        (ReferenceBackend(), {"head_dim": 16}),
    ):
        case = build(3, [1], kv_heads=KV_HEADS, group=GROUP, **options)
        heads = heads_of(case)
        before = heads.clone()
        rotation = rotation_of(1, 16, 16)
        step = backend.prepare(case.with_own_pool(), case.spans)
        assert not step.rotate_and_write(case.layer, heads, KV_HEADS * GROUP, rotation)
        assert torch.equal(heads, before)
    compare(case, AttentionSpec(0.3))
