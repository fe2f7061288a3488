"""Kernels of sampling: a program passes over a row of logits, of any size, with a part of it in registers."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from winnow.sampling.rows import Fault


@triton.jit
def argmax_rows(logits, chosen, row_stride, size, FAULT: tl.constexpr, BLOCK: tl.constexpr):
    """Store FAULT where a row holds NaN or plus infinity or nothing possible. Grid (R)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    token = column
    unsound = tl.zeros([BLOCK], tl.int32)
    for first in range(0, size, BLOCK):
        inside = first + column < size
        x = tl.load(logits + row * row_stride + first + column, mask=inside, other=float("-inf"))
        x = x.to(tl.float32)
        unsound |= ((x != x) | (x == float("inf"))).to(tl.int32)
        better = x > best
        token = tl.where(better, first + column, token)
        best = tl.where(better, x, best)
    top = tl.max(best, axis=0)
    lowest = tl.min(tl.where(best == top, token, size), axis=0)
    broken = (tl.max(unsound, axis=0) > 0) | (top == float("-inf"))
    tl.store(chosen + row, tl.where(broken, FAULT, lowest).to(tl.int64))


@triton.jit
def masses_from(row, size, first, second, third, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    """Return how many logits are not below each of three bounds, or the sums of their exponentials: float64."""
    column = tl.arange(0, BLOCK)
    one = tl.zeros([BLOCK], tl.float64 if WEIGHTED else tl.int32)
    two, three = one, one
    for start in range(0, size, BLOCK):
        x = tl.load(row + start + column, mask=start + column < size, other=float("nan"))
        mass = tl.exp(x).to(tl.float64) if WEIGHTED else tl.full([BLOCK], 1, tl.int32)
        one += tl.where(x >= first, mass, 0)
        two += tl.where(x >= second, mass, 0)
        three += tl.where(x >= third, mass, 0)
    # Sums of the same numbers are the same, so that a bound without effect needs all of the mass and has it.
    return (
        tl.sum(one, axis=0).to(tl.float64),
        tl.sum(two, axis=0).to(tl.float64),
        tl.sum(three, axis=0).to(tl.float64),
    )


@triton.jit
def bound_of(bits):
    """Return the float, at most 0, whose magnitude has these bits, int64."""
    return -bits.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def largest_bound(row, size, needed, floor, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    """Return the largest logit, at least `floor`, such that those not below it have the mass `needed`.

    Logits are at most 0, and those from `floor` on have that mass. Bits of such floats are in the order of their
    magnitudes, so a search by bits is exact; a pass over the row decides two of them.
    """
    low = tl.full([], 0, tl.int64)
    high = (-floor).to(tl.int32, bitcast=True).to(tl.int64)
    for _ in range(16):
        a = low + (high - low) // 4
        b = low + (high - low) // 2
        c = low + (high - low) * 3 // 4
        one, two, three = masses_from(row, size, bound_of(a), bound_of(b), bound_of(c), WEIGHTED, BLOCK)
        low = tl.where(
            one >= needed, low, tl.where(two >= needed, a + 1, tl.where(three >= needed, b + 1, c + 1))
        )
        high = tl.where(one >= needed, a, tl.where(two >= needed, b, tl.where(three >= needed, c, high)))
    return bound_of(high)


@triton.jit
def keep_top_rows(logits, top_k, top_p, size, BLOCK: tl.constexpr):
    """Drop, in place, what is below the bounds of a row. Grid (R)."""
    number = tl.program_id(0).to(tl.int64)
    row = logits + number * size
    bound = tl.full([], float("-inf"), tl.float32)
    if top_k is not None:
        wanted = tl.load(top_k + number).to(tl.float64)
        bound = largest_bound(row, size, wanted, bound, False, BLOCK)
    if top_p is not None:
        mass, _, _ = masses_from(row, size, bound, bound, bound, True, BLOCK)
        bound = largest_bound(row, size, tl.load(top_p + number) * mass, bound, True, BLOCK)
    column = tl.arange(0, BLOCK)
    for first in range(0, size, BLOCK):
        inside = first + column < size
        x = tl.load(row + first + column, mask=inside, other=0.0)
        tl.store(row + first + column, float("-inf"), inside & (x < bound))


# Logits that a program has in registers.
_BLOCK = 4096


def marked_argmax(logits: Tensor) -> Tensor:
    """Return the first of the most probable tokens of rows [R, V], or `Fault.NOT_FINITE`, int64 [R]: one kernel."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    size = logits.shape[1]
    with torch.cuda.device_of(logits):
        argmax_rows[(len(logits),)](
            logits, tokens, logits.stride(0), size, FAULT=Fault.NOT_FINITE.value,
            BLOCK=min(_BLOCK, triton.next_power_of_2(size)), num_warps=8,
        )  # fmt: skip
    return tokens


def keep_top(logits: Tensor, k: Tensor | None, largest_k: int, top_p: Tensor | None) -> None:
    """Do as `winnow.sampling.filters.keep_top`, whose sums may differ in the last bits; `largest_k` is of no use."""
    assert logits.is_contiguous(), "rows lie one behind the other"
    size = logits.shape[1]
    with torch.cuda.device_of(logits):
        keep_top_rows[(len(logits),)](
            logits, k, top_p, size, BLOCK=min(_BLOCK, triton.next_power_of_2(size)), num_warps=16
        )
