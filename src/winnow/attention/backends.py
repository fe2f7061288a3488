"""The backends by name."""

import torch

from winnow.attention.interface import AttentionBackend
from winnow.attention.reference import ReferenceBackend
from winnow.errors import ConfigError
from winnow.native import native_kernels


def open_backend(name: str, device: torch.device | str = "cpu") -> AttentionBackend:
    """The backend of that name, one of `winnow.config.ATTENTION_BACKENDS`; "auto" takes the fastest that runs there.

    Raises:
        ConfigError: the backend does not run on that device, or is not part of this installation.
    """
    on_cpu = torch.device(device).type == "cpu"
    if name == "native" or (name == "auto" and on_cpu):
        return _open_native(required=name == "native", on_cpu=on_cpu)
    return ReferenceBackend()


def _open_native(*, required: bool, on_cpu: bool) -> AttentionBackend:
    """The native backend; where it is not `required` and cannot be had, the reference."""
    if not on_cpu:
        raise ConfigError("attention_backend native computes on the CPU: set device to cpu, or leave the backend to auto")
    kernels = native_kernels()
    if kernels is None:
        if required:
            raise ConfigError("attention_backend native is not in this installation: it was built without a compiler")
        return ReferenceBackend()
    from winnow.attention.native import NativeBackend

    return NativeBackend(kernels)
