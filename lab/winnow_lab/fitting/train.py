"""Training, for each layer, of a linear function and hidden units that say the logarithm of a replay's score."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from winnow.eviction.predictor import Predictor
from winnow_lab.fitting.collect import Collected, joined

LEAST_SCORE = 1e-3
"""Lower bound of scores, well below what any round keeps: differences below it do not matter."""
_RIDGE = 30.0
"""Strength of the penalty on slopes of standardized inputs, in KVs."""


@dataclass(frozen=True)
class Training:
    """Hyperparameters of training.

    Attributes:
        hidden: hidden units of a layer, which its heads share; 0: a linear function.
        epochs: passes over the KVs.
        batch: tokens per step.
        rate: learning rate of Adam, with cosine decay to 0; a tenth of it for the linear part, which starts at its
            optimum.
        seed: of the initial weights and the order of tokens.
    """

    hidden: int = 64
    epochs: int = 8
    batch: int = 512
    rate: float = 3e-3
    seed: int = 0


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
        x, scores = joined(texts, layer)
        parts.append(_fit_layer(x, scores.clamp_min(LEAST_SCORE).log(), training, training.seed + layer))
        on_layer(layer)
    offset, slope, inner, bias, outer = (torch.stack(part) for part in zip(*parts, strict=True))
    return Predictor(offset, slope, inner, bias, outer, texts[0].probe.cpu())


def _fit_layer(x: Tensor, y: Tensor, training: Training, seed: int) -> tuple[Tensor, ...]:
    """Return offset [H], slope [D, H], inner [D, M], inner bias [M] and outer [M, H], from x [T, D] and y [T, H]."""
    mean, scale = x.mean(dim=0), x.std(dim=0, correction=0).clamp_min(1e-6)
    x = (x - mean) / scale
    offset = y.mean(dim=0)
    linear = [offset, _ridge(x, y - offset)]
    generator = torch.Generator().manual_seed(seed)
    width, hidden = x.shape[1], training.hidden
    inner = torch.randn((width, hidden), generator=generator, device="cpu") * width**-0.5
    network = [inner, torch.zeros(hidden, device="cpu"), torch.zeros(hidden, y.shape[1], device="cpu")]
    if hidden:
        _descend(x, y, linear, network, training, generator)
    offset, slope, inner, bias, outer = (weight.detach() for weight in (*linear, *network))
    # Fold the standardization into the weights.
    slope, inner = slope / scale[:, None], inner / scale[:, None]
    return offset - mean @ slope, slope, inner, bias - mean @ inner, outer


def _ridge(x: Tensor, y: Tensor) -> Tensor:
    """Return slopes [D, H] for standardized x [T, D] and centred y [T, H]."""
    moment = (x.mT @ x).double()
    moment.diagonal().add_(_RIDGE)
    return torch.linalg.solve(moment, (x.mT @ y).double()).float()


def _descend(
    x: Tensor,
    y: Tensor,
    linear: list[Tensor],
    network: list[Tensor],
    training: Training,
    generator: torch.Generator,
) -> None:
    """Minimize the squared error of `linear`, offset and slope, and `network`, inner, bias and outer, in place."""
    for weight in (*linear, *network):
        weight.requires_grad_()
    (offset, slope), (inner, bias, outer) = linear, network
    count, heads = y.shape
    batch = min(training.batch, count)
    groups: list[dict[str, Any]] = [{"params": linear, "lr": training.rate / 10}, {"params": network}]
    adam = torch.optim.AdamW(groups, lr=training.rate, weight_decay=0.01)
    steps = count // batch
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, training.epochs * steps)
    for _ in range(training.epochs):
        order = torch.randperm(count, generator=generator, device="cpu")
        for step in range(steps):
            chosen = order[step * batch : (step + 1) * batch]
            part = x[chosen]
            units = functional.silu(torch.addmm(bias, part, inner))
            guessed = torch.addmm(offset, part, slope) + units @ outer
            # So that the learning rate of a head does not depend on their number.
            loss = functional.mse_loss(guessed, y[chosen]) * heads
            adam.zero_grad()
            loss.backward()
            adam.step()
            schedule.step()
