"""Codecs: what they say of bytes is what the pool takes, and a KV survives every move whatever its fields."""

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from scaled_keys import ScaledKeys
from torch import Tensor

from winnow.attention import AttentionSpec, RankedRows, ReferenceBackend, Spans
from winnow.cache import CacheLayout, CacheSize, KVPool, LocalCache, PairCodec, codec_of
from winnow.cache.codec import CODECS, BlockFormat
from winnow.cache.formats import Field
from winnow.errors import ConfigError


def pool_of(kv_format: PairCodec | str, blocks: int = 6, head_dim: int = 5, block_size: int = 3) -> KVPool:
    """A pool that is full of KVs."""
    pool = KVPool(CacheLayout.even(1, 1, head_dim, block_size, kv_format, 2), blocks)
    slots = torch.arange(blocks * block_size)
    pool.of_layer(-1).write(slots, *torch.randn(2, len(slots), head_dim), slots * 7)
    pool.accumulators.normal_()
    return pool


def content(pool: KVPool, slots: Tensor) -> list[Tensor]:
    """All that belongs to the KVs in slots, bit by bit."""
    place = pool.numbers.place(slots)
    fields = [field[place].clone() for field in pool.of_layer(-1).fields.values()]
    return [*fields, pool.position[place].clone(), pool.accumulators[:, *place].clone()]


def test_a_name_and_a_dtype_stand_for_a_codec() -> None:
    assert codec_of("bfloat16") is codec_of(torch.bfloat16) is CODECS["bfloat16"]
    assert codec_of(ScaledKeys()).name == "scaled"
    assert CacheLayout.even(1, 1, 8, 4, torch.float16) == CacheLayout.even(1, 1, 8, 4, "float16")
    for unknown in ("int5", torch.float64):
        with pytest.raises(
            ConfigError, match=r"KV format must be one of auto, float32, .*, got '(int5|float64)'"
        ):
            CacheLayout.even(1, 1, 8, 4, unknown)
    with pytest.raises(ConfigError, match="KV format must say what auto stands for, got 'auto'"):
        CacheLayout.even(1, 1, 8, 4, "auto")


@pytest.mark.parametrize("name", CODECS)
def test_plain_keys_lie_before_the_values_of_their_block(name: str) -> None:
    """As the CPU kernels read them."""
    pool = pool_of(name)
    size, stride = pool.of_layer(-1).k.element_size(), 2 * 3 * 5
    assert pool.of_layer(-1).k.stride() == pool.of_layer(-1).v.stride() == (stride, 5, 1)
    assert pool.of_layer(-1).v.data_ptr() - pool.of_layer(-1).k.data_ptr() == 3 * 5 * size
    assert pool.of_layer(-1).storage.nbytes == 6 * stride * size


@given(
    sizes=st.lists(
        st.tuples(st.sampled_from(["int8", "float16", "float32"]), st.integers(1, 9)), min_size=1, max_size=4
    ),
    block_size=st.integers(1, 9),
)
def test_fields_of_a_block_are_aligned_and_apart(sizes: list[tuple[str, int]], block_size: int) -> None:
    fields = tuple(Field(str(i), dtype, length) for i, (dtype, length) in enumerate(sizes))
    form, end = BlockFormat.of(fields, block_size), 0
    for field, offset in form.fields:
        assert offset % field.item_bytes == 0 and 0 <= offset - end < field.item_bytes
        end = offset + block_size * field.slot_bytes
    assert 0 <= form.nbytes - end < 4
    assert all(form.nbytes % field.item_bytes == 0 for field in fields), "the next block is aligned too"


