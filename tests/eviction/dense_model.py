"""A Llama in float64, one token at a time, and the small arithmetic of the dense oracle."""

import math
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from winnow.attention import Group

Array = NDArray[np.float64]

OF_KEYS = 2e-6
"""How far float32 may carry a key or a value, as a share of it."""
WORDS = ["<s>", "</s>", "<pad>", ".", ",", "?!"] + [f"w{n}" for n in range(91)]
"""The texts of the tokens, each a word."""
RELATIVE = 2e-5
"""How far float32 may carry an attention weight, as a share of it, through all layers of a tiny model."""
ROUNDING = 2e-7
"""Of one float32 operation, with room for a few in a row."""
UNSCALED = 8
"""Times `RELATIVE`, of a softmax of logits that are not divided by the root of head_dim."""


class Llama:
    """The weights of transformers' Llama, and its parts for one token, in float64."""

    def __init__(self, model: torch.nn.Module) -> None:
        config: Any = model.config
        self.num_layers: int = config.num_hidden_layers
        self.num_heads: int = config.num_key_value_heads
        self.group: int = config.num_attention_heads // config.num_key_value_heads
        self.head_dim: int = config.head_dim
        self._eps: float = config.rms_norm_eps
        half = self.head_dim // 2
        frequencies = config.rope_parameters["rope_theta"] ** (-np.arange(half) / half)
        places = np.r_[
            : config.max_position_embeddings, -config.max_position_embeddings : 0
        ]  # also to turn back
        self._cos, self._sin = np.cos(places[:, None] * frequencies), np.sin(places[:, None] * frequencies)
        self._weights = {name: w.double().numpy() for name, w in model.state_dict().items()}

    def embed(self, token_id: int) -> Array:
        return self._weights["model.embed_tokens.weight"][token_id]

    def project(self, layer: int, hidden: Array) -> tuple[Array, Array, Array]:
        """Queries [H, g, d], keys [H, d] and values [H, d], none rotated."""
        normed = self.normed(layer, hidden)
        q, k, v = (self._linear(f"model.layers.{layer}.self_attn.{x}_proj", normed) for x in "qkv")
        rows = (self.num_heads, self.head_dim)
        return q.reshape(self.num_heads, self.group, self.head_dim), k.reshape(rows), v.reshape(rows)

    def join(self, layer: int, attended: Array) -> Array:
        """What attention adds to the hidden state."""
        return self._linear(f"model.layers.{layer}.self_attn.o_proj", attended.ravel())

    def normed(self, layer: int, hidden: Array) -> Array:
        """What attention is computed from."""
        return self._norm(f"model.layers.{layer}.input_layernorm", hidden)

    def output_of(self, layer: int, head: int) -> Array:
        """What a query head adds to the hidden state for what it read, [hidden, d]."""
        weight = self._weights[f"model.layers.{layer}.self_attn.o_proj.weight"]
        return weight[:, head * self.head_dim : (head + 1) * self.head_dim]

    def feed(self, layer: int, hidden: Array) -> Array:
        """What the rest of the layer adds to the hidden state."""
        name = f"model.layers.{layer}"
        normed = self._norm(f"{name}.post_attention_layernorm", hidden)
        gate = self._linear(f"{name}.mlp.gate_proj", normed)
        up = self._linear(f"{name}.mlp.up_proj", normed)
        return self._linear(f"{name}.mlp.down_proj", gate / (1.0 + np.exp(-gate)) * up)

    def logprobs(self, hidden: Array) -> Array:
        logits = self._linear("lm_head", self._norm("model.norm", hidden))
        return logits - logits.max() - math.log(np.exp(logits - logits.max()).sum())

    def rotate(self, x: Array, position: int) -> Array:
        """x, [..., d], at a position."""
        half = self.head_dim // 2
        cos, sin = self._cos[position], self._sin[position]
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def _norm(self, name: str, x: Array) -> Array:
        return x / math.sqrt((x * x).mean() + self._eps) * self._weights[f"{name}.weight"]

    def _linear(self, name: str, x: Array) -> Array:
        return self._weights[f"{name}.weight"] @ x


def floor_share(share: float, of: int) -> int:
    """floor(share * of) of the decimal that was written."""
    return math.floor(Fraction(str(share)) * of)


def aggregate(x: Array, group: Group) -> Array:
    """Query heads, the first dimension of x, to one."""
    if group is Group.MAX:
        return x.max(axis=0)
    return x.sum(axis=0) / (len(x) if group is Group.MEAN else 1)


def softmax(logits: Array) -> Array:
    """Over the last dimension."""
    p = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True)


def cosine(a: Array, b: Array) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def drawn(seed: int, position: int, layer: int, head: int) -> int:
    """The preset `random` draws from 32 bits: multiplied, shifted, mixed; 24 of them count."""
    mask = 0xFFFFFFFF
    x = (position * 0x9E3779B1 + (layer * 8191 + head) * 0x85EBCA77 + seed * 0xC2B2AE3D) & mask
    x = ((x ^ (x >> 15)) * 0x2C1B3C6D) & mask
    x = ((x ^ (x >> 12)) * 0x297A2D39) & mask
    return (x ^ (x >> 15)) >> 8
