"""Products of rows with a model's weights: Winnow's packed kernel, also of int8 weights, beside torch's ways, in turn.

    python -m winnow_lab.speed.linear_layers --threads 2

The weights are those of the twelve layers of W1's model, each read once in a pass, so that none waits in a cache. Who
takes longer than two seconds for a pass is left out of those with more rows.
"""

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from winnow.models.fast.fused.kernels import LayerKernels
from winnow.models.fast.packed_linear import PackedLinear, linear_of
from winnow.models.model.blocks import quantize
from winnow.process.native import native_kernels
from winnow_lab.bench.limits import Limits, interleave
from winnow_lab.bench.presets import PRESETS
from winnow_lab.report.tables import TextTable
from winnow_lab.study import Result, StudyOptions, flag, run_study

CPU = torch.device("cpu")
LONGEST_PASS = 2.0  # seconds
Q4_0, Q8_0 = "winnow, q4_0", "winnow, q8_0"


@dataclass(frozen=True)
class Options(StudyOptions):
    dtype: str = flag("bfloat16", choices=("bfloat16", "float32", "float16"))
    rows: tuple[int, ...] = flag((1, 8, 32, 128, 512, 2048), "tokens of a step", least=1)
    repeats: int = flag(9, least=1)
    threads: int | None = flag(None, "of torch", least=1)


def weights(dtype: torch.dtype) -> list[Tensor]:
    """Of all layers: queries, keys and values; output; gate and up; down."""
    shape = PRESETS["w1"].shape
    attended = shape.num_attention_heads * shape.head_dim
    projected = attended + 2 * shape.num_key_value_heads * shape.head_dim
    sizes = [
        (projected, shape.hidden_size),
        (shape.hidden_size, attended),
        (2 * shape.intermediate_size, shape.hidden_size),
        (shape.hidden_size, shape.intermediate_size),
    ]
    return [
        torch.randn(size).div_(size[1] ** 0.5).to(dtype)
        for _ in range(shape.num_hidden_layers)
        for size in sizes
    ]


def ways(all_weights: list[Tensor]) -> dict[str, list[Callable[[Tensor], Tensor]]]:
    """Products with the same weights, by who multiplies; oneDNN is left out where it packs no such type."""
    kernels = native_kernels()
    if kernels is None:
        raise SystemExit("error: this installation has no kernels")
    own = LayerKernels(kernels)
    found: dict[str, list[Callable[[Tensor], Tensor]]] = {
        "winnow": [PackedLinear.pack([linear_of(weight)], own) for weight in all_weights],
        **{
            way: [
                PackedLinear.pack_blocks([linear_of(weight)], [quantize(weight, kind)], own)
                for weight in all_weights
            ]
            for way, kind in ((Q4_0, "Q4_0"), (Q8_0, "Q8_0"))
        },
        "F.linear": [partial(F.linear, weight=weight) for weight in all_weights],
    }
    try:
        found["oneDNN, packed"] = [one_dnn(weight) for weight in all_weights]
    except (AttributeError, RuntimeError) as error:
        print(f"oneDNN packs no such weights here: {error}")
    return found


def one_dnn(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """oneDNN's product, of a weight packed for 32 rows, which serves 1 to 2048 as well as any number."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 32)
    product = torch.ops.mkldnn._linear_pointwise.default
    return lambda x: product(x, packed, None, "none", [], "")


@torch.inference_mode()
def study(options: Options) -> Result:
    if options.threads:
        torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    limits, all_weights = Limits.measure(dtype, CPU), weights(dtype)
    rivals = ways(all_weights)
    num_bytes = sum(weight.nbytes for weight in all_weights)
    numbers = sum(weight.numel() for weight in all_weights)
    names, lines, found = list(rivals), [], {}
    for rows in sorted(options.rows):
        inputs = {width: torch.randn(rows, width).to(dtype) for width in {w.shape[1] for w in all_weights}}

        def run(layers: list[Any], inputs: dict[int, Tensor] = inputs) -> None:
            for layer, weight in zip(layers, all_weights, strict=True):
                layer(inputs[weight.shape[1]])

        calls = [partial(run, layers) for layers in rivals.values()]
        measured = interleave(calls, options.repeats, CPU)
        seconds = {name: statistics.median(each) for name, each in zip(rivals, measured, strict=True)}
        own, found[rows] = seconds["winnow"], seconds
        rates = (
            num_bytes / own / 1e9,
            2 * rows * numbers / own / 1e9,
            2 * rows * numbers / seconds[Q4_0] / 1e9,
        )
        times = (f"{1e3 * seconds[name]:.2f}" if name in seconds else "" for name in names)
        lines.append((f"{rows:,}", (*times, f"{rates[0]:.1f}", f"{rates[1]:.0f}", f"{rates[2]:.0f}")))
        kept = {"winnow", Q4_0, Q8_0, *(name for name in rivals if seconds[name] <= LONGEST_PASS)}
        rivals = {name: layers for name, layers in rivals.items() if name in kept}
    columns = (*(f"{name}, ms" for name in names), "winnow, GB/s", "winnow, GFLOP/s", "int8, GOP/s")
    fact = (
        f"{options.dtype}; limits: read {limits.read / 1e9:.1f} GB/s, product {limits.matmul / 1e9:.0f} GFLOP/s; "
        f"{num_bytes / 2**20:.0f} MiB of weights a pass; median of {options.repeats}"
    )
    table = TextTable("Milliseconds of a pass", "rows", columns, tuple(lines))
    return Result("Products with a model's weights", [table], [fact], numbers={"seconds": found})


if __name__ == "__main__":
    sys.exit(run_study(Options, study))
