"""The native calls of a decoder and its layers against what they are made of, to the last bit."""

import sys
from collections.abc import Iterator
from itertools import product

import pytest
import torch
from tests.attention.paged import PagedBatch, contents_of, paged_batch
from torch import Tensor

_native = pytest.importorskip("winnow._native")
from winnow.attention import AttentionObserver, AttentionSpec, PagedCache, Smoothing, Term  # noqa: E402
from winnow.attention.interface import NativeSpec  # noqa: E402
from winnow.attention.native import NativeBackend  # noqa: E402
from winnow.models.fast.fused.kernels import NO_NORM, LayerKernels, PackedWeight  # noqa: E402
from winnow.models.fast.fused.parts import NormWeight  # noqa: E402
from winnow.models.model.blocks import quantize  # noqa: E402

pytestmark = pytest.mark.cpu

HIDDEN, QUERY_HEADS, KV_HEADS, HEAD_DIM, VOCAB = 48, 4, 2, 16, 100
UNLIKE = [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]
"""Activations and KVs of different dtypes."""


def pack(kernels: LayerKernels, weight: Tensor, weights: str) -> PackedWeight:
    if weights == "plain":
        return kernels.pack(weight)
    return kernels.pack_blocks([quantize(weight, weights)], weight.dtype)


class Layer:
    """A layer of random weights with `inner` gates, as kernels and as their parts take it.

    Args:
        normed: what each part adds has a norm.
        weights: in what form: "plain", "Q4_0" or "Q8_0".
    """

    def __init__(
        self,
        kernels: LayerKernels,
        dtype: torch.dtype,
        inner: int,
        biased: bool,
        normed: bool = False,
        weights: str = "plain",
    ) -> None:
        self.kernels, width = kernels, QUERY_HEADS * HEAD_DIM
        generator = torch.Generator().manual_seed(inner)

        def linear(out_features: int, in_features: int) -> tuple[PackedWeight, Tensor | None]:
            weight = torch.randn(out_features, in_features, generator=generator) / in_features**0.5
            bias = torch.randn(out_features, generator=generator).to(dtype) if biased else None
            return pack(kernels, weight.to(dtype), weights), bias

        self.qkv = linear(self.qkv_width, HIDDEN)
        self.output, self.down = linear(HIDDEN, width), linear(HIDDEN, inner)
        self.gate_up = linear(2 * inner, HIDDEN)
        self.norm, self.added_norm = (
            NormWeight(torch.randn(HIDDEN, generator=generator).to(dtype), 1e-5) for _ in range(2)
        )
        self.normed = normed
        of_added = self.added_norm.native if normed else NO_NORM
        self.activation = _native.Activation.silu

        def bias(of: Tensor | None) -> int:
            return 0 if of is None else of.data_ptr()

        self.native = _native.DecoderLayer(
            qkv=self.qkv[0].native,
            qkv_bias=bias(self.qkv[1]),
            output=self.output[0].native,
            output_bias=bias(self.output[1]),
            gate_up=self.gate_up[0].native,
            gate_up_bias=bias(self.gate_up[1]),
            down=self.down[0].native,
            down_bias=bias(self.down[1]),
            input_norm=self.norm.native,
            query_norm=NO_NORM,
            key_norm=NO_NORM,
            post_norm=self.norm.native,
            output_norm=of_added,
            down_norm=of_added,
            activation=self.activation,
            num_query_heads=QUERY_HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
        )

    @property
    def qkv_width(self) -> int:
        return (QUERY_HEADS + 2 * KV_HEADS) * HEAD_DIM

    def post_attention(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Part by part."""

        def times(x: Tensor, linear: tuple[PackedWeight, Tensor | None]) -> Tensor:
            return self.kernels.linear(x, *linear)

        def fed(x: Tensor) -> Tensor:
            return times(self.kernels.gate(times(x, self.gate_up), self.activation), self.down)

        stream = times(attended, self.output)
        if not self.normed:
            normed = self.kernels.rms_norm(stream, self.norm, add=residual)
            return fed(normed) + stream
        stream, attention = residual.clone(), stream
        self.kernels.add_normed(attention, self.added_norm, to=stream)
        feed_forward = fed(self.kernels.rms_norm(stream, self.norm))
        self.kernels.add_normed(feed_forward, self.added_norm, to=stream)
        return stream


def in_two_calls(
    layer: Layer,
    backend: NativeBackend,
    cache: PagedCache,
    batch: PagedBatch,
    x: Tensor,
    rotation: Tensor,
    spec: AttentionSpec,
) -> Tensor:
    """The layer with attention called in between."""
    qkv = layer.kernels.pre_attention(layer.native, x, rotation, rotation, layer.qkv_width)
    heads = qkv.view(len(x), -1, HEAD_DIM)
    q, k, v = heads.split_with_sizes([QUERY_HEADS, KV_HEADS, KV_HEADS], dim=1)
    backend.prepare(cache, batch.spans).write(batch.layer, k, v)
    attended = backend.prepare(cache, batch.spans).attend(batch.layer, q, spec)
    return layer.kernels.post_attention(layer.native, x, attended.flatten(1))


@pytest.mark.parametrize(
    "spec",
    [
        AttentionSpec(0.25),
        AttentionSpec(
            0.3, window=40, softcap=2.0, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)
        ),
    ],
    ids=["plain", "window, softcap and sinks"],
)
@pytest.mark.parametrize("counts", [(1, 1, 1), (1, 30, 1, 61)], ids=["decoding", "with chunks"])
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [*((dtype, dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)), *UNLIKE],
    ids=str,
)
@pytest.mark.parametrize("isa", _native.instruction_sets())
def test_whole_layer_in_one_call(
    isa: str, dtype: torch.dtype, kv_dtype: torch.dtype, counts: tuple[int, ...], spec: AttentionSpec
) -> None:
    kernels = _native.Kernels(isa)
    layer, backend = Layer(LayerKernels(kernels), dtype, 128, biased=True), NativeBackend(kernels)
    observe = [AttentionObserver((Term.ATTENTION,))] * len(counts)
    batch = paged_batch(
        3, counts, kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=dtype, kv_dtype=kv_dtype, observe=observe
    )
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(sum(counts), HIDDEN, generator=generator).to(dtype)
    rotation = torch.randn(sum(counts), HEAD_DIM, generator=generator).to(dtype)
    ours, theirs = batch.with_own_pool(), batch.with_own_pool()
    step = backend.prepare(ours, batch.spans).whole_layers
    found = layer.kernels.decoder_layer(
        layer.native, batch.layer, x, rotation, rotation, NativeSpec(spec), step
    )
    assert torch.equal(found, in_two_calls(layer, backend, theirs, batch, x, rotation, spec))
    for a, b in zip(*(contents_of(cache.pool) for cache in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """For kernels to share work, whatever the environment asks of torch."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


OBSERVED = {
    "nothing": None,
    "attention": AttentionObserver((Term.ATTENTION,)),
    "squared": AttentionObserver((Term.SQUARED,)),
    "pooled": AttentionObserver((Term.SQUARED,), replace=True, smoothing=Smoothing(5)),
}


# Few tokens, whose features threads share; more, of which each thread takes its own; and sequences of its own.
COUNTS = {"few": (1, 30, 1, 61), "many": (1, 1, 170, 250), "even": (1, 1, *8 * [49])}
WANTED = [None, [], [3], [92, 0, 31, 0]]
# Every pair of what is observed, wanted and counted, each of them tied and not. Kernels of one kind see four of them,
# with everything that is observed, and those of four kinds all.
PAIRS = [
    ((j ^ i >> 1) % 2 == 0, WANTED[(i + j) % 4], observe, list(COUNTS)[j % 3])
    for i, observe in enumerate(OBSERVED)
    for j in range(4)
]


@pytest.mark.parametrize(
    ("isa", "dtype", "tied", "wanted", "observe", "number"),
    [
        (isa, dtype, *PAIRS[4 * row + (row + turn) % 4])
        for turn, (isa, dtype) in enumerate(
            product(_native.instruction_sets(), (torch.float32, torch.bfloat16))
        )
        for row in range(4)
    ],
    ids=str,
)
@pytest.mark.usefixtures("two_threads")
def test_a_decoder_in_one_call(
    isa: str, dtype: torch.dtype, tied: bool, wanted: list[int] | None, observe: str, number: str
) -> None:
    decode_in_one_call(isa, dtype, dtype, tied, wanted, observe, number)


@pytest.mark.parametrize(("dtype", "kv_dtype"), UNLIKE, ids=str)
@pytest.mark.parametrize("isa", _native.instruction_sets())
@pytest.mark.usefixtures("two_threads")
def test_a_decoder_over_kvs_of_another_dtype(isa: str, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    for number in COUNTS:
        decode_in_one_call(isa, dtype, kv_dtype, True, [92, 0, 31, 0], "attention", number)


@pytest.mark.parametrize("weights", ["Q4_0", "Q8_0"])
@pytest.mark.parametrize("isa", _native.instruction_sets())
@pytest.mark.usefixtures("two_threads")
def test_a_decoder_of_weights_in_blocks(isa: str, weights: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "HIDDEN", 64)  # whole blocks
    # AMX multiplies more than 32 rows in another way than few, so all rows must be asked for.
    wanted = None if isa.startswith("amx") else [92, 0, 31, 0]
    for number in COUNTS:
        decode_in_one_call(isa, torch.bfloat16, torch.bfloat16, True, wanted, "nothing", number, weights)


def decode_in_one_call(
    isa: str,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    tied: bool,
    wanted: list[int] | None,
    observe: str,
    number: str,
    weights: str = "plain",
) -> None:
    """A decoder in one call against its layers one by one, to the last bit."""
    kernels, spec, counts = LayerKernels(_native.Kernels(isa)), AttentionSpec(0.25), COUNTS[number]
    layers = [
        Layer(kernels, dtype, inner, biased=False, normed=inner == 192, weights=weights)
        for inner in (128, 192)
    ]
    backend, native = NativeBackend(_native.Kernels(isa)), NativeSpec(spec)
    observed = [OBSERVED[observe]] * len(counts)
    batch = paged_batch(
        3, counts, kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=dtype, kv_dtype=kv_dtype, observe=observed
    )
    for field in batch.cache.pool.of_layer(-1).fields.values():
        field.nan_to_num_(0.5)  # the batch has written the rows of its own layer only
    generator = torch.Generator().manual_seed(1)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    norm, dense = NormWeight(randn(HIDDEN), 1e-5), randn(VOCAB, HIDDEN)
    head, bias = pack(kernels, dense, weights), randn(VOCAB) if tied else None
    table = kernels.unpack_rows(head, torch.arange(VOCAB)) if tied else randn(VOCAB, HIDDEN)
    cos, sin = randn(2, 700, HEAD_DIM)
    tokens = torch.randint(VOCAB, (sum(counts),), generator=generator)
    ours, theirs = batch.with_own_pool(), batch.with_own_pool()

    hidden, step = table[tokens], backend.prepare(theirs, batch.spans).whole_layers
    turns = cos[batch.spans.position], sin[batch.spans.position]
    for index, layer in enumerate(layers):
        hidden = kernels.decoder_layer(layer.native, index, hidden, *turns, native, step)
    expected = kernels.linear(kernels.rms_norm(hidden, norm), head, bias)
    decoder = _native.Decoder(
        embedding=0 if tied else table.data_ptr(),
        embedding_rows=head.native,
        num_tokens=VOCAB,
        layers=[_native.StackedLayer(layer.native, native.native, i) for i, layer in enumerate(layers)],
        selects=tied,
        norm=norm.native,
        head=head.native,
        head_bias=0 if bias is None else bias.data_ptr(),
    )
    step, rows = (
        backend.prepare(ours, batch.spans).whole_layers,
        None if wanted is None else torch.tensor(wanted).long(),
    )
    found = kernels.decode(decoder, tokens, cos, sin, step, rows, VOCAB)

    assert kernels._work.num_sub_batches == (2 if number == "even" else 0)
    assert not expected.isnan().any()
    assert torch.equal(found, expected if rows is None else expected[rows])
    with pytest.raises(IndexError, match="between 0 and 99, got 100"):
        kernels.decode(decoder, tokens.clone().fill_(VOCAB), cos, sin, step, rows, VOCAB)
    for a, b in zip(*(contents_of(cache.pool) for cache in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("normed", [False, True], ids=["added as it is", "added normed"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("inner", [128, 204], ids=["whole panels of gates", "a part of a panel"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("isa", _native.instruction_sets())
def test_what_lies_after_attention(
    isa: str, dtype: torch.dtype, inner: int, biased: bool, normed: bool
) -> None:
    layer = Layer(LayerKernels(_native.Kernels(isa)), dtype, inner, biased, normed)
    for tokens in (1, 7, 97, 700):
        generator = torch.Generator().manual_seed(tokens)
        residual = torch.randn(tokens, HIDDEN, generator=generator).to(dtype)
        attended = torch.randn(tokens, QUERY_HEADS * HEAD_DIM, generator=generator).to(dtype)
        found = layer.kernels.post_attention(layer.native, residual, attended)
        assert torch.equal(found, layer.post_attention(residual, attended))


@pytest.mark.parametrize("weights", ["Q4_0", "Q8_0"])
@pytest.mark.parametrize("isa", _native.instruction_sets())
def test_what_lies_after_attention_of_weights_in_blocks(
    isa: str, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "HIDDEN", 64)  # whole blocks
    kernels = LayerKernels(_native.Kernels(isa))
    for inner, dtype in ((128, torch.float32), (128, torch.bfloat16), (160, torch.bfloat16)):
        layer = Layer(kernels, dtype, inner, biased=True, weights=weights)
        for tokens in (1, 97):
            generator = torch.Generator().manual_seed(tokens)
            residual = torch.randn(tokens, HIDDEN, generator=generator).to(dtype)
            attended = torch.randn(tokens, QUERY_HEADS * HEAD_DIM, generator=generator).to(dtype)
            found = layer.kernels.post_attention(layer.native, residual, attended)
            assert torch.equal(found, layer.post_attention(residual, attended))


@pytest.mark.parametrize("normed", [False, True], ids=["added as it is", "added normed"])
@pytest.mark.parametrize("isa", _native.instruction_sets())
def test_any_number_of_threads_gives_the_same_bits(isa: str, normed: bool) -> None:
    layer = Layer(LayerKernels(_native.Kernels(isa)), torch.bfloat16, 128, biased=True, normed=normed)
    generator = torch.Generator().manual_seed(0)
    residual = torch.randn(700, HIDDEN, generator=generator).bfloat16()
    attended = torch.randn(700, QUERY_HEADS * HEAD_DIM, generator=generator).bfloat16()
    rotation = torch.randn(700, HEAD_DIM, generator=generator).bfloat16()
    before, outs = torch.get_num_threads(), []
    try:
        # Two threads take tokens of their own, four have too few and share the features.
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            qkv = layer.kernels.pre_attention(layer.native, residual, rotation, rotation, layer.qkv_width)
            outs.append((qkv, layer.kernels.post_attention(layer.native, residual, attended)))
    finally:
        torch.set_num_threads(before)
    for other in outs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(outs[0], other, strict=True))
