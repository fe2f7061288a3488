"""The native kernels around a layer's matrix products, with tensors in place of addresses."""

from collections.abc import Sequence

import torch
from torch import Tensor

from winnow import native
from winnow.attention.native_step import NativeSpec, NativeStep
from winnow.models.fast.fused.forms import Activation, NormWeight
from winnow.models.fast.int8_linear import BLOCK, quantize_weight

NO_NORM = native.RmsNorm(0, 0.0, False)
"""Value where a layer has no such norm."""


def native_activation(activation: Activation) -> native.Activation:
    """Return the kernels' name of an activation."""
    found: native.Activation = getattr(native.Activation, activation.name)
    return found


class PackedWeight:
    """A linear layer's weight in the form that the kernel reads, which depends on the instruction set.

    Args:
        dtype: of the rows that it multiplies; None: of the weight itself.
        scale: of an int8 weight, float32 [out_features], or in blocks float16 [panels, blocks of a feature, features of
            a panel]; None: of any other.
    """

    def __init__(
        self,
        packed: Tensor,
        in_features: int,
        out_features: int,
        dtype: torch.dtype | None = None,
        scale: Tensor | None = None,
    ) -> None:
        assert (packed.dtype == torch.int8) == (scale is not None)
        self.packed, self.scale = packed, scale  # what `native` points at
        self.dtype = packed.dtype if dtype is None else dtype
        self.in_features, self.out_features = in_features, out_features
        self.native = native.PackedWeight(
            native.native_dtype(self.dtype),
            packed.data_ptr(),
            in_features,
            out_features,
            0 if scale is None else scale.data_ptr(),
            scale is not None and scale.dtype == torch.float16,
        )


