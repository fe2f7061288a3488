"""The sampling rules once more, one row at a time and in the plainest numpy: what the vectorised sampler must do."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from winnow.sampling import SamplingParams

CLOSE = 1e-5  # a decision nearer to its border than this may fall either way in float32


@dataclass
class Verdict:
    """What one row may answer: one token, or several where a decision is too close to call."""

    tokens: set[int] = field(default_factory=set)
    close: bool = False


def adjusted(
    logits: Sequence[float],
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    eos: frozenset[int],
) -> NDArray[np.float64]:
    """Logits after bias, min_tokens and penalties."""
    x = np.array(logits, dtype=np.float64)
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    if len(output) < params.min_tokens:
        for token in set(params.stop_token_ids) | (set() if params.ignore_eos else eos):
            x[token] = -np.inf
    for token in range(len(x)):
        if token in prompt or token in output:
            if x[token] > 0:
                x[token] /= params.repetition_penalty
            else:
                x[token] *= params.repetition_penalty
        x[token] -= params.frequency_penalty * output.count(token)
        x[token] -= params.presence_penalty * (token in output)
    return x


def filtered(x: NDArray[np.float64], params: SamplingParams) -> tuple[NDArray[np.float64], bool]:
    """Probabilities after temperature, min-p, top-k and top-p; and whether a token was close to the border."""
    close = False
    weights = np.exp((x - x.max()) / params.temperature)
    for token, weight in enumerate(weights):
        if params.min_p > 0 and weight > 0:
            close |= weight < 1 and abs(weight - params.min_p) < CLOSE * params.min_p
            if weight < params.min_p:
                weights[token] = 0
    order = sorted(range(len(x)), key=lambda token: -weights[token])
    if params.top_k > 0:
        last = weights[order[min(params.top_k, len(x)) - 1]]
        ratios = [weights[token] / last for token in order if last > 0 and weights[token] != last]
        close |= any(abs(ratio - 1) < CLOSE for ratio in ratios)
        weights[weights < last] = 0
    if params.top_p < 1:
        total, mass, last = weights.sum(), 0.0, 0.0
        for token in order:
            if mass >= params.top_p * total:
                break
            mass += weights[token]
            last = weights[token]
            close |= abs(mass / total - params.top_p) < CLOSE
        close |= any(0 < abs(weight / last - 1) < CLOSE for weight in weights)
        weights[weights < last] = 0
    return weights / weights.sum(), close


def verdict(x: NDArray[np.float64], params: SamplingParams, uniform: float) -> Verdict:
    """The token of a row after its penalties, given its random number."""
    if np.isneginf(x).all():
        return Verdict({0})
    if params.is_greedy:
        best = [token for token in range(len(x)) if x[token] > x.max() - CLOSE]
        return Verdict({int(x.argmax())}, close=len({x[token] for token in best}) > 1)
    probabilities, close = filtered(x, params)
    low = 0.0
    for token, probability in enumerate(probabilities):
        high = low + probability
        if uniform < high:
            return Verdict({token}, close or uniform > high - CLOSE or uniform < low + CLOSE)
        low = high
    return Verdict({len(x) - 1}, close=True)
