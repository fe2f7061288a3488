"""Data-parallel training on one machine: one process per core, which meet once per step.

On a busy machine this beats one process with several threads, whose every small operation waits for the slowest thread.
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor


class Workers:
    """The processes that `torchrun` started, or this one alone."""

    def __init__(self) -> None:
        self.count, self.rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
        if self.count > 1:
            dist.init_process_group("gloo")

    def agree(self, value: float) -> float:
        """The first worker's `value`, in all of them."""
        shared = torch.tensor([value], dtype=torch.float64)
        if self.count > 1:
            dist.broadcast(shared, src=0)
        return shared.item()

    def average_gradients(self, parameters: list[torch.nn.Parameter]) -> None:
        """Replaces every gradient by its mean over the workers."""
        if self.count == 1:
            return
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        flat = torch.cat([gradient.view(-1) for gradient in gradients])
        dist.all_reduce(flat)
        flat /= self.count
        for gradient, part in zip(
            gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True
        ):
            gradient.copy_(part.view_as(gradient))

    def own(self, matrices: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
        """The share of the matrices that this worker updates."""
        return matrices[self.rank :: self.count]

    def exchange(self, matrices: list[torch.nn.Parameter]) -> None:
        """Sends every matrix from the worker that updated it to all others."""
        if self.count == 1:
            return
        with torch.no_grad():
            for owner in range(self.count):
                owned: list[Tensor] = [matrix.data for matrix in matrices[owner :: self.count]]
                flat = torch.cat([matrix.view(-1) for matrix in owned])
                dist.broadcast(flat, src=owner)
                for matrix, part in zip(owned, flat.split([matrix.numel() for matrix in owned]), strict=True):
                    matrix.copy_(part.view_as(matrix))

    def close(self) -> None:
        """Leaves the group."""
        if self.count > 1:
            dist.destroy_process_group()
