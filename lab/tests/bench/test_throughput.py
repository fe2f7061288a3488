"""The throughput bench: its work, the room it asks for, its arithmetic and its report."""

import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_gguf import save_gguf, tiny_llama
from tiny_llama import save_tiny_llama

from winnow.cache import CacheLayout, CacheSize
from winnow.cli.main import main
from winnow.config import EngineConfig
from winnow.errors import ConfigError
from winnow.models import load_model
from winnow_lab.bench import presets
from winnow_lab.bench.presets import LlamaShape, Preset, Workload, kv_memory_for
from winnow_lab.bench.throughput import Pass, ThroughputReport, spread

WORK = "--requests 6 --prompt-tokens 40 --new-tokens 20 --progress off --max-num-seqs 8"
SHAPE = LlamaShape(2, 32, 4, 2, 8, 48, 97, 512)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("bench") / "model", seed=0)


def run(tmp_path: Path, *typed: str) -> dict[str, Any]:
    """The report of the command."""
    path = tmp_path / "report.json"
    assert main(["bench", "throughput", *WORK.split(), *typed, "--json", str(path)]) == 0
    report: dict[str, Any] = json.loads(path.read_text())
    return report


def test_the_same_work_for_everyone() -> None:
    work = Workload(requests=3, prompt_tokens=20, new_tokens=4)
    prompts = work.prompts(50)
    assert prompts == work.prompts(50) != replace(work, prompt_seed=1).prompts(50)
    assert [len(prompt) for prompt in prompts] == [20] * 3
    assert {token for prompt in prompts for token in prompt} <= set(range(50))
    assert (work.output_tokens, work.total_tokens, work.sequence_tokens) == (12, 72, 24)


def test_rates_medians_and_spread() -> None:
    one = Pass(Workload(4, 30, 10), 2.0, 3.0, 0.5, (1, 3, 2), 3, 120, 0, 0, 0, {"execute": 1.0}, 100, "")
    assert (one.output_rate, one.total_rate, one.mean_running, one.most_running) == (20.0, 80.0, 2.0, 3)
    passes = tuple(replace(one, seconds=seconds) for seconds in (2.0, 8.0, 4.0))
    report = ThroughputReport(one.workload, passes, 200, 300)
    assert spread([each.seconds for each in report.passes]) == (4.0, 2.0, 8.0)
    shown = report.to_json()
    assert shown["median"]["cpu_seconds"] == 3.0
    assert shown["median"]["output_rate"] == 10.0 and shown["passes"][1]["output_rate"] == 5.0


