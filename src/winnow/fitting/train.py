"""Ridge regression and a small network on its residuals, for all rows of a layer at once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from winnow.eviction.predictor import Predictor, features
from winnow.fitting.collect import Collected, joined

LEAST_SCORE = 1e-5
"""Lower bound of scores: differences below it do not matter."""


@dataclass(frozen=True)
class Training:
    """Hyperparameters of training.

    Attributes:
        hidden: hidden units of the network of a row; 0: ridge regression only.
        epochs: passes over the KVs.
        batch: KVs of a row per step.
        rate: learning rate of Adam, with cosine decay to 0.
        ridge: strength of the ridge penalty, in KVs.
        seed: of the network's initial weights and the order of KVs.
    """

    hidden: int = 32
    epochs: int = 12
    batch: int = 256
    rate: float = 3e-3
    ridge: float = 10.0
    seed: int = 0


def targets(scores: Tensor) -> Tensor:
    """The regression targets, logarithms of scores."""
    return scores.clamp_min(LEAST_SCORE).log()


@torch.enable_grad()
def train(
    texts: Sequence[Collected], training: Training, on_layer: Callable[[int], None] = lambda layer: None
) -> Predictor:
    """Fit a predictor to texts.

    Args:
        on_layer: called with the index of each finished layer.
    """
    parts: list[tuple[Tensor, ...]] = []
    for layer in range(len(texts[0].scores)):
        keys, values, scores = joined(texts, layer)
        parts.append(_fit_layer(features(keys, values), targets(scores), training, layer))
        on_layer(layer)
    offset, slope, inner, bias, outer = (torch.stack(part).float() for part in zip(*parts, strict=True))
    return Predictor(offset, slope, inner, bias, outer, texts[0].probe)


def _fit_layer(x: Tensor, y: Tensor, training: Training, layer: int) -> tuple[Tensor, ...]:
    """Offset [H], slope [H, F], inner [H, F, M], inner bias and outer [H, M], from x [H, T, F] and y [H, T]."""
    mean = x.mean(dim=1, keepdim=True)
    scale = x.std(dim=1, keepdim=True, correction=0).clamp_min(1e-6)
    x = (x - mean) / scale
    middle = y.mean(dim=1, keepdim=True)
    slope = _ridge(x, y - middle, training.ridge)
    left = y - middle - (x @ slope[..., None])[..., 0]
    inner, bias, outer, offset = _network(x, left, training, training.seed + layer)
    # Fold the standardization into the weights.
    mean, scale = mean[:, 0], scale[:, 0]
    slope, inner = slope / scale, inner / scale[..., None]
    return (
        middle[:, 0] + offset - (slope * mean).sum(dim=-1),
        slope,
        inner,
        bias - (mean[:, None] @ inner)[:, 0],
        outer,
    )


def _ridge(x: Tensor, y: Tensor, ridge: float) -> Tensor:
    """Slopes [H, F] for standardised x [H, T, F] and centred y [H, T]."""
    moment = (x.mT @ x).double()
    moment.diagonal(dim1=-2, dim2=-1).add_(ridge)
    product = (x.mT @ y[..., None]).double()
    return torch.linalg.solve(moment, product)[..., 0].float()


def _network(x: Tensor, y: Tensor, training: Training, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Inner [H, F, M], bias [H, M], outer [H, M] and offset [H] of networks that predict y [H, T] from x [H, T, F]."""
    heads, count, width = x.shape
    generator = torch.Generator().manual_seed(seed)
    hidden = training.hidden
    inner = torch.randn((heads, width, hidden), generator=generator) * width**-0.5
    weights = [inner, torch.zeros(heads, hidden), torch.zeros(heads, hidden), torch.zeros(heads)]
    if not hidden:
        return weights[0], weights[1], weights[2], weights[3]
    for weight in weights:
        weight.requires_grad_()
    inner, bias, outer, offset = weights
    steps = max(1, count // training.batch)
    adam = torch.optim.AdamW(weights, lr=training.rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, training.epochs * steps)
    for _ in range(training.epochs):
        order = torch.randperm(count, generator=generator)
        for step in range(steps):
            chosen = order[step::steps]
            part = functional.silu(x[:, chosen] @ inner + bias[:, None])
            guessed = (part @ outer[..., None])[..., 0] + offset[:, None]
            loss = (
                functional.mse_loss(guessed, y[:, chosen]) * heads
            )  # so that the learning rate of a head does not depend on their number
            adam.zero_grad()
            loss.backward()
            adam.step()
            schedule.step()
    return inner.detach(), bias.detach(), outer.detach(), offset.detach()
