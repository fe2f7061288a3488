"""Forward passes of a transformers model over a padded batch, with the inputs that `generate` would pass."""

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from winnow.models.bind.binding import cache_argument
from winnow_lab.padded.cache import PaddedCache


class PaddedModel:
    """Calls a model of any class with the arguments that its class takes.

    A model without `position_ids` derives positions from the mask or from columns.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        parameters = inspect.signature(type(model).forward).parameters
        self.takes_positions = "position_ids" in parameters
        self._cache_argument = cache_argument(model)
        self._takes_kept = "logits_to_keep" in parameters

    @property
    def is_pure(self) -> bool:
        """Return whether a forward pass does not change the model, so that two may run in parallel.

        The exception is rotary embeddings that change their frequencies with the sequence length.
        """
        kinds = [str(getattr(module, "rope_type", "")) for module in self.model.modules()]
        return not any("dynamic" in kind or "longrope" in kind for kind in kinds)

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def device(self) -> torch.device:
        return self.model.device

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
    """Return int64 [rows, columns]: 1 in each row from `first` to before `last` of its span."""
    first, last = torch.tensor(spans, device=device).T[:, :, None]
    column = torch.arange(columns, device=device)
    return ((column >= first) & (column < last)).long()
