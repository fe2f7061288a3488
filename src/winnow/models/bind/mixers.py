"""Binding of transformers' layers that keep a state in place of KVs: convolutions and recurrences over tokens.

Their own code runs. It takes and leaves its states in a cache of transformers', so a packed step hands the model one
that splits the packed row: sequences with one token are one batch, and each longer piece of a prompt goes by itself.
"""

import inspect
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.cache_utils import LinearAttentionLayer

from winnow.attention import Spans
from winnow.cache.recurrent import RecurrentStates, StateShape
from winnow.models.bind.binding import EmptyCache
from winnow.models.bind.state_steps import StateRows, steps_in_place

# What layers call the cache that has their states.
_CACHE_NAMES = ("cache", "cache_params", "past_key_values")


class PackedStates(EmptyCache):
    """Cache that a packed step hands to the model. KVs are none of it: attention is bound by itself."""

    def __init__(self, states: RecurrentStates, spans: Spans) -> None:
        super().__init__()
        self._states, self._spans = states, spans

    def run(
        self,
        layer: int,
        compute: Callable[[Tensor, Cache], Any],
        hidden: Tensor,
        *,
        continues: bool = True,
        in_place: frozenset[str] = frozenset(),
    ) -> Any:
        """Return what a layer gives for a packed row, [1, T, size], sequence by sequence.

        Args:
            compute: it gives that for rows alike, [B, n, size], that have a cache.
            continues: a piece of several tokens may begin with a state; else such a piece goes token by token.
            in_place: kinds of states that one token of each changes where they lie (`winnow.models.bind.state_steps`).
        """
        spans, found = self._spans, []
        decodes = spans.num_decodes
        if decodes:
            rows, slots = hidden[0, :decodes, None], spans.device_slots[:decodes]
            out = self._compute(layer, compute, rows, slots, in_place=in_place)
            found.append(_each(out, lambda part: part.transpose(0, 1)))
        for index in range(decodes, len(spans.counts)):
            first = int(spans.starts[index])
            piece = hidden[:, first : first + int(spans.counts[index])]
            slot = spans.device_slots[index : index + 1]
            whole = continues or not spans.first_position[index]
            parts = [piece] if whole else piece.split(1, dim=1)
            found += [self._compute(layer, compute, part, slot) for part in parts]
        return found[0] if len(found) == 1 else _joined(found)

    def _compute(
        self,
        layer: int,
        compute: Callable[[Tensor, Cache], Any],
        hidden: Tensor,
        slots: Tensor,
        *,
        in_place: frozenset[str] = frozenset(),
    ) -> Any:
        rows = self._states.by_layer[layer]
        numbers = 1 + max(index for _, index in rows)
        held = LinearAttentionLayer(number_of_states=numbers)
        for (kind, index), row in rows.items():
            held.has_previous_state[index] = True
            state: Any = StateRows(row, slots) if kind in in_place else row.index_select(0, slots)
            if kind == "conv":
                held.conv_states[index], held.is_conv_states_initialized[index] = state, True
                held.conv_kernel_size[index] = row.shape[-1]
                held.dtype, held.device = row.dtype, row.device
            else:
                held.recurrent_states[index], held.is_recurrent_states_initialized[index] = state, True
        out = compute(hidden, _Held(layers=[held] * (layer + 1)))
        for (kind, index), row in rows.items():
            if kind not in in_place:
                state = held.conv_states[index] if kind == "conv" else held.recurrent_states[index]
                row.index_copy_(0, slots, state)
        if not isinstance(out, tuple):
            return out
        # Some return their state beside, which is not read there.
        return tuple(part if part.shape[:2] == hidden.shape[:2] else None for part in out)


class _Held(Cache):
    """Cache of rows that have states, in one layer alone."""

    def get_linear_cache(self, layer_idx: int) -> Tensor:
        return self.layers[layer_idx].recurrent_states[0]

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        self.layers[layer_idx].recurrent_states[0] = linear_cache


class StateProbe(EmptyCache):
    """Cache without a past that writes down the shapes of states, and in `mixers` which modules of the model gave them,
    with their numbers as layers and what they got, [1, 1, size]."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.shapes: dict[tuple[int, str, int], StateShape] = {}
        self.mixers: dict[nn.Module, tuple[int, Tensor]] = {}
        self._model = model
        self._running: list[tuple[nn.Module, Any]] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record which module runs, for a while."""

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._running.append((module, next(iter((*args, *kwargs.values())), None)))

        def leave(module: nn.Module, _: Any, __: Any) -> None:
            self._running.pop()

        modules = list(self._model.modules())
        hooks = [module.register_forward_pre_hook(enter, with_kwargs=True) for module in modules]
        hooks += [module.register_forward_hook(leave) for module in modules]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return False

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Return None: there is no past."""

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Return None: there is no past."""

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: Any = None, **_: Any
    ) -> Tensor:
        """Record the state of a convolution; return its inputs behind the zeros that stand for its past."""
        size = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
        self._note("conv", layer_idx, state_idx, (*conv_states.shape[1:-1], size), conv_states)
        return nn.functional.pad(conv_states, (max(size - conv_states.shape[-1], 0), 0))

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> Tensor:
        self._note("recurrent", layer_idx, state_idx, tuple(recurrent_states.shape[1:]), recurrent_states)
        return recurrent_states

    def get_linear_cache(self, layer_idx: int) -> None:
        """Return None: there is no past."""

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        self._note("recurrent", layer_idx, 0, tuple(linear_cache.shape[1:]), linear_cache)

    def _note(self, kind: str, layer: int, index: int, shape: tuple[int, ...], state: Tensor) -> None:
        dtype = str(state.dtype).removeprefix("torch.")
        self.shapes[layer, kind, index] = StateShape(layer, kind, index, shape, dtype)
        module, given = self._running[-1]
        self.mixers[module] = layer, given


