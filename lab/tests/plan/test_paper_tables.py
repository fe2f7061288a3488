"""The tables of the text on KV cache memory: our numbers, and what the text prints beside them."""

from dataclasses import replace

import pytest

from winnow_lab.papers.plan import memory_text as paper, memory_text_serving as serving
from winnow_lab.plan.models import MODELS


def rows(name: str) -> dict[str, tuple[str, ...]]:
    return dict(paper.TABLES[name]().rows)


def test_memory_follows_the_formula_and_shows_what_is_printed() -> None:
    table = rows("memory")
    kvs = {name: (entries[4], entries[5]) for name, entries in table.items()}
    assert kvs == {
        "Llama 3 8B": ("16", "4"),
        "Mistral 7B": ("16", "4"),
        "Llama 3 70B": ("40", "10"),
        "Llama 3 70B (batch=64)": ("80", "20"),
        "Llama 3 70B (batch=128)": ("160", "40"),
        "Llama 3 405B": ("63", "15.8"),
        "GPT-4 class (est.)": ("120", "30"),
    }
    weights = [entries[3] for entries in table.values()]
    assert weights == ["16", "14", "141", "141", "141", "812", "800"]


def test_the_worked_example() -> None:
    model = MODELS["llama-3-70b"]
    assert model.kv_elements() == 163_840
    assert model.kv_elements(4096) * 64 * 2 == 85_899_345_920


def test_batch_is_four_times_what_is_printed() -> None:
    for kvs, printed, _ in rows("batch").values():
        assert float(kvs) == pytest.approx(4 * float(printed), rel=0.01)


def test_grouped_heads_save_eight_times() -> None:
    """The text: 80 GB with 8 KV heads for 64 query heads, 640 GB with as many KV heads."""
    assert rows("heads") == {"8": ("80", "80"), "64": ("640", "640")}


def test_waste() -> None:
    table = rows("waste")
    printed = {name: (entries[3], entries[4]) for name, entries in table.items() if name != "mean"}
    assert all(ours == said for ours, said in printed.values())
    assert table["mean"][3] == "66%"  # equal weights; the printed mean is weighted, and does not say how


def test_copy_on_write_beams() -> None:
    table = rows("beams")
    assert table["copies"] == ("512", "4.00x", "4x")
    assert table["copy-on-write"] == ("140", "1.09x", "1.05x")


def test_quantized_sizes_are_as_printed() -> None:
    for _, plain, printed, *_ in rows("quantization").values():
        assert plain == printed


def test_eviction_memory_is_as_printed() -> None:
    for _, _, share, printed, *_ in rows("eviction").values():
        assert share == printed


def test_bandwidth_over_the_gpus_that_hold_the_weights() -> None:
    table = rows("bandwidth")
    assert [entries[1] for entries in table.values()] == ["0.6", "5.0", "20.0", "40.0", "80.0", "160.0"]
    # One device's time, as printed, is four times as long.
    for entries in table.values():
        assert float(entries[4]) == pytest.approx(float(entries[5]) / 4, rel=0.04)


def test_halving_the_kvs_pays_as_the_text_says() -> None:
    fp16, _, int8, _, int4, _ = map(float, rows("throughput")["256"])
    assert int8 / fp16 == pytest.approx(1.37, abs=0.02)  # 27 % fewer bytes
    assert int4 / fp16 == pytest.approx(1.70, abs=0.02)


def test_swap_sizes_are_eight_times_the_printed() -> None:
    table = rows("swap")
    assert table["2048"][0] == "0.625"
    assert table["2048"][2] == "26.8"
    for size, printed, _, printed_ms, *_ in table.values():
        assert float(size) == pytest.approx(8 * float(printed), rel=0.03)
        assert printed_ms


def test_small_cases() -> None:
    assert [entries[0] for entries in rows("small").values()] == ["2", "8"]


def test_layout_fills_the_cards() -> None:
    for column in (0, 2):
        total = sum(float(entries[column]) for entries in rows("layout").values())
        assert total == pytest.approx(320, abs=1.5)


@pytest.fixture
def short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """An eighth of the text's: as many steps of the simulator."""
    monkeypatch.setattr(serving, "_MEAN_NEW", 64)


@pytest.mark.usefixtures("short_answers")
def test_each_step_of_the_stack_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    # A third of the text's memory is full with a third of its requests.
    monkeypatch.setattr(serving, "STACK", (replace(serving.STACK[0], printed_batch=8), *serving.STACK[1:]))
    table = dict(serving.stack(100).rows)
    assert [entries[3] for entries in table.values()] == ["420", "780", "1050", "1180", "1420"]
    gains = [float(entries[4].rstrip("x")) for entries in table.values() if entries[4]]
    printed = [float(entries[5].rstrip("x")) for entries in table.values() if entries[5]]
    assert printed == [1.86, 1.35, 1.12, 1.2]
    assert all(gain > 1 for gain in gains)


def test_higher_watermarks_let_more_run_and_preempt(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [printed for _, printed, *_ in serving.WATERMARKS] == [42, 54, 58, 61, 63]
    monkeypatch.setattr(serving, "WATERMARKS", (serving.WATERMARKS[0], *serving.WATERMARKS[-2:]))
    table = dict(serving.watermark(80).rows)
    batches = [int(entries[0]) for entries in table.values()]
    assert batches == sorted(batches) and batches[0] < batches[-1]
    preempted = [float(entries[4]) for entries in table.values()]
    assert preempted[0] == 0 < preempted[-2] < preempted[-1]
    assert all(float(entries[4]) <= float(entries[5]) for entries in table.values()), (
        "fewer preemptions than printed"
    )


@pytest.mark.usefixtures("short_answers")
def test_a_tenant_alone_borrows_what_the_other_does_not_use(monkeypatch: pytest.MonkeyPatch) -> None:
    # A third of the text's memory is full with a third of its requests.
    monkeypatch.setattr(serving, "STACK", (replace(serving.STACK[0], printed_batch=8),))
    table = dict(serving.tenants(70).rows)
    for name in ("a alone", "b alone"):
        assert int(table[name][4].rstrip("%")) > 90
    both = table["both, equal load"]
    assert min(int(both[1]), int(both[3])) > 0