def test_the_report_counts_what_was_done(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = run(tmp_path, "--model", str(model), "--kv-seqs", "3", "--repeat", "2")
    assert {"command", "date", "commit", "machine", "engine"} < set(report)
    assert report["engine"]["model"] == str(model) and report["kv_seqs"] == 3
    first, second = report["passes"]
    for one in (first, second):
        assert one["output_rate"] == pytest.approx(120 / one["seconds"])
        assert one["computed_prompt_tokens"] == 6 * 40
        assert one["most_running"] == 3 >= one["mean_running"] > 1
        assert one["steps"] >= 2 * 20
        assert 0 < one["first_token_seconds"] < one["seconds"]
        assert set(one["parts"]) == {"schedule", "evict", "swap", "execute", "output"}
        assert sum(one["parts"].values()) <= one["seconds"]
        assert 0 < one["kv_bytes_peak"] <= report["kv_bytes_budget"] == report["engine"]["kv_memory"]
    assert first["tokens_sha256"] == second["tokens_sha256"]
    assert report["median"]["seconds"] == statistics.median([first["seconds"], second["seconds"]])
    assert report["peak_resident_bytes"] > 50 * 2**20
    shown = capsys.readouterr().out
    assert "6 requests of 40 + 20 tokens" in shown and "median of 2" in shown and "output tokens/s" in shown


def test_a_gguf_file_is_a_model(tmp_path: Path) -> None:
    model = save_gguf(tmp_path / "model.gguf", tiny_llama())
    assert run(tmp_path, "--model", str(model))["median"]["output_rate"] > 0


def test_eviction_runs_more_within_the_same_bytes(model: Path, tmp_path: Path) -> None:
    typed = ("--model", str(model), "--kv-seqs", "2", "--repeat", "1", "--prompt-tokens", "256")
    full = run(tmp_path, *typed)
    held = run(tmp_path, *typed, "--eviction", "batch-max", "--kv-budget", "72")
    assert held["kv_bytes_budget"] == full["kv_bytes_budget"]
    assert held["passes"][0]["most_running"] > full["passes"][0]["most_running"] == 2
    assert held["passes"][0]["eviction_rounds"] > 0 < held["passes"][0]["kv_bytes_freed"]


@pytest.mark.parametrize("sequences", [1, 3, 8])
def test_room_is_the_least_that_holds_so_many(model: Path, sequences: int) -> None:
    config = EngineConfig.from_options({"model": model, "max_num_seqs": 8})
    loaded = load_model(config.model)
    layout = CacheLayout.even(2, 2, 8, 16, loaded.dtype, 1)
    wanted = sequences * layout.blocks_for(45)
    room = kv_memory_for(config, sequences, 45)
    assert CacheSize.fit(layout, room, 8, loaded.max_model_len).num_blocks == wanted
    assert room - 1 < layout.block_bytes or fits_less(layout, room - 1, loaded.max_model_len, wanted)


def fits_less(layout: Any, kv_memory: int, max_model_len: int, wanted: int) -> bool:
    """One byte less holds fewer blocks, or not even a sequence."""
    try:
        return CacheSize.fit(layout, kv_memory, 8, max_model_len).num_blocks < wanted
    except ConfigError:
        return True


def test_a_preset_makes_its_model_once_and_gives_way_to_what_is_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    preset = Preset(SHAPE, Workload(requests=4, prompt_tokens=20, new_tokens=3), "bfloat16", kv_seqs=2)
    monkeypatch.setitem(presets.PRESETS, "w1", preset)
    report = run(tmp_path, "--preset", "w1", "--repeat", "1")
    [made] = (tmp_path / "cache" / "winnow" / "bench").iterdir()
    assert report["engine"] | {"model": str(made), "dtype": "bfloat16"} == report["engine"]
    assert report["workload"]["requests"] == 6 and report["kv_seqs"] == 2
    before = (made / "model.safetensors").stat().st_mtime_ns
    again = run(tmp_path, "--preset", "w1", "--repeat", "1", "--kv-memory", "1MiB", "--dtype", "float32")
    assert (made / "model.safetensors").stat().st_mtime_ns == before
    assert again["engine"]["dtype"] == "float32" and again["kv_seqs"] is None
    assert again["engine"]["kv_memory"] == 2**20


def test_w1_is_the_work_that_numbers_are_published_for() -> None:
    w1 = presets.PRESETS["w1"]
    shape = w1.shape
    per_layer = shape.hidden_size * (
        shape.head_dim * 2 * (shape.num_attention_heads + shape.num_key_value_heads)
        + 3 * shape.intermediate_size
    )
    matrices = shape.num_hidden_layers * per_layer + shape.vocab_size * shape.hidden_size
    assert round(matrices / 1e6) == 107
    assert (w1.workload.requests, w1.workload.prompt_tokens, w1.workload.new_tokens) == (32, 1024, 128)
    assert (w1.dtype, w1.kv_seqs) == ("bfloat16", 8)


def test_an_interrupted_model_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: LlamaShape, path: Path) -> None:
        path.mkdir()
        (path / "config.json").touch()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(LlamaShape, "_write", interrupted)
        SHAPE.save(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert (SHAPE.save(tmp_path) / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("--kv-seqs 2 --kv-memory 1MiB", "--kv-seqs and --kv-memory mean the same, give one"),
        ("--kv-seqs 0", "--kv-seqs must be at least 1, got 0"),
        ("--repeat 0", "--repeat must be at least 1, got 0"),
        ("--requests 0", "requests must be at least 1, got 0"),
        ("--kv-seqs 9", "kv_seqs must be between 1 and max_num_seqs (8), got 9"),
        (
            "--kv-seqs 2 --prompt-tokens 9000",
            "prompt_tokens + new_tokens must be at most the model's 4096, got 9020",
        ),
        ("--prompt-tokens 9000", "prompt must be shorter than the context of 4096 tokens"),
        ("--preset w9", "argument --preset: invalid choice: 'w9'"),
        ("--model nowhere", "model must be a directory"),
        ("--evictoin full", "did you mean --eviction? (see `winnow bench throughput --help`)"),
        ("--json /dev/null/x", "cannot write --json /dev/null/x"),
    ],
)
def test_what_is_unusable_is_one_line(typed: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "throughput", *WORK.split(), *typed.split()]) == 2
    shown = capsys.readouterr().err.splitlines()
    assert len(shown) == 1 and message in shown[0]


@pytest.mark.parametrize("typed", ["bench", "bench kernel", "bench throughput"])
def test_help_teaches_by_example(typed: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*typed.split(), "--help"])
    assert stop.value.code == 0
    assert f"examples:\n  winnow {typed}" in capsys.readouterr().out
