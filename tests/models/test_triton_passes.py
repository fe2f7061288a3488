"""Triton's passes around matrix products against torch's formulas, and whole layers of them against transformers'."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")
from optimizing import FUSED, MAX_POSITION, Step, bound, layers_of, optimized

from winnow.models.fast import optimize
from winnow.models.fast.fused import build
from winnow.models.fast.fused.build import record_calls, run_model
from winnow.models.fast.fused.layer import FusedLayer, FusedNorm
from winnow.models.fast.fused.parts import Activation, NormWeight
from winnow.models.fast.fused.triton_passes import TritonPasses
from winnow.models.fast.packed_linear import join_linears

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
LAUNCHES = 6


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape).to(DEVICE, dtype)


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert found.dtype in DTYPES and found.shape == expected.shape
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    assert float(error) < DTYPES[found.dtype], error


def normed(x: Tensor, weight: NormWeight) -> Tensor:
    scaled = x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + weight.eps)
    return scaled * (weight.weight.double() + weight.one_plus)


@pytest.mark.parametrize(("rows", "size", "one_plus"), [(1, 5, True), (2, 64, False), (2, 771, True)])
def test_norms(rows: int, size: int, one_plus: bool, dtype: torch.dtype) -> None:
    passes = TritonPasses()
    weight = NormWeight(random(size, dtype=dtype), 1e-2, one_plus=one_plus)
    x, add = random(rows, size, dtype=dtype), random(rows, size, dtype=dtype)
    assert_close(passes.rms_norm(x, weight), normed(x, weight))
    total, stream = (x.float() + add.float()).to(dtype), x.clone()
    assert_close(passes.rms_norm(stream, weight, add=add), normed(total, weight))
    assert_close(stream, total)  # the interpreter cuts bfloat16 off where a GPU rounds
    before = add.clone()
    assert_close(passes.add_normed(x, weight, add, in_place=False), before.double() + normed(x, weight))
    assert torch.equal(add, before)
    assert passes.add_normed(x, weight, add) is add
    assert_close(add, before.double() + normed(x, weight))


@pytest.mark.parametrize(
    ("head_dim", "rotary", "norms"),
    [(8, 8, ()), (8, 8, ("query", "key")), (20, 12, ("query",)), (20, 12, ("query", "key"))],
    ids=str,
)
def test_rotation(head_dim: int, rotary: int, norms: tuple[str, ...], dtype: torch.dtype) -> None:
    tokens, queries, keys = 2, 3, 2
    heads = random(tokens, (queries + 2 * keys) * head_dim, dtype=dtype)
    # Halves that differ: each dimension has an angle of its own.
    cos, sin = random(tokens, rotary, dtype=dtype), random(tokens, rotary, dtype=dtype)
    weights = {name: NormWeight(random(head_dim, dtype=dtype), 1e-3) for name in norms}
    split = heads.double().view(tokens, -1, head_dim).clone()
    for name, part in (("query", slice(0, queries)), ("key", slice(queries, queries + keys))):
        if name in weights:
            split[:, part] = normed(split[:, part], weights[name])
        first, second = split[:, part, : rotary // 2], split[:, part, rotary // 2 : rotary]
        turned = torch.cat([-second, first], dim=-1)
        split[:, part, :rotary] = (
            split[:, part, :rotary] * cos.double()[:, None] + turned * sin.double()[:, None]
        )
    values = heads[:, (queries + keys) * head_dim :].clone()
    TritonPasses().rotate(heads, queries, keys, head_dim, cos, sin, weights.get("query"), weights.get("key"))
    assert_close(heads, split.flatten(1))
    assert torch.equal(heads[:, (queries + keys) * head_dim :], values)


@pytest.mark.parametrize("activation", [Activation.silu, Activation.gelu_tanh])
@pytest.mark.parametrize(("rows", "size"), [(2, 5), (1, 1100)])
def test_gates(rows: int, size: int, activation: Activation, dtype: torch.dtype) -> None:
    gate_up = 4 * random(rows, 2 * size, dtype=dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    active = F.silu(gate) if activation == Activation.silu else F.gelu(gate, approximate="tanh")
    assert_close(TritonPasses().gate(gate_up, activation), active * up)


def test_products_of_one_input_are_one() -> None:
    linears = [nn.Linear(5, 3), nn.Linear(5, 4, bias=False)]
    x = torch.randn(2, 5)
    with torch.inference_mode():
        assert_close(join_linears(linears)(x), torch.cat([each(x) for each in linears], dim=-1))
    assert join_linears(linears[:1]).weight.data_ptr() == linears[0].weight.data_ptr()


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """With trials of two tokens: the interpreter takes long for each."""
    monkeypatch.setattr(optimize, "_passes_fit", lambda model: True)
    monkeypatch.setattr(build, "_POSITIONS", (7,))


@pytest.mark.parametrize(
    ("architecture", "num_layers", "dtype", "tolerance"),
    [
        ("qwen3", 1, torch.float32, 1e-5),
        ("gemma3", 2, torch.float32, 1e-5),
        ("gpt2", None, torch.float32, 1e-5),
        ("llama-gqa", 1, torch.bfloat16, 5e-2),
    ],
    ids=str,
)
def test_logits_stay(
    architecture: str, num_layers: int | None, dtype: torch.dtype, tolerance: float, as_on_a_gpu: None
) -> None:
    model = bound(architecture, dtype, num_layers).to(DEVICE)
    before = run_model(model, MAX_POSITION, Step())
    after = run_model(optimized(model), MAX_POSITION, Step())
    assert all(isinstance(layer, FusedLayer) == (architecture in FUSED) for layer in layers_of(model))
    assert isinstance(getattr(model.base_model, "norm", None), FusedNorm) == (architecture in FUSED)
    assert float((after - before).norm()) <= tolerance * float(before.norm())


class Launches(TorchDispatchMode):
    """Counter of what torch would launch beside products, views and memory."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.products = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        product = name in ("mm", "addmm", "linear", "bmm")
        self.products += product
        self.small += not (product or func.is_view or name.startswith(("empty", "new_empty", "_unsafe_view")))
        return func(*args, **kwargs or {})


class Silent:
    """Attention that launches nothing."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: Any) -> Tensor:
        return torch.empty(q.shape, dtype=q.dtype, device=q.device)


@pytest.mark.parametrize("architecture", ["llama-gqa", "gemma3"])
def test_a_layer_takes_few_launches(
    architecture: str, as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = bound(architecture, torch.float32, 1).to(DEVICE)
    own = layers_of(model)[0]
    [call, *_] = record_calls(model, nn.ModuleList(layers_of(model)), MAX_POSITION)
    fused = layers_of(optimized(model))[0]
    counts = {}
    for layer in (own, fused):
        with torch.inference_mode(), monkeypatch.context() as patch, Launches() as found:
            for name in ("rms_norm", "add_normed", "rotate", "gate"):
                patch.setattr(TritonPasses, name, counted(getattr(TritonPasses, name), found))
            kwargs = {name: value for name, value in call.kwargs.items() if name != "hidden_states"}
            layer(call.hidden_states, *call.args[1:], **kwargs | {"winnow_step": Silent()})
        counts[layer] = found
    assert counts[fused].products == 4
    assert counts[fused].small <= LAUNCHES < counts[own].small


def counted(method: Any, launches: Launches) -> Any:
    def launch(*args: Any, **kwargs: Any) -> Any:
        with torch.utils._python_dispatch._disable_current_modes():
            result = method(*args, **kwargs)
        launches.small += 1
        return result

    return launch
