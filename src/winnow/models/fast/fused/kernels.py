"""The native kernels around a layer's matrix products, with tensors in place of addresses."""

from collections.abc import Sequence

import torch
from torch import Tensor

from winnow.attention.interface import NativeSpec, NativeStep
from winnow.models.fast.fused.parts import Activation, NormWeight
from winnow.models.model.blocks import BLOCK, RAW, Blocks, quantize
from winnow.process import native

NO_NORM = native.RmsNorm(0, 0.0, False)
"""Value where a layer has no such norm."""


def native_activation(activation: Activation) -> native.Activation:
    found: native.Activation = getattr(native.Activation, activation.name)
    return found


class PackedWeight:
    """A linear layer's weight in the form that the kernel reads, which depends on the instruction set.

    Args:
        dtype: of the rows that it multiplies; None: of the weight itself.
        panels: of a weight in blocks, where each panel begins in `packed`, in bytes, and its kind, int64 [panels, 2];
            None: of any other.
    """

    def __init__(
        self,
        packed: Tensor,
        in_features: int,
        out_features: int,
        dtype: torch.dtype | None = None,
        panels: Tensor | None = None,
    ) -> None:
        assert (packed.dtype == torch.uint8) == (panels is not None)
        self.packed, self.panels = packed, panels  # what `native` points at
        self.dtype = packed.dtype if dtype is None else dtype
        self.in_features, self.out_features = in_features, out_features
        form, kinds = native.native_dtype(self.dtype), 0 if panels is None else panels.data_ptr()
        self.native = native.PackedWeight(form, packed.data_ptr(), in_features, out_features, kinds)

    @property
    def kinds(self) -> set[str]:
        """Names of its blocks in llama.cpp; none: it is in none."""
        numbers = [] if self.panels is None else self.panels[:, 1].unique().tolist()
        return {native.BlockKind(number).name for number in numbers}


