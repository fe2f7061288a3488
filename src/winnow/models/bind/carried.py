"""Keyword arguments that a model's layers do not hand on to their attention: they are carried there."""

import inspect
from typing import Any

from torch import nn


class Carrier:
    """Holder of the steps of the passes that run, of the model or of a layer by itself; empty between them."""

    def __init__(self) -> None:
        self._steps: list[Any] = []

    def bind(self, model: nn.Module) -> None:
        """Let every part that takes further arguments get the step that the whole was called with."""
        for module in model.modules():
            if _takes_more(module):
                module.register_forward_pre_hook(self._enter, with_kwargs=True)
                module.register_forward_hook(self._leave, always_call=True)

    def _enter(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        step = kwargs.get("winnow_step", self._steps[-1] if self._steps else None)
        self._steps.append(step)
        return None if step is None else (args, kwargs | {"winnow_step": step})

    def _leave(self, *_: Any) -> None:
        self._steps.pop()


def _takes_more(module: nn.Module) -> bool:
    parameters = inspect.signature(module.forward).parameters.values()
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
