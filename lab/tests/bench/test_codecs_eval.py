"""The evaluation of codecs: how they are named, and its tables."""

from typing import Any

import pytest

from winnow.errors import ConfigError
from winnow.values.eviction_request import Amount
from winnow_lab.evaluate.cell import AGNOSTIC, FULL_CELL, Cell
from winnow_lab.evaluate.perplexity import Perplexity, WindowScore
from winnow_lab.real.codec_tables import Codec, Measured, at_share, equal_compressions, shares_figure, tables
from winnow_lab.real.rows import Row


def test_a_codec_is_a_format_and_what_else_is_said() -> None:
    codec = Codec("k=int8,v=int4 group=64 rotate=kv wide=sinks=4,recent=64")
    assert codec.options == {
        "kv_cache_dtype": "k=int8,v=int4",
        "kv_group": 64,
        "kv_rotate": "kv",
        "kv_wide": "sinks=4,recent=64",
    }
    assert Codec("int4 wide=recent=64").folder != Codec("int4").folder
    with pytest.raises(ConfigError, match="a codec has group=, rotate= and wide=, got 'heads=2'"):
        _ = Codec("int4 heads=2").options


def measured(name: str, token_bytes: float, nats: float, scores: dict[Cell, float]) -> Measured:
    windows = tuple(WindowScore("full", i, nats + i, 10, 20.0, 640, 0) for i in range(3))
    rows: list[Any] = [
        Row(work, cell.name, cell.preset, cell.query, cell.amount.compression, score, 0.1, 2, 2, 1.0, 64.0)
        for work in ("a", "b")
        for cell, score in scores.items()
    ]
    return Measured(Codec(name), token_bytes, {128: [Perplexity("full", windows)]}, rows)


def test_mixes_are_in_the_order_of_their_bytes() -> None:
    half = Cell("keydiff", Amount(2.0), AGNOSTIC)
    found = [
        measured("auto", 800.0, 20.0, {FULL_CELL: 0.9, half: 0.8}),
        measured("int4 rotate=none", 200.0, 20.1, {FULL_CELL: 0.7, half: 0.6}),
    ]
    perplexity, accuracy, mixes = tables(found, 0.5)
    assert [entry for _, entry in perplexity.rows][1][3].startswith("+1.01 ± 0.00 %")
    assert perplexity.rows[1][1][4] == "0.3-1.0 %"
    assert [name for name, _ in mixes.rows] == [
        "int4 rotate=none, keydiff 2x, later",
        "int4 rotate=none, full",
        "auto, keydiff 2x, later",
        "auto, full",
    ]
    assert [entry[:2] for _, entry in mixes.rows] == [
        ("100", "8.0x"),
        ("200", "4.0x"),
        ("400", "2.0x"),
        ("800", "1.0x"),
    ]
    assert len(accuracy.markdown()) > 4
    assert len(tables(found, 0.95)) == 1, "no category counts"


def test_a_narrower_codec_compresses_by_less_for_the_same_bytes() -> None:
    assert equal_compressions((2, 4, 16), 800.0, 800.0) == ((2, 2.0), (4, 4.0), (16, 16.0))
    assert equal_compressions((2, 4, 16), 250.0, 800.0) == ((4, 1.25), (16, 5.0))
    assert equal_compressions((2, 4), 200.0, 800.0) == (), "its own bytes are few enough"


def test_mixes_are_compared_at_equal_bytes() -> None:
    double, quadruple = (Cell("keydiff", Amount(amount), AGNOSTIC) for amount in (2.0, 4.0))
    found = [
        measured("auto", 800.0, 20.0, {FULL_CELL: 0.9, double: 0.8, quadruple: 0.5}),
        measured("int8", 400.0, 20.1, {FULL_CELL: 0.85, double: 0.75}),
        measured("int2", 100.0, 20.1, {FULL_CELL: 0.2}),
    ]
    full = [row.work for row in found[1].rows if row.query is None]
    assert [*at_share(found[1], 2, 800.0, "keydiff")] == full
    assert at_share(found[1], 4, 800.0, "keydiff")["a"].score == 0.75
    assert at_share(found[1], 8, 800.0, "keydiff") == {}
    _, accuracy, means, at_4 = tables(found, 0.5, (4.0,))
    assert accuracy.columns[0] in ("a", "auto")
    assert [(name, entries[0], entries[2][:5]) for name, entries in means.rows] == [
        ("auto", "1.00x", "0.500"),
        ("int8", "2.00x", "0.750"),
        ("int2", "8.00x", "0.200"),
    ], "a full cache that does not count stands in"
    assert at_4.columns == ("auto at 4.0x", "int8 at 2.0x", "int2")
    pytest.importorskip("matplotlib")
    panels = shares_figure(found, 0.5, (2.0, 4.0), "keydiff").axes
    assert [panel.get_title() for panel in panels] == ["mean", "a", "b"]
    lines = {line.get_label(): line.get_xydata().tolist() for line in panels[0].lines}
    assert lines["int8"] == [pytest.approx([2.0, 0.85]), pytest.approx([4.0, 0.75])]
