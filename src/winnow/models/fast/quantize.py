"""A model whose linear layers have weights of blocks as numbers: where no kernels compute, and as their oracle."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from winnow.models.bind.layers import decoder_layers
from winnow.models.fast.blocks import BlockWeights
from winnow.models.fast.experts import is_experts, linear_of, product_names


def round_to_blocks(model: Any, num_layers: int, blocks: BlockWeights) -> None:
    """Round the weights of a model of transformers to what blocks hold, in place, its embedding with its head."""
    layers = decoder_layers(model, num_layers)
    parts: list[Any] = [layer for i, layer in enumerate(layers) if blocks.of_layer(i, len(layers))]
    if not blocks.wide_head:
        parts.append(model.get_output_embeddings())
    for part in parts:
        for module in part.modules():
            if type(module) is nn.Linear:
                _round([module], blocks)
            elif is_experts(module):
                for name in product_names(module):
                    weights = getattr(module, name).detach()
                    _round(
                        [linear_of(each) for each in (weights.mT if module.is_transposed else weights)],
                        blocks,
                    )


def _round(linears: Sequence[nn.Linear], blocks: BlockWeights) -> None:
    for linear, found in zip(linears, blocks.parts(linears) or (), strict=False):
        linear.weight.data.copy_(found.numbers(linear.weight.dtype))
