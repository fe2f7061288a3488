"""A model's weights over ranks: each has some heads and some inner features, and products add up what they give.

Which linear layers are cut, and along which side, transformers says of its classes (`base_model_tp_plan`). Norms and
the embedding are the same on every rank, so hidden states are too.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from winnow.errors import ConfigError, UnsupportedModelError
from winnow.models.model.experts import linear_of
from winnow.models.model.geometry import ModelGeometry
from winnow.process.ranks import Ranks

_COLUMNS, _ROWS = "colwise", "rowwise"
_WHOLE = ("replicated_with_grad_allreduce",)


class AddedLinear(nn.Module):
    """Linear layer of this rank's inputs, whose outputs the ranks add up."""

    def __init__(self, own: nn.Linear, ranks: Ranks) -> None:
        super().__init__()
        self.own, self._ranks = own, ranks

    def forward(self, x: Tensor) -> Tensor:
        return self._ranks.add_up(self.own(x))


class JoinedLinear(nn.Module):
    """Linear layer of this rank's outputs, beside which those of the others are put."""

    def __init__(self, own: nn.Linear, ranks: Ranks, total: int) -> None:
        super().__init__()
        self.own, self._ranks, self._total = own, ranks, total

    def forward(self, x: Tensor) -> Tensor:
        return self._ranks.join(self.own(x), -1, self._total)


@torch.inference_mode()
def shard_model(model: PreTrainedModel, geometry: ModelGeometry, ranks: Ranks) -> ModelGeometry:
    """Leave a model the weights of one rank. Returns what this rank's cache and kernels depend on.

    Raises:
        ConfigError: its KV heads or query heads do not divide by the number of ranks.
        UnsupportedModelError: it is of a kind whose parts are not cut.
    """
    size, refused = ranks.size, f"tensor_parallel_size: {type(model).__name__} is not cut"
    plan = _plan(model, geometry)
    query_heads, kv_heads = geometry.num_query_heads, geometry.num_kv_heads
    if kv_heads % size or query_heads % size:
        raise ConfigError(
            f"tensor_parallel_size must divide the model's {kv_heads} KV heads and {query_heads} query heads, "
            f"got {size}"
        )
    cut = 0
    for path, part in list(model.base_model.named_modules()):
        kind = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", path))
        if kind in (_COLUMNS, _ROWS):
            if type(part) is not nn.Linear:
                raise UnsupportedModelError(f"{refused}: {path} is no linear layer")
            parent, _, name = path.rpartition(".")
            setattr(model.base_model.get_submodule(parent), name, _cut(part, kind, ranks))
            cut += 1
    if not cut:
        raise UnsupportedModelError(f"{refused}: no layer is named as transformers says")
    head = model.get_output_embeddings()
    if type(head) is nn.Linear:
        total = head.out_features
        model.set_output_embeddings(JoinedLinear(_cut(head, _COLUMNS, ranks), ranks, total))
    return replace(geometry, num_query_heads=query_heads // size, num_kv_heads=kv_heads // size)


def _plan(model: PreTrainedModel, geometry: ModelGeometry) -> Mapping[str, str]:
    """Return how each module of the model without its head is cut, by its path with * for numbers."""
    plan = getattr(model.config.get_text_config(), "base_model_tp_plan", None) or {}
    unknown = sorted(set(plan.values()) - {_COLUMNS, _ROWS, *_WHOLE})
    reasons = (
        ("transformers says nothing of how to cut it", not plan),
        (f"parts of it are cut as {', '.join(unknown)}", bool(unknown)),
        ("layers keep states in place of KVs", bool(geometry.states)),
        ("its layers have different numbers of heads", bool(geometry.by_layer)),
        ("its heads share latents", geometry.latent),
    )
    for reason, holds in reasons:
        if holds:
            raise UnsupportedModelError(
                f"tensor_parallel_size: {type(model).__name__} runs on one rank alone: {reason}"
            )
    return plan


def _cut(linear: Any, kind: str, ranks: Ranks) -> Any:
    bias = linear.bias
    if kind == _COLUMNS:
        part = ranks.part(linear.out_features)
        return linear_of(linear.weight[part].clone(), None if bias is None else bias[part].clone())
    part = ranks.part(linear.in_features)
    own = linear_of(linear.weight[:, part].clone(), bias if ranks.leads else None)
    return AddedLinear(own, ranks)
