"""Linear layers of 4 and 8 bits in safetensors: GPTQ, AWQ, compressed-tensors, and fp8 of several makers.

A weight of integers is scale * (code - zero), with a scale and a zero for each group of inputs of a feature. Groups of
whole blocks of 32 inputs become blocks of GGUF kinds, which hold the same codes:

    Q4_0, Q8_0: scale * (code - 8), scale * (code - 128)      Q4_1: scale * code + minimum

The minimum, -scale * zero, is rounded to float16, by less than scale / 250; nothing else is rounded. Groups out of
order (GPTQ's `desc_act`) and scales that float16 does not hold become plain numbers. A weight of fp8 is scale * code,
with a scale for a tile of it, a feature or all: blocks of F8_E4M3, not rounded. Activations stay wide, whatever the
checkpoint says of theirs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor

from winnow.errors import UnsupportedModelError
from winnow.models.load.directory import ModelDirectory
from winnow.models.model.blocks import BLOCK, Blocks

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_OF_EXPERT = ("gate_proj", "up_proj", "down_proj")
_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]
"""Which of eight codes of a word belongs to each of eight features."""


@dataclass(frozen=True)
class Codes:
    """A weight as scale * (code - zero)."""

    bits: int
    codes: Tensor  # uint8 [out_features, in_features]
    scales: Tensor  # [out_features, groups]
    zeros: Tensor  # integers of the same shape
    group: Tensor | None = None  # of each input, [in_features]; None: equally long, one behind the other

    def numbers(self) -> Tensor:
        out_features = len(self.codes)
        if self.group is not None:
            scales, zeros = (each.float()[:, self.group] for each in (self.scales, self.zeros))
            return scales * (self.codes.float() - zeros)
        codes = self.codes.float().view(out_features, self.scales.shape[1], -1)
        return (self.scales.float()[..., None] * (codes - self.zeros.float()[..., None])).flatten(1)

    def blocks(self) -> Blocks | None:
        """Return the weight in blocks; None: no kind holds it."""
        (out_features, in_features), groups = self.codes.shape, self.scales.shape[1]
        scales = self.scales.half()
        exact = scales.float().equal(self.scales.float())
        if self.group is not None or in_features % (groups * BLOCK) or not exact:
            return None
        symmetric = bool((self.zeros == 1 << (self.bits - 1)).all())
        head = [scales]
        if self.bits == 8:
            if not symmetric:
                return None
            kind, stored = "Q8_0", (self.codes ^ 128).view(out_features, -1, BLOCK)
        else:
            kind = "Q4_0" if symmetric else "Q4_1"
            if not symmetric:
                head.append((-self.scales.float() * self.zeros).half())
            codes = self.codes.view(out_features, -1, BLOCK)
            stored = codes[..., : BLOCK // 2] | codes[..., BLOCK // 2 :] << 4
        each = in_features // groups // BLOCK
        of_blocks = torch.stack(head, dim=-1).repeat_interleave(each, dim=1).view(torch.uint8)
        return Blocks(kind, torch.cat([of_blocks, stored], dim=-1).flatten(1))


@dataclass(frozen=True)
class FloatCodes:
    """A weight as scale * code."""

    codes: Tensor  # float8_e4m3fn [out_features, in_features]
    scales: Tensor  # one for each tile, [tiles of features, tiles of inputs]; the last tiles may be cut
    tile: tuple[int, int]  # features and inputs

    def numbers(self) -> Tensor:
        return self.codes.float() * self._scales(self.tile[1], self.codes.shape[1])

    def blocks(self) -> Blocks | None:
        """Return the weight in blocks; None: a block would lie in two tiles."""
        out_features, in_features = self.codes.shape
        if in_features % BLOCK or (self.tile[1] % BLOCK and self.scales.shape[1] > 1):
            return None
        codes = self.codes.view(torch.uint8).view(out_features, -1, BLOCK)
        scales = self._scales(-(-self.tile[1] // BLOCK), in_features // BLOCK)
        scales = scales.masked_fill((codes & 127 == 127).any(dim=-1), float("nan"))[..., None]
        return Blocks("F8_E4M3", torch.cat([scales.contiguous().view(torch.uint8), codes], dim=-1).flatten(1))

    def _scales(self, each: int, columns: int) -> Tensor:
        """Return float32 [out_features, columns], `each` of which share a tile."""
        wide = self.scales.float().repeat_interleave(self.tile[0], 0)[: len(self.codes)]
        return wide.repeat_interleave(each, 1)[:, :columns]


def _unpack(packed: Tensor, bits: int, dim: int) -> Tensor:
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device="cpu")
    shape = [-1 if i == dim % packed.ndim + 1 else 1 for i in range(packed.ndim + 1)]
    codes = packed.unsqueeze(dim % packed.ndim + 1) >> shifts.view(shape) & (1 << bits) - 1
    return codes.to(torch.uint8).flatten(dim % packed.ndim, dim % packed.ndim + 1)


Take = Callable[[str], Tensor | None]
"""Returns a layer's tensor by the last part of its name; None: it has none."""


