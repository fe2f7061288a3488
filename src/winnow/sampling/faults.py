"""Rows of logits that no token can be taken from."""

from collections.abc import Callable
from enum import IntEnum
from math import isfinite

import torch
from torch import Tensor

from winnow.sampling.host_copy import HostCopy


class Fault(IntEnum):
    """Reason for which a row gave no token. Below 0, so that one column can hold a token or a fault."""

    NOT_FINITE = -1
    """NaN or plus infinity among the model's logits, or minus infinity everywhere."""
    NOTHING_LEFT = -2
    """The model's logits are sound, but what was asked for leaves no token possible."""

    def explain(self, dtype: torch.dtype | None = None) -> str:
        """Return what is wrong and what may help, for a model that computes in `dtype`; None: it is not known here."""
        if self is Fault.NOTHING_LEFT:
            return (
                "no token is possible: min_tokens, logit_bias, stop_token_ids and structured_outputs together rule out "
                "every token that the model allows"
            )
        advice = []
        if dtype in (None, torch.float16):
            advice.append("float16 overflows beyond 65504, and dtype=bfloat16 has float32's range")
        if dtype is not torch.float16:
            advice.append("the model's weights may hold NaN or infinity")
        where = "" if dtype is None else f" in {str(dtype).removeprefix('torch.')}"
        return f"the model's logits are not finite (NaN or infinity){where}: {', or '.join(advice)}"


def mark_faults(tokens: Tensor, logits: Tensor) -> Tensor:
    """Return `tokens` with `Fault.NOT_FINITE` where a row of logits is unsound; nothing waits for the device.

    Args:
        tokens: int64 [R].
        logits: [R, V], any float type, as the model gave them.
    """
    return torch.where(sound_rows(logits), tokens, Fault.NOT_FINITE.value)


def marked_tokens(tokens: Tensor, logits: Tensor) -> Callable[[], list[int]]:
    """Do as `mark_faults` does, and return what waits for them.

    On the host, a step of one sequence spends less in this than in two operators.
    """
    if logits.device.type != "cpu":
        copy = HostCopy(mark_faults(tokens, logits))
        return lambda: copy.read().tolist()
    largest = logits.amax(1).tolist()
    marked = [
        token if isfinite(most) else Fault.NOT_FINITE.value
        for token, most in zip(tokens.tolist(), largest, strict=True)
    ]
    return lambda: marked


def sound_rows(logits: Tensor) -> Tensor:
    """Return which rows of [R, V] a token can be taken from, bool [R].

    One reduction tells: the largest of a row is NaN if any logit is, and infinite if one is or all are minus infinity.
    Single logits of minus infinity are sound: models rule out tokens by them.
    """
    return logits.amax(1).isfinite()
