"""One step of layers that keep a state, over sequences whose states stay where they lie, by the CPU kernels.

transformers' steps pass over a batch's states several times, and they are copied into it and out of it. Its modules
call them by name: a copy of a module's forward finds these here in their place.
"""

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from winnow.process import native
from winnow.process.native import native_dtype, native_kernels

if TYPE_CHECKING:
    from winnow.process.native import Kernels, SeqRows, StateSlots

Step = Callable[..., Any]


class StateRows:
    """States of some sequences in the rows of all, [slots, *shape of a state], which a step changes in place; the
    sequences' slots are int64 [B]."""

    def __init__(self, rows: Tensor, slots: Tensor) -> None:
        self.rows, self.slots = rows, slots

    def __getitem__(self, part: tuple[slice, int]) -> "StateRows":
        return StateRows(self.rows[part], self.slots)

    def to(self, dtype: torch.dtype) -> "StateRows":
        return self

    def copy_(self, new: "StateRows") -> None:
        assert new is self, "changed in place"

    def native(self, dtype: torch.dtype, *shape: int) -> "StateSlots":
        """Return them for the kernels. Raises TypeError: they are of another type, shape or order."""
        found = self.rows.dtype, tuple(self.rows.shape[1:])
        if found != (dtype, shape) or not self.rows[0].is_contiguous():
            raise TypeError(f"states must be dense, {dtype} {shape}, got {found}")
        rows, slots = self.rows, self.slots
        return native.StateSlots(rows.data_ptr(), rows.stride(0), slots.data_ptr(), len(slots))


def steps_in_place(kind: type[nn.Module]) -> tuple[Callable[..., Any] | None, frozenset[str]]:
    """Return the forward of a module with the steps below in place of its own, and which kinds of states they take.
    None: it has none of them, or there are no kernels."""
    own: Any = inspect.unwrap(kind.forward)
    names = {*own.__code__.co_names} & own.__globals__.keys()
    found = {name: step for name, step in STEPS.items() if name in names}
    if not found or native_kernels() is None:
        return None, frozenset()
    steps = {name: _either(step, own.__globals__[name]) for name, (_, step) in found.items()}
    scope = own.__globals__ | steps
    made = FunctionType(own.__code__, scope, own.__name__, own.__defaults__, own.__closure__)
    made.__kwdefaults__ = own.__kwdefaults__
    return made, frozenset(of for of, _ in found.values())


def _either(step: Step, own: Step) -> Step:
    def run(*args: Any, **kwargs: Any) -> Any:
        in_place = any(isinstance(each, StateRows) for each in (*args, *kwargs.values()))
        return (step if in_place else own)(*args, **kwargs)

    return run


def conv_step(
    hidden_states: Tensor,
    conv_state: StateRows,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """Return what a convolution over the last inputs of each channel gives for one more, both [B, channels, 1], by a
    weight [channels, taps]."""
    x, silu = hidden_states[..., 0], activation in ("silu", "swish")
    out = torch.empty(x.shape, dtype=x.dtype, device="cpu")
    weight, bias = _dense(weight, x.dtype), None if bias is None else _dense(bias, x.dtype)
    channels, length = x.shape[1], conv_state.rows.shape[-1]
    _kernels().conv_step(
        native_dtype(x.dtype), conv_state.native(x.dtype, channels, length), _rows(x, x.dtype),
        weight.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr(), channels, length,
        weight.shape[-1], silu, torch.get_num_threads(),
    )  # fmt: skip
    return (out if silu or activation is None else ACT2FN[activation](out))[..., None]


def delta_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: StateRows,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, StateRows]:
    """Return what the gated delta rule gives for one token of each sequence, [B, 1, H, value size], and its states.

    Args:
        query, key: [B, 1, key heads, key size].
        value: [B, 1, H, value size].
        g: the decay's logarithm, [B, 1, H], or of each row of a state, [B, 1, H, key size].
        beta: [B, 1, H].
    """
    dtype, key_heads, key_size = query.dtype, *query.shape[2:]
    heads, value_size = value.shape[2:]
    out = torch.empty(value.shape, dtype=dtype, device="cpu")
    log_decay, rate = _dense(g, torch.float32), _dense(beta, torch.float32)
    _kernels().delta_step(
        native_dtype(dtype), initial_state.native(torch.float32, heads, key_size, value_size),
        _rows(query, dtype), _rows(key, dtype), _rows(value, dtype), log_decay.data_ptr(), rate.data_ptr(),
        out.data_ptr(), key_heads, heads, key_size, value_size, g[0, 0, 0].numel(), use_qk_l2norm_in_kernel,
        torch.get_num_threads(),
    )  # fmt: skip
    return out, initial_state


def space_step(
    state: StateRows,
    hidden_states: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    z: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Return what a selective state space gives for one token of each sequence, as `hidden_states`.

    Args:
        hidden_states, dt, z: [B, H, head size], dt the same all over a head (Mamba-2); or [B, H].
        a: [H, head size, state size], the same all over a head; or [H, state size].
        b, c: [B, groups, state size]; or [B, state size].
        d, dt_bias: [H, head size], the same all over a head; or [H].
    """
    dtype, (heads, *head_size), state_size = hidden_states.dtype, hidden_states.shape[1:], a.shape[-1]
    if head_size:
        a, dt, d = _of_head(_of_head(a)), _of_head(dt), _of_head(d)
        dt_bias = None if dt_bias is None else _of_head(dt_bias)
    times = _dense(dt if dt_bias is None else dt.float() + dt_bias.float(), torch.float32)
    times = F.softplus(times) if dt_softplus else times
    rates, skips = _dense(a, torch.float32), _dense(d, torch.float32)
    out = torch.empty(hidden_states.shape, dtype=dtype, device="cpu")
    _kernels().space_step(
        native_dtype(dtype), state.native(torch.float32, heads, *head_size, state_size),
        _rows(hidden_states, dtype), _rows(b, dtype), _rows(c, dtype), times.data_ptr(), rates.data_ptr(),
        skips.data_ptr(), out.data_ptr(), heads, out[0, 0].numel(), state_size, b[0].numel() // state_size,
        rates[0].numel(), torch.get_num_threads(),
    )  # fmt: skip
    return out if z is None else out * F.silu(z)


STEPS: dict[str, tuple[str, Step]] = {
    "causal_conv1d_update": ("conv", conv_step),
    "torch_recurrent_gated_delta_rule": ("recurrent", delta_step),
    "recurrent_kimi_delta_attention": ("recurrent", delta_step),
    "mamba2_selective_state_update": ("recurrent", space_step),
    "mamba_selective_state_update": ("recurrent", space_step),
}
"""Steps by the names that transformers gives them, with the kind of state that each takes."""


def _kernels() -> "Kernels":
    kernels = native_kernels()
    assert kernels is not None, "asked for where a forward is made"
    return kernels


def _dense(each: Tensor, dtype: torch.dtype) -> Tensor:
    return each.to(dtype).contiguous()


def _rows(each: Tensor, dtype: torch.dtype) -> "SeqRows":
    if each.dtype != dtype or not each[0].is_contiguous():
        raise TypeError(f"rows must be dense and of {dtype}, got {each.dtype} {each.shape} {each.stride()}")
    return native.SeqRows(each.data_ptr(), each.stride(0))


def _of_head(each: Tensor) -> Tensor:
    if each.stride(-1) and each.shape[-1] > 1:
        found = f"{each.shape} {each.stride()}"
        raise TypeError(f"one number for each head is what the kernels take, got {found}")
    return each[..., 0]
