"""One step over states where they lie, beside transformers' own steps: every number format, every instruction set."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.granitemoehybrid import modeling_granitemoehybrid as mamba2
from transformers.models.jamba import modeling_jamba as mamba
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

native = pytest.importorskip("winnow._native")
from winnow.models.bind import state_steps  # noqa: E402
from winnow.models.bind.state_steps import StateRows, conv_step, delta_step, space_step, steps_in_place  # noqa: E402

pytestmark = pytest.mark.cpu

DTYPES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
SLOTS = torch.tensor([4, 0, 3])


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def assert_same_step(
    step: Callable[[Any], Tensor],
    own: Callable[[Tensor], tuple[Tensor, Tensor]],
    rows: Tensor,
    tolerance: float,
) -> None:
    """The same outputs and states by every instruction set, and no other state changes.

    Args:
        step: over states that stay in place.
        own: what transformers gives for a batch's states, and these after it.
        rows: the states of all slots.
    """
    before = rows.clone()
    expected, states = own(rows[SLOTS].clone())
    others = [slot for slot in range(len(rows)) if slot not in SLOTS.tolist()]
    for isa in native.instruction_sets():
        rows = before.clone()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(state_steps, "native_kernels", partial(native.Kernels, isa))
            found = step(StateRows(rows, SLOTS))
        assert found.shape == expected.shape
        for one, other in ((found, expected), (rows[SLOTS], states)):
            torch.testing.assert_close(
                one.float(), other.float(), rtol=tolerance, atol=tolerance * float(other.abs().max())
            )
        assert torch.equal(rows[others], before[others]), isa


# Value sizes with and without a rest after strips and registers.
@pytest.mark.parametrize(("key_size", "value_size"), [(8, 12), (16, 128), (20, 145)])
@pytest.mark.parametrize("kind", ["grouped", "normed", "each row"])
def test_delta(kind: str, key_size: int, value_size: int, dtype: torch.dtype) -> None:
    key_heads, each_row, norm = 2 if kind == "grouped" else 4, kind == "each row", kind != "grouped"
    q, k = (torch.randn(3, 1, key_heads, key_size).to(dtype) for _ in range(2))
    v, beta = torch.randn(3, 1, 4, value_size).to(dtype), torch.rand(3, 1, 4).to(dtype)
    g = -torch.rand(3, 1, 4, key_size) if each_row else -torch.rand(3, 1, 4)
    rule = kimi.recurrent_kimi_delta_attention if each_row else qwen.torch_recurrent_gated_delta_rule
    options = {"g": g, "beta": beta, "use_qk_l2norm_in_kernel": norm}

    assert_same_step(
        lambda rows: delta_step(q, k, v, **options, initial_state=rows)[0],
        lambda states: rule(q, k, v, **options, initial_state=states, output_final_state=True),
        torch.randn(6, 4, key_size, value_size),
        DTYPES[dtype],
    )


@pytest.mark.parametrize(("channels", "length", "taps"), [(5, 4, 4), (770, 4, 4), (33, 3, 3), (20, 4, 3)])
@pytest.mark.parametrize("activation", [None, "silu", "gelu"])
def test_conv(channels: int, length: int, taps: int, activation: str | None, dtype: torch.dtype) -> None:
    x, weight = torch.randn(3, channels, 1).to(dtype), torch.randn(channels, taps).to(dtype)
    bias = torch.randn(channels).to(dtype) if activation else None

    def own(states: Tensor) -> tuple[Tensor, Tensor]:
        return qwen.causal_conv1d_update(x, states, weight, bias, activation), states

    rows = torch.randn(6, channels, length).to(dtype)
    assert_same_step(lambda rows: conv_step(x, rows, weight, bias, activation), own, rows, DTYPES[dtype])


@pytest.mark.parametrize(("head_size", "state_size"), [(16, 8), (64, 128), (20, 33)])
def test_state_spaces_of_heads(head_size: int, state_size: int, dtype: torch.dtype) -> None:
    x, dt = torch.randn(3, 4, head_size).to(dtype), torch.randn(3, 4, 1).to(dtype).expand(3, 4, head_size)
    a = (-torch.rand(4, 1, 1)).expand(4, head_size, state_size)
    b, c = (torch.randn(3, 2, state_size).to(dtype) for _ in range(2))
    d, bias = (torch.rand(4, 1).to(dtype).expand(4, head_size) for _ in range(2))

    def own(states: Tensor) -> tuple[Tensor, Tensor]:
        return mamba2.mamba2_selective_state_update(
            states, x, dt, a, b, c, d, dt_bias=bias, dt_softplus=True
        ), states

    assert_same_step(
        lambda rows: space_step(rows, x, dt, a, b, c, d, dt_bias=bias, dt_softplus=True),
        own,
        torch.randn(6, 4, head_size, state_size),
        DTYPES[dtype],
    )


@pytest.mark.parametrize("channels", [5, 130])
def test_state_spaces_of_channels(channels: int, dtype: torch.dtype) -> None:
    x, dt, z = (torch.randn(3, channels).to(dtype) for _ in range(3))
    b, c = (torch.randn(3, 16).to(dtype) for _ in range(2))
    a, d, bias = -torch.rand(channels, 16), torch.rand(channels).to(dtype), torch.rand(channels).to(dtype)

    def own(states: Tensor) -> tuple[Tensor, Tensor]:
        return mamba.mamba_selective_state_update(
            states, x, dt, a, b, c, d, z=z, dt_bias=bias, dt_softplus=True
        ), states

    assert_same_step(
        lambda rows: space_step(rows, x, dt, a, b, c, d, z=z, dt_bias=bias, dt_softplus=True),
        own,
        torch.randn(6, channels, 16),
        DTYPES[dtype],
    )


@pytest.mark.parametrize("isa", native.instruction_sets())
def test_a_step_depends_neither_on_threads_nor_on_other_sequences(
    isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_steps, "native_kernels", lambda: native.Kernels(isa))
    q, k, v = (torch.randn(3, 1, 4, 64) for _ in range(3))
    g, beta, first = -torch.rand(3, 1, 4), torch.rand(3, 1, 4), torch.randn(6, 4, 64, 64)
    together, alone = first.clone(), first.clone()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    out, _ = delta_step(q, k, v, g, beta, StateRows(together, SLOTS))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    for i in range(3):
        one = slice(i, i + 1)
        found, _ = delta_step(q[one], k[one], v[one], g[one], beta[one], StateRows(alone, SLOTS[one]))
        assert torch.equal(found, out[one])
    assert torch.equal(together, alone)


def test_what_the_kernels_do_not_take_is_refused() -> None:
    x = torch.randn(3, 5, 1)
    with pytest.raises(TypeError, match="states must be dense"):
        conv_step(x, StateRows(torch.randn(6, 5, 4).half(), SLOTS), torch.randn(5, 4))
    a, per_row = torch.ones(4, 1, 1).expand(4, 8, 16), torch.rand(3, 4, 8)
    rows, b = StateRows(torch.randn(6, 4, 8, 16), SLOTS), torch.randn(3, 1, 16)
    with pytest.raises(TypeError, match="one number for each head"):
        space_step(rows, torch.randn(3, 4, 8), per_row, a, b, b, torch.ones(4, 1).expand(4, 8))


def test_modules_without_such_steps_keep_their_own_forward() -> None:
    own = qwen.torch_recurrent_gated_delta_rule
    assert steps_in_place(nn.Linear) == steps_in_place(qwen.Qwen3_5Attention) == (None, frozenset())
    assert steps_in_place(qwen.Qwen3_5GatedDeltaNet)[1] == {"conv", "recurrent"}
    assert qwen.torch_recurrent_gated_delta_rule is own, "transformers' module is as it was"
