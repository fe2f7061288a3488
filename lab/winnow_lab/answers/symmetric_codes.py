"""Whether codes of 4 bits and fewer should be symmetric around zero, which saves a min in 16 bits for each group.

    python -m winnow_lab.answers.symmetric_codes -o docs/results

Keys and values of a text are taken from a cache of float32 and encoded. What is compared at equal bytes is a symmetric
group of 32 channels (a scale) and an asymmetric one of 64 (a scale and a min), beside the default of 32 with both.
Error: that of what is decoded, as a share of the vectors' squared norm, mean over layers and heads. Keys are rotated
first, as the codecs do.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from winnow.cache.codec import rotation_block
from winnow.cache.formats import AffineFormat
from winnow.cache.packing import hadamard
from winnow.config import ModelConfig
from winnow.models.load.loader import load_plain_model
from winnow_lab.evaluate.wikitext import wikitext
from winnow_lab.report.tables import TextTable
from winnow_lab.study import RealModelOptions, Result, flag, run_study


@dataclass(frozen=True)
class Options(RealModelOptions):
    """The text."""

    tokens: int = flag(1024, least=64)


def symmetric(x: Tensor, bits: int, group: int) -> Tensor:
    """Decoded codes of -(2**(bits-1) - 1) to 2**(bits-1) - 1 times a float16 scale."""
    most = 2 ** (bits - 1) - 1
    grouped = x.unflatten(-1, (-1, group))
    scale = (grouped.abs().amax(dim=-1, keepdim=True) / most).half().float()
    code = (grouped / scale).nan_to_num(0.0).round().clamp(-most, most)
    return (code * scale).flatten(-2)


def asymmetric(x: Tensor, bits: int, group: int) -> Tensor:
    """Return KVs after a round trip through Winnow's codecs."""
    form = AffineFormat(group, bits)
    return form.decode(*form.encode(x))


def error(x: Tensor, decoded: Tensor) -> float:
    """The share of the squared norm of vectors, [rows, N, d], that is lost, in percent."""
    lost = (x - decoded).square().sum(dim=(1, 2)) / x.square().sum(dim=(1, 2))
    return 100 * float(lost.mean())


@torch.inference_mode()
def vectors(model: str, tokens: int) -> tuple[Tensor, Tensor]:
    """Keys, rotated as they are stored, and values of a text: float32 [rows, N, d]."""
    loaded = load_plain_model(ModelConfig(model, dtype="float32"))
    plain: Any = loaded.model
    tokenizer: Any = loaded.tokenizer
    text = tokenizer.encode(wikitext(None)[: 8 * tokens], add_special_tokens=False)[:tokens]
    layers = plain(torch.tensor([text]), use_cache=True).past_key_values.layers
    k, v = (torch.cat([getattr(layer, side)[0] for layer in layers]) for side in ("keys", "values"))
    return hadamard(k, rotation_block(k.shape[-1])), v


def study(options: Options) -> Result:
    """Errors of each kind of codes."""
    sides = vectors(options.model, options.tokens)
    kinds = {
        "asymmetric, 32": (asymmetric, 32, 32),
        "asymmetric, 64": (asymmetric, 64, 32),
        "symmetric, 32": (symmetric, 32, 16),
    }
    rows = [
        {"bits": bits, "codes": name, "bits_a_channel": bits + extra / group}
        | {side: error(x, decode(x, bits, group)) for side, x in zip("kv", sides, strict=True)}
        for bits in (4, 3, 2)
        for name, (decode, group, extra) in kinds.items()
    ]
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "bits a channel": lambda row: f"{row['bits_a_channel']:.2f}",
        "keys": lambda row: f"{row['k']:.2f} %",
        "values": lambda row: f"{row['v']:.2f} %",
    }
    named = {f"int{row['bits']} {row['codes']}": row for row in rows}
    model = Path(options.model).name
    facts = [f"KVs of {options.tokens:,} tokens of WikiText-2 in {model}."]
    note = "The share of the squared norm of vectors that is lost, mean over layers and heads; keys are rotated.\n"
    table = TextTable.of("Error of what is decoded", "codes", named, columns)
    return Result("Symmetric codes of few bits", [table], facts, note, {"model": model, "rows": rows})


if __name__ == "__main__":
    sys.exit(run_study(Options, study))
