"""The page of an inspection: a heat map over the text, in one HTML file without anything from elsewhere.

The text is written as HTML, a span for each token, so that it can be read and searched without a script. Which rows
hold a token comes as one bit per row; the script counts them for the rows that are looked at.
"""

import json
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape

_JOINERS = "\u200c\u200d"  # part of how some scripts and emoji are written, and harmless
_MARKED = {"\n": "n", "\t": "t"}  # the style sheet puts a mark before them
_UNSEEN = {"Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp"}  # characters that show nothing, or turn the text around


@dataclass(frozen=True)
class Moment:
    """What rows held at one moment: by layer and head the indices of tokens, out of the first `num_tokens`."""

    name: str
    num_tokens: int
    rows: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def num_rows(self) -> int:
        return len(self.rows) * len(self.rows[0])

    def holders(self) -> list[int]:
        """For each token the set of rows that hold it: bit r is row r, row after row, layer after layer."""
        bits = [0] * self.num_tokens
        flat = (row for layer in self.rows for row in layer)
        for index, row in enumerate(flat):
            for token in row:
                bits[token] |= 1 << index
        return bits

    def packed(self) -> str:
        """`holders` in hex digits, as many for each token, rows 0 to 3 in the first of them."""
        digits = -(-self.num_rows // 4)
        return "".join(f"{bits:0{digits}x}"[::-1] for bits in self.holders())


@dataclass(frozen=True)
class Page:
    """What the page shows."""

    title: str
    facts: Mapping[str, str]
    texts: tuple[str, ...]
    """Of each token."""
    num_prompt_tokens: int
    moments: tuple[Moment, ...]
    """The first one is shown until another is chosen."""


def render(page: Page) -> str:
    """The page as HTML."""
    spans = list(_spans(page))
    prompt, answer = "".join(spans[: page.num_prompt_tokens]), "".join(spans[page.num_prompt_tokens :])
    facts = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in page.facts.items())
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>Winnow inspect: {escape(page.title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<header>
<h1>Which tokens stayed</h1>
<dl>{facts}</dl>
</header>
<main>
<section aria-labelledby="text-title">
<h2 id="text-title">Text</h2>
{_controls(page)}
<p id="legend"><span class="scale" aria-hidden="true"></span> share of rows that hold the token, from none to all;
<span class="text"><span class="new">dashed</span></span>: not computed by then. A row is one head of one layer.
<kbd>Tab</kbd> and <kbd>&larr;</kbd> <kbd>&rarr;</kbd> go from token to token.</p>
<canvas id="strip" height="24" aria-hidden="true"></canvas>
<h3>Prompt</h3>
<p class="text" dir="auto">{prompt}</p>
<h3>Answer</h3>
<p class="text" dir="auto">{answer}</p>
</section>
<section aria-labelledby="rows-title">
<h2 id="rows-title">KVs by layer and head</h2>
<p id="rows-hint">The longest bar is the longest row. Choose a bar to look at that row alone; a dot marks the rows
that hold the chosen token.</p>
<div class="wide" role="region" aria-labelledby="rows-title" tabindex="0">{_table(page.moments[0])}</div>
</section>
</main>
<p id="detail" role="status"></p>
<script type="application/json" id="data">{_data(page)}</script>
<script>{_SCRIPT}</script>
</body>
</html>
"""


def _spans(page: Page) -> Iterator[str]:
    """One span for each token, coloured by what all rows held at the first moment."""
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
    """A token's text as HTML in which blanks, line ends and characters without a shape can be seen."""
    return "".join(map(_visible, text)) or "<i>\u22ef</i>"


def _visible(char: str) -> str:
    if char == " ":
        return '<i class="s"> </i>'
    if char in _MARKED:
        return f'<i class="{_MARKED[char]}"></i>{char}'
    if char in _JOINERS or unicodedata.category(char) not in _UNSEEN:
        return escape(char)
    return f"<i>U+{ord(char):04X}</i>"


def _controls(page: Page) -> str:
    """What is looked at: a moment, a layer, a head. They need the script, which shows them."""
    first = page.moments[0]

    def select(name: str, entries: list[str]) -> str:
        options = "".join(f'<option value="{i}">{escape(entry)}</option>' for i, entry in enumerate(entries))
        return f'<label>{name} <select id="{name}">{options}</select></label>'

    layers = ["all", *map(str, range(len(first.rows)))]
    heads = ["all", *map(str, range(len(first.rows[0])))]
    moments = [moment.name for moment in page.moments]
    return (
        "<noscript><p>Shown is what all rows hold after the prompt. With JavaScript, single layers and heads "
        "can be looked at.</p></noscript>"
        f'<form id="controls" hidden>{select("moment", moments)}{select("layer", layers)}{select("head", heads)}'
        '<output id="sum"></output></form>'
    )


def _table(moment: Moment) -> str:
    """KVs of each row as bars, the longest row's bar being full; the buttons need the script."""
    counts = [[len(row) for row in layer] for layer in moment.rows]
    most = max(1, *(count for layer in counts for count in layer))
    lines = [
        f'<tr><th scope="row">{layer}</th>'
        + "".join(
            f'<td><button type="button" style="--w:{count / most:.3g}" '
            f'aria-label="layer {layer}, head {head}: {count} KVs">{count}</button></td>'
            for head, count in enumerate(row)
        )
        + "</tr>"
        for layer, row in enumerate(counts)
    ]
    head_cells = "".join(f'<th scope="col">head {head}</th>' for head in range(len(counts[0])))
    return (
        f'<table><thead><tr><th scope="col">layer</th>{head_cells}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table>"
    )


def _data(page: Page) -> str:
    first = page.moments[0]
    data = {
        "layers": len(first.rows),
        "heads": len(first.rows[0]),
        "prompt": page.num_prompt_tokens,
        "moments": [
            {"name": moment.name, "tokens": moment.num_tokens, "held": moment.packed()}
            for moment in page.moments
        ],
    }
    # Inside a script element "</script>" and "<!--" would be read as HTML.
    return json.dumps(data).replace("<", "\\u003c")


_STYLE = """
:root { --back: #fff; --fore: #1b1f24; --dim: #59636e; --line: #d1d9e0; --heat: 92 164 250; --mark: #9a3b00 }
@media (prefers-color-scheme: dark) {
  :root { --back: #0d1117; --fore: #e6edf3; --dim: #9198a1; --line: #3d444d; --heat: 25 88 186; --mark: #ffa657 }
}
* { box-sizing: border-box }
html { scroll-padding: 5rem 0 6rem }
body { margin: 0 auto; max-width: 76rem; padding: 1rem 1.25rem 5rem; background: var(--back); color: var(--fore);
  font: 1rem/1.5 system-ui, sans-serif }
h1 { font-size: 1.5rem; margin: .5rem 0 }
h2 { font-size: 1.2rem; margin: 2rem 0 .5rem }
h3 { font-size: .9rem; margin: 1rem 0 .25rem; color: var(--dim) }
dl { display: flex; flex-wrap: wrap; gap: .5rem 2rem; margin: 0 }
dt { font-size: .8rem; color: var(--dim) }
dd { margin: 0 }
#controls:not([hidden]) { display: flex; flex-wrap: wrap; gap: .5rem 1.5rem; align-items: center; position: sticky;
  top: 0; z-index: 1; padding: .5rem 0; background: var(--back); border-bottom: 1px solid var(--line) }
select, button { font: inherit; color: inherit; background: var(--back); border: 1px solid var(--line);
  border-radius: 4px; padding: .1rem .4rem }
:focus-visible { outline: 3px solid var(--mark); outline-offset: 1px }
#sum, #legend, #rows-hint { color: var(--dim); font-size: .9rem }
.scale { display: inline-block; width: 6rem; height: .8em; border: 1px solid var(--line);
  background: linear-gradient(to right, transparent, rgb(var(--heat))) }
#strip { display: block; width: 100%; height: 24px; border: 1px solid var(--line) }
.text { margin: 0; font: .95rem/1.9 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere }
.text > span { padding: .15em 0; border-radius: 2px; box-shadow: inset 1px 0 var(--line); cursor: pointer;
  background: rgb(var(--heat) / calc(.15 + .85 * var(--s))); forced-color-adjust: none }
.text > .none { color: var(--dim); background: none }
.text > .new { background: none; text-decoration: underline dashed var(--dim); text-underline-offset: .3em }
.text > .chosen { outline: 2px solid var(--mark) }
.text i { font-style: normal; color: var(--dim); font-size: .8em }
.text i.s { font-size: inherit; position: relative }
.text i.s::before { content: "\\b7"; position: absolute; left: 0; opacity: .6 }
.text i.n::before { content: "\\21b5" }
.text i.t::before { content: "\\2192" }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th { font-weight: normal; color: var(--dim); text-align: left; padding: 0 .75rem 0 0 }
td { padding: 2px 4px 2px 0 }
td button { width: 9rem; text-align: left; cursor: pointer; forced-color-adjust: none;
  background: linear-gradient(to right, rgb(var(--heat)) calc(var(--w) * 100%), transparent 0) }
td button[aria-pressed=true] { border-color: var(--mark); box-shadow: 0 0 0 1px var(--mark) }
td button.holds::after { content: "\\25cf"; float: right; color: var(--mark) }
#detail { position: fixed; inset: auto 0 0 0; margin: 0; padding: .5rem 1.25rem; max-height: 30vh; overflow: auto;
  background: var(--back); border-top: 1px solid var(--line) }
#detail:empty { display: none }
"""

_SCRIPT = r"""
"use strict";
(() => {
  const find = (id) => document.getElementById(id);
  const data = JSON.parse(find("data").textContent);
  const rows = data.layers * data.heads, digits = Math.ceil(rows / 4);
  const spans = [...document.querySelectorAll("section .text[dir] > span")];
  const bars = [...document.querySelectorAll("td button")];
  const [moment, layer, head] = ["moment", "layer", "head"].map(find);
  const strip = find("strip"), detail = find("detail");
  let current = 0, chosen = null, shares = [];

  // -- what is held ----------------------------------------------------------------------------------------------
  const now = () => data.moments[moment.selectedIndex];
  const holds = (token, row) =>
    (parseInt(now().held[token * digits + (row >> 2)], 16) >> (row & 3)) & 1;
  const rowsLookedAt = () => [...Array(rows).keys()].filter((row) =>
    (layer.value === "0" || Math.floor(row / data.heads) === layer.value - 1) &&
    (head.value === "0" || row % data.heads === head.value - 1));
  const describe = (token) => {
    const of = token < data.prompt ? "prompt" : "answer";
    if (token >= now().tokens) return `Token ${token} (${of}): not computed ${now().name}`;
    const lines = [];
    let count = 0;
    for (let l = 0; l < data.layers; l++) {
      const heads = [...Array(data.heads).keys()].filter((h) => holds(token, l * data.heads + h));
      count += heads.length;
      if (heads.length) {
        const names = heads.length === data.heads ? "all heads" : `head ${heads.join(", ")}`;
        lines.push(`layer ${l}: ${names}`);
      }
    }
    const share = Math.round(100 * count / rows);
    return [`Token ${token} (${of}): held in ${count} of ${rows} rows, ${share}%`, ...lines].join("\n");
  };

  // -- showing it ------------------------------------------------------------------------------------------------
  const showText = () => {
    const looked = rowsLookedAt();
    let held = 0, nowhere = 0;
    shares = spans.map((span, token) => {
      const computed = token < now().tokens;
      const count = computed ? looked.reduce((sum, row) => sum + holds(token, row), 0) : 0;
      held += count;
      nowhere += computed && !count;
      span.style.setProperty("--s", (count / looked.length).toFixed(3));
      span.classList.toggle("none", computed && !count);
      span.classList.toggle("new", !computed);
      return count / looked.length;
    });
    const tokens = now().tokens, mean = held / looked.length;
    find("sum").textContent =
      `${+mean.toFixed(1)} of ${tokens} tokens per row; ${nowhere} tokens in none of these rows`;
  };
  const showStrip = () => {
    const width = strip.width = strip.clientWidth, paint = strip.getContext("2d");
    paint.fillStyle = `rgb(${getComputedStyle(document.body).getPropertyValue("--heat")})`;
    for (let x = 0; x < width; x++) {
      const from = Math.floor(x * shares.length / width);
      const part = shares.slice(from, Math.max(Math.floor((x + 1) * shares.length / width), from + 1));
      const height = strip.height * part.reduce((a, b) => a + b, 0) / part.length;
      paint.fillRect(x, strip.height - height, 1, height);
    }
  };
  const showBars = () => {
    const counts = Array(rows).fill(0);
    for (let token = 0; token < now().tokens; token++)
      for (let row = 0; row < rows; row++) counts[row] += holds(token, row);
    const most = Math.max(1, ...counts), looked = rowsLookedAt();
    bars.forEach((bar, row) => {
      const name = `layer ${Math.floor(row / data.heads)}, head ${row % data.heads}`;
      bar.textContent = counts[row];
      bar.style.setProperty("--w", counts[row] / most);
      bar.setAttribute("aria-label", `${name}: ${counts[row]} KVs`);
      bar.setAttribute("aria-pressed", looked.length < rows && looked.includes(row));
    });
  };
  const showChosen = () => {
    const computed = chosen !== null && chosen < now().tokens;
    bars.forEach((bar, row) => bar.classList.toggle("holds", computed && !!holds(chosen, row)));
    detail.textContent = chosen === null ? "" : describe(chosen).replace(/\n/, ": ").replace(/\n/g, "; ");
  };
  const show = () => { showText(); showStrip(); showBars(); showChosen(); };

  // -- choosing --------------------------------------------------------------------------------------------------
  const choose = (token) => {
    spans[chosen ?? current].classList.remove("chosen");
    chosen = token;
    if (token !== null) spans[token].classList.add("chosen");
    showChosen();
  };
  const goTo = (token) => {
    spans[current].removeAttribute("tabindex");
    spans[current].removeAttribute("role");
    current = Math.min(Math.max(token, 0), spans.length - 1);
    spans[current].tabIndex = 0;
    spans[current].setAttribute("role", "button");
  };
  const tokenOf = (target) => spans.indexOf(target.closest(".text[dir] > span"));
  for (const text of document.querySelectorAll(".text[dir]")) {
    text.addEventListener("pointerover", (event) => {
      const token = tokenOf(event.target);
      if (token >= 0) spans[token].title = describe(token);
    });
    text.addEventListener("click", (event) => {
      const token = tokenOf(event.target);
      if (token < 0) return;
      goTo(token);
      choose(token);
    });
    text.addEventListener("focusin", (event) => choose(tokenOf(event.target)));
    text.addEventListener("keydown", (event) => {
      const to = { ArrowRight: current + 1, ArrowLeft: current - 1, Home: 0, End: spans.length - 1 }[event.key];
      if (event.key === "Escape") choose(null);
      if (to === undefined || event.ctrlKey || event.altKey || event.metaKey) return;
      event.preventDefault();
      goTo(to);
      spans[current].focus();
    });
  }
  bars.forEach((bar, row) => bar.addEventListener("click", () => {
    const alone = bar.getAttribute("aria-pressed") === "true" && rowsLookedAt().length === 1;
    layer.value = alone ? 0 : Math.floor(row / data.heads) + 1;
    head.value = alone ? 0 : row % data.heads + 1;
    show();
  }));
  strip.addEventListener("click", (event) => {
    goTo(Math.floor(event.offsetX / strip.clientWidth * spans.length));
    spans[current].scrollIntoView({ block: "center" });
    choose(current);
  });
  for (const control of [moment, layer, head]) control.addEventListener("change", show);
  find("controls").addEventListener("submit", (event) => event.preventDefault());
  addEventListener("resize", showStrip);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", showStrip);
  find("controls").hidden = false;
  goTo(0);
  show();
})();
"""
