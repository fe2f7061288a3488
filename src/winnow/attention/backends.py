"""Attention backends by name, and why one cannot serve a cache."""

import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import NamedTuple

import torch

from winnow.attention.interface import AttentionBackend
from winnow.attention.reference import ReferenceBackend
from winnow.cache import CacheLayout
from winnow.errors import ConfigError
from winnow.process.extras import install_hint
from winnow.process.native import native_kernels


class BackendKind(NamedTuple):
    """A way to compute attention, which `auto` tries on devices of the type `device`; None: on any."""

    device: str | None
    refusal: Callable[[torch.device, CacheLayout | None], str | None]
    """Why it cannot serve a cache of that layout on that device; None: it can."""
    open: Callable[[], AttentionBackend]


def open_backend(
    name: str, device: torch.device | str = "cpu", layout: CacheLayout | None = None
) -> AttentionBackend:
    """Create the backend of that name, one of `winnow.config.ATTENTION_BACKENDS`.

    "auto" selects the first of `BACKENDS` that has no refusal; without `layout` KVs are plain vectors. Raises
    ConfigError: the backend refuses; says why.
    """
    return BACKENDS[backend_name(name, device, layout)].open()


def backend_name(name: str, device: torch.device | str = "cpu", layout: CacheLayout | None = None) -> str:
    where = torch.device(device)
    if name != "auto":
        why = BACKENDS[name].refusal(where, layout)
        if why is not None:
            raise ConfigError(f"attention_backend {name} {why}")
        return name
    for each, kind in BACKENDS.items():
        if kind.device in (None, where.type):
            why = kind.refusal(where, layout)
            if why is None:
                return each
            if kind.device == "cuda" and find_spec("triton") is None:
                warnings.warn(f"attention runs in plain torch, many times slower: {each} {why}", stacklevel=3)
    raise AssertionError("the reference refuses nothing")


def _native_refusal(device: torch.device, layout: CacheLayout | None) -> str | None:
    if device.type != "cpu":
        return "computes on the CPU: set device to cpu, or leave the backend to auto"
    if native_kernels() is None:
        return "is not in this installation: it was built without a compiler"
    from winnow.attention.native import reads

    if layout is not None and any(group.key_size != group.value_size for group in layout.groups):
        return "reads keys and values of one size: leave the backend to auto, or take reference"
    return None if layout is None else _unread(layout, reads(*layout.codecs))


def _triton_refusal(device: torch.device, layout: CacheLayout | None) -> str | None:
    if find_spec("triton") is None:
        return f"cannot be used, the package triton is not installed: {install_hint('triton')}"
    from winnow.attention.triton.launch import device_refusal
    from winnow.attention.triton.side_format import reads

    why = device_refusal(device)
    if why is not None or layout is None:
        return why
    near = [group.kind(layout.block_size) for group in layout.groups if group.tier is None]
    if len(set(near)) > 1 or len(set(layout.heads)) > 1:
        return "reads layers with the same heads alone: leave the backend to auto, or take reference"
    return _unread(layout, reads(*layout.codecs) and not layout.wide.any)


def _unread(layout: CacheLayout, reads: bool) -> str | None:
    wide = f" and kept wide in part (kv_wide={layout.wide})" * layout.wide.any
    stored = f"{layout.codec_names} (kv_cache_dtype){wide}"
    refused = f"does not read KVs stored as {stored}: leave the backend to auto, or take reference"
    return None if reads else refused


def _open_native() -> AttentionBackend:
    from winnow.attention.native import NativeBackend

    kernels = native_kernels()
    assert kernels is not None, "it would have refused"
    return NativeBackend(kernels)


def _open_triton() -> AttentionBackend:
    from winnow.attention.triton import TritonBackend

    return TritonBackend()


BACKENDS = {
    "native": BackendKind("cpu", _native_refusal, _open_native),
    "triton": BackendKind("cuda", _triton_refusal, _open_triton),
    "reference": BackendKind(None, lambda device, layout: None, ReferenceBackend),
}
"""The fastest first."""
