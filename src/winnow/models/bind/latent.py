"""Attention over latents (MLA) in absorbed form: what expands a latent to heads is applied to queries and to outputs.

A token keeps its latent and one rotated key of all heads, beside each other: the only key there is, and the value is
its first part. With k = U c and v = V c for a latent c, q . k = (U^T q) . c, and a sum of values is V times that of
latents.

Source: DeepSeek-V2 (2405.04434), section 2.1.2.
"""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn


class LatentHeads(nn.Module):
    """Expansion of latents to keys and values of heads, in place of a module's `kv_b_proj`.

    Linear layers that are packed are of torch's own class: this weight stays as it is.
    """

    def __init__(self, own: nn.Linear, key_size: int, num_heads: int) -> None:
        super().__init__()
        self.weight = own.weight
        self._key_size, self._num_heads = key_size, num_heads

    def forward(self, latents: Tensor) -> Tensor:
        """Return keys and values, as the layer in whose place it is."""
        return nn.functional.linear(latents, self.weight)

    def absorb(self, query: Tensor) -> Tensor:
        """Return queries of latents and rotated keys, [1, Hq, T, rank + rotated], from those of keys."""
        up = self.weight.unflatten(0, (self._num_heads, -1))[:, : self._key_size]
        own, rotated = query.tensor_split([self._key_size], dim=-1)
        return torch.cat([own @ up, rotated], dim=-1)

    def expand(self, out: Tensor) -> Tensor:
        """Return attention of values, [T, Hq, v], from that of keys, [T, Hq, rank + rotated]."""
        up = self.weight.unflatten(0, (self._num_heads, -1))[:, self._key_size :]
        latents = out[..., : self.weight.shape[1]]
        return (latents.transpose(0, 1) @ up.mT).transpose(0, 1).contiguous()


def bind_latents(model: nn.Module, attentions: Collection[str]) -> None:
    """Let modules that expand latents hand latents to attention, where it is one of these implementations."""
    module: Any
    for module in model.modules():
        own, up = (getattr(module, name, None) for name in ("expand_kv", "kv_b_proj"))
        if own is not None and type(up) is nn.Linear and getattr(up, "bias", None) is None:
            module.kv_b_proj = LatentHeads(up, module.qk_nope_head_dim, module.num_heads)
            module.expand_kv = _latents_or(own, module, attentions)


def _latents_or(own: Callable[..., Any], module: Any, attentions: Collection[str]) -> Callable[..., Any]:
    def expand_kv(latents: Tensor, rotated: Tensor) -> Any:
        if module.config._attn_implementation in attentions:
            return torch.cat([latents, rotated], dim=-1), latents
        return own(latents, rotated)

    return expand_kv
