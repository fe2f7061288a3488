"""Pictures in a prompt, as the model's processor leaves them: pixels for the vision tower, and places among tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class TokenGrid:
    """Some consecutive tokens of a picture, which show a part of it row by row.

    Attributes:
        first: of them, counted among the picture's tokens.
        box: left, top, right and bottom of that part, as fractions of the picture's width and height.
    """

    first: int
    rows: int
    cols: int
    box: tuple[float, float, float, float] = (0.0, 0.0, 1.0, 1.0)


@dataclass(frozen=True, eq=False)
class PromptImage:
    """A picture of a prompt, processed. Immutable; a request keeps it, since preemption may compute its tokens again.

    Attributes:
        inputs: arguments of the vision tower by name (`pixel_values`, `image_grid_thw`), of this picture alone.
        digest: SHA-256 of `inputs` with their names; the tower's outputs and prefixes of KVs are found by it.
        tokens: indices in the prompt of the tokens that stand for it, int64 [n], ascending. Tokens around and between
            them (begin, end, new row) are text.
        size: width and height of the picture that was given, in pixels.
        grids: which part of the picture each token shows. One grid of all tokens for most classes; where a class cuts
            pictures into tiles, one for each tile, and one of the whole picture at low resolution. Empty: not known.
        positions: rotary positions of `tokens`, int64 [3, n] (time, height, width), where the model's have three
            axes (M-RoPE); None: they are the token indices.
        position_offset: rotary position less token index of the text that follows, up to the next picture.
        two_way: runs of its tokens, half-open indices in the prompt, that see each other in both directions: no step
            may compute a part of one. Empty: attention is causal.
    """

    inputs: Mapping[str, NDArray[Any]]
    digest: bytes
    tokens: NDArray[np.int64]
    size: tuple[int, int]
    grids: tuple[TokenGrid, ...] = ()
    positions: NDArray[np.int64] | None = None
    position_offset: int = 0
    two_way: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(
        cls, inputs: Mapping[str, NDArray[Any]], tokens: Sequence[int] | NDArray[np.int64], **fields: Any
    ) -> Self:
        digest = sha256()
        for name, value in sorted(inputs.items()):
            digest.update(f"{name} {value.dtype.str} {value.shape}\n".encode())
            digest.update(np.ascontiguousarray(value).data)
        return cls(inputs, digest.digest(), np.asarray(tokens, dtype=np.int64), **fields)

    @property
    def span(self) -> tuple[int, int]:
        """Index in the prompt of its first token, and of the one behind its last."""
        return int(self.tokens[0]), int(self.tokens[-1]) + 1

    @property
    def nbytes(self) -> int:
        return sum(value.nbytes for value in self.inputs.values())


def prefix_ids(token_ids: list[int], images: Sequence[PromptImage]) -> list[int]:
    """Return token ids that tell pictures apart, for the keys of prefixes: those of pictures are of their digests. They
    are negative, which no token id is; four consecutive ones hold all of a digest but 4 bits."""
    if not images:
        return token_ids
    found = np.array(token_ids, dtype=np.int64)
    for image in images:
        words = np.frombuffer(image.digest, dtype=np.int64) | np.iinfo(np.int64).min
        there = image.tokens < len(found)
        found[image.tokens[there]] = np.resize(words, len(image.tokens))[there]
    return found.tolist()


def cut_run(runs: Sequence[tuple[int, int]], end: int) -> tuple[int, int] | None:
    """Return the run that a step up to token `end`, exclusive, would cut; None: there is none."""
    return next((run for run in runs if run[0] < end < run[1]), None)


def rotary_positions(images: Sequence[PromptImage], start: int, end: int) -> NDArray[np.int64]:
    """Return the rotary positions of tokens start..end - 1 of a prompt with pictures, or its answer: int64 [3, n]."""
    found = np.arange(start, end)[None].repeat(3, axis=0)
    for image in images:
        first, behind = image.span
        if end <= first:
            break
        if start < behind:
            here = (image.tokens >= start) & (image.tokens < end)
            if image.positions is not None:
                found[:, image.tokens[here] - start] = image.positions[:, here]
        later = max(behind - start, 0)
        found[:, later:] = np.arange(start + later, end) + image.position_offset
    return found
