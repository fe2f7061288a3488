"""The page of an inspection: a heat map over the text, in one self-contained HTML file.

Each token is a span, so that the text can be read and searched without a script. Which rows hold a token is one bit per
row; the script counts the bits of the selected rows.
"""

import json
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape
from importlib.resources import files

from winnow.inspect.pictures import Picture

_JOINERS = "\u200c\u200d"  # part of how some scripts and emoji are written, and harmless
_MARKED = {"\n": "n", "\t": "t"}  # the style sheet puts a mark before them
_UNSEEN = {"Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp"}  # characters without a shape, or that reverse the text


@dataclass(frozen=True)
class Moment:
    """KVs that rows held at one moment: by layer and head the indices of tokens, out of the first `num_tokens`."""

    name: str
    num_tokens: int
    rows: tuple[tuple[tuple[int, ...], ...], ...]
    added: tuple[tuple[float, ...], ...]
    """Mass that biases add to each row, in KVs without a bias."""

    @property
    def num_rows(self) -> int:
        return len(self.rows) * len(self.rows[0])

    def holders(self) -> list[int]:
        """Return for each token the set of rows that hold it: bit r is row r, row after row, layer after layer."""
        bits = [0] * self.num_tokens
        flat = (row for layer in self.rows for row in layer)
        for index, row in enumerate(flat):
            for token in row:
                bits[token] |= 1 << index
        return bits

    def packed(self) -> str:
        """Return `holders` in hex digits, as many for each token, rows 0 to 3 in the first of them."""
        digits = -(-self.num_rows // 4)
        return "".join(f"{bits:0{digits}x}"[::-1] for bits in self.holders())


@dataclass(frozen=True)
class Page:
    """Content of the page."""

    title: str
    facts: Mapping[str, str]
    texts: tuple[str, ...]
    """Text of each token."""
    num_prompt_tokens: int
    moments: tuple[Moment, ...]
    """The first one is shown until another is chosen."""
    pictures: tuple[Picture, ...] = ()
    """Images of the prompt."""


def render(page: Page) -> str:
    """Return the page as HTML: `page.html`, a Jinja template, filled in.

    The template escapes all text but the spans and the data, which are escaped here.
    """
    from jinja2 import Environment, StrictUndefined  # late: only pages need it

    source = files("winnow.inspect").joinpath("page.html").read_text(encoding="utf-8")
    template = Environment(
        autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True
    ).from_string(source)
    first, spans = page.moments[0], list(_spans(page))
    bars = [
        [(len(row), row_label(len(row), added)) for row, added in zip(*layer, strict=True)]
        for layer in zip(first.rows, first.added, strict=True)
    ]
    return template.render(
        page=page,
        controls={
            "moment": [moment.name for moment in page.moments],
            "layer": ["all", *range(len(first.rows))],
            "head": ["all", *range(len(first.rows[0]))],
        },
        prompt="".join(spans[: page.num_prompt_tokens]),
        answer="".join(spans[page.num_prompt_tokens :]),
        bars=bars,
        shares=[bits.bit_count() / first.num_rows for bits in first.holders()],
        longest=max(1, *(count for layer in bars for count, _ in layer)),
        data=_data(page),
    )


def row_label(count: int, added: float) -> str:
    """Return a row's KVs and, in parentheses, what their biases add to its mass; nothing where they add nothing."""
    return f"{count}{_added(added)}"


def _added(added: float) -> str:
    return f"({added:+.1f})" if abs(added) >= 0.05 else ""


def _spans(page: Page) -> Iterator[str]:
    """Yield one span for each token, coloured by what all rows held at the first moment."""
    first = page.moments[0]
    holders = first.holders()
    for index, text in enumerate(page.texts):
        if index >= first.num_tokens:
            yield f'<span class="new" title="token {index}: not computed">{visible(text)}</span>'
            continue
        count = holders[index].bit_count()
        look = f'style="--s:{count / first.num_rows:.3g}"' if count else 'class="none"'
        title = f"token {index}: held in {count} of {first.num_rows} rows"
        yield f'<span {look} title="{title}">{visible(text)}</span>'


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


def _data(page: Page) -> str:
    first = page.moments[0]
    data = {
        "layers": len(first.rows),
        "heads": len(first.rows[0]),
        "prompt": page.num_prompt_tokens,
        "moments": [
            {
                "name": moment.name,
                "tokens": moment.num_tokens,
                "held": moment.packed(),
                "added": [_added(added) for layer in moment.added for added in layer],
            }
            for moment in page.moments
        ],
    }
    # Inside a script element "</script>" and "<!--" would be read as HTML.
    return json.dumps(data).replace("<", "\\u003c")
