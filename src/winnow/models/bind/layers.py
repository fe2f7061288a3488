"""A model's decoder layers, found among its modules."""

from typing import Any

from torch import nn

from winnow.models.load.kinds import text_part


def decoder_layers(model: Any, num_layers: int) -> nn.ModuleList:
    """Return the model's layers in order, those without attention too; empty if they cannot be identified."""
    config = getattr(model, "config", None)
    depth = num_layers if config is None else config.get_text_config().num_hidden_layers
    for module in (model if config is None else text_part(model)).modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            return module
    return nn.ModuleList()
