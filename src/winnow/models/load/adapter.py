"""An adapter (LoRA), merged into linear layers when a model is loaded: a directory of peft's, or a GGUF file.

A layer's weight W becomes W + scale * B A, in float32 on the way; scale is alpha / rank, or alpha / sqrt(rank) where
the adapter says so (https://arxiv.org/abs/2106.09685, https://arxiv.org/abs/2312.03732). Layers in blocks become
numbers for good.
"""

import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from winnow.errors import UnsupportedModelError, WinnowError
from winnow.models.model.blocks import own_blocks, widen_for_good
from winnow.models.model.damage import first_line, read_object
from winnow.process.digest import ADAPTER_FILES

log = logging.getLogger("winnow.models")

_PREFIX, _LAYERS = "base_model.model.", re.compile(r"(?:^|\.)(layers\.\d+\..*|h\.\d+\..*)$")
# What changes more than a weight's sum with a product, and the values that ask for nothing.
_UNSERVED: Mapping[str, tuple[Any, ...]] = {
    "use_dora": (False,), "lora_bias": (False,), "bias": ("none",), "modules_to_save": ([],),
    "layer_replication": ([],), "trainable_token_indices": ([],), "target_parameters": ([],),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"), "alora_invocation_tokens": ([],),
}  # fmt: skip


@dataclass(frozen=True)
class _Product:
    a: Tensor  # [rank, in_features]
    b: Tensor  # [out_features, rank]
    scale: float


def merge_adapter(model: nn.Module, path: Path) -> None:
    """Merge the adapter at `path` into a model of transformers. Raises UnsupportedModelError: it is damaged, has parts
    of another kind than factors of linear layers, or was made for another model."""
    try:
        products = dict(_of_gguf(path, model) if path.is_file() else _of_peft(path))
        if not products:
            raise ValueError("it has no factors of layers")
        found = [_merge(model, name, product) for name, product in products.items()]
    except WinnowError:
        raise
    except Exception as error:  # safetensors, gguf and torch raise what they like over a stranger's files
        raise UnsupportedModelError(f"lora: cannot use {path}: {first_line(error)}") from error
    ranks, scales = (
        "/".join(f"{each:g}" for each in sorted(set(values)))
        for values in (
            [len(each.a) for each in products.values()],
            [each.scale for each in products.values()],
        )
    )
    kinds = Counter(kind for kind in found if kind is not None)
    wide = ", ".join(f"{count} of {kind}" for kind, count in kinds.items())
    widened = f"; became numbers: {wide}" if wide else ""
    log.warning(
        "winnow: adapter %s: rank %s, scale %s, %d layers%s", path.name, ranks, scales, len(found), widened
    )


def _merge(model: Any, name: str, product: _Product) -> str | None:
    """Merge one product, and return the kind of the blocks that its layer had, if any."""
    modules = dict(model.named_modules())
    if name not in modules and (inner := _LAYERS.search(name)):
        ends = [each for each in modules if each.endswith(f".{inner[1]}")]
        name = ends[0] if len(ends) == 1 else name
    layer = modules.get(name)
    if not isinstance(layer, nn.Linear | Conv1D):
        raise ValueError(f"{name} is no linear layer of {type(model).__name__}")
    if layer.weight is model.get_input_embeddings().weight:
        raise ValueError(f"{name} shares its weight with the embedding")
    own = own_blocks(layer)
    widen_for_good(layer)
    change = product.scale * (product.b.float() @ product.a.float())
    change = (change.T if isinstance(layer, Conv1D) else change).to(layer.weight.device)
    if change.shape != layer.weight.shape:
        raise ValueError(
            f"{name} is of shape {list(layer.weight.shape)}, and the product of {list(change.shape)}"
        )
    merged = (layer.weight.detach().float() + change).to(layer.weight.dtype)
    layer.weight = nn.Parameter(merged, requires_grad=False)
    return None if own is None else own.kind


def _of_peft(path: Path) -> Iterator[tuple[str, _Product]]:
    config = read_object(path / ADAPTER_FILES[0])
    if config.get("peft_type") != "LORA":
        raise ValueError(f"its peft_type must be LORA, got {config.get('peft_type')!r:.80}")
    for name, harmless in _UNSERVED.items():
        if config.get(name) is not None and config[name] not in harmless:
            raise ValueError(f"{name} = {config[name]!r:.80} is not served")
    tensors = load_file(path / ADAPTER_FILES[1])
    alphas = config.get("alpha_pattern") or {}
    for key in sorted(key for key in tensors if key.endswith(".lora_A.weight")):
        name = key.removesuffix(".lora_A.weight")
        a, b = tensors.pop(key), tensors.pop(f"{name}.lora_B.weight")
        name = name.removeprefix(_PREFIX)
        own = (alpha for part, alpha in alphas.items() if re.match(rf"(.*\.)?({part})$", name))
        alpha, rank = next(own, config.get("lora_alpha", 8)), len(a)
        yield name, _Product(a, b, alpha / (rank**0.5 if config.get("use_rslora") else rank))
    if tensors:
        raise ValueError(f"{min(tensors)} is no factor of a linear layer's weight")


def _of_gguf(path: Path, model: Any) -> Iterator[tuple[str, _Product]]:
    from gguf import MODEL_ARCH_NAMES, dequantize, get_tensor_name_map

    from winnow.models.load.gguf.header import GgufHeader

    header = GgufHeader.read(path)
    kind = header.values.get("general.type"), header.values.get("adapter.type")
    if kind != ("adapter", "lora"):
        raise ValueError(f"general.type and adapter.type must be adapter and lora, got {kind}")
    text = model.config.get_text_config()
    arch = next(each for each, name in MODEL_ARCH_NAMES.items() if name == header.architecture)
    names = get_tensor_name_map(arch, text.num_hidden_layers)
    ours = {names.get_name(name): name for name, each in model.named_modules() if isinstance(each, nn.Linear)}
    arrays = {e.name: torch.from_numpy(dequantize(header.array(e), e.kind)) for e in header.tensors}
    for key in sorted(key for key in arrays if key.endswith(".weight.lora_a")):
        name = key.removesuffix(".weight.lora_a")
        a, b = arrays.pop(key), arrays.pop(f"{name}.weight.lora_b")
        if header.architecture == "llama" and (part := name.rpartition(".")[2]) in ("attn_q", "attn_k"):
            # llama.cpp has the two halves of a head's rotation side by side.
            heads = text.num_attention_heads if part == "attn_q" else text.num_key_value_heads
            b = b.view(heads, -1, 2, b.shape[-1]).transpose(1, 2).reshape(b.shape)
        alpha = header.values.get("adapter.lora.alpha", 0)
        yield ours.get(name) or name, _Product(a, b, alpha / len(a) if alpha else 1.0)
    if arrays:
        raise ValueError(f"{min(arrays)} is no factor of a linear layer's weight")
