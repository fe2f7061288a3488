"""Choice of a token: filters of those that stay in the draw, the draw itself, and the most probable one.

Every filter is a threshold on a row's logits: tokens as probable as the last one that must stay, stay too. So equals
are treated alike, no filter can empty a row, and no sorted copy has to be scattered back. What one row gets depends on
no other row.
"""

from collections.abc import Callable
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from winnow.process.native import DTYPES, native_kernels
from winnow.sampling.rows import HostCopy, clean_rows, marked_tokens, row_blocks

KeepTop = Callable[[Tensor, Tensor | None, int, Tensor | None], None]
"""See `keep_top`."""


class TopK(NamedTuple):
    """Logits that `keep_top_k` left of each row."""

    values: Tensor  # [R, largest k] float32, descending, -inf after the row's own k-th
    last: Tensor  # [R, 1] float32, the k-th value
    equals: Tensor  # [R] int64, how many more tokens stay because they equal the k-th


def scale(logits: Tensor, temperature: Tensor) -> None:
    """Shift, in place, the top of every row [R, V] to 0, and divide by its temperature [R, 1].

    A row with nothing possible (all -inf) becomes all NaN, which passes every filter and which `draw` knows.
    """
    logits.sub_(logits.amax(1, keepdim=True)).div_(temperature)


def keep_min_p(logits: Tensor, log_min_p: Tensor) -> None:
    """Drop, in place, tokens below min_p times the top probability (Nguyen et al., "Turning up the heat"), of scaled
    logits [R, V] float32, by the natural logarithm of min_p, [R, 1] float32: with the top at 0 it is a bound on the
    logit itself, since the normaliser cancels."""
    logits.masked_fill_(logits < log_min_p, -torch.inf)


def open_keep_top(device: torch.device) -> KeepTop:
    """Return the fastest that there is on a device: on GPUs one kernel that sorts nothing."""
    if _has_triton(device):
        from winnow.sampling import triton_kernels

        return triton_kernels.keep_top
    return keep_top


def keep_top(logits: Tensor, k: Tensor | None, largest_k: int, top_p: Tensor | None) -> None:
    """Drop, in place, what top-k, then what top-p leaves out.

    Args:
        logits: [R, V] float32, contiguous, scaled.
        k: [R] int64, 1 to `largest_k`; None: all stay.
        largest_k: the most of `k`, at most V.
        top_p: [R] float64, above 0, at most 1; None: all stay.
    """
    kept = None if k is None else keep_top_k(logits, k, largest_k)
    if top_p is not None:
        keep_top_p(logits, top_p, kept)


def keep_top_k(logits: Tensor, k: Tensor, largest_k: int) -> TopK:
    """Drop, in place, what is less probable than the k-th token of a row; arguments as those of `keep_top`."""
    values = logits.topk(largest_k, dim=1).values
    last = values.gather(1, k[:, None] - 1)
    equals = (logits >= last).sum(1) - k
    logits.masked_fill_(logits < last, -torch.inf)
    beyond = torch.arange(largest_k, device=logits.device) >= k[:, None]
    return TopK(values.masked_fill_(beyond, -torch.inf), last, equals)


def keep_top_p(logits: Tensor, top_p: Tensor, top_k: TopK | None) -> None:
    """Drop, in place, what the fewest tokens of probability `top_p` can do without (Holtzman et al., 2020); arguments
    as those of `keep_top`. If `keep_top_k` ran, what it left is given too, and nothing need be sorted."""
    values = logits.sort(dim=1, descending=True).values if top_k is None else top_k.values
    masses = values.exp().cumsum(1, dtype=torch.float64)
    total = masses[:, -1:]
    if top_k is not None:
        total = total + top_k.equals[:, None] * top_k.last.double().exp()
    needed = torch.searchsorted(masses, top_p[:, None] * total).clamp_(max=values.shape[1] - 1)
    # Where the equals of the k-th are needed too, this points behind the k-th: at -inf, so that all stay.
    logits.masked_fill_(logits < values.gather(1, needed), -torch.inf)


def draw(logits: Tensor, uniform: Tensor) -> Tensor:
    """Return one token per row, [R] int64, by inverting the cumulative distribution in the order of token ids.

    Sums run in float64, so the rarest token of a large vocabulary keeps its chance. A token without probability is
    never drawn: its sum equals the one before it. A row with nothing possible gives token 0.

    Args:
        logits: [R, V] float32; -inf is impossible.
        uniform: [R] float64 in [0, 1).
    """
    # Softmax and cumsum walk each row by itself. A plain sum might split a lone long row among threads, and
    # round differently than in a batch.
    sums = logits.softmax(1).cumsum(1, dtype=torch.float64)
    total = sums[:, -1:]
    tokens = torch.searchsorted(sums, uniform[:, None] * total, right=True)
    return torch.where(total > 0, tokens, 0).squeeze(1)


Argmax = Callable[[Tensor], Tensor]
"""Logits [R, V] of any float type -> tokens [R] int64. Ties go to the first; NaN is impossible; 0 if all are.

On GPUs a row that no token can be taken from may give `Fault.NOT_FINITE` instead."""
Greedy = Callable[[Tensor], tuple[Tensor, Callable[[], list[int]]]]
"""Logits [R, V] -> tokens [R] int64, and what waits for them and returns them, with faults in their places."""


def open_greedy(device: torch.device) -> Greedy:
    """Return the fastest choice of tokens for rows that ask for nothing else; on GPUs it is one kernel."""
    argmax, marks_faults = open_argmax(device), _has_triton(device)

    def greedy(logits: Tensor) -> tuple[Tensor, Callable[[], list[int]]]:
        tokens = argmax(logits)
        if not marks_faults:
            return tokens, marked_tokens(tokens, logits)
        copy = HostCopy(tokens)
        return tokens, lambda: copy.read().tolist()

    return greedy


def _has_triton(device: torch.device) -> bool:
    return device.type == "cuda" and find_spec("triton") is not None


def open_argmax(device: torch.device) -> Argmax:
    if _has_triton(device):
        from winnow.sampling import triton_kernels

        return triton_kernels.marked_argmax
    kernels = native_kernels() if device.type == "cpu" else None
    if kernels is None:
        return _argmax

    def native_argmax(logits: Tensor) -> Tensor:
        if logits.dtype not in DTYPES or logits.stride(1) != 1:
            return _argmax(logits)
        count, size = logits.shape
        tokens = torch.empty(count, dtype=torch.int64, device="cpu")
        kernels.greedy(
            DTYPES[logits.dtype], logits.data_ptr(), logits.stride(0), count, size, tokens.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        return tokens

    return native_argmax


def _argmax(logits: Tensor) -> Tensor:
    blocks = row_blocks(*logits.shape)
    return torch.cat([clean_rows(logits[first:end]).argmax(1) for first, end in blocks])
