"""A model whose linear layers have int8 weights, in plain torch: where no kernels compute, and as their oracle."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from winnow.models.bind.residuals import decoder_layers
from winnow.models.fast.int8_linear import Int8Linear, Int8Weights, keep_blocks, quantize_linears
from winnow.models.fast.packed_linear import join_biases, pack_linears


def quantize_model(model: Any, num_layers: int, int8: Int8Weights) -> None:
    """Quantize the weights of a model of transformers in place, those of its embedding with a head that shares them."""

    def narrow(linears: Sequence[nn.Linear]) -> Int8Linear:
        return Int8Linear(*quantize_linears(linears, blocks=int8.blocks), join_biases(linears))

    layers = decoder_layers(model, num_layers)
    for index, layer in enumerate(layers):
        if int8.of_layer(index, len(layers)):
            pack_linears(layer, narrow)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if int8.wide_head or type(head) is not nn.Linear:
        return
    narrow_head = narrow([head])
    if head.weight is embedding.weight:
        rows = narrow_head.rows(head.weight.dtype)
        embedding.weight = nn.Parameter(rows, requires_grad=False)
    model.set_output_embeddings(narrow_head)


def round_beside_blocks(model: Any, num_layers: int, int8: Int8Weights, dtype: torch.dtype) -> None:
    """Bring a float32 model's parameters to a type, in place, after weights that will be in blocks were quantized."""
    layers = decoder_layers(model, num_layers)
    parts = [layer for index, layer in enumerate(layers) if int8.of_layer(index, len(layers))]
    if not int8.wide_head:
        parts.append(model.get_output_embeddings())
    for part in parts:
        for linear in part.modules():
            if type(linear) is nn.Linear:
                keep_blocks(linear)
    for parameter in model.parameters():  # buffers stay: angles of rotary positions are of float32
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