class LayerKernels:
    """Works on CPU tensors of float32, bfloat16 or float16, all of a call of the same type; arithmetic is float32."""

    def __init__(self, kernels: native.Kernels) -> None:
        self._kernels = kernels
        self._work = native.DecoderWorkspace()

    @property
    def beside_matrix_units(self) -> bool:
        """Return whether the processor multiplies matrices of bfloat16 (AMX), and `linear` does not."""
        return native.has_matrix_units() and not self._kernels.matrix_units

    def packs(self, dtype: torch.dtype, in_features: int) -> bool:
        """Return whether a weight can be packed: some kernels take inputs of 16 bits in pairs."""
        return dtype in native.DTYPES and (dtype == torch.float32 or in_features % 2 == 0)

    def packs_int8(self, dtype: torch.dtype) -> bool:
        """Return whether a weight can be packed as int8."""
        return dtype in native.DTYPES

    def panel_shape(self, dtype: torch.dtype) -> tuple[int, int]:
        """Return rows of a panel, and how many elements of a row lie together in it.

        Both depend on the instruction set.

        A packed weight is cut into panels, in each of which the elements of its rows lie side by side.
        """
        weight = torch.tensor([[1, 2], [3, 4]], dtype=dtype, device="cpu")
        packed = self.pack(weight).packed
        return len(packed) // weight.shape[1], 2 if packed[1] == weight[0, 1] else 1

    @property
    def int8_panel_shape(self) -> tuple[int, int]:
        """The same of int8 weights."""
        # Of one panel, whose inputs are padded to those that lie together.
        together = self.packed_size(1, 1, int8=True)
        several = next(n for n in range(2, 9) if self.packed_size(n, 1, int8=True) > together) - 1
        return together // several, several

    def packed_size(self, in_features: int, out_features: int, *, int8: bool = False) -> int:
        """Return elements of a packed weight."""
        return self._kernels.packed_size(in_features, out_features, int8)

    def pack(self, weight: Tensor) -> PackedWeight:
        """Copy a weight, [out_features, in_features], into the form that `linear` reads."""
        assert self.packs(weight.dtype, weight.shape[1])
        return self._pack(weight.contiguous(), weight.dtype, None)

    def pack_int8(self, weight: Tensor, *, blocks: bool = False) -> PackedWeight:
        """Return the same of its int8 codes; see `winnow.models.fast.int8_linear`."""
        return self.pack_codes(*quantize_weight(weight, blocks=blocks), weight.dtype)

    def pack_codes(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> PackedWeight:
        """Return the same of codes and scales as `quantize_weight` gives them, for rows of a type."""
        assert self.packs_int8(dtype)
        return self._pack(codes.contiguous(), dtype, scale if scale.ndim == 1 else self._by_panel(scale))

    def block_scale_shape(self, in_features: int, out_features: int) -> tuple[int, int, int]:
        """Return the shape of a packed weight's scales in blocks: panels, blocks of a feature, features of a panel."""
        panel, _ = self.int8_panel_shape
        return -(-out_features // panel), -(-in_features // BLOCK), panel

    def _by_panel(self, scale: Tensor) -> Tensor:
        """Map scale [out_features, blocks] -> [panels, blocks, features of a panel], as it is read."""
        out_features, blocks = scale.shape
        panels, _, panel = self.block_scale_shape(blocks * BLOCK, out_features)
        padded = scale.new_zeros(panels * panel, blocks)
        padded[:out_features] = scale
        return padded.view(panels, panel, blocks).mT.contiguous()

    def _pack(self, dense: Tensor, dtype: torch.dtype, scale: Tensor | None) -> PackedWeight:
        out_features, in_features = dense.shape
        size = self.packed_size(in_features, out_features, int8=scale is not None)
        packed = torch.empty(size, dtype=dense.dtype, device="cpu")
        out = PackedWeight(packed, in_features, out_features, dtype, scale)
        self._kernels.pack(out.native, dense.data_ptr(), torch.get_num_threads())
        return out

    def unpack_rows(self, weight: PackedWeight, features: Tensor) -> Tensor:
        """Map rows of the dense weight: features, int64 [...] -> [..., in_features].

        Raises:
            IndexError: the weight has no such row.
        """
        assert features.dtype == torch.int64
        features = features.contiguous()
        out = torch.empty(*features.shape, weight.in_features, dtype=weight.dtype, device="cpu")
        self._kernels.unpack_rows(
            weight.native, features.data_ptr(), features.numel(), out.data_ptr(), torch.get_num_threads()
        )
        return out

    def linear(self, x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
        """Return x [T, in_features] times the weight, transposed, plus the bias [out_features]: [T, out_features].

        Raises:
            TypeError: x is of another type than the weight is for.
        """
        if x.dtype != weight.dtype:
            raise TypeError(f"a weight of {weight.dtype} cannot multiply {x.dtype}")
        if x.stride(1) != 1:
            x = x.contiguous()
        out = x.new_empty(len(x), weight.out_features)
        self._kernels.linear(
            weight.native,
            x.data_ptr(),
            x.stride(0),
            0 if bias is None else bias.data_ptr(),
            out.data_ptr(),
            len(x),
            torch.get_num_threads(),
        )
        return out

    def grouped_linear(
        self,
        x: Tensor,
        weights: Sequence[PackedWeight],
        biases: Sequence[Tensor | None],
        counts: Sequence[int],
    ) -> Tensor:
        """Return what `linear` gives consecutive rows of x [T, in_features], `counts` of them for each weight.

        Args:
            weights: of the same type and shape.
        """
        x = x.contiguous()
        out = x.new_empty(len(x), weights[0].out_features)
        self._kernels.grouped_linear(
            [weight.native for weight in weights],
            [0 if bias is None else bias.data_ptr() for bias in biases],
            x.data_ptr(),
            out.data_ptr(),
            counts,
            torch.get_num_threads(),
        )
        return out

    def pre_attention(
        self, layer: native.DecoderLayer, x: Tensor, cos: Tensor, sin: Tensor, width: int
    ) -> Tensor:
        """Return a layer up to its attention: norm, queries, keys and values, rotation.

        Args:
            x: [T, hidden_size], dense, of the type of the layer's weights.
            cos, sin: [T, rotary_dim].
            width: of a row of queries, keys and values.

        Returns:
            [T, width].
        """
        assert x.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()
        assert x.dtype == cos.dtype == sin.dtype and cos.shape == sin.shape
        tokens = x.shape[0]
        out = x.new_empty(tokens, width)
        self._kernels.pre_attention(
            self._work,
            layer,
            x.data_ptr(),
            tokens,
            cos.data_ptr(),
            sin.data_ptr(),
            cos.shape[1],
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out

    def post_attention(self, layer: native.DecoderLayer, residual: Tensor, attended: Tensor) -> Tensor:
        """Return the rest of a layer: output projection, norm, feed-forward part, both added to the layer's input.

        Args:
            residual: the layer's input, [T, hidden_size], dense.
            attended: what attention read, [T, Hq * d], dense.
        """
        assert residual.is_contiguous() and attended.is_contiguous() and residual.dtype == attended.dtype
        out = residual.clone()
        self._kernels.post_attention(
            self._work, layer, out.data_ptr(), attended.data_ptr(), out.shape[0], torch.get_num_threads()
        )
        return out

    def decoder_layer(
        self,
        layer: native.DecoderLayer,
        index: int,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        spec: NativeSpec,
        step: NativeStep,
    ) -> Tensor:
        """Return a whole layer, attention over the cache included.

        Args:
            index: the layer's number in the cache.
            x: its input, [T, hidden_size], dense, of the type of the layer's weights; KVs have the cache's.
            cos, sin: [T, rotary_dim].

        Returns:
            Its output, [T, hidden_size].
        """
        assert x.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()
        assert x.dtype == cos.dtype == sin.dtype and cos.shape == sin.shape
        assert native.native_dtype(x.dtype) == layer.dtype
        out = x.clone()
        self._kernels.decoder_layer(
            self._work,
            layer,
            index,
            out.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            cos.shape[1],
            spec.native,
            step.cache,
            step.batch,
            step.work,
            step.far,
            step.selection,
            torch.get_num_threads(),
        )
        step.count_reads()
        return out

    def decode(
        self,
        decoder: native.Decoder,
        tokens: Tensor,
        cos: Tensor,
        sin: Tensor,
        step: NativeStep,
        logits_indices: Tensor | None,
        vocab_size: int,
    ) -> Tensor:
        """Return a whole model.

        Args:
            tokens: of the step, int64 [T], dense.
            cos, sin: of the positions from 0 to those of the step, [positions, rotary_dim], of the weights' type.
            logits_indices: tokens whose logits are asked for, int64 [n]; None: all.

        Returns:
            Logits, [T, vocab_size] or [n, vocab_size].

        Raises:
            IndexError: the embedding does not know a token.
        """
        assert tokens.dtype == torch.int64 and tokens.is_contiguous()
        assert cos.is_contiguous() and sin.is_contiguous() and step.batch.end <= len(cos)
        assert (
            cos.dtype == sin.dtype
            and native.native_dtype(cos.dtype) == decoder.dtype
            and cos.shape == sin.shape
        )
        assert logits_indices is None or (
            logits_indices.dtype == torch.int64 and logits_indices.is_contiguous()
        )
        logits = cos.new_empty(len(tokens if logits_indices is None else logits_indices), vocab_size)
        self._kernels.decode(
            self._work,
            decoder,
            tokens.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            cos.shape[1],
            step.cache,
            step.batch,
            step.work,
            step.far,
            step.selection,
            -1 if logits_indices is None else len(logits_indices),
            0 if logits_indices is None else logits_indices.data_ptr(),
            logits.data_ptr(),
            torch.get_num_threads(),
        )
        step.count_reads()
        return logits

    def rms_norm(self, x: Tensor, norm: NormWeight, add: Tensor | None = None) -> Tensor:
        """Return the norm of x, [T, size]; `add`, of the same shape, is first added to x in place."""
        assert x.is_contiguous() and (add is None or (add.is_contiguous() and add.shape == x.shape))
        out = torch.empty_like(x)
        self._kernels.rms_norm(
            native.native_dtype(x.dtype),
            x.data_ptr(),
            0 if add is None else add.data_ptr(),
            out.data_ptr(),
            x.shape[0],
            x.shape[1],
            norm.native,
            torch.get_num_threads(),
        )
        return out

    def add_normed(self, x: Tensor, norm: NormWeight, to: Tensor, *, in_place: bool = True) -> Tensor:
        """Return `to`, [T, size], plus the norm of x, of its shape."""
        to = to if in_place else to.clone()
        assert x.is_contiguous() and to.is_contiguous() and x.shape == to.shape and x.dtype == to.dtype
        self._kernels.add_normed(
            native.native_dtype(x.dtype),
            x.data_ptr(),
            to.data_ptr(),
            x.shape[0],
            x.shape[1],
            norm.native,
            torch.get_num_threads(),
        )
        return to

    def rotate(
        self,
        heads: Tensor,
        num_query_heads: int,
        num_kv_heads: int,
        head_dim: int,
        cos: Tensor,
        sin: Tensor,
        query_norm: NormWeight | None = None,
        key_norm: NormWeight | None = None,
    ) -> None:
        """Norm and rotate queries and keys in place, as `LayerPasses` has it."""
        assert heads.stride(1) == 1 and cos.is_contiguous() and sin.is_contiguous()
        assert heads.dtype == cos.dtype == sin.dtype and cos.shape == sin.shape
        self._kernels.rotate(
            native.native_dtype(heads.dtype),
            heads.data_ptr(),
            heads.stride(0),
            heads.shape[0],
            num_query_heads,
            num_kv_heads,
            head_dim,
            cos.data_ptr(),
            sin.data_ptr(),
            cos.shape[1],
            NO_NORM if query_norm is None else query_norm.native,
            NO_NORM if key_norm is None else key_norm.native,
            torch.get_num_threads(),
        )

    def gate(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """Return activation(gate) * up, [T, F], of both side by side, [T, 2 * F]."""
        assert gate_up.is_contiguous()
        out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        self._kernels.gate(
            native.native_dtype(gate_up.dtype),
            gate_up.data_ptr(),
            out.data_ptr(),
            out.shape[0],
            out.shape[1],
            native_activation(activation),
            torch.get_num_threads(),
        )
        return out
