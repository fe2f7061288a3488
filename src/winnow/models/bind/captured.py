"""Attention of classes that write it themselves, where others take it from transformers' `AttentionInterface`.

Their code runs as it is. The cache that it gets hands out keys and values that have a shape and no numbers, and what
the code makes of them is noted: products with queries, factors, biases that fall with distance, the softmax. When it
multiplies weights with values, one call computes attention over the paged cache.
"""

import inspect
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from winnow.attention import AttentionSpec
from winnow.errors import UnsupportedModelError
from winnow.models.bind.binding import AttentionStep, EmptyCache, cache_argument

_PRODUCTS = {"matmul", "bmm", "__matmul__"}
_TIMES = {"mul", "__mul__", "__rmul__", "__imul__", "mul_"}
_OVER = {"div", "__div__", "__truediv__", "__itruediv__", "true_divide", "div_"}
_PLUS = {"add", "__add__", "__radd__", "__iadd__", "add_"}
# What changes no number, only its place or type.
_LAYOUT = {"__get__", "contiguous", "dim", "expand", "flatten", "float", "permute", "reshape", "size", "to"}
_LAYOUT |= {"transpose", "type", "type_as", "view"}
# Logits of one row that rise evenly from key to key, up to rounding in bfloat16.
_EVENLY = 1e-2

Slopes = dict[int, Tensor | None]
"""Slope of each query head's logits, [Hq], by the number of the layer; None: it adds no bias to them."""


@dataclass(frozen=True)
class _Described:
    """One layer's attention, as far as the model's code has described it."""

    step: AttentionStep
    number: int
    k: Tensor  # [1, H, T, d]
    v: Tensor
    slopes: Slopes
    q: Tensor  # [T, Hq, d]
    scale: float = 1.0
    bias_scale: float | None = None  # None: nothing was added to logits
    window: int | None = None

    def asked(self, query: Tensor, scale: float) -> Self:
        return replace(self, q=query.reshape(-1, *query.shape[-2:]).transpose(0, 1), scale=scale)

    def times(self, factor: float) -> Self:
        bias_scale = None if self.bias_scale is None else self.bias_scale * factor
        return replace(self, scale=self.scale * factor, bias_scale=bias_scale)

    def plus(self, bias: Tensor, scale: float = 1.0) -> Self:
        """Return it with a bias of logits, [..., Hq or 1, T or 1, T]. What the last query gets tells its slopes."""
        if not any(bias.stride()) or self.bias_scale is not None:
            return self  # one number of all logits, or Falcon's mask, into which its bias was put
        tokens, heads = self.q.shape[:2]
        if tokens > 1 and self.number not in self.slopes and bias.device.type != "meta":
            last = bias.expand(*bias.shape[:-1], tokens)[..., -1, :].reshape(-1, tokens).float()
            rises = last.diff(dim=1)
            if not torch.allclose(rises, rises[:, :1], rtol=_EVENLY):
                reason = "its attention adds to logits what is no multiple of distance"
                raise UnsupportedModelError(f"{reason}; Winnow computes no other bias")
            self.slopes[self.number] = rises[:, 0].expand(heads).contiguous() if bool(rises.any()) else None
        return replace(self, bias_scale=scale)

    def attend(self, weights: Tensor) -> Tensor:
        """Return attention, [..., T, d], where weights are [..., T, T]."""
        slopes = None if self.bias_scale is None else self.slopes.get(self.number)
        if slopes is not None and self.bias_scale is not None:
            slopes = slopes * self.bias_scale
        k, v = self.k[0].transpose(0, 1), self.v[0].transpose(0, 1)
        spec = AttentionSpec(self.scale, self.window, slopes=slopes)
        out = self.step.attend(self.number, self.q.to(k.dtype), k, v, spec)
        return out.transpose(0, 1).reshape(*weights.shape[:-1], v.shape[-1])


