"""Linear layers whose weight lies in memory in the order in which it is read.

torch re-packs the weight of `F.linear` on every call. Winnow's kernels read one that is packed for good. Only where the
processor has matrix units (AMX) and the kernels at hand do without them (`WINNOW_ISA`) is oneDNN faster; torch's
operators that keep a weight packed for it are private, made for its compiler: whether they are there and right is tried
out.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from winnow.models.fused.kernels import LayerKernels, PackedWeight

MakeLinear = Callable[[Tensor, Tensor | None], nn.Module]
"""weight [out_features, in_features] and bias [out_features] -> a layer that computes x @ weight.T + bias."""

# oneDNN's packing depends on how many rows are promised; one for 32 serves 1 to 2048 as well as any.
_ROWS = 32
_TOLERANCE = 1e-2


class PackedLinear(nn.Module):
    """x @ weight.T + bias, as `nn.Linear`. A row's result does not depend on the rows beside it, to the last bit.

    Args:
        bias: [out_features].
    """

    def __init__(self, packed: "PackedWeight", bias: Tensor | None, kernels: "LayerKernels") -> None:
        super().__init__()
        self.out_features, self.in_features = packed.out_features, packed.in_features
        self.bias = bias if bias is None else bias.detach().contiguous()
        self.packed = packed
        self.kernels = kernels

    @classmethod
    def pack(
        cls, weight: Tensor, bias: Tensor | None, kernels: "LayerKernels", *, int8: bool = False
    ) -> "PackedLinear":
        """Of a weight [out_features, in_features], which is not kept: its memory is free once the caller lets it go."""
        pack = kernels.pack_int8 if int8 else kernels.pack
        return cls(pack(weight.detach()), bias, kernels)

    @property
    def is_int8(self) -> bool:
        """Whether the weight is one of int8; see `winnow.models.int8_linear`."""
        return self.packed.scale is not None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> [..., out_features]."""
        out = self.kernels.linear(x.reshape(-1, self.in_features), self.packed, self.bias)
        return out.view(*x.shape[:-1], self.out_features)


class OneDnnLinear(nn.Module):
    """The same by oneDNN, which uses matrix units where there are some."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = bias if bias is None else bias.detach()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _ROWS)
        self._product = torch.ops.mkldnn._linear_pointwise.default

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self._product(x, self._packed, self.bias, "none", [], "")
        return out


def linear_maker(
    kernels: "LayerKernels", dtype: torch.dtype, *, native: bool = False, int8: bool = False
) -> MakeLinear:
    """What makes the fastest layers of a type on this processor; `nn.Linear` for a weight that cannot be packed.

    Args:
        native: of weights packed for Winnow's kernels alone, which can be written to a file, also where oneDNN's are
            faster.
        int8: of int8 weights, which those kernels alone take.
    """
    if int8:
        return lambda weight, bias: (
            PackedLinear.pack(weight, bias, kernels, int8=True)
            if kernels.packs_int8(weight)
            else _plain_linear(weight, bias)
        )
    if not native and dtype == torch.bfloat16 and kernels.beside_matrix_units and one_dnn_works():
        return OneDnnLinear

    def make(weight: Tensor, bias: Tensor | None) -> nn.Module:
        return (
            PackedLinear.pack(weight, bias, kernels) if kernels.packs(weight) else _plain_linear(weight, bias)
        )

    return make


def one_dnn_works() -> bool:
    """Whether packed products of bfloat16 are there on this processor, and give what `F.linear` gives."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 80, generator=generator).bfloat16()
    bias = torch.randn(48, generator=generator).bfloat16()
    try:
        for packed, own_bias in ((OneDnnLinear(weight, bias), bias), (OneDnnLinear(weight, None), None)):
            for rows in (1, 3, 65):
                x = torch.randn(rows, 80, generator=generator).bfloat16()
                expected, found = F.linear(x, weight, own_bias), packed(x)
                if found.dtype != expected.dtype or found.shape != expected.shape:
                    return False
                scale = float(expected.abs().max())
                if float((found - expected).abs().max()) > _TOLERANCE * scale:
                    return False
    except (AttributeError, RuntimeError, TypeError):  # no such operator, or not for this type here
        return False
    return True


def pack_linears(module: nn.Module, make: MakeLinear) -> list[tuple[nn.Module, str, nn.Linear]]:
    """Pack every `nn.Linear` below a module. Returns what it replaced, for `unpack_linears`."""
    replaced = []
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:  # a subclass may compute something else
                setattr(parent, name, make(child.weight, child.bias))
                replaced.append((parent, name, child))
    return replaced


def unpack_linears(replaced: list[tuple[nn.Module, str, nn.Linear]]) -> None:
    """Put back what `pack_linears` replaced."""
    for parent, name, child in replaced:
        setattr(parent, name, child)


def _plain_linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    out = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    out.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        out.bias = nn.Parameter(bias, requires_grad=False)
    return out
