"""A model whose linear layers have int8 weights, in plain torch: where no kernels compute, and as their oracle."""

from typing import Any

from torch import nn

from winnow.models.int8_linear import Int8Linear, Int8Weights
from winnow.models.packed_linear import pack_linears
from winnow.models.residuals import decoder_layers


def quantize_model(model: Any, num_layers: int, int8: Int8Weights) -> None:
    """Quantize the weights of a model of transformers in place, those of its embedding with a head that shares them."""
    layers = decoder_layers(model, num_layers)
    for index, layer in enumerate(layers):
        if int8.of_layer(index, len(layers)):
            pack_linears(layer, Int8Linear)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if int8.wide_head or type(head) is not nn.Linear:
        return
    narrow = Int8Linear(head.weight, head.bias)
    if head.weight is embedding.weight:
        rows = narrow.rows(head.weight.dtype)
        embedding.weight = nn.Parameter(rows, requires_grad=False)
    model.set_output_embeddings(narrow)