@pytest.mark.parametrize("kv_format", [*CODECS, ScaledKeys()], ids=str)
def test_the_pool_holds_what_the_codec_says(kv_format: PairCodec | str) -> None:
    pool = pool_of(kv_format)
    assert pool.nbytes == 6 * pool.layout.block_bytes
    slots, codec = torch.tensor([[4, 17], [0, 9]]), pool.layout.codecs[0]
    k, v = torch.randn(2, 2, 2, 5)
    pool.of_layer(-1).write(slots, k, v, torch.tensor([[1, 2], [3, 4]]))
    stored = {name: x.to(pool.of_layer(-1).fields[name].dtype) for name, x in codec.encode(k, v).items()}
    assert torch.equal(pool.of_layer(-1).keys(slots), codec.keys(stored))
    assert torch.equal(pool.of_layer(-1).values(slots), codec.values(stored))
    torch.testing.assert_close(pool.of_layer(-1).keys(slots), k, atol=0.02, rtol=0.01)
    assert pool.position[pool.numbers.place(slots)].tolist() == [[1, 2], [3, 4]]
    assert not pool.accumulators.flatten(1)[:, slots].any()

    blocks = torch.tensor([[5, 1]])
    assert torch.equal(
        pool.of_layer(-1).keys_of(blocks), pool.of_layer(-1).keys(pool.numbers.slots_of(blocks))
    )
    assert torch.equal(
        pool.of_layer(-1).values_of(blocks), pool.of_layer(-1).values(pool.numbers.slots_of(blocks))
    )
    assert torch.equal(
        pool.numbers.accumulated(blocks), pool.accumulators.flatten(1)[:, pool.numbers.slots_of(blocks)]
    )


@pytest.mark.parametrize("kv_format", [*CODECS, ScaledKeys()], ids=str)
@pytest.mark.parametrize("head_dim", [5, 8])
def test_moving_and_copying_keep_every_bit(kv_format: PairCodec | str, head_dim: int) -> None:
    pool = pool_of(kv_format, head_dim=head_dim)
    source, target = torch.tensor([17, 3, 10]), torch.tensor([0, 9, 1])
    rest = torch.tensor([slot for slot in range(18) if slot not in target])
    moved, stayed = content(pool, source), content(pool, rest)
    pool.move(source, target)
    assert all(map(torch.equal, content(pool, target), moved))
    assert all(map(torch.equal, content(pool, rest), stayed))

    copied = content(pool, torch.arange(6))
    pool.copy_blocks(torch.tensor([0, 1], dtype=torch.int32), torch.tensor([5, 2], dtype=torch.int32))
    assert all(map(torch.equal, content(pool, torch.tensor([15, 16, 17, 6, 7, 8])), copied))

    kept = content(pool, torch.tensor([1, 5]))
    block, score = torch.tensor([[0, 1]]), torch.tensor([[0.0, 7.0, 1.0, 2.0, 3.0, 9.0]])
    ranked = RankedRows(
        block,
        torch.tensor([6], dtype=torch.int32),
        pool.numbers.positions_of(block),
        score,
        torch.zeros(1, 6) > 0,
    )
    ReferenceBackend().keep_best(pool, ranked, torch.tensor([2]), 4)
    assert all(map(torch.equal, content(pool, torch.tensor([1, 0])), kept))


def test_attention_reads_what_is_stored() -> None:
    """The reference over a codec is the reference over the vectors that the codec gives back."""
    answers = []
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 11, 2, 8, generator=generator)
    q = torch.randn(11, 4, 8, generator=generator).bfloat16()
    decoded = k
    for kv_format in (ScaledKeys(), "float32"):
        layout = CacheLayout.even(1, 2, 8, 4, kv_format)
        local = LocalCache(layout, CacheSize.of_blocks(layout, 20, 1, 40))
        cache, slot = local.paged, local.ledger.open()
        local.append([slot], [11])
        spans = Spans.build([slot], [0], [11], np.array([11]))
        backend = ReferenceBackend()
        backend.prepare(cache, spans).write(0, decoded, v)
        out = backend.prepare(cache, spans).attend(0, q, AttentionSpec(0.4))
        assert out.dtype == torch.bfloat16
        answers.append(out)
        stored = layout.codecs[0].encode_keys(k)
        decoded = layout.codecs[0].keys(
            {name: x.half() if name == "k_scale" else x for name, x in stored.items()}
        )
    assert torch.equal(*answers)
