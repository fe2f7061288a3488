"""Attention in Triton kernels, for GPUs. Importing it imports triton; `open_backend` does so when asked."""

from winnow.attention.triton.backend import TritonBackend

__all__ = ["TritonBackend"]
