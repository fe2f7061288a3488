"""Copies of small tensors to the host."""

import torch
from torch import Tensor


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
        """Return the copy, once it is there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._tensor.cpu()
