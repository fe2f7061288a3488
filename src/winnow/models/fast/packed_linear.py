"""Linear layers whose weight lies in memory in the order in which it is read; torch re-packs one at every call."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from winnow.models.model.blocks import BLOCK, Blocks, BlockWeights, dense_weight
from winnow.models.model.experts import GroupedExperts, is_experts, linear_of

if TYPE_CHECKING:
    from winnow.models.fast.fused.kernels import LayerKernels, PackedWeight

MakeLinear = Callable[[Sequence[nn.Linear]], nn.Module]
"""Linear layers of the same inputs -> one that computes all of them side by side."""


class PackedLinear(nn.Module):
    """x @ weight.T + bias, as `nn.Linear`. A row's result does not depend on the rows beside it, to the last bit."""

    def __init__(self, packed: "PackedWeight", bias: Tensor | None, kernels: "LayerKernels") -> None:
        super().__init__()
        self.out_features, self.in_features = packed.out_features, packed.in_features
        # A parameter: BERT's kind registers its head's bias a second time.
        self.bias = None if bias is None else nn.Parameter(bias.detach().contiguous(), requires_grad=False)
        self.packed = packed
        self.kernels = kernels

    @classmethod
    def pack(cls, linears: Sequence[nn.Linear], kernels: "LayerKernels") -> "PackedLinear":
        """Pack these side by side, which are not kept: their memory is free once the caller lets them go."""
        return cls(kernels.pack(join_weights(linears)), join_biases(linears), kernels)

    @classmethod
    def pack_blocks(
        cls, linears: Sequence[nn.Linear], parts: Sequence[Blocks], kernels: "LayerKernels"
    ) -> "PackedLinear":
        return cls(kernels.pack_blocks(parts, linears[0].weight.dtype), join_biases(linears), kernels)

    @property
    def in_blocks(self) -> bool:
        return self.packed.panels is not None

    def forward(self, x: Tensor) -> Tensor:
        out = self.kernels.linear(x.reshape(-1, self.in_features), self.packed, self.bias)
        return out.view(*x.shape[:-1], self.out_features)

    def of_groups(self, layers: Sequence["PackedLinear"], x: Tensor, counts: Sequence[int]) -> Tensor:
        return self.kernels.grouped_linear(
            x, [layer.packed for layer in layers], [layer.bias for layer in layers], counts
        )


def linear_maker(
    kernels: "LayerKernels", dtype: torch.dtype, *, blocks: BlockWeights | None = None
) -> MakeLinear:
    """Return what makes packed layers of a type, of weights in `blocks` where there can be some. A weight that cannot
    be packed stays an `nn.Linear`."""
    if blocks is not None and kernels.packs(dtype, BLOCK):
        wide = linear_maker(kernels, dtype)

        def narrow(linears: Sequence[nn.Linear]) -> nn.Module:
            parts = blocks.parts(linears)
            return wide(linears) if parts is None else PackedLinear.pack_blocks(linears, parts, kernels)

        return narrow
    return lambda linears: (
        PackedLinear.pack(linears, kernels)
        if kernels.packs(dtype, linears[0].in_features)
        else join_linears(linears)
    )


def join_weights(linears: Sequence[nn.Linear]) -> Tensor:
    """Return the weight of one layer that computes all of these side by side."""
    weights = [dense_weight(part).to(part.weight) for part in linears]
    return weights[0] if len(weights) == 1 else torch.cat(weights)


def join_biases(linears: Sequence[nn.Linear]) -> Tensor | None:
    if all(part.bias is None for part in linears):
        return None
    biases = [
        part.weight.new_zeros(part.out_features) if part.bias is None else part.bias.detach()
        for part in linears
    ]
    return biases[0] if len(biases) == 1 else torch.cat(biases)


def pack_linears(
    module: nn.Module, make: MakeLinear, *, experts: bool = True
) -> list[tuple[nn.Module, str, nn.Module]]:
    """Pack every `nn.Linear` below a module, and `experts`. Returns what it replaced, for `put_back`."""
    replaced: list[tuple[nn.Module, str, nn.Module]] = []
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:  # a subclass may compute something else
                setattr(parent, name, make([child]))
                replaced.append((parent, name, child))
            elif experts and is_experts(child):
                setattr(parent, name, GroupedExperts(child, make))
                replaced.append((parent, name, child))
    return replaced


def put_back(replaced: list[tuple[nn.Module, str, nn.Module]]) -> None:
    for parent, name, child in reversed(replaced):
        setattr(parent, name, child)


def join_linears(linears: Sequence[nn.Linear]) -> nn.Linear:
    """Return one layer that computes all of these side by side; a single one's weight is not copied."""
    return linear_of(join_weights(linears), join_biases(linears))


class PackedEmbedding(nn.Module):
    """Embedding that looks up rows as `nn.Embedding` does, to the last bit, in a weight [num_tokens, in_features] that
    a head may share; times `scale`, if any."""

    def __init__(self, weight: "PackedWeight", kernels: "LayerKernels", scale: float | None = None) -> None:
        super().__init__()
        self.table, self._kernels, self.scale = weight, kernels, scale
        # A parameter: where no other is left, it tells the model's type and device. Codes would not.
        rows = weight.packed if weight.panels is None else torch.empty(0, dtype=weight.dtype, device="cpu")
        self.packed = nn.Parameter(rows, requires_grad=False)

    def forward(self, tokens: Tensor) -> Tensor:
        rows = self._kernels.unpack_rows(self.table, tokens.long())
        return rows if self.scale is None else rows * torch.tensor(self.scale, dtype=rows.dtype, device="cpu")


class ScaledEmbedding(nn.Module):
    """Rows of a table [num_tokens, size], times a factor."""

    def __init__(self, weight: Tensor, scale: float) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(weight, requires_grad=False), scale

    def forward(self, tokens: Tensor) -> Tensor:
        rows = self.weight[tokens.long()]
        return rows * torch.tensor(self.scale, dtype=rows.dtype, device="cpu")


def embedding_scale(embedding: nn.Module) -> float | None:
    """Return the factor by which a scaled embedding of transformers multiplies its rows (Gemma); None: no factor."""
    scale = getattr(embedding, "embed_scale", None)
    return float(scale) if isinstance(scale, Tensor | float | int) else None
