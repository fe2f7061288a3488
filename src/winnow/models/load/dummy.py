"""Random weights made fast: billions of random numbers take a minute, a pattern of them as long as memory takes."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Prime, so that rows of a weight are cuts of the pattern at different places.
_PATTERN = 1_048_573
_RANDOM = (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default)


class RepeatedRandom(TorchDispatchMode):
    """Filler of large tensors, by repeating the random numbers that their first `_PATTERN` elements got."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _RANDOM or args[0].numel() <= _PATTERN or not args[0].is_contiguous():
            return func(*args, **kwargs)
        whole: Tensor = args[0].view(-1)
        pattern = func(whole[:_PATTERN], *args[1:], **kwargs)
        for part in whole[_PATTERN:].split(_PATTERN):
            part.copy_(pattern[: len(part)])
        return args[0]
