"""One step of the gated delta rule over sequences whose states stay where they lie, on a CPU.

transformers' step passes over a batch's states eight times, and they are copied into it and out of it. Here a state is
read once from memory, and what follows finds it in the processor's cache.
"""

import inspect
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

_NAME = "torch_recurrent_gated_delta_rule"


class StateRows:
    """States of some sequences in the rows of all, which a step changes in place.

    Args:
        rows: float32 [slots, H, key size, value size].
        slots: of the sequences.
    """

    def __init__(self, rows: Tensor, slots: Sequence[int]) -> None:
        self.each = [rows[slot] for slot in slots]

    def copy_(self, new: "StateRows") -> None:
        """Take what a step gives as the new states: these."""
        assert new is self, "changed in place"


def steps_in_place(kind: type[nn.Module]) -> Callable[..., Any] | None:
    """Return the forward of a module that steps by the rule, with the step below in its place; None: it does not."""
    own: Any = inspect.unwrap(kind.forward)
    rule = own.__globals__.get(_NAME)
    if rule is None or _NAME not in own.__code__.co_names:
        return None

    def step(*args: Any, initial_state: Any = None, **kwargs: Any) -> Any:
        if isinstance(initial_state, StateRows):
            return gated_delta_step(initial_state, *args, **kwargs)
        return rule(*args, initial_state=initial_state, **kwargs)

    made = FunctionType(
        own.__code__, own.__globals__ | {_NAME: step}, own.__name__, own.__defaults__, own.__closure__
    )
    made.__kwdefaults__ = own.__kwdefaults__
    return made


def gated_delta_step(
    states: StateRows,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, StateRows]:
    """Return what the rule gives for one token of each sequence, [B, 1, H, value size], and the states after it.

    S <- e^g S + k (beta (v - e^g k S)), out = q S (Gated DeltaNet, arXiv 2412.06464, equation 10).

    Args:
        query, key: [B, 1, key heads, key size].
        value: [B, 1, H, value size].
        g, beta: [B, 1, H].
    """
    dtype, heads = query.dtype, value.shape[2]
    q, k = (_heads(each[:, 0].float(), heads, norm=use_qk_l2norm_in_kernel) for each in (query, key))
    q = q / q.shape[-1] ** 0.5
    both = torch.stack([k, q], dim=2)  # [B, H, 2, key size]
    decay, rate = g[:, 0].float().exp()[..., None], beta[:, 0].float()[..., None]
    values, dots = value[:, 0].float(), (q * k).sum(dim=-1, keepdim=True)
    out = torch.empty_like(values)
    for index, state in enumerate(states.each):
        read = torch.bmm(both[index], state).mul_(decay[index, :, None])
        delta = (values[index] - read[:, 0]).mul_(rate[index])
        torch.addcmul(read[:, 1], dots[index], delta, out=out[index])
        state.mul_(decay[index, ..., None]).baddbmm_(k[index, ..., None], delta[:, None])
    return out[:, None].to(dtype), states


def _heads(each: Tensor, heads: int, *, norm: bool) -> Tensor:
    """Return keys or queries, [B, key heads, size], for each head that shares them."""
    if norm:
        each = each * torch.rsqrt((each * each).sum(dim=-1, keepdim=True) + 1e-6)
    return each.repeat_interleave(heads // each.shape[1], dim=1)