def bind_mixers(probe: StateProbe) -> None:
    """Let modules that keep states split packed rows, where a packed step runs; else they are as they were."""
    ways: dict[type[nn.Module], tuple[bool, frozenset[str]]] = {}
    for module, (layer, given) in probe.mixers.items():
        kind: Any = type(module)
        own = kind.forward.__get__(module)  # as it is before any binding
        stepping, kinds = steps_in_place(kind)
        stepping = own if stepping is None else stepping.__get__(module)
        if kind not in ways:
            states = [each for each in probe.shapes.values() if each.layer == layer]
            same = bool(kinds) and _steps_alike(own, stepping, kinds, states, given)
            ways[kind] = _continues(own, states, given), kinds if same else frozenset()
        continues, in_place = ways[kind]
        module.forward = _packed(layer, stepping if in_place else own, continues=continues, in_place=in_place)


@torch.inference_mode()
def _tried(
    forward: Callable[..., Any],
    states: list[StateShape],
    given: Tensor,
    spans: Spans,
    kinds: Collection[str],
    in_place: frozenset[str] = frozenset(),
) -> tuple[list[Tensor], list[Tensor]]:
    """Return what a layer's forward gives for random rows like `given`, [1, 1, size], and the states that it leaves;
    those of `kinds` are random before, the others 0."""
    chance = torch.Generator().manual_seed(0)
    size = (1, int(spans.counts.sum()), given.shape[-1])
    hidden = torch.randn(size, generator=chance, device="cpu").to(given)
    held = RecurrentStates(states, int(spans.slots.max()) + 1, given.device)
    rows = held.by_layer[states[0].layer]
    for (kind, _), each in rows.items():
        if kind in kinds:
            each.copy_(torch.randn(each.shape, generator=chance, device="cpu"))
    _, cache_name = _parameters(forward)
    packed = _packed(states[0].layer, forward, in_place=in_place)
    out = packed(hidden, **{cache_name: PackedStates(held, spans)})
    parts = out if isinstance(out, tuple) else (out,)
    return [part.float() for part in parts if part is not None], [each.float() for each in rows.values()]


def _steps_alike(
    own: Callable[..., Any],
    stepping: Callable[..., Any],
    in_place: frozenset[str],
    states: list[StateShape],
    given: Tensor,
) -> bool:
    """Return whether one token of two sequences gives the same, and leaves the same states, by both forwards."""
    if given.device.type != "cpu":
        return False
    spans = Spans.build([2, 0], [3, 4], [1, 1], np.array([4, 5]), given.device)
    kinds, tolerance = {each.kind for each in states}, 1e-4 if given.dtype == torch.float32 else 3e-2
    expected = _tried(own, states, given, spans, kinds)
    try:
        found = _tried(stepping, states, given, spans, kinds, in_place)
    except (AttributeError, RuntimeError, TypeError):  # it does something else with them
        return False
    pairs = zip((*found[0], *found[1]), (*expected[0], *expected[1]), strict=True)
    return all(float((a - b).abs().max()) <= tolerance * float(b.abs().max()) for a, b in pairs)


def _continues(own: Callable[..., Any], states: list[StateShape], given: Tensor) -> bool:
    """Return whether a piece of several tokens begins with the states that there are, each kind of which then tells:
    transformers' scan of Mamba's first kind begins with none, whatever its cache holds."""
    spans = Spans.build([0], [1], [3], np.array([4]), given.device)
    without, _ = _tried(own, states, given, spans, ())
    for kind in {each.kind for each in states}:
        out, _ = _tried(own, states, given, spans, (kind,))
        if all(map(torch.equal, out, without)):
            return False
    return True


def _packed(
    layer: int, own: Callable[..., Any], *, continues: bool = True, in_place: frozenset[str] = frozenset()
) -> Callable[..., Any]:
    """Return the forward of a module that keeps states, over packed rows, around its own."""
    names, cache_name = _parameters(own)
    hidden_name, parameters = names[0], inspect.signature(own).parameters
    required = {name: None for name in names if parameters[name].default is inspect.Parameter.empty}

    def forward(*args: Any, **kwargs: Any) -> Any:
        # What layers hand on to their kernels beside it is meant for attention.
        given = required | dict(zip(names, args, strict=False))
        given |= {name: kwargs[name] for name in names if name in kwargs}
        cache, hidden = given.get(cache_name), given.pop(hidden_name)
        if not isinstance(cache, PackedStates):
            return own(hidden, **given | {cache_name: None})

        def compute(rows: Tensor, held: Cache) -> Any:
            return own(rows, **given | {cache_name: held})

        return cache.run(layer, compute, hidden, continues=continues, in_place=in_place)

    return forward


def _parameters(own: Callable[..., Any]) -> tuple[list[str], str]:
    parameters = inspect.signature(own).parameters
    names = [name for name in parameters if parameters[name].kind is not inspect.Parameter.VAR_KEYWORD]
    [cache_name] = [name for name in names if name in _CACHE_NAMES]
    return names, cache_name


def _each(out: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(out, tuple):
        return tuple(None if part is None else change(part) for part in out)
    return change(out)


def _joined(found: Any) -> Any:
    if isinstance(found[0], tuple):
        return tuple(map(_joined, zip(*found, strict=True)))
    return None if any(part is None for part in found) else torch.cat(found, dim=1)
