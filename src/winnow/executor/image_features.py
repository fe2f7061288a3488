"""Outputs of the vision tower, computed beside steps and kept by pictures' digests, and those that a step needs."""

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from threading import Lock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from winnow.engine.executor import VisionTower
from winnow.engine.plan import StepPlan
from winnow.errors import describe_error
from winnow.executor.occupants import Occupants
from winnow.models import LoadedModel
from winnow.models.load.processor import PackedImages, run_tower, two_way_layers
from winnow.values.images import PromptImage, rotary_positions

_BATCH = 8
_MOMENT = 0.02  # seconds, after which callers are heard again

Features = tuple[Tensor, ...]
"""See `PackedImages.features`."""


class ImageFeatures(VisionTower):
    """What the vision tower made of pictures, up to `limit` bytes; the least recently used go first. The pictures of
    one step are kept until its end, and new ones until the next step with pictures, whatever they take.

    A thread of its own runs it, on up to 8 pictures of one size at a time.
    """

    def __init__(self, model: LoadedModel, limit: int) -> None:
        self._model = model
        self._limit = limit
        self._thread = ThreadPoolExecutor(1, "winnow-tower")
        self._lock = Lock()  # of what waits for the thread
        self._queue: list[tuple[PromptImage, Future[Features]]] = []
        self._pending: dict[bytes, Future[Features]] = {}
        self._kept: OrderedDict[bytes, Features] = OrderedDict()
        self._joined = False
        self.nbytes = 0
        self.num_runs = 0
        own = getattr(model.model, "config", None)  # a packed model has none
        self.windowed = own is not None and two_way_layers(own) == "windowed"

    def ready(self, images: Sequence[PromptImage], start: int, end: int) -> bool | str:
        self._collect()
        later = [image for image in images if image.span[1] > start]
        for image in later:
            self._begin(image)
        for image in later:
            found = self._pending.get(image.digest) if image.span[0] < end else None
            if found is not None and not found.done():
                return False
            if found is not None and isinstance(error := found.exception(), Exception):
                del self._pending[image.digest]
                return describe_error(error)
        self._collect()
        return True

    def wait(self) -> bool:
        running = [each for each in self._pending.values() if not each.done()]
        wait(running, _MOMENT, FIRST_COMPLETED)
        return bool(running)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def pack(self, plan: StepPlan, occupants: Occupants, position: Tensor) -> PackedImages | None:
        """Return the pictures of a step whose tokens have positions, int64 [T]; None: none that matter to it."""
        if not any(occupants[entry.slot].images for entry in plan.entries):
            return None
        tokens, parts, turned, first = [], [], [], 0
        for entry in plan.entries:
            images = occupants[entry.slot].images
            for image in images:
                start, end = np.searchsorted(image.tokens, (entry.start, entry.end)).tolist()
                if start < end:
                    tokens.append(image.tokens[start:end] + (first - entry.start))
                    parts.append([each[start:end] for each in self._of(image)])
            if images and images[0].positions is not None:
                turned.append((first, rotary_positions(images, entry.start, entry.end)))
            first += entry.count
        while self.nbytes > self._limit and self._kept:
            self.nbytes -= _bytes(self._kept.popitem(last=False)[1])
        if not tokens and not turned:
            return None
        positions = None
        if turned:
            positions = position[None].repeat(3, 1)
            for begin, own in turned:
                positions[:, begin : begin + own.shape[1]] = torch.from_numpy(own)
        places = np.concatenate(tokens) if tokens else np.empty(0, dtype=np.int64)
        features = tuple(map(torch.cat, zip(*parts, strict=True)))
        return PackedImages(torch.from_numpy(places).to(position.device), features, self._joined, positions)

    def last_visible(self, plan: StepPlan, occupants: Occupants) -> dict[int, NDArray[np.int64]]:
        """Return positions of the last KVs that tokens of sequences see, by entry; none where all are causal."""
        found = {}
        for index, entry in enumerate(plan.entries):
            last = None
            for image in occupants[entry.slot].images:
                for start, end in image.two_way:
                    if start < entry.end and entry.start < end:
                        assert end <= entry.end, "no step cuts a run"
                        last = np.arange(entry.start, entry.end) if last is None else last
                        last[max(start - entry.start, 0) : end - entry.start] = end - 1
            if last is not None:
                found[index] = last
        return found

    def _of(self, image: PromptImage) -> Features:
        if image.digest not in self._kept:  # it went since the step was planned
            self._begin(image)
            self._pending[image.digest].result()
            self._collect()
        self._kept.move_to_end(image.digest)
        return self._kept[image.digest]

    def _collect(self) -> None:
        for digest, future in list(self._pending.items()):
            if future.done() and future.exception() is None:
                self._kept[digest] = features = self._pending.pop(digest).result()
                self.nbytes += _bytes(features)
                self.num_runs += 1

    def _begin(self, image: PromptImage) -> None:
        if image.digest in self._kept or image.digest in self._pending:
            return
        self._pending[image.digest] = future = Future[Features]()
        with self._lock:
            self._queue.append((image, future))
        self._thread.submit(self._run)

    def _run(self) -> None:
        with self._lock:
            shapes = [_shapes(image) for image, _ in self._queue]
            alike = [each for each, shape in zip(self._queue, shapes, strict=True) if shape == shapes[0]]
            batch = alike[:_BATCH]
            self._queue = [each for each in self._queue if each not in batch]
        if not batch:  # an earlier call took them all
            return
        try:
            found, self._joined = self._beside_steps([image for image, _ in batch])
        except Exception as error:
            for _, future in batch:
                future.set_exception(error)
            return
        for (_, future), features in zip(batch, found, strict=True):
            future.set_result(features)

    def _beside_steps(self, images: list[PromptImage]) -> tuple[list[Features], bool]:
        """Run the tower on a stream of its own, where a device has streams, and wait for it."""
        model, device = self._model.model, self._model.device
        if device.type != "cuda":
            return run_tower(model, images)
        stream, steps = torch.cuda.Stream(device), torch.cuda.default_stream(device)
        with torch.cuda.stream(stream):
            found, joined = run_tower(model, images)
        stream.synchronize()
        for features in found:
            for each in features:
                each.record_stream(steps)
        return found, joined


def _shapes(image: PromptImage) -> tuple[tuple[str, tuple[int, ...]], ...]:
    sizes = tuple((name, value.shape) for name, value in image.inputs.items())
    return (("tokens", image.tokens.shape), *sizes)


def _bytes(features: Features) -> int:
    return sum(each.nbytes for each in features)
