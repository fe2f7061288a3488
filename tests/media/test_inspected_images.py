"""The page of an inspection shows of each image how many rows hold each part of it."""

import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("PIL")

from PIL import Image
from tests.media.vision import FIRST, MARK, SECOND, png, uri
from tests.server.browser import BROWSER, open_browser
from tests.server.running import eventually
from tests.server.test_dashboard import require_fit

from winnow import LLM, SamplingParams
from winnow.cli.main import main
from winnow.values.images import PromptImage, TokenGrid
from winnow_inspect import Inspection
from winnow_inspect.page import Picture

PARAMS = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, eviction="keydiff", kv_budget=12)
MESSAGES = [
    {"role": "user", "content": [
        {"type": "image_pil", "image_pil": FIRST},
        {"type": "image_url", "image_url": {"url": uri(SECOND)}},
        {"type": "text", "text": "w1 w2 w3"},
    ]},
]  # fmt: skip


@pytest.fixture(scope="module")
def inspection(llm: LLM) -> Inspection:
    return llm.inspect(MESSAGES, PARAMS)


class Cells(HTMLParser):
    """The images of a page, and what lies over each: token -> share, and place."""

    def __init__(self) -> None:
        super().__init__()
        self.images: list[str] = []
        self.maps: list[dict[int, tuple[float, tuple[float, ...]]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        if tag == "img":
            self.images.append(found["src"])
        elif tag == "svg":
            self.maps.append({})
        elif tag == "rect":
            place = tuple(float(found[name]) for name in ("x", "y", "width", "height"))
            self.maps[-1][int(found["data-token"])] = float(found["style"].removeprefix("--s:")), place

    handle_startendtag = handle_starttag


def cells_of(page: str) -> Cells:
    parser = Cells()
    parser.feed(page)
    return parser


def test_parts_of_images_and_their_shares(llm: LLM, inspection: Inspection) -> None:
    [output] = llm.chat(MESSAGES, PARAMS, use_tqdm=False)
    page = inspection.to_html()
    found = cells_of(page)
    assert len(found.images) == len(found.maps) == len(output.images) == 2
    rows = [row for layer in inspection.after_prompt.rows for row in layer]
    shown = set()
    for processed, cells, given in zip(output.images, found.maps, (FIRST, SECOND), strict=True):
        assert list(cells) == processed.tokens.tolist()
        [grid] = processed.grids
        assert len(cells) == grid.rows * grid.cols > 4
        for index, (token, (share, place)) in enumerate(cells.items()):
            assert share == pytest.approx(sum(token in row for row in rows) / len(rows), abs=5e-4)
            row, column = divmod(index, grid.cols)
            expected = (column / grid.cols, row / grid.rows, 1 / grid.cols, 1 / grid.rows)
            assert place == pytest.approx([1000 * each for each in expected], abs=0.02)
            shown.add(share)
        assert given.size == processed.size
    assert len(shown) > 2, "all parts are alike: nothing was tested"
    assert page.count("\u25a6") == sum(len(each.tokens) for each in output.images)
    assert "<|image_pad|>" not in page.partition("<main>")[2].partition("<script")[0]
    tokens = {token for each in output.images for token in each.tokens.tolist()}
    means = [
        np.mean([sum(token in row for row in rows) / len(rows) for token in group])
        for group in (tokens, set(range(inspection.num_prompt_tokens)) - tokens)
    ]
    assert inspection.facts()["images"] == (
        f"2, {len(tokens)} tokens: {means[0]:.0%} of their KVs stayed after the prompt, {means[1]:.0%} of the text's"
    )
    assert [each["tokens"] for each in inspection.to_json()["images"]] == [list(each) for each in found.maps]
    assert not re.search(r'(?:src|href)="(?!data:)', page)


def test_prompts_of_generate_are_inspected_alike(llm: LLM, inspection: Inspection) -> None:
    prompt = {
        "prompt": f"w9 {MARK}{MARK} w1 w2 w3 </s>w8 ",
        "multi_modal_data": {"image": [png(FIRST), SECOND]},
    }
    found = llm.inspect(prompt, PARAMS)
    assert found.pictures == inspection.pictures
    assert found.tokens[: found.num_prompt_tokens] == inspection.tokens[: inspection.num_prompt_tokens]


def test_tiles_and_the_whole_are_two_views() -> None:
    """Tokens of two tiles side by side, and of the whole at low resolution behind them."""
    grids = (
        TokenGrid(0, 2, 2, (0.0, 0.0, 0.5, 1.0)), TokenGrid(4, 2, 2, (0.5, 0.0, 1.0, 1.0)), TokenGrid(8, 1, 2),
    )  # fmt: skip
    processed = PromptImage({}, b"", np.arange(20, 30), (2000, 1000), grids)
    picture = Picture.of(processed, Image.new("RGB", (2000, 1000), "red"))
    assert [view.name for view in picture.views] == ["2 tiles", "2 x 1 tokens"]
    tiles, whole = (view.cells for view in picture.views)
    assert [cell.token for cell in tiles] == [*range(20, 28)] and [cell.token for cell in whole] == [28, 29]
    assert (tiles[5].x, tiles[5].y, tiles[5].width, tiles[5].height) == (750, 0, 250, 500)
    assert (
        sum(cell.width * cell.height for cell in tiles)
        == sum(cell.width * cell.height for cell in whole)
        == 1e6
    )
    assert Picture.of(processed, FIRST).uri != picture.uri


def test_the_command(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.png").write_bytes(png(FIRST))
    asked = [
        "inspect",
        "w1 w2",
        "--model",
        str(model),
        "--image",
        str(tmp_path / "a.png"),
        "--kv-memory",
        "4MiB",
    ]
    more = [
        "--block-size",
        "4",
        "--kv-budget",
        "8",
        "--eviction",
        "keydiff",
        "-o",
        str(tmp_path / "page.html"),
    ]
    assert main([*asked, *more, "--max-tokens", "3"]) == 0
    assert len(cells_of((tmp_path / "page.html").read_text()).maps) == 1
    assert "of their KVs stayed" in " ".join(capsys.readouterr().out.split())
    assert main([*asked[:5], str(tmp_path / "none.png")]) == 2
    assert "none.png: No such file" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs Chromium: apt install chromium")
def test_in_a_browser(inspection: Inspection, tmp_path: Path) -> None:
    """A row that is chosen is the one that the maps show, and the multiples show every row."""
    file = tmp_path / "page.html"
    file.write_text(inspection.to_html(), encoding="utf-8")
    rows, [first, *_] = inspection.after_prompt.rows, inspection.pictures
    shares = (
        "[...document.querySelector('.map svg').children].map(each => +each.style.getPropertyValue('--s'))"
    )
    with open_browser(tmp_path / "profile") as page:
        page.open(file.as_uri(), "light")
        eventually(lambda: page.evaluate("document.querySelectorAll('.map rect').length") > 4, "no image", 60)
        assert page.evaluate("[...document.images].every(each => each.naturalWidth > 0)"), (
            "images are blocked"
        )
        for layer, head in ((1, 1), (2, 0)):
            step = "canvas.clientWidth / 2, y = canvas.clientHeight / 3"
            page.evaluate(
                "{const canvas = document.querySelector('.multiples'), x = " + step + ", place = canvas."
                "getBoundingClientRect(); canvas.dispatchEvent(new MouseEvent('click', {clientX: place.x + x * "
                f"{head + 0.4}, clientY: place.y + y * {layer + 0.4}}}))}}"
            )
            assert page.evaluate(shares) == [float(token in rows[layer][head]) for token in first.tokens]
        size = page.evaluate("(c => [c.width, c.height])(document.querySelector('.multiples'))")
        assert size == [50 * len(rows[0]), 50 * len(rows)]
        require_fit(page, tmp_path)