def _read_gptq(take: Take, values: Mapping[str, Any]) -> Codes:
    bits = values["bits"]
    packed, zeros, scales, group = take("qweight"), take("qzeros"), take("scales"), take("g_idx")
    assert packed is not None and zeros is not None and scales is not None
    codes = _unpack(packed, bits, 0).T.contiguous()
    stored = _unpack(zeros, bits, 1).T
    if values.get("checkpoint_format") != "gptq_v2":  # the first form holds zeros less one
        stored = stored + 1 & (1 << bits) - 1
    inputs = torch.arange(codes.shape[1], device="cpu")
    if group is not None and group.equal((inputs // (len(inputs) // scales.shape[0])).to(group)):
        group = None
    return Codes(bits, codes, scales.T, stored, group)


def _read_awq(take: Take, values: Mapping[str, Any]) -> Codes:
    packed, zeros, scales = take("qweight"), take("qzeros"), take("scales")
    assert packed is not None and zeros is not None and scales is not None
    codes, stored = (
        _unpack(words, 4, 1).view(len(words), -1, 8)[..., _AWQ_ORDER].flatten(1).T
        for words in (packed, zeros)
    )
    return Codes(4, codes.contiguous(), scales.T, stored)


def _read_fp8(take: Take, values: Mapping[str, Any], tile: Sequence[int] | None = None) -> FloatCodes:
    codes, scales = take("weight"), take("weight_scale_inv")
    scales = take("weight_scale") if scales is None else scales
    assert codes is not None and scales is not None
    out_features, in_features = codes.shape
    if scales.numel() == 1 or scales.numel() == len(scales) == out_features:
        return FloatCodes(codes, scales.reshape(-1, 1), (out_features // scales.numel(), in_features))
    tile = tile or values.get("weight_block_size") or (128, 128)
    if tuple(scales.shape) != (-(-out_features // tile[0]), -(-in_features // tile[1])):
        raise UnsupportedModelError(
            f"model: a weight of fp8, {list(codes.shape)} in tiles of {list(tile)}, has scales {list(scales.shape)}"
        )
    return FloatCodes(codes, scales, (tile[0], tile[1]))


def _read_compressed(take: Take, values: Mapping[str, Any]) -> Codes | FloatCodes:
    if values["format"] == "float-quantized":
        weights = next(iter(values["config_groups"].values()))["weights"]
        return _read_fp8(take, values, weights.get("block_structure"))
    scales, group = take("weight_scale"), take("weight_g_idx")
    assert scales is not None
    scales = scales.view(len(scales), -1)
    packed, zeros, whole = take("weight_packed"), take("weight_zero_point"), take("weight")
    same = partial(torch.full_like, scales, dtype=torch.int32)
    if whole is not None:  # int8
        zeros = same(128) if zeros is None else zeros.int().view(scales.shape) + 128
        return Codes(8, whole.view(torch.uint8) ^ 128, scales, zeros, group)
    shape = take("weight_shape")
    assert packed is not None and shape is not None
    bits = next(iter(values["config_groups"].values()))["weights"]["num_bits"]
    codes = _unpack(packed, bits, 1)[:, : int(shape[1])].contiguous()
    zeros = same(1 << bits - 1) if zeros is None else _unpack(zeros, bits, 0)[: len(scales)]
    return Codes(bits, codes, scales, zeros, group)


@dataclass(frozen=True)
class _Method:
    read: Callable[[Take, Mapping[str, Any]], Codes | FloatCodes]
    marks: tuple[str, ...]  # last parts of the names of tensors, one of which a quantized layer has
    parts: tuple[str, ...]  # of all the others


_FP8_PARTS = ("weight", "input_scale", "input_scale_ub", "activation_scale")
_FP8 = _Method(_read_fp8, ("weight_scale_inv", "weight_scale"), _FP8_PARTS)
_METHODS = {
    **dict.fromkeys(("fp8", "fbgemm_fp8", "modelopt"), _FP8),
    "gptq": _Method(_read_gptq, ("qweight",), ("qzeros", "scales", "g_idx")),
    "awq": _Method(_read_awq, ("qweight",), ("qzeros", "scales")),
    "compressed-tensors": _Method(
        _read_compressed,
        ("weight_packed", "weight_scale"),
        ("weight", "weight_zero_point", "weight_shape", "weight_g_idx", "input_scale"),
    ),
}


def _join_experts(kept: dict[str, Blocks]) -> dict[str, Tensor]:
    """Let experts of a layer have their blocks side by side, as their classes have them. Returns numbers of others."""
    layers: dict[str, dict[str, dict[int, Blocks]]] = {}
    for name in [name for name in kept if ".experts." in name]:
        layer, _, rest = name.partition(".experts.")
        index, part = rest.removesuffix(".weight").split(".", 1)
        layers.setdefault(layer, {}).setdefault(part, {})[int(index)] = kept.pop(name)
    numbers: dict[str, Tensor] = {}
    for layer, parts in layers.items():
        kinds = {own.kind for part in parts.values() for own in part.values()}
        counts = {len(part) for part in parts.values()}
        if parts.keys() == set(_OF_EXPERT) and len(kinds) == len(counts) == 1:
            gate, up, down = ([own.data for _, own in sorted(parts[n].items())] for n in _OF_EXPERT)
            both = [torch.cat(pair) for pair in zip(gate, up, strict=True)]
            for name, data in (("gate_up_proj", both), ("down_proj", down)):
                kept[f"{layer}.experts.{name}"] = Blocks(min(kinds), torch.stack(data))
        else:
            numbers |= {
                f"{layer}.experts.{index}.{part}.weight": own.numbers(torch.float32)
                for part, each in parts.items()
                for index, own in each.items()
            }
    return numbers


def _is_read(values: Mapping[str, Any]) -> bool:
    method = values.get("quant_method")
    if method == "gptq":
        return values.get("bits") in (4, 8)
    if method == "awq":
        bits, version = values.get("bits") or values.get("w_bit"), values.get("version", "gemm")
        return bits == 4 and version.lower() == "gemm"
    if method == "fp8":
        return values.get("fmt", "e4m3") == "e4m3" and values.get("expert_dtype", "fp8") == "fp8"
    if method == "modelopt":
        return values.get("quant_algo") == "FP8"
    if method == "fbgemm_fp8":
        return True
    if method != "compressed-tensors" or values.get("transform_config") or values.get("sparsity_config"):
        return False
    groups = (values.get("config_groups") or {}).values()
    weights = [group.get("weights") or {} for group in groups]
    if values.get("format") == "float-quantized":
        return all(each.get("type") == "float" and each.get("num_bits") == 8 for each in weights)
    return (
        values.get("format") in ("pack-quantized", "int-quantized")
        and len({each.get("num_bits") for each in weights}) == 1
        and all(each.get("type") == "int" and each.get("num_bits") in (4, 8) for each in weights)
        and not any(group.get("input_activations") or group.get("output_activations") for group in groups)
    )


class QuantizedDirectory(ModelDirectory):
    @classmethod
    def at(cls, path: Path) -> "QuantizedDirectory | None":
        if not (path / "config.json").exists():
            return None
        values = ModelDirectory(path).config_values().get("quantization_config")
        return cls(path, values) if isinstance(values, dict) and _is_read(values) else None

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        super().__init__(path)
        self._values = values
        self._method = _METHODS[values["quant_method"]]
        self._kept: dict[str, Blocks] | None = None

    def config_values(self) -> dict[str, Any]:
        values = super().config_values()
        return {name: value for name, value in values.items() if name != "quantization_config"}

    @contextmanager
    def reading(self, *, keeps_blocks: bool = False) -> Iterator[dict[str, Blocks]]:
        self._kept = {} if keeps_blocks else None
        yield self._kept if self._kept is not None else {}

    def weights(self) -> dict[str, Any]:
        super().weights()  # which says that there are none
        found: dict[str, Tensor] = {}
        with ExitStack() as stack:
            paths = sorted(self.path.glob("*.safetensors"))
            files = [stack.enter_context(safe_open(path, "pt")) for path in paths]
            of_name = {name: file for file in files for name in file.keys()}  # noqa: SIM118
            named = [name.rpartition(".") for name in of_name]
            layers = dict.fromkeys(layer for layer, _, end in named if end in self._method.marks)
            ends = (*self._method.marks, *self._method.parts)
            taken = {f"{layer}.{end}" for layer in layers for end in ends}
            found.update((name, file.get_tensor(name)) for name, file in of_name.items() if name not in taken)

            def take(layer: str, end: str) -> Tensor | None:
                file = of_name.get(f"{layer}.{end}")
                return None if file is None else file.get_tensor(f"{layer}.{end}")

            for layer in layers:
                codes = self._method.read(partial(take, layer), self._values)
                if self._kept is not None and (blocks := codes.blocks()) is not None:
                    self._kept[f"{layer}.weight"] = blocks
                else:
                    found[f"{layer}.weight"] = codes.numbers()
        if self._kept is not None:
            found |= _join_experts(self._kept)
        return {"pretrained_model_name_or_path": None, "state_dict": found}

    def check_weights(self, model: "PreTrainedModel", left_out: Any) -> None:
        self._check_unused(model, left_out, scaled=True)
