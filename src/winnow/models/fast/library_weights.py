"""Linear layers of 8 and 4 bits on GPUs, whose weights and products are torchao's."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Self

import torch
from torch import nn

from winnow.config import ModelConfig
from winnow.errors import ConfigError
from winnow.extras import install_hint
from winnow.models.bind.geometry import decoder_layers
from winnow.models.fast.blocks import WideLayers
from winnow.models.fast.packed_linear import join_linears

# What products read as they are: cuBLAS's of fp8, with a scale for each row, and torch's of int4 in tiles.
_FP8_PRODUCTS, _INT4_PRODUCTS = (8, 9), (8, 0)
_INT4_GROUP = 128
"""Inputs of a feature that share a scale and a zero."""


@dataclass(frozen=True)
class LibraryWeights(WideLayers):
    """Choice of the linear layers that torchao quantizes: decoder layers and head, less those that stay wide.

    A head that shares its weight with the embedding stays wide too; what a form has no product for also does.
    """

    weight_dtype: str = "int8"
    """int8: a scale for each output feature, widened for every product; fp8: E4M3 likewise, multiplied with activations
    of 8 bits where the device has such products, else widened; int4: groups of 128 inputs."""

    @classmethod
    def of(cls, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Self | None:
        """Return the choice as configured; None: no layers have them.

        Raises:
            ConfigError: torchao is not installed, or the device or the dtype has no products of this form.
        """
        form = config.weight_dtype
        if form == "auto":
            return None
        if find_spec("torchao") is None:
            raise ConfigError(
                f"weight_dtype {form} on {device} needs the package torchao: {install_hint('torchao')}"
            )
        if form in ("fp8", "int4") and dtype != torch.bfloat16:
            found = str(dtype).removeprefix("torch.")
            raise ConfigError(f"weight_dtype {form} needs dtype bfloat16, got {found}")
        if form == "int4" and _capability(device) < _INT4_PRODUCTS:
            needed, found = (f"{major}.{minor}" for major, minor in (_INT4_PRODUCTS, _capability(device)))
            raise ConfigError(
                f"weight_dtype int4 needs compute capability {needed}, and {device} has {found}"
            )
        return cls("head" in config.weight_wide, "ends" in config.weight_wide, form)

    def join(self, linears: Sequence[nn.Linear]) -> nn.Module:
        """Return one quantized product in place of several of the same input, which stay as they are."""
        joined = join_linears(linears)
        self._quantize(joined)
        return joined

    def quantize_model(self, model: Any, num_layers: int) -> None:
        """Quantize what is still wide of a model of transformers, in place."""
        layers = decoder_layers(model, num_layers)
        for index, layer in enumerate(layers):
            if self.of_layer(index, len(layers)):
                self._quantize(layer)
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        if not self.wide_head and type(head) is nn.Linear and head.weight is not embedding.weight:
            self._quantize(head)

    def _quantize(self, part: nn.Module) -> None:
        from torchao.quantization import quantize_

        device = next(part.parameters()).device
        quantize_(part, self._config(device), lambda each, _: _is_wide(each))

    def _config(self, device: torch.device) -> Any:
        from torchao import quantization

        plain = {"set_inductor_config": False}
        if self.weight_dtype == "int8":
            return quantization.Int8WeightOnlyConfig(**plain)
        if self.weight_dtype == "int4":
            return quantization.Int4WeightOnlyConfig(
                group_size=_INT4_GROUP, int4_packing_format="tile_packed_to_4d", **plain
            )
        if _capability(device) < _FP8_PRODUCTS:
            return quantization.Float8WeightOnlyConfig(**plain)
        return quantization.Float8DynamicActivationFloat8WeightConfig(
            granularity=quantization.PerRow(), **plain
        )


def _is_wide(part: nn.Module) -> bool:
    return type(part) is nn.Linear and type(part.weight) is nn.Parameter


def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
