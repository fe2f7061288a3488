"""Images of an inspected prompt: what is shown of them, and which part each of their tokens stands for."""

import base64
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Self

from winnow.values.images import PromptImage, TokenGrid

if TYPE_CHECKING:
    from PIL.Image import Image

_MAX_SIDE = 640
"""Most pixels of a side of what is shown."""


class Cell(NamedTuple):
    """Part of a picture that a token shows, in thousandths of the picture's width and height."""

    token: int
    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True)
class View:
    """Grids of tokens that lie beside each other over one picture."""

    name: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Picture:
    """An image of a prompt.

    Attributes:
        uri: what is shown of it, a PNG.
        size: width and height of what was given, in pixels.
        tokens: indices in the prompt of its tokens.
        views: their places over it; empty where they are not known.
    """

    uri: str
    size: tuple[int, int]
    tokens: tuple[int, ...]
    views: tuple[View, ...]

    @classmethod
    def of(cls, processed: PromptImage, image: "Image") -> Self:
        """Return an image as it is shown beside its tokens."""
        shown, file = image.copy(), io.BytesIO()
        shown.thumbnail((_MAX_SIDE, _MAX_SIDE))
        shown.save(file, "PNG")
        tokens = tuple(map(int, processed.tokens))
        uri = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
        return cls(uri, processed.size, tokens, tuple(_views(processed.grids, tokens)))


def _views(grids: Sequence[TokenGrid], tokens: Sequence[int]) -> Iterator[View]:
    whole = [each for each in grids if each.box == (0.0, 0.0, 1.0, 1.0)]
    tiles = [each for each in grids if each not in whole]
    if tiles:
        yield View(f"{len(tiles)} tiles", tuple(cell for each in tiles for cell in _cells(each, tokens)))
    for each in whole:
        yield View(f"{each.cols} x {each.rows} tokens", tuple(_cells(each, tokens)))


def _cells(grid: TokenGrid, tokens: Sequence[int]) -> Iterator[Cell]:
    left, top, right, bottom = grid.box
    width, height = 1000 * (right - left) / grid.cols, 1000 * (bottom - top) / grid.rows
    for index in range(grid.rows * grid.cols):
        row, column = divmod(index, grid.cols)
        x, y = 1000 * left + column * width, 1000 * top + row * height
        yield Cell(tokens[grid.first + index], round(x, 2), round(y, 2), round(width, 2), round(height, 2))
