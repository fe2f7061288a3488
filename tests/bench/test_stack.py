"""The stack of KV memory, small: every row answers all requests, and each adds what its name says."""

import json
from pathlib import Path

from tiny_llama import save_tiny_llama

from benchmarks.stack import LAYERS, main, options_of, parse


def test_rows_build_on_those_above() -> None:
    typed = parse(["--fits", "3", "--requests", "9", "--eviction", "keydiff"])
    options = {layer.name: options_of(layer, None, 1 << 20, typed) for layer in LAYERS}
    assert options["padded"]["max_num_seqs"] == 3 and options["contiguous"]["max_num_seqs"] == 9
    assert options["contiguous"]["kv_reservation"] == "max"
    assert options["paged"] | {"kv_cache_dtype": "int8"} == options["int8"]
    assert options["int8"] | {"enable_prefix_caching": True} == options["prefix cache"]
    assert options["eviction"]["kv_cache_dtype"] == "int4" and options["eviction"]["eviction"] == "keydiff"


def test_every_row_holds_more_and_answers_all(tmp_path: Path) -> None:
    model = save_tiny_llama(tmp_path / "model", seed=1, head_dim=16, max_position_embeddings=512)
    words = [
        "--model",
        str(model),
        "--requests",
        "12",
        "--scale",
        "16",
        "--fits",
        "2",
        "--eviction",
        "keydiff",
    ]
    main([*words, "--compression", "2", "--threads", "1", "-o", str(tmp_path)])
    rows = json.loads((tmp_path / "stack.json").read_text())["rows"]
    found = {row["row"]: row["median"] for row in rows}
    assert [*found] == [layer.name for layer in LAYERS]
    fit = [each["fit"] for each in found.values()]
    assert fit[0] == 2 and fit == sorted(fit)
    assert found["contiguous"]["most_running"] == 2 < found["paged"]["most_running"]
    assert found["prefix cache"]["computed"] < found["int8"]["computed"]
    page = (tmp_path / "stack.md").read_text()
    assert "| + eviction |" in page and "paged INT4 + prefix cache" in page
