"""`kv_cache_dtype`, `kv_group`, `kv_rotate`, `kv_wide` from the user's side: what runs, is refused, and costs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from scaled_keys import ScaledKeys
from tests.extension import needs_extension
from tiny_llama import VOCAB, save_tiny_llama

from winnow import LLM, SamplingParams
from winnow.attention.backends import backend_name
from winnow.cache import CacheLayout, CacheSize
from winnow.cli.main import main
from winnow.errors import ConfigError

PROMPTS = [
    torch.randint(2, VOCAB, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (70, 9, 33)
]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
CODECS: list[dict[str, Any]] = [
    {"kv_cache_dtype": "bfloat16"},
    {"kv_cache_dtype": "fp8_e4m3"},
    {"kv_cache_dtype": "int8", "kv_rotate": "k"},
    {"kv_cache_dtype": "k=int8,v=int4"},
    {"kv_cache_dtype": "int4"},
    {"kv_cache_dtype": "int4-outlier", "kv_rotate": "none"},
    {"kv_cache_dtype": "k=int3,v=auto", "kv_group": 8},
    {"kv_cache_dtype": "int2", "kv_wide": "layers=1,sinks=2,recent=8"},
]


def name_of(options: dict[str, Any]) -> str:
    return " ".join(options.values()) if all(isinstance(x, str) for x in options.values()) else "grouped"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("model"), seed=4)


def open_llm(path: Path, **options: Any) -> LLM:
    settings = {"kv_memory": "1MiB", "max_num_seqs": 4, "max_model_len": 256, "prefill_chunk": 32}
    return LLM(path, **(settings | options))


def logprobs(llm: LLM, prompt: list[int]) -> torch.Tensor:
    """Of each prompt token but the first."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    found = llm.generate([prompt], params)[0].prompt_logprobs
    assert found is not None
    return torch.tensor([next(iter(entry.values())).logprob for entry in found[1:] if entry])


@pytest.fixture(scope="module")
def exact(model: Path) -> torch.Tensor:
    with open_llm(model) as llm:
        return logprobs(llm, PROMPTS[0])


@pytest.mark.parametrize("options", CODECS, ids=name_of)
def test_answers_hardly_change(options: dict[str, Any], model: Path, exact: torch.Tensor) -> None:
    """The more bits the less; of codes of 3 bits and below only that they are read at all."""
    with open_llm(model, **options) as llm:
        found = logprobs(llm, PROMPTS[0])
        assert [len(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, GREEDY)] == [12] * 3
        llm.check_integrity()
    off = float((found - exact).abs().mean())
    kind = options["kv_cache_dtype"]
    most = (
        1.5
        if "int3" in kind or "int2" in kind
        else 0.4
        if "int4" in kind
        else 0.15
        if "fp8" in kind
        else 0.05
    )
    assert 0 < off < most


@pytest.mark.parametrize("options", CODECS[3::2], ids=name_of)  # K and V apart, outliers, wide parts
def test_samples_fork_and_preempted_requests_come_back(options: dict[str, Any], model: Path) -> None:
    sampled = SamplingParams(n=3, temperature=1.0, seed=3, max_tokens=30, ignore_eos=True)
    with open_llm(model, **options) as llm:
        layout = llm._engine._executor.layout
        [alone] = llm.generate([PROMPTS[1]], sampled)
    assert len({tuple(answer.token_ids) for answer in alone.outputs}) == 3
    room = CacheSize.of_blocks(layout, 2 * layout.blocks_for(100), 4, 256).nbytes(layout)
    with open_llm(model, **options, kv_memory=room) as llm:
        outputs = llm.generate([PROMPTS[0], PROMPTS[2]] * 3, sampled)
        assert llm.stats().num_preemptions > 0
        llm.check_integrity()
    assert all(len(answer.token_ids) == 30 for output in outputs for answer in output.outputs)


@pytest.mark.parametrize("policy", ["h2o", "leverage", "kvzip"])
def test_policies_run_over_narrow_and_wide_kvs(policy: str, model: Path) -> None:
    options: dict[str, Any] = {"kv_cache_dtype": "k=int8,v=int4", "kv_wide": "layers=1,sinks=2,recent=8"}
    with open_llm(model, **options, eviction=policy, kv_budget=24, kv_floor=1) as llm:
        outputs = llm.generate(PROMPTS, GREEDY)
        assert all(output.error is None for output in outputs)
        assert llm.stats().num_rounds > 0
        llm.check_integrity()


@needs_extension
def test_codecs_that_kernels_do_not_read() -> None:
    layout = CacheLayout.even(1, 1, 16, 16, ScaledKeys())
    assert backend_name("auto", "cpu", layout) == "reference", "auto takes what works"
    with pytest.raises(ConfigError, match=r"attention_backend native does not read KVs stored as scaled"):
        backend_name("native", "cpu", layout)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache_dtype": "int5"}, r"kv_cache_dtype must be one of auto, .*, got 'int5'"),
        ({"kv_dtype": "int5"}, r"kv_cache_dtype must be one of auto, .*, got 'int5'"),
        ({"kv_group": 12}, "kv_group must be a multiple of 8, as codes are packed in bytes, got 12"),
        ({"kv_group": 4}, "kv_group must be at least 8, got 4"),
        (
            {"kv_group": 16, "kv_cache_dtype": "int4"},
            r"kv_group must divide the model's head_dim \(8\) for int4 KVs",
        ),
        ({"kv_rotate": "v"}, "kv_rotate must be one of auto, none, k, kv, got 'v'"),
        (
            {"kv_wide": "layers=2", "kv_cache_dtype": "int4"},
            "kv_wide must be fewer layers than the model's 2",
        ),
        (
            {"kv_wide": "sinks=2"},
            "kv_wide=sinks=2 keeps KVs in 16 bits beside a kv_cache_dtype of fewer, got float32",
        ),
        (
            {"kv_cache_dtype": "int8", "kv_wide": "layers=1", "kv_memory": "64KiB"},
            "kv_memory must be at least",
        ),
    ],
)
def test_refused_by_name(options: dict[str, Any], message: str, model: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        open_llm(model, **options)


def test_kv_memory_holds_as_many_tokens_as_bytes_say(model: Path) -> None:
    """2 layers of 2 heads of 8 channels: a slot of int8 takes 2 x (8 + 2) bytes, and 8 of position and accumulator."""
    with open_llm(
        model, kv_cache_dtype="int8", kv_memory="256KiB", max_num_seqs=64, max_model_len=4096
    ) as llm:
        executor = llm._engine._executor
        layout, size = executor.layout, executor.size
    assert layout.block_bytes == 16 * (20 + 8)
    tables = size.nbytes(layout) - size.num_blocks * layout.block_bytes
    spare = 2**18 - size.nbytes(layout)
    more = CacheSize.of_blocks(layout, size.num_blocks + 1, 64, 4096)
    assert 0 <= spare < more.nbytes(layout) - size.nbytes(layout)
    assert size.num_blocks == (2**18 - tables - spare) // (16 * 28)


def test_flags(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    typed = ["generate", "x", "--model", str(model), "--kv-dtype", "int9"]
    assert main(typed) == 2
    assert "kv_cache_dtype must be one of auto, float32" in capsys.readouterr().err
