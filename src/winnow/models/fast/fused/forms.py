"""The norms and activations of a layer, as data: who computes them, native kernels or Triton's, reads what it needs."""

from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING

from torch import Tensor

from winnow import native

if TYPE_CHECKING:
    from winnow.native import RmsNorm


class Activation(Enum):
    """The function of a gate; its names are the native kernels' too."""

    silu = "silu"
    gelu_tanh = "gelu_tanh"


class NormWeight:
    """The weight of a root-mean-square norm.

    Args:
        weight: [size], dense.
        one_plus: rows are multiplied by 1 + weight (Gemma).
    """

    def __init__(self, weight: Tensor, eps: float, *, one_plus: bool = False) -> None:
        assert weight.is_contiguous(), "a kernel reads the weight as one dense row"
        self.weight = weight  # what `native` points at
        self.eps, self.one_plus = eps, one_plus

    @cached_property
    def native(self) -> "RmsNorm":
        """The norm as the native kernels take it; a GPU needs none, nor the extension."""
        return native.RmsNorm(self.weight.data_ptr(), self.eps, self.one_plus)