class LayerKernels:
    """Works on CPU tensors of float32, bfloat16 or float16, all of a call of the same type; arithmetic is float32."""

    def __init__(self, kernels: native.Kernels) -> None:
        self._kernels = kernels
        self._work = native.DecoderWorkspace()

    def packs(self, dtype: torch.dtype, in_features: int) -> bool:
        """Return whether a weight can be packed: some kernels take inputs of 16 bits in pairs."""
        return dtype in native.DTYPES and (dtype == torch.float32 or in_features % 2 == 0)

    def panel_shape(self, dtype: torch.dtype) -> tuple[int, int]:
        """Return rows of a panel, and how many elements of a row lie together in it: both depend on the instruction
        set. A packed weight is cut into panels, in each of which the elements of its rows lie side by side."""
        weight = torch.tensor([[1, 2], [3, 4]], dtype=dtype, device="cpu")
        packed = self.pack(weight).packed
        return len(packed) // weight.shape[1], 2 if packed[1] == weight[0, 1] else 1

    @property
    def block_panel(self) -> int:
        return self._kernels.block_bytes(native.BlockKind.Q8_0, BLOCK, 1) // RAW["Q8_0"][1]

    def panel_bytes(self, kind: int, in_features: int) -> int:
        """Return the bytes of a panel of a weight in blocks. Raises ValueError: there is no such kind."""
        return self._kernels.block_bytes(native.BlockKind(kind), in_features, 1)

    def packed_size(self, in_features: int, out_features: int) -> int:
        return self._kernels.packed_size(in_features, out_features)

    def pack(self, weight: Tensor) -> PackedWeight:
        """Copy a weight, [out_features, in_features], into the form that `linear` reads."""
        assert self.packs(weight.dtype, weight.shape[1])
        weight = weight.contiguous()
        out_features, in_features = weight.shape
        packed = weight.new_empty(self.packed_size(in_features, out_features))
        out = PackedWeight(packed, in_features, out_features)
        self._kernels.pack(out.native, weight.data_ptr(), torch.get_num_threads())
        return out

    def pack_blocks(self, parts: Sequence[Blocks], dtype: torch.dtype) -> PackedWeight:
        """Copy weights of the same inputs, side by side, into panels, for rows of a type. Where they are of several
        kinds and do not fill panels, all become Q8_0."""
        assert self.packs(dtype, BLOCK)
        if len(parts) > 1 and len({part.kind for part in parts}) == 1:
            parts = [Blocks(parts[0].kind, torch.cat([part.data for part in parts]))]
        elif any(part.shape[0] % self.block_panel for part in parts[:-1]):
            return self.pack_blocks([quantize(part.numbers(torch.float32), "Q8_0") for part in parts], dtype)
        in_features = parts[0].shape[1]
        rows, sizes = [], []
        for part in parts:
            kind = getattr(native.BlockKind, part.kind)
            sizes.append(self._kernels.block_bytes(kind, in_features, part.shape[0]))
            each = self._kernels.block_bytes(kind, in_features, 1)
            rows += [(sum(sizes[:-1]) + at, kind.value) for at in range(0, sizes[-1], each)]
        packed = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu")
        for part, to in zip(parts, packed.split(sizes), strict=True):
            self._kernels.pack_blocks(part.raw(), to.data_ptr(), torch.get_num_threads())
        panels = torch.tensor(rows, dtype=torch.int64, device="cpu")
        return PackedWeight(packed, in_features, sum(part.shape[0] for part in parts), dtype, panels)

    def unpack_rows(self, weight: PackedWeight, features: Tensor) -> Tensor:
        """Return rows of the dense weight, [..., in_features], for features, int64 [...]. Raises IndexError: it has no
        such row."""
        assert features.dtype == torch.int64
        features = features.contiguous()
        out = torch.empty(*features.shape, weight.in_features, dtype=weight.dtype, device="cpu")
        self._kernels.unpack_rows(
            weight.native, features.data_ptr(), features.numel(), out.data_ptr(), torch.get_num_threads()
        )
        return out

    def linear(self, x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
        """Return x [T, in_features] times the weight, transposed, plus the bias [out_features]: [T, out_features].
        Raises TypeError: x is of another type than the weight is for."""
        if x.dtype != weight.dtype:
            raise TypeError(f"a weight of {weight.dtype} cannot multiply {x.dtype}")
        if x.stride(1) != 1:
            x = x.contiguous()
        out = x.new_empty(len(x), weight.out_features)
        self._kernels.linear(
            weight.native, x.data_ptr(), x.stride(0), 0 if bias is None else bias.data_ptr(),
            out.data_ptr(), len(x), torch.get_num_threads(),
        )  # fmt: skip
        return out

    def grouped_linear(
        self,
        x: Tensor,
        weights: Sequence[PackedWeight],
        biases: Sequence[Tensor | None],
        counts: Sequence[int],
    ) -> Tensor:
        """Return what `linear` gives consecutive rows of x [T, in_features], `counts` of them for each of the weights,
        which are of the same type and shape."""
        x = x.contiguous()
        out = x.new_empty(len(x), weights[0].out_features)
        self._kernels.grouped_linear(
            [weight.native for weight in weights], [0 if bias is None else bias.data_ptr() for bias in biases],
            x.data_ptr(), out.data_ptr(), counts, torch.get_num_threads(),
        )  # fmt: skip
        return out

    def pre_attention(
        self, layer: native.DecoderLayer, x: Tensor, cos: Tensor, sin: Tensor, width: int
    ) -> Tensor:
        """Return a layer up to its attention, [T, width]: norm, queries, keys and values side by side, rotation.

        Args:
            x: [T, hidden_size], dense, of the type of the layer's weights.
            cos, sin: [T, rotary_dim].
        """
        assert x.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()
        assert x.dtype == cos.dtype == sin.dtype and cos.shape == sin.shape
        tokens = x.shape[0]
        out = x.new_empty(tokens, width)
        self._kernels.pre_attention(
            self._work, layer, x.data_ptr(), tokens, cos.data_ptr(), sin.data_ptr(), cos.shape[1],
            out.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return out

    def post_attention(self, layer: native.DecoderLayer, residual: Tensor, attended: Tensor) -> Tensor:
        """Return the rest of a layer: output projection, norm, feed-forward part, both added to the layer's input,
        `residual`, [T, hidden_size]. What attention read is [T, Hq * d]. Both are dense."""
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
        """Return a whole layer, attention over the cache included, [T, hidden_size].

        Args:
            index: the layer's number in the cache.
            x: its input, [T, hidden_size], dense, of the type of the layer's weights; KVs have the cache's.
            cos, sin: [T, rotary_dim].
        """
        assert x.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()
        assert x.dtype == cos.dtype == sin.dtype and cos.shape == sin.shape
        assert native.native_dtype(x.dtype) == layer.dtype
        out = x.clone()
        self._kernels.decoder_layer(
            self._work, layer, index, out.data_ptr(), cos.data_ptr(), sin.data_ptr(), cos.shape[1],
            spec.native, step.cache, step.batch, step.work, step.far, step.selection,
            torch.get_num_threads(),
        )  # fmt: skip
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
        """Return logits of a whole model, [T, vocab_size] or [n, vocab_size]. Raises IndexError: the embedding does not
        know a token.

        Args:
            tokens: of the step, int64 [T], dense.
            cos, sin: of the positions from 0 to those of the step, [positions, rotary_dim], of the weights' type.
            logits_indices: tokens whose logits are asked for, int64 [n]; None: all.
        """
        for each in (tokens, *(() if logits_indices is None else (logits_indices,))):
            assert each.dtype == torch.int64 and each.is_contiguous()
        assert cos.is_contiguous() and sin.is_contiguous() and step.batch.end <= len(cos)
        assert cos.dtype == sin.dtype and cos.shape == sin.shape
        assert native.native_dtype(cos.dtype) == decoder.dtype
        logits = cos.new_empty(len(tokens if logits_indices is None else logits_indices), vocab_size)
        self._kernels.decode(
            self._work, decoder, tokens.data_ptr(), cos.data_ptr(), sin.data_ptr(), cos.shape[1],
            step.cache, step.batch, step.work, step.far, step.selection,
            -1 if logits_indices is None else len(logits_indices),
            0 if logits_indices is None else logits_indices.data_ptr(), logits.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        step.count_reads()
        return logits

    # The passes between a layer's products, which `TritonPasses` has for GPUs.

    def rms_norm(self, x: Tensor, norm: NormWeight, add: Tensor | None = None) -> Tensor:
        """Return the norm of x, [T, size]; `add`, of the same shape, is first added to x in place."""
        assert x.is_contiguous() and (add is None or (add.is_contiguous() and add.shape == x.shape))
        out = torch.empty_like(x)
        self._kernels.rms_norm(
            native.native_dtype(x.dtype), x.data_ptr(), 0 if add is None else add.data_ptr(),
            out.data_ptr(), x.shape[0], x.shape[1], norm.native, torch.get_num_threads(),
        )  # fmt: skip
        return out

    def add_normed(self, x: Tensor, norm: NormWeight, to: Tensor, *, in_place: bool = True) -> Tensor:
        """Return `to`, [T, size], plus the norm of x, of its shape."""
        to = to if in_place else to.clone()
        assert x.is_contiguous() and to.is_contiguous() and x.shape == to.shape and x.dtype == to.dtype
        self._kernels.add_normed(
            native.native_dtype(x.dtype), x.data_ptr(), to.data_ptr(), x.shape[0], x.shape[1], norm.native,
            torch.get_num_threads(),
        )  # fmt: skip
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
        """Norm and rotate queries and keys in place, dimension i with dimension i + rotary_dim / 2.

        Args:
            heads: [T, (num_query_heads + num_kv_heads) * head_dim or more], rows dense: queries, keys, anything.
            cos, sin: [T, rotary_dim].
            query_norm, key_norm: of each head, before it is rotated.
        """
        assert heads.stride(1) == 1 and cos.is_contiguous() and sin.is_contiguous()
        assert heads.dtype == cos.dtype == sin.dtype and cos.shape == sin.shape
        self._kernels.rotate(
            native.native_dtype(heads.dtype), heads.data_ptr(), heads.stride(0), heads.shape[0],
            num_query_heads, num_kv_heads, head_dim, cos.data_ptr(), sin.data_ptr(), cos.shape[1],
            NO_NORM if query_norm is None else query_norm.native,
            NO_NORM if key_norm is None else key_norm.native, torch.get_num_threads(),
        )  # fmt: skip

    def gate(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """Return activation(gate) * up, [T, F], of both side by side, [T, 2 * F]."""
        assert gate_up.is_contiguous()
        out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        self._kernels.gate(
            native.native_dtype(gate_up.dtype), gate_up.data_ptr(), out.data_ptr(), out.shape[0],
            out.shape[1], native_activation(activation), torch.get_num_threads(),
        )  # fmt: skip
        return out
