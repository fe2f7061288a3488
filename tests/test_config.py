"""Options and sizes: what is accepted, and what the refusal says."""

import argparse

import pytest
from hypothesis import given, strategies as st

from winnow.cli.flags import options as flags
from winnow.config import CacheConfig, EngineConfig, EvictionConfig, ModelConfig, SchedulerConfig
from winnow.errors import ConfigError
from winnow.values.units import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        (4096, 4096),
        ("512MiB", 512 * 2**20),
        ("1.5 GiB", 3 * 2**29),
        ("2GB", 2 * 10**9),
        ("64m", 64 * 2**20),
        (" 3 kb ", 3000),
    ],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "-1MiB", "1 XiB", "1e9", "0", 0, -5, True, None, "12 34"])
def test_what_is_no_size(text: object) -> None:
    with pytest.raises(ConfigError, match=r"^budget must be"):
        parse_bytes(text, "budget")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**20, "1.0 MiB"), (3 * 2**40, "3.0 TiB")],
)
def test_sizes_as_text(size: int, text: str) -> None:
    assert format_bytes(size) == text


@given(st.integers(1, 2**50))
def test_what_is_printed_can_be_read_and_means_nearly_the_same(size: int) -> None:
    assert parse_bytes(format_bytes(size)) == pytest.approx(size, rel=0.06)


def test_options_find_their_part() -> None:
    config = EngineConfig.from_options({"kv_memory": "1MiB", "max_num_seqs": 3, "dtype": "bfloat16"})
    assert config.cache == CacheConfig(kv_memory=2**20)
    assert config.scheduler == SchedulerConfig(max_num_seqs=3)
    assert config.model == ModelConfig(dtype="bfloat16")


def test_an_earlier_name_stays_a_keyword_and_a_flag() -> None:
    assert EngineConfig.from_options({"num_scores": 2}) == EngineConfig.from_options({"num_accumulators": 2})
    parser = argparse.ArgumentParser()
    flags.add_flags(parser, EvictionConfig, "eviction")
    assert flags.given(parser.parse_args(["--num-scores", "2"]), EvictionConfig) == {"num_accumulators": 2}
    for options in ({"num_scores": 1, "num_accumulators": 1}, {"num_accumulators": 1, "num_scores": 1}):
        with pytest.raises(
            ConfigError, match="num_scores is the earlier name of num_accumulators: give num_acc"
        ):
            EngineConfig.from_options(options)
    with pytest.raises(ConfigError, match="num_accumulators must be at most 2, got 3"):
        EngineConfig.from_options({"num_scores": 3})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nonsense": 1}, "unknown option 'nonsense'"),
        ({"dtype": "int8"}, "dtype must be one of auto, float32, bfloat16, float16, got 'int8'"),
        ({"load_format": "pt"}, "load_format must be one of auto, dummy"),
        ({"attention_backend": "magic"}, "attention_backend must be one of"),
        ({"block_size": 0}, "block_size must be at least 1, got 0"),
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1, got 0"),
        ({"max_num_seqs": 1.5}, "max_num_seqs must be an integer, got 1.5"),
        ({"max_num_seqs": True}, "max_num_seqs must be an integer, got True"),
        ({"prefill_chunk": 0}, "prefill_chunk must be at least 1, got 0"),
        ({"max_model_len": -1}, "max_model_len must be at least 1, got -1"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"max_num_batched_tokens": 10}, r"at least max_num_seqs \(64\)"),
    ],
)
def test_refusals_name_field_value_and_limit(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_options(options)
