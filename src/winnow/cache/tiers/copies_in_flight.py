"""Copies of new KVs from the device to a tier, made while the device computes the next layers."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

# A copy is as large as what a layer stores in a step, and takes memory of the device until it is stored.
_MOST_COPIES = 2


@dataclass(frozen=True)
class _Copy:
    """Copy of one write: its slots, int64 [n], ascending, their fields, [n, length], and when they are stored."""

    slots: Tensor
    values: dict[str, Tensor]
    stored: Future[None]


class CopiesInFlight:
    """Fields of KVs on their way to a tier: a stream copies them to pinned memory, a thread stores them from there.

    Neither the device nor the thread that drives it waits for either. Reads find what is not stored yet on the device;
    whatever moves or copies whole blocks has to `wait` first.

    Args:
        fields: those that lie on the tier, by name: [num_blocks, block_size, length].
        device: the one that computes. Without a stream of its own what it has written is there to be read.
    """

    def __init__(self, fields: Mapping[str, Tensor], device: torch.device) -> None:
        self.fields = fields
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, "winnow-tier-writer")
        self._copies: deque[_Copy] = deque()

    def write(self, block: Tensor, offset: Tensor, encoded: Mapping[str, Tensor]) -> float:
        """Start to store fields, [..., length], in distinct slots, int64 [...] each, on the device. Returns seconds
        waited for older copies, of which two may be on their way."""
        fields = {name: field for name, field in self.fields.items() if name in encoded}
        if not fields or not block.numel():
            return 0.0
        waited = self.wait(_MOST_COPIES - 1)
        size = next(iter(fields.values())).shape[1]
        slots, order = (block * size + offset).flatten().sort()
        values = {name: encoded[name].to(field.dtype).flatten(0, -2)[order] for name, field in fields.items()}
        (place, *sent), arrive = self._send([slots, *values.values()])
        stored = self._thread.submit(_store, list(fields.values()), place, sent, arrive)
        self._copies.append(_Copy(slots, values, stored))
        return waited

    def read(self, name: str, index: tuple[Tensor, ...]) -> Tensor:
        """Return a field, as the last write left it, at an index into [num_blocks, block_size] or [num_blocks]."""
        field = self.fields[name]
        within = torch.arange(field.shape[1], device=self._device)
        block, offset = index if len(index) == 2 else (index[0][..., None], within)
        shape = torch.broadcast_shapes(block.shape, offset.shape)
        slots = (block * field.shape[1] + offset).flatten()
        found = torch.empty(len(slots), field.shape[-1], dtype=field.dtype, device=self._device)
        left = torch.arange(len(slots), device=self._device)
        while self._copies and self._copies[0].stored.done():
            self._copies.popleft().stored.result()
        for copy in reversed(self._copies):
            if name in copy.values:
                wanted = slots[left]
                at = torch.searchsorted(copy.slots, wanted).clamp_max_(len(copy.slots) - 1)
                here = copy.slots[at] == wanted
                found[left[here]] = copy.values[name][at[here]]
                left = left[~here]
        there = slots[left].to(field.device)
        found[left] = field[there // field.shape[1], there % field.shape[1]].to(self._device)
        return found.view(*shape, -1)

    def wait(self, most: int = 0) -> float:
        """Wait until at most `most` copies are on their way. Returns the seconds that took."""
        start = time.perf_counter()
        while len(self._copies) > most:
            self._copies.popleft().stored.result()
        return time.perf_counter() - start

    def _send(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Callable[[], None]]:
        """Return tensors in host memory that is being filled, and what waits until it is."""
        if self._stream is None:
            return list(tensors), lambda: None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            sent = [each.to("cpu", non_blocking=True) for each in tensors]  # to pinned memory
        return sent, self._stream.record_event().synchronize


@torch.inference_mode()
def _store(
    fields: Sequence[Tensor], slots: Tensor, values: Sequence[Tensor], arrive: Callable[[], None]
) -> None:
    arrive()
    for field, value in zip(fields, values, strict=True):
        field[slots // field.shape[1], slots % field.shape[1]] = value
