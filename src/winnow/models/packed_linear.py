"""Linear layers whose weight lies in memory as the processor's matrix units read it.

torch re-packs the weight of `F.linear` on every call. The operators that keep a packed weight are torch's own but
private, made for its compiler: whether they are there and right is tried out, and `nn.Linear` stays where they are not.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# The packing depends on how many rows are promised; one for 32 serves 1 to 2048 as well as any.
_ROWS = 32
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


class PackedLinear(nn.Module):
    """x @ weight.T + bias, as `nn.Linear`.

    Args:
        weight: [out_features, in_features]; not kept, so that its memory is free once the caller lets it go.
        bias: [out_features].
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = bias if bias is None else bias.detach()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _ROWS)
        self._product = torch.ops.mkldnn._linear_pointwise.default

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self._product(x, self._packed, self.bias, "none", [], "")
        return out


def packing_works(dtype: torch.dtype) -> bool:
    """Whether packed products are there for this type on this processor, and give what `F.linear` gives."""
    if dtype not in _TOLERANCE:
        return False
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 80, generator=generator).to(dtype)
    bias = torch.randn(48, generator=generator).to(dtype)
    try:
        for packed, own_bias in ((PackedLinear(weight, bias), bias), (PackedLinear(weight, None), None)):
            for rows in (1, 3, 65):
                x = torch.randn(rows, 80, generator=generator).to(dtype)
                expected, found = F.linear(x, weight, own_bias), packed(x)
                if found.dtype != dtype or found.shape != expected.shape:
                    return False
                scale = float(expected.abs().max())
                if float((found - expected).abs().max()) > _TOLERANCE[dtype] * scale:
                    return False
    except (AttributeError, RuntimeError, TypeError):  # no such operator, or not for this type here
        return False
    return True


def linear(weight: Tensor, bias: Tensor | None, *, packed: bool) -> nn.Module:
    """A linear layer of these weights."""
    if packed:
        return PackedLinear(weight, bias)
    out = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    out.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        out.bias = nn.Parameter(bias, requires_grad=False)
    return out


def pack_linears(module: nn.Module) -> list[tuple[nn.Module, str, nn.Linear]]:
    """Pack every `nn.Linear` below a module. Returns what it replaced, for `unpack_linears`."""
    replaced = []
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:  # a subclass may compute something else
                setattr(parent, name, PackedLinear(child.weight, child.bias))
                replaced.append((parent, name, child))
    return replaced


def unpack_linears(replaced: list[tuple[nn.Module, str, nn.Linear]]) -> None:
    """Put back what `pack_linears` replaced."""
    for parent, name, child in replaced:
        setattr(parent, name, child)
