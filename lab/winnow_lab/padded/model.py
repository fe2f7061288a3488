"""A transformers model over a padded batch: forward passes with the inputs that `generate` would pass, and the shape of
a token's KVs."""

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from winnow.errors import UnsupportedModelError
from winnow.models.bind.binding import cache_argument
from winnow.models.model.damage import first_line
from winnow_lab.padded.cache import KVShape, LayerShape, PaddedCache


def probe_shape(model: PreTrainedModel) -> KVShape:
    """Run two tokens through the model with transformers' own cache, and read the shapes of the KVs.

    Raises:
        UnsupportedModelError: the model has no cache, or one of other contents than keys and values by token.
    """
    name = type(model).__name__
    for part in model.modules():
        if getattr(part, "is_causal", True) is False and hasattr(part, "layer_idx"):
            raise UnsupportedModelError(
                f"{name} is not supported: {type(part).__name__} is not causal, and Winnow generates token by token"
            )
    cache = DynamicCache(config=model.config)
    tokens = torch.zeros((1, 2), dtype=torch.int64, device=model.device)
    try:
        with torch.inference_mode():
            model(
                input_ids=tokens,
                attention_mask=torch.ones_like(tokens),
                use_cache=True,
                **{cache_argument(model): cache},
            )
    # Models of other kinds expect caches of other classes, and fail on this one with any exception.
    except Exception as error:
        raise UnsupportedModelError(
            f"{name} is not supported: it does not run over a cache ({first_line(error)})"
        ) from error
    for index, layer in enumerate(cache.layers):
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) or layer.keys is None:
            raise UnsupportedModelError(
                f"{name} is not supported: layer {index} keeps no keys and values by token ({type(layer).__name__})"
            )
    if not cache.layers:
        raise UnsupportedModelError(f"{name} is not supported: it keeps no cache")
    return KVShape(
        tuple(
            LayerShape(layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3], layer.keys.dtype)
            for layer in cache.layers
        )
    )


class PaddedModel:
    """Calls a model of any class with the arguments that its class takes.

    A model without `position_ids` derives positions from the mask or from columns.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.dtype, self.device = model, model.dtype, model.device
        parameters = inspect.signature(type(model).forward).parameters
        self.takes_positions = "position_ids" in parameters
        self._cache_argument = cache_argument(model)
        self._takes_kept = "logits_to_keep" in parameters

    @property
    def is_pure(self) -> bool:
        """Whether a forward pass does not change the model, so that two may run in parallel.

        The exception is rotary embeddings that change their frequencies with the sequence length.
        """
        kinds = [str(getattr(module, "rope_type", "")) for module in self.model.modules()]
        return not any("dynamic" in kind or "longrope" in kind for kind in kinds)

    def forward(
        self, cache: PaddedCache, tokens: Tensor, positions: Tensor, mask: Tensor, keep: list[int] | None
    ) -> Tensor:
        """Compute new columns and write their KVs after the cache's window.

        Args:
            tokens: int64 [rows, width].
            positions: int64 [rows, width]; token indices within the query, not counting padding.
            mask: int64 [rows, columns + width], over the window and the new columns; 1 where a row has a token.
            keep: new columns whose logits are returned; None: all.

        Returns:
            Logits [rows, kept, V].
        """
        width = tokens.shape[1]
        kept = list(range(width)) if keep is None else keep
        extra: dict[str, object] = {}
        if self.takes_positions:
            extra["position_ids"] = positions
        if self._takes_kept:
            only_last = kept == [width - 1]
            extra["logits_to_keep"] = 1 if only_last else torch.tensor(kept, device=tokens.device)
        cache.begin()
        output = self.model(
            input_ids=tokens,
            attention_mask=mask,
            use_cache=True,
            return_dict=True,
            **{self._cache_argument: cache},
            **extra,
        )
        logits: Tensor = output.logits
        return logits if logits.shape[1] == len(kept) else logits[:, kept]


def span_mask(spans: Sequence[tuple[int, int]], columns: int, device: torch.device) -> Tensor:
    """Int64 [rows, columns]: 1 in each row from `first` to before `last` of its span."""
    first, last = torch.tensor(spans, device=device).T[:, :, None]
    column = torch.arange(columns, device=device)
    return ((column >= first) & (column < last)).long()
