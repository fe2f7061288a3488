"""Outputs of the vision tower, kept by the digests of pictures, and those that a step needs."""

from collections import OrderedDict

import numpy as np
import torch
from torch import Tensor

from winnow.engine.plan import StepPlan
from winnow.executor.occupants import Occupants
from winnow.models import LoadedModel
from winnow.models.bind.images import PackedImages, run_tower
from winnow.values.images import PromptImage, rotary_positions


class ImageFeatures:
    """What the vision tower made of pictures; the least recently used go first.

    Args:
        limit: bytes. The pictures of one step are kept until its end, whatever they take.
    """

    def __init__(self, model: LoadedModel, limit: int) -> None:
        self._model = model
        self._limit = limit
        self._kept: OrderedDict[bytes, tuple[Tensor, ...]] = OrderedDict()
        self._joined = False
        self.nbytes = 0
        self.num_runs = 0

    def pack(self, plan: StepPlan, occupants: Occupants, position: Tensor) -> PackedImages | None:
        """Return the pictures of a step; None: its sequences have none that matter to it.

        Args:
            position: of each token, int64 [T].
        """
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
        self._drop()
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

    def _of(self, image: PromptImage) -> tuple[Tensor, ...]:
        found = self._kept.get(image.digest)
        if found is None:
            found, self._joined = run_tower(self._model.model, image)
            self._kept[image.digest] = found
            self.nbytes += _bytes(found)
            self.num_runs += 1
        self._kept.move_to_end(image.digest)
        return found

    def _drop(self) -> None:
        while self.nbytes > self._limit and self._kept:
            self.nbytes -= _bytes(self._kept.popitem(last=False)[1])


def _bytes(features: tuple[Tensor, ...]) -> int:
    return sum(each.nbytes for each in features)
