"""Numbers by which models know positions, where they keep a table that does not begin with the first token's."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from winnow.models.bind.binding import ATTENTION_NAME, cache_argument


class _Counted(Cache):
    """Cache of a packed pass that holds nothing: layers that count tokens behind those in a cache get positions."""

    def __init__(self, positions: Tensor) -> None:
        super().__init__(layers=[])
        self._before = positions - torch.arange(len(positions), device=positions.device)

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """Return the tokens before a sequence's first, for each token, [T]."""
        return self._before


def bind_counted_positions(model: PreTrainedModel) -> None:
    """Let layers that scale queries by positions of their own count (Llama 4) take those of a packed pass."""
    if not any(getattr(module, "attn_temperature_tuning", False) for module in model.modules()):
        return
    cache = cache_argument(model)

    def enter(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if model.config._attn_implementation != ATTENTION_NAME:
            return None
        return args, kwargs | {cache: _Counted(kwargs["position_ids"][0])}

    model.register_forward_pre_hook(enter, with_kwargs=True)


def bind_positions(model: PreTrainedModel, attention: AbstractContextManager[None]) -> int:
    """Let a model take positions that are counted from 0, whatever it calls the first; return that number.

    RoBERTa's table begins with places that are none; the model adds them itself only where it is given no positions.

    Args:
        attention: a context in which the model attends by code of its own.
    """
    with attention:
        first = _first_position(model)
    if first:

        def shift(
            _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
            given = kwargs.get("position_ids")
            return None if given is None else (args, kwargs | {"position_ids": given + first})

        model.register_forward_pre_hook(shift, with_kwargs=True)
    return first


@torch.inference_mode()
def _first_position(model: PreTrainedModel) -> int:
    """Return what the model itself looks up for a first token beyond what it does for position 0."""
    words = model.get_input_embeddings()
    tables = [each for each in model.modules() if isinstance(each, nn.Embedding) and each is not words]
    if not tables:
        return 0
    found: list[list[Tensor]] = []

    def note(_: nn.Module, args: tuple[Any, ...]) -> None:
        if isinstance(args[0], Tensor):  # RoFormer asks for as many as there are tokens
            found[-1].append(args[0])

    hooks = [table.register_forward_pre_hook(note) for table in tables]
    padding = getattr(model.config.get_text_config(), "pad_token_id", None)
    token = torch.full((1, 1), int(padding == 0), device=model.device)
    more: tuple[dict[str, Any], ...] = ({}, {"position_ids": torch.zeros_like(token)})
    try:
        for given in more:
            found.append([])
            model(input_ids=token, use_cache=False, **given)
    except TypeError:  # it takes no positions
        return 0
    finally:
        for hook in hooks:
            hook.remove()
    own, zero = found
    return max((int(a.max() - b.max()) for a, b in zip(own, zero, strict=True)), default=0)
