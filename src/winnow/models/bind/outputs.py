"""The weights that project what attention read to the hidden state."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from winnow.errors import UnsupportedModelError
from winnow.models.bind.residuals import attends, decoder_layers
from winnow.models.fast.shards import AddedLinear

_NAMES = ("output", "o_proj", "out_proj", "dense", "c_proj", "wo")


def output_projections(model: nn.Module, widths: Sequence[int]) -> list[nn.Module]:
    """Return the projection of each layer that attends, from [n, width] to [n, hidden_size].

    Args:
        widths: of each of these layers: query heads times head_dim.

    Raises:
        UnsupportedModelError: they cannot be found.
    """
    num_layers = len(widths)
    found = [_projection(layer) for layer in decoder_layers(model, num_layers)]
    projections = [projection for projection in found if projection is not None]
    fitting = [
        p for p, width in zip(projections, widths, strict=False) if getattr(p, "in_features", width) == width
    ]
    if not len(fitting) == len(projections) == num_layers:
        raise UnsupportedModelError(
            f"{type(model).__name__}: cannot find the output projections of its {num_layers} attention layers"
        )
    return fitting


@torch.inference_mode()
def projection_weights(projection: nn.Module, width: int, like: Tensor) -> Tensor:
    """Return [width, hidden_size] of any linear layer, whatever form its weight lies in: what it makes of unit vectors.

    like: a tensor of the type and on the device that the layer computes with.
    """
    unit = torch.eye(width, dtype=like.dtype, device=like.device)
    weights: Tensor = projection(unit) - projection(torch.zeros_like(unit[:1]))  # less its bias
    return weights


def _projection(layer: nn.Module) -> nn.Module | None:
    parts = [layer, *(part for part in layer.children() if hasattr(part, "layer_idx") and attends(part))]
    for part in parts:
        for name in _NAMES:
            projection = getattr(part, name, None)
            if isinstance(projection, AddedLinear):
                projection = projection.own
            if isinstance(projection, nn.Module) and (part is not layer or hasattr(layer, "layer_idx")):
                return projection
    return None
