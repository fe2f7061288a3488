"""A compression that counts bytes: by the format of KVs, and by how many stay."""

from dataclasses import replace
from typing import Any

import pytest

from winnow import LLM, SamplingParams
from winnow.cli.flags.engine import open_llm

PROMPT = list(range(10, 810))


def opened(**options: Any) -> tuple[str, float, float]:
    """The format of KVs of an engine, and bytes and KVs a row that an answer ends with; then of one of twice that."""
    with LLM(kv_memory="32MiB", kv_floor=1, block_size=4, dtype="bfloat16", **options) as llm:
        asked = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
        report = llm.generate(PROMPT, asked)[0].outputs[0].eviction
        assert report is not None
        return llm.implementation()["KVs"], report.bytes_held, round(report.mean_kept)


def test_the_mix_takes_the_bytes_of_as_many_times_fewer_kvs() -> None:
    plain, held, kept = opened(compression=8, kv_cache_dtype="auto")
    assert plain == "bfloat16" and 97 <= kept <= 103
    named, _, as_many = opened(compression=8, eviction="winnow-keys")
    assert named == "bfloat16" and 97 <= as_many <= 103
    mixed, same, more = opened(compression=8)
    assert mixed == "int8" and more > 1.5 * kept and same == pytest.approx(held, rel=0.05)
    beyond, _, most = opened(compression=20)
    assert beyond == "k=int8,v=int4" and most > 1.8 * 800 / 20


def test_requests_count_bytes_where_the_engine_does(capsys: pytest.CaptureFixture[str]) -> None:
    options = {"kv_memory": "32MiB", "kv_floor": 1, "block_size": 4, "dtype": "bfloat16", "compression": 2}
    with open_llm(options) as llm:
        factor = llm.config.codec_factor
        assert llm.config.cache.kv_cache_dtype == "int8" and 1.5 < factor < 2
        assert "winnow: compression 2 in bytes: int8 KVs and all of them" in capsys.readouterr().err
        asked = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
        whole, counted, named = (
            llm.generate(PROMPT, each)[0].outputs[0].eviction
            for each in (
                asked,
                replace(asked, compression=8),
                replace(asked, compression=8, eviction="winnow-keys"),
            )
        )
        assert whole is None and counted is not None and named is not None
        assert counted.compression == pytest.approx(8 / factor, rel=0.05)
        assert named.compression == pytest.approx(8, rel=0.05)


def test_auto_starts_with_int8_where_the_model_has_16_bits() -> None:
    for dtype, asked, stored in (
        ("bfloat16", {}, "int8"),
        ("float32", {}, "float32"),
        ("bfloat16", {"kv_cache_dtype": "auto"}, "bfloat16"),
    ):
        with LLM(kv_memory="4MiB", dtype=dtype, compression="auto", **asked) as llm:
            assert llm.implementation()["KVs"] == stored and llm.config.eviction.compression == "auto"
