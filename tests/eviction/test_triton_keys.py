"""Triton's comparison of keys with their mean direction, in its interpreter where there is no GPU, against torch."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tests.attention.paged import paged_batch
from torch import Tensor

from winnow.attention import ReferenceBackend
from winnow.attention.triton.side_format import key_format
from winnow.cache.codec import make_codec
from winnow.eviction import KeyDeviation, KeyDifference
from winnow.eviction.round_rows import LayerRows, RoundInputs, RoundRows
from winnow.eviction.scores import keys as torch_scores
from winnow.eviction.signals import KeyDirections, RotationTable
from winnow.models.bind.rotation import LayerRotation
from winnow.values.kv_dtype import KVDtype

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KV_HEADS = 2


@dataclass
class Signals:
    """Signals of one layer's keys, of which a part is counted already."""

    rotation: LayerRotation
    directions: KeyDirections
    kept: list[KeyDirections] = field(default_factory=list)

    def turn(self, layer: int, keys: Tensor, difference: Tensor) -> Tensor:
        return self.rotation.turn(keys, difference)

    def rotation_table(self, layer: int, positions: int) -> RotationTable:
        return self.rotation.table(positions)

    def key_directions(
        self, layers: Sequence[int], slots: Sequence[int], shape: tuple[int, int]
    ) -> KeyDirections:
        return KeyDirections(self.directions.sums.clone(), self.directions.counted)

    def keep_key_directions(
        self, layers: Sequence[int], slots: Sequence[int], directions: KeyDirections
    ) -> None:
        self.kept.append(directions)


def build(
    kv_dtype: str, rotation: LayerRotation, longest: int, rotate: str = "none", **sizes: Any
) -> tuple[LayerRows, Signals]:
    """Rows of two sequences: of uneven lengths, one without a key; half of the second sequence is counted."""
    codec = make_codec(KVDtype.parse(kv_dtype), None, rotate)
    case = paged_batch(3, [1, 1], longest=longest, kv_dtype=codec, kv_heads=KV_HEADS, device=DEVICE, **sizes)
    ReferenceBackend().prepare(case.cache, case.spans).write(case.layer, case.k, case.v)
    slots, (counted, recent) = (
        tuple(case.spans.slots.tolist()),
        torch.zeros(2, 2, dtype=torch.int64).to(DEVICE),
    )
    counted[1] = longest // 2
    generator = torch.Generator().manual_seed(0)
    sums = 5 * torch.randn(1, 2, KV_HEADS, case.k.shape[2], generator=generator).to(DEVICE)
    signals = Signals(rotation, KeyDirections(sums * (counted > 0)[:, None, None], counted.int()))
    now = case.spans.position.int()
    round_ = RoundInputs(slots, now, recent, 0, recent, ((), ()), now.long() + 1)
    case.cache.tables.lengths[slots[0], case.layer, 1] = 0
    rows = RoundRows(case.cache, round_, (case.layer,), int(case.spans.lengths.max()), signals)  # type: ignore[arg-type]
    return rows.layer(0), signals


@pytest.mark.parametrize(
    ("kv_dtype", "head_dim", "pairs", "first", "interleaved", "sizes"),
    [
        ("float32", 16, 8, 0, False, {"longest": 400}),  # two tiles
        ("bfloat16", 80, 40, 0, False, {"longest": 100}),  # tiles in several blocks
        ("float16", 64, 32, 0, True, {"longest": 40, "block_size": 16}),
        ("float32", 40, 6, 28, True, {"longest": 40}),
        ("bfloat16", 16, 0, 0, False, {"longest": 40}),
        ("bfloat16", 16, 8, 0, False, {"longest": 40, "value_tier": "host:L=1,N=4"}),  # another kind's blocks first
        ("int8", 24, 12, 0, True, {"longest": 40}),
        ("fp8_e4m3", 24, 10, 2, False, {"longest": 40}),
        ("int4-outlier", 64, 32, 0, False, {"longest": 40}),
        ("int3", 80, 20, 40, True, {"longest": 40}),
    ],
)  # fmt: skip
def test_scores_are_those_of_torch(
    kv_dtype: str,
    head_dim: int,
    pairs: int,
    first: int,
    interleaved: bool,
    sizes: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of both scores, with the sums that are kept; torch's are not asked."""
    rotation = LayerRotation(torch.logspace(0, -2, pairs).to(DEVICE), interleaved, first)
    rows, signals = build(kv_dtype, rotation, head_dim=head_dim, **sizes)
    assert 0 in rows.length and len(rows.length.unique()) > 2
    directions = rows.key_directions()
    before = directions.sums.clone()
    deviation, difference = torch_scores.key_deviation(rows, directions), torch_scores.key_difference(rows)
    assert not torch.equal(directions.sums, before)
    monkeypatch.setattr("winnow.eviction.kernels.native_kernels", lambda: None)
    for name in ("key_deviation", "key_difference"):
        monkeypatch.delattr(torch_scores, name)
    for scorer, expected in ((KeyDeviation(), deviation), (KeyDifference(), difference)):
        found = scorer.score(rows)
        torch.testing.assert_close(found[rows.valid], expected[rows.valid], rtol=1e-5, atol=2e-5)
    [kept] = signals.kept
    torch.testing.assert_close(kept.sums[0], directions.sums, rtol=1e-5, atol=1e-4)


def test_keys_turned_before_coding_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    rotation = LayerRotation(torch.ones(8).to(DEVICE), False)
    rows, _ = build("int4", rotation, 20, rotate="kv")
    assert key_format(rows.pool.kind) is None
    assert key_format(build("int4", rotation, 20)[0].pool.kind) is not None
    monkeypatch.setattr("winnow.eviction.kernels.native_kernels", lambda: None)
    directions = rows.key_directions()
    assert torch.equal(KeyDeviation().score(rows), torch_scores.key_deviation(rows, directions))
