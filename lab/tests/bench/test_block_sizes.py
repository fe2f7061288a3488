"""Block sizes: larger blocks waste more, under a policy most; sizes that no engine takes are named."""

import json
from pathlib import Path

from winnow.models.load.loader import DEMO_MODEL
from winnow_lab.memory.block_sizes import Options, study
from winnow_lab.study import run_study


def test_larger_blocks_waste_more(tmp_path: Path) -> None:
    words = ["--model", str(DEMO_MODEL), "--sizes", "1,32,2000", "--requests", "2", "--tokens", "240"]
    words += [
        "--new-tokens",
        "8",
        "--window-tokens",
        "128",
        "--windows",
        "2",
        "--repeat",
        "1",
        "--threads",
        "1",
    ]
    run_study(Options, study, [*words, "-o", str(tmp_path)])
    sizes = json.loads((tmp_path / "block_sizes.json").read_text())["sizes"]
    assert [each["block_size"] for each in sizes] == [1, 32]
    waste = {name: [each["runs"][0][name]["waste"] for each in sizes] for name in sizes[0]["runs"][0]}
    full, policy = waste["full cache"], waste["kv-compress 8x"]
    assert full[0] == policy[0] == 0.0, "a block of one slot is full"
    assert 0 < full[1] < policy[1] < 1, "shorter rows end oftener"
    held = [each["runs"][0]["kv-compress 8x"]["held"] for each in sizes]
    assert held[0] < held[1] and held[0] < sizes[0]["runs"][0]["full cache"]["held"] / 2
    names = [[each["name"] for each in size["perplexity"]] for size in sizes]
    assert names == [["full cache", "kv-compress 8x"], ["kv-compress 8x"]]
    page = (tmp_path / "block_sizes.md").read_text()
    assert "2000: refused: block_size must be" in page and "± " in page
