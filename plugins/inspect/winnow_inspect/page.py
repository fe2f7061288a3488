"""The page of an inspection: a heat map over the text, in one self-contained HTML file.

Each token is a span, so that the text can be read and searched without a script. Which rows hold a token is one bit per
row; the script counts the bits of the selected rows.
"""

import base64
import io
import json
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from winnow.engine.requests.new_request import KeptKVs
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


_JOINERS = "\u200c\u200d"  # part of how some scripts and emoji are written, and harmless
_MARKED = {"\n": "n", "\t": "t"}  # the style sheet puts a mark before them
_UNSEEN = {"Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp"}  # characters without a shape, or that reverse the text


Rows = tuple[tuple[tuple[int, ...], ...], ...]
"""Token indices, ascending, by layer and head."""


@dataclass(frozen=True)
class Held:
    """The tokens whose KVs the rows of a sequence held at one moment."""

    num_tokens: int
    """Tokens that had been computed by then, of which a row without eviction would hold all."""
    rows: Rows
    added: tuple[tuple[float, ...], ...]
    """Mass that biases add to each row, in KVs without a bias: e^bias - 1, summed."""

    @classmethod
    def of(cls, kept: KeptKVs, num_tokens: int) -> Self:
        """Return what `kept` says of the first `num_tokens` tokens; later ones have no bias."""
        rows = tuple(
            tuple(tuple(token for token in row if token < num_tokens) for row in layer)
            for layer in kept.positions
        )
        added = tuple(
            tuple(weight - len(row) for weight, row in zip(*layer, strict=True))
            for layer in zip(kept.weights, kept.positions, strict=True)
        )
        return cls(num_tokens, rows, added)

    @property
    def counts(self) -> tuple[tuple[int, ...], ...]:
        """KVs held, by layer and head."""
        return tuple(tuple(map(len, layer)) for layer in self.rows)

    @property
    def labels(self) -> tuple[tuple[str, ...], ...]:
        """KVs held, by layer and head, and in parentheses what their biases add where they add anything."""
        return tuple(
            tuple(f"{count}{_added(added)}" for count, added in zip(*layer, strict=True))
            for layer in zip(self.counts, self.added, strict=True)
        )

    @property
    def num_rows(self) -> int:
        return sum(map(len, self.rows))

    @property
    def mean(self) -> float:
        """KVs per row."""
        return sum(map(sum, self.counts)) / self.num_rows

    @property
    def compression(self) -> float:
        """Tokens per KV held in a row on average; 1 where nothing was taken."""
        return self.num_tokens / self.mean

    @cached_property
    def holders(self) -> tuple[int, ...]:
        """For each token the set of rows that hold it: bit r is row r, row after row, layer after layer."""
        bits = [0] * self.num_tokens
        for index, row in enumerate(row for layer in self.rows for row in layer):
            for token in row:
                bits[token] |= 1 << index
        return tuple(bits)

    @property
    def shares(self) -> tuple[float, ...]:
        """For each token that had been computed: the share of rows that held it, 0..1."""
        return tuple(bits.bit_count() / self.num_rows for bits in self.holders)

    def to_json(self) -> dict[str, Any]:
        rows = [[list(row) for row in layer] for layer in self.rows]
        return {"num_tokens": self.num_tokens, "rows": rows, "added": list(map(list, self.added))}

    def packed(self) -> str:
        """Return `holders` in hex digits, as many for each token, rows 0 to 3 in the first of them."""
        digits = -(-self.num_rows // 4)
        return "".join(f"{bits:0{digits}x}"[::-1] for bits in self.holders)


def render(
    title: str,
    facts: Mapping[str, str],
    texts: Sequence[str],
    num_prompt_tokens: int,
    moments: Mapping[str, Held],
    pictures: Sequence[Picture] = (),
) -> str:
    """Return the page as HTML: `page.html`, a Jinja template, filled in.

    The template escapes all text but the spans and the data, which are escaped here. The first moment is shown until
    another is chosen.
    """
    from jinja2 import Environment, StrictUndefined  # late: only pages need it

    source = files("winnow_inspect").joinpath("page.html").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True)
    first = next(iter(moments.values()))
    spans = [_span(first, index, text) for index, text in enumerate(texts)]
    layers, heads = len(first.rows), len(first.rows[0])
    data = {
        "layers": layers,
        "heads": heads,
        "prompt": num_prompt_tokens,
        "moments": [
            {
                "name": name,
                "tokens": moment.num_tokens,
                "held": moment.packed(),
                "added": [_added(added) for layer in moment.added for added in layer],
            }
            for name, moment in moments.items()
        ],
    }
    return environment.from_string(source).render(
        title=title,
        facts=facts,
        pictures=pictures,
        controls={"moment": list(moments), "layer": ["all", *range(layers)], "head": ["all", *range(heads)]},
        prompt="".join(spans[:num_prompt_tokens]),
        answer="".join(spans[num_prompt_tokens:]),
        bars=[list(zip(*layer, strict=True)) for layer in zip(first.counts, first.labels, strict=True)],
        shares=first.shares,
        longest=max(1, *(count for layer in first.counts for count in layer)),
        # Inside a script element "</script>" and "<!--" would be read as HTML.
        data=json.dumps(data).replace("<", "\\u003c"),
    )


def _added(added: float) -> str:
    return f"({added:+.1f})" if abs(added) >= 0.05 else ""


def _span(first: Held, index: int, text: str) -> str:
    """Return the span of a token, coloured by what all rows held at the first moment."""
    if index >= first.num_tokens:
        return f'<span class="new" title="token {index}: not computed">{visible(text)}</span>'
    count = first.holders[index].bit_count()
    look = f'style="--s:{count / first.num_rows:.3g}"' if count else 'class="none"'
    title = f"token {index}: held in {count} of {first.num_rows} rows"
    return f'<span {look} title="{title}">{visible(text)}</span>'


def visible(text: str) -> str:
    """Return a token's text as HTML in which blanks, line ends and characters without a shape can be seen."""
    return "".join(map(_visible, text)) or "<i>\u22ef</i>"


def _visible(char: str) -> str:
    if char == " ":
        return '<i class="s"> </i>'
    if char in _MARKED:
        return f'<i class="{_MARKED[char]}"></i>{char}'
    if char in _JOINERS or unicodedata.category(char) not in _UNSEEN:
        return escape(char)
    return f"<i>U+{ord(char):04X}</i>"
