"""Experts of feed-forward parts whose products are grouped: one for each expert that tokens go to, over all of them."""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

_FORM = ("num_experts", "has_gate", "has_bias", "is_transposed", "has_post_expert_norm")


def is_experts(module: nn.Module) -> bool:
    """Return whether a module is one of transformers' whose weights are those of all experts, side by side."""
    return all(hasattr(module, name) for name in _FORM)


class GroupedExperts(nn.Module):
    """The same with a linear layer for each expert and product, as `make` packs them.

    Tokens are sorted by expert, and a token's experts add up in the order in which it chose them. What an expert gives
    a token does not depend on the others where that holds of layers.
    """

    def __init__(self, own: Any, make: Callable[[Sequence[nn.Linear]], nn.Module]) -> None:
        super().__init__()
        self.up, self.down = (
            nn.ModuleList([make([linear]) for linear in linears_of(own, name)]) for name in product_names(own)
        )
        self.rest: Any = copy.copy(own)  # its activation and norm, without the weights
        self.rest._parameters = {}
        self.rest.__dict__.pop("kept_blocks", None)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        tokens, chosen = top_k_index.shape
        experts, order = top_k_index.flatten().sort(stable=True)
        counts = experts.bincount(minlength=len(self.up)).tolist()[: len(self.up)]
        order = order[: sum(counts)]  # some models have experts beyond these, which give nothing
        x = _grouped(self.up, hidden_states[order // chosen], counts)
        x = self.rest._apply_gate(x) if self.rest.has_gate else self.rest.act_fn(x)
        x = _grouped(self.down, x, counts)
        if self.rest.has_post_expert_norm:
            x = self.rest.post_expert_norm(x)
        weighted = x * top_k_weights.flatten()[order, None]
        out = weighted.new_zeros(tokens * chosen, x.shape[1])
        out[order] = weighted
        return out.view(tokens, chosen, -1).sum(dim=1).to(hidden_states.dtype)


def product_names(own: Any) -> tuple[str, str]:
    return ("gate_up_proj" if own.has_gate else "up_proj"), "down_proj"


def linears_of(own: Any, name: str) -> Iterator[nn.Linear]:
    """Return one product of each expert, its weight a view where it can be."""
    weights = getattr(own, name).detach()
    weights = weights.mT if own.is_transposed else weights
    biases = getattr(own, f"{name}_bias").detach() if own.has_bias else [None] * len(weights)
    kept = getattr(own, "kept_blocks", {}).get(name)
    for index, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        linear = linear_of(weight if kept is not None else weight.contiguous(), bias)
        if kept is not None:
            linear.kept_blocks = {"weight": kept.of_expert(index)}  # type: ignore[assignment]
        yield linear


def linear_of(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """Return the layer of a weight [out_features, in_features] and a bias [out_features], which are not copied."""
    out = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    out.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        out.bias = nn.Parameter(bias, requires_grad=False)
    return out


def _grouped(layers: nn.ModuleList, x: Tensor, counts: Sequence[int]) -> Tensor:
    """Map x, sorted by layer, `counts` rows for each."""
    together = getattr(layers[0], "of_groups", None)
    if together is not None:
        out: Tensor = together(layers, x, counts)
        return out
    parts, start = [], 0
    for layer, count in zip(layers, counts, strict=True):
        if count:
            parts.append(layer(x[start : start + count]))
            start += count
    return torch.cat(parts)
