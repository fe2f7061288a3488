"""KIVI's codec: keys by channel over a block, values by token, the last KVs in 16 bits, and no KV that moves."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_llama import VOCAB, save_tiny_llama
from torch import Tensor

from winnow import LLM, SamplingParams
from winnow.attention import AttentionSpec, ReferenceBackend, Spans
from winnow.cache import CacheLayout, CacheSize, LocalCache, make_codec
from winnow.errors import ConfigError, InvalidRequestError
from winnow.kv_dtype import KVDtype, WideParts

HEADS, DIM, BLOCK, RECENT = 2, 16, 4, 6


def rounded(x: Tensor, bits: int, dim: int) -> Tensor:
    """x by `bits` between the least and the greatest along a dimension, with the scales in float16."""
    least = x.amin(dim, keepdim=True).half().float()
    scale = ((x.amax(dim, keepdim=True) - least) / (2**bits - 1)).half().float()
    return ((x - least) / scale).round().clamp(0, 2**bits - 1) * scale + least


@pytest.mark.parametrize("bits", [4, 2])
@pytest.mark.parametrize("counts", [(1,) * 14, (3, 1, 9, 1, 2, 12, 1), (8, 4, 1)])
def test_attention_reads_blocks_as_kivi_rounds_them(bits: int, counts: tuple[int, ...]) -> None:
    codec = make_codec(KVDtype.parse(f"kivi{bits}"), block_size=BLOCK)
    layout = CacheLayout.even(1, HEADS, DIM, BLOCK, codec, wide=WideParts(recent=RECENT, dtype="float16"))
    local = LocalCache(layout, CacheSize.of_blocks(layout, 60, 2, 40))
    _, slot = local.ledger.open(), local.ledger.open()
    k, v = torch.randn(2, 40, HEADS, DIM, generator=torch.Generator().manual_seed(bits))
    backend, length = ReferenceBackend(), 0
    for count in counts:
        local.append([slot], [count])
        spans = Spans.build([slot], [length], [count], local.paged.tables.longest([slot]))
        part, q = slice(length, length + count), torch.randn(count, HEADS, DIM)
        length += count
        backend.prepare(local.paged, spans).write(0, k[part], v[part])
        found = backend.prepare(local.paged, spans).attend(0, q, AttentionSpec(0.5))[-1]

        keys, values = k[:length].half().float(), v[:length].half().float()
        old = max(length - RECENT, 0)
        whole = length // BLOCK * BLOCK
        by_block = rounded(keys[:whole].unflatten(0, (-1, BLOCK)), bits, 1).flatten(0, 1)
        keys[:old] = by_block[:old]
        values[:old] = rounded(v[:old], bits, -1)  # one group: half of the default 32 channels
        p = (torch.einsum("hd,nhd->hn", q[-1], keys) * 0.5).softmax(-1)
        torch.testing.assert_close(found, torch.einsum("hn,nhd->hd", p, values), atol=1e-5, rtol=1e-4)


def test_bytes_by_hand() -> None:
    """Of 32 slots: keys of 4 bits, 64 scales and mins; values of 4 bits with 2 scales and 2 mins a slot."""
    codec = make_codec(KVDtype.parse("kivi4"), block_size=32)
    assert CacheLayout.even(1, 1, 64, 32, codec).kinds[0].form.nbytes == 32 * 32 + 64 * 4 + 32 * (32 + 8)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("model"), seed=4, head_dim=16)


def open_llm(path: Path, **options: Any) -> LLM:
    settings = {"kv_memory": "1MiB", "max_num_seqs": 4, "max_model_len": 256, "prefill_chunk": 32}
    return LLM(path, **(settings | {"kv_cache_dtype": "kivi4"} | options))


def test_answers_run_fork_and_come_back(model: Path) -> None:
    prompts = [torch.randint(2, VOCAB, (n,)).tolist() for n in (70, 33)]
    params = SamplingParams(n=2, temperature=1.0, seed=3, max_tokens=30, ignore_eos=True)
    with open_llm(model, kv_wide="recent=16") as llm:
        layout = llm._engine._executor.layout
        assert layout.codecs[0].name == "kivi4" and not layout.codecs[0].movable
    room = CacheSize.of_blocks(layout, 2 * layout.blocks_for(100), 4, 256).nbytes(layout)
    with open_llm(model, kv_wide="recent=16", kv_memory=room) as llm:
        outputs = llm.generate(prompts * 2, params)
        assert llm.stats().num_preemptions > 0
        llm.check_integrity()
    assert all(len(answer.token_ids) == 30 for output in outputs for answer in output.outputs)


def test_eviction_is_refused(model: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"kv_cache_dtype kivi4 cannot be evicted, as keys of a block share scales"
    ):
        open_llm(model, eviction="snapkv", kv_budget=20)
    with (
        open_llm(model) as llm,
        pytest.raises(InvalidRequestError, match=r"KVs stored as kivi4 \(kv_cache_dtype\) cannot be evicted"),
    ):
        llm.generate([[5] * 40], SamplingParams(max_tokens=2, eviction="h2o", kv_budget=20))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_wide": "recent=8"}, r"kv_wide must be at least block_size \(16\) recent KVs for kivi4"),
        (
            {"block_size": 32},
            r"kivi4 KVs need a head_dim that is a multiple of 8 and of block_size \(32\), got 16",
        ),
        ({"kv_cache_dtype": "k=kivi4,v=int4"}, "kv_cache_dtype must be one of"),
    ],
)
def test_refused_by_name(options: dict[str, Any], message: str, model: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        open_llm(model, **options)
