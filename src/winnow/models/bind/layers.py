"""A model's decoder layers, found among its modules."""

from typing import Any

from torch import nn


def decoder_layers(model: Any, num_layers: int) -> nn.ModuleList:
    """Return the model's layers in order, those without attention too; empty if they cannot be identified."""
    config = getattr(model, "config", None)
    depth, searched = num_layers, model
    if config is not None:  # a packed model has none, and does without transformers
        from winnow.models.load.kinds import text_part

        depth, searched = config.get_text_config().num_hidden_layers, text_part(model)
    for module in searched.modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            return module
    return nn.ModuleList()
