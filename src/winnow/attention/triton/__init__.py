"""Attention in Triton kernels, for GPUs. Importing this package imports triton; `open_backend` does so on demand."""

from winnow.attention.triton.backend import TritonBackend

__all__ = ["TritonBackend"]
