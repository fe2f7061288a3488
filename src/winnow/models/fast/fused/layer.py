"""A whole decoder layer in one forward: four matrix products, attention, and four passes between them.

With packed weights the layer is one native call where the kernels attend too; else what lies before attention is one,
and what lies after it another. Called one by one, the parts of a small step take longer to reach than to compute.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from winnow.attention import AttentionSpec, HeadRotation
from winnow.attention.interface import NativeSpec, NativeStep
from winnow.models.fast.fused.parts import Activation, LayerNorms, NormWeight
from winnow.models.fast.packed_linear import PackedLinear

if TYPE_CHECKING:
    from winnow.models.bind.binding import AttentionStep
    from winnow.models.fast.fused.kernels import LayerKernels
    from winnow.models.fast.fused.triton_passes import TritonPasses
    from winnow.process.native import DecoderLayer, StackedLayer

    LayerPasses: TypeAlias = LayerKernels | TritonPasses


class FusedNorm(nn.Module):
    """Norm of rows in one pass: [..., size] -> the same shape."""

    def __init__(self, norm: NormWeight, kernels: "LayerPasses") -> None:
        super().__init__()
        self.norm = norm
        self._kernels = kernels

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != self.norm.weight.dtype:
            raise TypeError(f"a norm of {self.norm.weight.dtype} cannot scale {x.dtype}")
        return self._kernels.rms_norm(x.reshape(-1, x.shape[-1]).contiguous(), self.norm).view_as(x)


class FusedFeedForward(nn.Module):
    """Gated feed-forward part of two products and a pass between them: [..., size] -> the same shape."""

    def __init__(
        self, gate_up: nn.Module, down: nn.Module, activation: Activation, kernels: "LayerPasses"
    ) -> None:
        super().__init__()
        self.gate_up, self.down = gate_up, down
        self._activation, self._kernels = activation, kernels

    def forward(self, x: Tensor) -> Tensor:
        rows = self.gate_up(x.reshape(-1, x.shape[-1]))
        out: Tensor = self.down(self._kernels.gate(rows, self._activation))
        return out.view_as(x)


class FusedLayer(nn.Module):
    """Layer in place of a decoder layer that is built of `LayerParts`.

    Args:
        layer_idx: its number from the bottom.
        products: the four matrix products by name, each [T, in] -> [T, out]: `qkv` (queries, keys and values side by
            side), `output`, `gate_up` (both side by side), `down`.
        shape: query heads, KV heads and head_dim.
        attributes: of the layer that it replaces; models may look at them.

    Attributes:
        last_layer_only_wanted: for tokens whose logits are not wanted, compute keys and values alone. True only of the
            last layer, where no later layer reads their hidden states.
    """

    def __init__(
        self,
        layer_idx: int,
        norms: LayerNorms,
        activation: Activation,
        products: dict[str, nn.Module],
        spec: AttentionSpec,
        shape: tuple[int, int, int],
        kernels: "LayerPasses",
        attributes: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        super().__init__()
        self.__dict__ |= attributes
        self.layer_idx = layer_idx
        self.last_layer_only_wanted = False
        self.qkv, self.output = products["qkv"], products["output"]
        self.gate_up, self.down = products["gate_up"], products["down"]
        self.norms, self.activation, self.spec = norms, activation, spec
        self._shape = shape
        self.kernels = kernels
        self._native = native_layer(norms, activation, products, shape)
        self._native_spec = NativeSpec(spec)

    @property
    def is_native(self) -> bool:
        """Return whether all products are of packed weights, so that native calls compute the layer."""
        return self._native is not None

    @property
    def _native_kernels(self) -> "LayerKernels":
        assert self.is_native, "packed weights are made by native kernels alone"
        return cast("LayerKernels", self.kernels)

    def stacked(self) -> "StackedLayer":
        """Return the layer as a part of a native decoder. It points into the layer, which must be native."""
        assert self._native is not None, "only packed weights can be stacked"
        from winnow.process.native import StackedLayer

        return StackedLayer(self._native, self._native_spec.native, self.layer_idx)

    def forward(
        self,
        hidden_states: Tensor,
        *_: Any,
        position_embeddings: tuple[Tensor, Tensor],
        winnow_step: "AttentionStep",
        **__: Any,
    ) -> Tensor:
        """Map hidden_states [1, T, hidden_size] -> the same shape; the input is left as it is. All else that
        transformers passes to a layer changes nothing here: masks follow from positions."""
        residual = hidden_states[0]
        logits_indices: Tensor | None = None
        if self.last_layer_only_wanted:
            logits_indices = getattr(winnow_step, "logits_indices", None)
        native: NativeStep | None = getattr(winnow_step, "native", None)
        if self._native is not None and native is not None and logits_indices is None:
            cos, sin = position_embeddings[0][0], position_embeddings[1][0]
            kernels, spec = self._native_kernels, self._native_spec
            return kernels.decoder_layer(self._native, self.layer_idx, residual, cos, sin, spec, native)[None]
        attended = self._attend(residual, position_embeddings, winnow_step)
        if logits_indices is not None:
            residual, attended = residual[logits_indices], attended[logits_indices]
        out = self._finish(residual, attended)
        if len(out) == hidden_states.shape[1]:
            return out[None]
        assert logits_indices is not None, "only a selection makes rows fewer"
        return torch.zeros_like(hidden_states).index_copy_(1, logits_indices, out[None])

    def _attend(self, x: Tensor, rotation: tuple[Tensor, Tensor], step: "AttentionStep") -> Tensor:
        query_heads, kv_heads, head_dim = self._shape
        num_heads = query_heads + 2 * kv_heads
        cos, sin = rotation[0][0], rotation[1][0]
        attend = step.attend
        if self._native is not None:
            qkv = self._native_kernels.pre_attention(self._native, x, cos, sin, num_heads * head_dim)
        else:
            qkv = self.qkv(self.kernels.rms_norm(x, self.norms.input))
            norms = self.norms.query, self.norms.key
            write = getattr(step, "rotate_and_write", None)
            if write is not None and write(self.layer_idx, qkv, query_heads, HeadRotation(cos, sin, *norms)):
                attend = step.attend_written  # type: ignore[attr-defined]
            else:
                self.kernels.rotate(qkv, query_heads, kv_heads, head_dim, cos, sin, *norms)
        heads = qkv.view(-1, num_heads, head_dim)
        q, k, v = heads.split_with_sizes([query_heads, kv_heads, kv_heads], dim=1)
        return attend(self.layer_idx, q, k, v, self.spec).flatten(1)

    def _finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        if self._native is not None:
            return self._native_kernels.post_attention(self._native, residual, attended)
        stream = self.output(attended)
        kernels, norms = self.kernels, self.norms
        # Either way the residual stream is a new tensor: the layer's input may belong to another caller.
        if norms.output is None:
            normed = kernels.rms_norm(stream, norms.post, add=residual)
        else:
            stream = kernels.add_normed(stream, norms.output, to=residual, in_place=False)
            normed = kernels.rms_norm(stream, norms.post)
        out: Tensor = self.down(kernels.gate(self.gate_up(normed), self.activation))
        if norms.down is None:
            return out.add_(stream)
        return kernels.add_normed(out, norms.down, to=stream)


def native_layer(
    norms: LayerNorms, activation: Activation, products: dict[str, nn.Module], shape: tuple[int, int, int]
) -> "DecoderLayer | None":
    """Return the layer as the kernels take it, pointing into norms and products; None: a product is not theirs."""
    packed = {name: product for name, product in products.items() if isinstance(product, PackedLinear)}
    if len(packed) < len(products):
        return None
    # They need the extension, as packed products do.
    from winnow.models.fast.fused.kernels import NO_NORM, native_activation
    from winnow.process.native import DecoderLayer

    parts: dict[str, Any] = dict(zip(("num_query_heads", "num_kv_heads", "head_dim"), shape, strict=True))
    for name, product in packed.items():
        parts[name] = product.packed.native
        parts[f"{name}_bias"] = 0 if product.bias is None else product.bias.data_ptr()
    for place, norm in vars(norms).items():
        parts[f"{place}_norm"] = NO_NORM if norm is None else norm.native
    return DecoderLayer(**parts, activation=native_activation(activation))
