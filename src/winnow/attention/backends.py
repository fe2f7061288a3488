"""Attention backends by name."""

import warnings
from importlib.util import find_spec

import torch

from winnow.attention.interface import AttentionBackend
from winnow.attention.reference import ReferenceBackend
from winnow.cache import CacheLayout
from winnow.errors import ConfigError
from winnow.extras import install_hint
from winnow.native import native_kernels


def open_backend(
    name: str, device: torch.device | str = "cpu", layout: CacheLayout | None = None
) -> AttentionBackend:
    """Create the backend of that name, one of `winnow.config.ATTENTION_BACKENDS`.

    "auto" selects the fastest one available on `device` that reads KVs as `layout` stores them; None: plain vectors.

    Raises:
        ConfigError: the backend does not run on that device, is not part of this installation, or does not read such
            KVs.
    """
    on_cpu = torch.device(device).type == "cpu"
    if name == "native" or (name == "auto" and on_cpu):
        return _open_native(layout, required=name == "native", on_cpu=on_cpu)
    if name == "triton" or (name == "auto" and torch.device(device).type == "cuda"):
        return _open_triton(device, layout, required=name == "triton")
    return ReferenceBackend()


def _open_native(layout: CacheLayout | None, *, required: bool, on_cpu: bool) -> AttentionBackend:
    """Create the native backend, or the reference if it is unavailable and not `required`."""
    if not on_cpu:
        raise ConfigError(
            "attention_backend native computes on the CPU: set device to cpu, or leave the backend to auto"
        )
    kernels = native_kernels()
    if kernels is None:
        if required:
            raise ConfigError(
                "attention_backend native is not in this installation: it was built without a compiler"
            )
        return ReferenceBackend()
    from winnow.attention.native import NativeBackend, reads

    read = layout is None or reads(layout.codec)
    return NativeBackend(kernels) if _reads(read, layout, "native", required) else ReferenceBackend()


def _open_triton(
    device: torch.device | str, layout: CacheLayout | None, *, required: bool
) -> AttentionBackend:
    """Create the Triton backend, or the reference if it is unavailable and not `required`."""
    if find_spec("triton") is None:
        missing = f"the package triton is not installed: {install_hint('triton')}"
        if required:
            raise ConfigError(f"attention_backend triton cannot be used, {missing}")
        warnings.warn(f"attention runs in plain torch, many times slower: {missing}", stacklevel=3)
        return ReferenceBackend()
    from winnow.attention.triton import TritonBackend
    from winnow.attention.triton.side_format import reads

    read = layout is None or (reads(layout.codec) and not layout.wide.any)
    return TritonBackend(device) if _reads(read, layout, "triton", required) else ReferenceBackend()


def _reads(reads: bool, layout: CacheLayout | None, backend: str, required: bool) -> bool:
    """Whether a backend `reads` KVs as a cache stores them.

    Raises:
        ConfigError: it does not, and is `required`.
    """
    if required and not reads:
        assert layout is not None, "every backend reads plain vectors"
        wide = f" and kept wide in part (kv_wide={layout.wide})" * layout.wide.any
        raise ConfigError(
            f"attention_backend {backend} does not read KVs stored as {layout.codec.name} (kv_cache_dtype){wide}: "
            "leave the backend to auto, or take reference"
        )
    return reads
