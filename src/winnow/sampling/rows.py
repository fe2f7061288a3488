"""Rows of logits: in blocks, on their way to the host, and those that no token can be taken from."""

from collections.abc import Callable, Iterator
from enum import IntEnum
from math import isfinite

import torch
from torch import Tensor

_BLOCK_ELEMENTS = 2**22  # 16 MiB of float32: 128 rows of a 32k vocabulary, 27 rows of a 152k one
_HUGE = 1e30  # stands for +inf: far above any logit, and stays finite through every penalty


def row_blocks(num_rows: int, vocab_size: int) -> Iterator[tuple[int, int]]:
    """Yield (first, end) of consecutive blocks: at most about 4 million logits each, at least one row."""
    size = max(1, _BLOCK_ELEMENTS // vocab_size)
    for first in range(0, num_rows, size):
        yield first, min(first + size, num_rows)


def clean_rows(logits: Tensor) -> Tensor:
    """Return a float32 copy where NaN counts as impossible (-inf), and +inf as all but certain, yet a number."""
    return torch.nan_to_num(logits.float(), nan=-torch.inf, posinf=_HUGE, neginf=-torch.inf)


class HostCopy:
    """Copy that is on its way as soon as it is asked for: reading it waits for nothing that the device does later."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._arrived: torch.cuda.Event | None = None
        if tensor.is_cuda:
            host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            self._tensor = host.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def read(self) -> Tensor:
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._tensor.cpu()


class Fault(IntEnum):
    """Reason for which a row gave no token. Below 0, so that one column can hold a token or a fault."""

    NOT_FINITE = -1  # NaN or plus infinity among the model's logits, or minus infinity everywhere
    NOTHING_LEFT = -2  # the model's logits are sound, but what was asked for leaves no token possible

    def explain(self, dtype: torch.dtype | None = None) -> str:
        """Return what is wrong and what may help, for a model that computes in `dtype`; None: it is not known here."""
        if self is Fault.NOTHING_LEFT:
            return (
                "no token is possible: min_tokens, bad_words, logit_bias, stop_token_ids and structured_outputs "
                "together rule out every token that the model allows"
            )
        advice = []
        if dtype in (None, torch.float16):
            advice.append("float16 overflows beyond 65504, and dtype=bfloat16 has float32's range")
        if dtype is not torch.float16:
            advice.append("the model's weights may hold NaN or infinity")
        where = "" if dtype is None else f" in {str(dtype).removeprefix('torch.')}"
        return f"the model's logits are not finite (NaN or infinity){where}: {', or '.join(advice)}"


def mark_faults(tokens: Tensor, logits: Tensor) -> Tensor:
    """Return `tokens`, int64 [R], with `Fault.NOT_FINITE` where a row of the model's logits, [R, V] of any float type,
    is unsound; nothing waits for the device."""
    return torch.where(sound_rows(logits), tokens, Fault.NOT_FINITE.value)


def marked_tokens(tokens: Tensor, logits: Tensor) -> Callable[[], list[int]]:
    """Do as `mark_faults` does, and return what waits for them. On the host, a step of one sequence spends less in this
    than in two operators."""
    if logits.device.type != "cpu":
        copy = HostCopy(mark_faults(tokens, logits))
        return lambda: copy.read().tolist()
    largest = logits.amax(1).tolist()
    pairs = zip(tokens.tolist(), largest, strict=True)
    marked = [token if isfinite(most) else Fault.NOT_FINITE.value for token, most in pairs]
    return lambda: marked


def sound_rows(logits: Tensor) -> Tensor:
    """Return which rows of [R, V] a token can be taken from, bool [R].

    One reduction tells: the largest of a row is NaN if any logit is, and infinite if one is or all are minus infinity.
    Single logits of minus infinity are sound: models rule out tokens by them.
    """
    return logits.amax(1).isfinite()