class _Captured(Tensor):
    """Keys, values, logits or weights of a layer: a shape without numbers, on the device "meta"."""

    kind: str
    layer: _Described

    @staticmethod
    def of(kind: str, layer: _Described, shape: Any, dtype: torch.dtype) -> "_Captured":
        return _marked(torch.empty(shape, dtype=dtype, device="meta"), kind, layer)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute what the model's code asks for: its description, until all is known. Raises UnsupportedModelError:
        attention here computes no such thing."""
        name, kwargs = func.__name__, kwargs or {}
        parts = [x for x in (*args, *kwargs.values()) if isinstance(x, _Captured)]
        this, kinds = parts[0], [part.kind for part in parts]
        if name in _LAYOUT:
            with torch._C.DisableTorchFunctionSubclass():
                out = func(*args, **kwargs)
            return _marked(out, this.kind, this.layer) if isinstance(out, Tensor) else out
        if name in _PRODUCTS and kinds == ["k"] and args[1] is this:
            return _logits(this, args[0], 1.0)
        if name == "baddbmm" and kinds == ["k"]:
            first = inspect.signature(_baddbmm).bind(*args, **kwargs).arguments
            logits = _logits(this, first["batch1"], first.get("alpha", 1.0))
            return logits.then(logits.layer.plus(first["bias"], first.get("beta", 1.0)))
        if name in _PRODUCTS and kinds == ["weights", "v"]:
            return this.layer.attend(this)
        if kinds == ["logits"]:
            out = this.noted(name, [x for x in args if x is not this], kwargs)
            if out is not None:
                return out
        if name == "dropout" and kinds == ["weights"]:
            return this
        raise UnsupportedModelError(f"its attention computes {name} of {kinds}, which Winnow does not")

    def noted(self, name: str, other: list[Any], kwargs: dict[str, Any]) -> "_Captured | None":
        if name in _TIMES | _OVER and isinstance(other[0], Real):
            factor = float(other[0])
            return self.then(self.layer.times(1.0 / factor if name in _OVER else factor))
        if name in _PLUS and other[0] is None:
            return self
        if name in _PLUS and isinstance(other[0], Tensor):
            return self.then(self.layer.plus(other[0]))
        if name in ("masked_fill", "max"):  # by a mask, and from a least number on
            return self
        if name == "where":
            return self.then(replace(self.layer, window=_window_of(other[0])))
        if name == "softmax":
            return _Captured.of("weights", self.layer, self.shape, kwargs.get("dtype") or self.dtype)
        return None

    def then(self, layer: _Described) -> "_Captured":
        return _Captured.of(self.kind, layer, self.shape, self.dtype)


def _marked(shape: Tensor, kind: str, layer: _Described) -> _Captured:
    found = shape.as_subclass(_Captured)
    found.kind, found.layer = kind, layer
    return found


def _baddbmm(bias: Any, batch1: Any, batch2: Any, beta: Any = 1, alpha: Any = 1) -> None: ...


def _logits(keys: _Captured, query: Tensor, scale: float) -> _Captured:
    shape = (*query.shape[:-1], keys.shape[-1])
    return _Captured.of("logits", keys.layer.asked(query, scale), shape, query.dtype)


def _window_of(mask: Tensor) -> int | None:
    """Return the window that a mask of a model's own leaves; what is given is a part of it, [1, 1, n, n]."""
    whole = mask if mask._base is None else mask._base
    if whole.device.type == "meta":
        return None
    last = whole.flatten(0, -2)[-1]
    window = int(last.sum())
    if not bool(last[-window:].all()):
        raise UnsupportedModelError("its attention masks logits by what is no window; Winnow builds no masks")
    return window if window < len(last) else None


class CapturedCache(EmptyCache):
    """Cache whose keys and values go to a step. A pass of several tokens finds `slopes`, all others read them."""

    def __init__(self, step: AttentionStep, slopes: Slopes) -> None:
        super().__init__()
        self._step, self._slopes, self._count = step, slopes, 0

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Return their shapes. Layers count in the order in which they attend."""
        nothing = key_states.new_empty(0)
        layer = _Described(self._step, self._count, key_states, value_states, self._slopes, nothing)
        self._count += 1
        k = _Captured.of("k", layer, key_states.shape, key_states.dtype)
        return k, _Captured.of("v", layer, value_states.shape, value_states.dtype)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0


class CapturedPasses:
    """Passes of a model that come with a `winnow_step`: they attend through it."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._cache, self._slopes = cache_argument(model), Slopes()
        self._positions: Tensor | None = None
        model.register_forward_pre_hook(self._enter, with_kwargs=True)
        for module in model.modules():
            if isinstance(module, nn.Embedding) and "position_ids" in _arguments(module):
                module.register_forward_pre_hook(self._place, with_kwargs=True)

    def _enter(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._positions = None
        step = kwargs.pop("winnow_step", None)
        if step is None or model.config._attn_implementation in ("eager", "sdpa"):
            return args, kwargs
        self._positions = kwargs["position_ids"][0]
        return args, kwargs | {self._cache: CapturedCache(step, self._slopes)}

    def _place(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Hand positions to a table that the model asks for as many as there are tokens."""
        given = "position_ids" in kwargs or list(_arguments(module)).index("position_ids") < len(args)
        positions = self._positions
        return None if given or positions is None else (args, kwargs | {"position_ids": positions})


def _arguments(module: nn.Module) -> Any:
    return inspect.signature(module.forward).parameters
