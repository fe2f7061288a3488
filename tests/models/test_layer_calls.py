"""The two native calls of a decoder layer against the kernels that they are made of, to the last bit."""

import pytest
import torch
from torch import Tensor

_native = pytest.importorskip("winnow._native")
from winnow.models.fused.kernels import NO_NORM, LayerKernels, NormWeight, PackedWeight  # noqa: E402

HIDDEN, HEADS, HEAD_DIM = 48, 3, 16


class Layer:
    """A layer of random weights with `inner` gates, as kernels and as their parts take it."""

    def __init__(self, kernels: LayerKernels, dtype: torch.dtype, inner: int, biased: bool) -> None:
        self.kernels, width = kernels, HEADS * HEAD_DIM
        generator = torch.Generator().manual_seed(inner)

        def linear(out_features: int, in_features: int) -> tuple[PackedWeight, Tensor | None]:
            weight = torch.randn(out_features, in_features, generator=generator) / in_features**0.5
            bias = torch.randn(out_features, generator=generator).to(dtype) if biased else None
            return kernels.pack(weight.to(dtype)), bias

        self.output, self.down = linear(HIDDEN, width), linear(HIDDEN, inner)
        self.gate_up = linear(2 * inner, HIDDEN)
        self.norm = NormWeight(torch.randn(HIDDEN, generator=generator).to(dtype), 1e-5)
        self.activation = _native.Activation.silu

        def bias(of: Tensor | None) -> int:
            return 0 if of is None else of.data_ptr()

        self.native = _native.DecoderLayer(
            qkv=self.output[0].native,  # not used here
            qkv_bias=0,
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
            activation=self.activation,
            num_query_heads=HEADS,
            num_kv_heads=HEADS,
            head_dim=HEAD_DIM,
        )

    def after_attention(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Part by part."""

        def product(x: Tensor, linear: tuple[PackedWeight, Tensor | None]) -> Tensor:
            return self.kernels.linear(x, *linear)

        stream = product(attended, self.output)
        normed = self.kernels.rms_norm(stream, self.norm, add=residual)
        gated = self.kernels.gate(product(normed, self.gate_up), self.activation)
        return product(gated, self.down) + stream


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("inner", [128, 204], ids=["whole panels of gates", "a part of a panel"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("isa", _native.instruction_sets())
def test_what_lies_after_attention(isa: str, dtype: torch.dtype, inner: int, biased: bool) -> None:
    layer = Layer(LayerKernels(_native.Kernels(isa)), dtype, inner, biased)
    for tokens in (1, 7, 97, 700):
        residual = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(tokens)).to(dtype)
        attended = residual.flip(0).contiguous()
        found = layer.kernels.after_attention(layer.native, residual, attended)
        assert torch.equal(found, layer.after_attention(residual, attended))


@pytest.mark.parametrize("isa", _native.instruction_sets())
def test_any_number_of_threads_gives_the_same_bits(isa: str) -> None:
    layer = Layer(LayerKernels(_native.Kernels(isa)), torch.bfloat16, 128, biased=True)
    residual = torch.randn(700, HIDDEN, generator=torch.Generator().manual_seed(0)).bfloat16()
    before, outs = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            outs.append(layer.kernels.after_attention(layer.native, residual, residual))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])
