"""`winnow bench formats`: which number formats are fastest with which instruction set."""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from winnow.errors import UsageError
from winnow_lab.report.tables import TextTable
from winnow_lab.study import Result, StudyOptions, flag

if TYPE_CHECKING:
    from torch import Tensor

    from winnow.models.fast.fused.kernels import LayerKernels, PackedWeight

SUMMARY = "number formats of linear layers, by instruction set: what `--dtype auto` goes by"
ARGUMENTS = ""
DESCRIPTION = """\
Multiply rows with the weights of layers of 107 million parameters, with every instruction set that runs here.

Weights are blocks of few bits or numbers of two bytes, as files have them, or widened to four bytes; dtype is that of
activations and KVs. Tokens/s of one core's processor time: one sequence, 16, a prompt. `--dtype auto` goes by them.
"""
EPILOG = """\
examples:
  winnow bench formats
  winnow bench formats --json src/winnow/models/load/formats.json   (what auto reads from then on)
"""
WORKS = {"one": 1, "16": 16, "prompt": 256}
WIDENED = "float32, widened"
FORMS = {"blocks": ("float32", "bfloat16", WIDENED), "bfloat16": ("float32", "bfloat16")}
"""Forms by what a file has. Numbers of two bytes that are multiplied as float32 are widened too."""
Call: TypeAlias = tuple[tuple[str, str, str], Callable[[], object]]


@dataclass(frozen=True)
class Options(StudyOptions):
    isa: tuple[str, ...] = flag((), "instruction sets (default: all that run here)")
    layers: int = flag(6, "of the twelve that the model has", least=1)
    repeats: int = flag(3, least=1)
    kind: str = flag("Q4_0", "of the blocks", choices=("Q4_0", "Q8_0"))


def measure(options: Options) -> Result:
    import torch

    from winnow.process import native
    from winnow_lab.speed.linear_layers import weights

    if not native.is_installed():
        raise UsageError("this installation has no kernels to measure")
    torch.set_num_threads(1)
    names = options.isa or tuple(each for each in native.instruction_sets() if each != "amx_emulated")
    own = weights(torch.float32)[: 4 * options.layers]
    part = sum(each.numel() for each in own) / sum(each.numel() for each in weights(torch.float32))
    rates: dict[str, dict[str, dict[str, list[float]]]] = {}
    lines = []
    for isa in names:
        calls = dict(_calls(isa, own, options.kind))
        rounds = [[_processor_seconds(call) for call in calls.values()] for _ in range(options.repeats + 1)]
        for (kind, form, work), seconds in zip(calls, zip(*rounds[1:], strict=True), strict=True):
            of_form = rates.setdefault(isa, {}).setdefault(kind, {}).setdefault(form, [])
            of_form.append(round(WORKS[work] / min(seconds) * part, 1))
        for kind, forms in rates[isa].items():
            best = max(map(statistics.geometric_mean, forms.values()))
            for form, of_form in forms.items():
                share = statistics.geometric_mean(of_form) / best
                numbers = (*(f"{each:,.0f}" for each in of_form), f"{share:.2f}")
                lines.append((f"{isa}, {kind} as {form}", numbers))
    table = TextTable("Tokens/s of linear layers", "", (*WORKS, "of the fastest"), tuple(lines))
    facts = [f"{options.layers} of twelve layers; one thread's processor time; best of {options.repeats}"]
    return Result("winnow bench formats", [table], facts, numbers={"rates": rates})


def _processor_seconds(call: Callable[[], object]) -> float:
    begin = time.thread_time()
    call()
    return time.thread_time() - begin


def _calls(isa: str, own: "list[Tensor]", block_kind: str) -> Iterator[Call]:
    """Yield products with all weights, by what a file has, form and work."""
    import torch

    from winnow.models.fast.fused.kernels import LayerKernels
    from winnow.models.model.blocks import quantize
    from winnow.process import native

    # As the processor is used that has this set and no wider one.
    kernels = LayerKernels(native.Kernels(isa, ""))
    blocks = [quantize(weight, block_kind) for weight in own]
    for kind, forms in FORMS.items():
        for form in forms:
            dtype = getattr(torch, form.removesuffix(", widened"))
            in_blocks = kind == "blocks" and form != WIDENED
            packed = [
                kernels.pack_blocks([part], dtype) if in_blocks else kernels.pack(weight.to(dtype))
                for part, weight in zip(blocks, own, strict=True)
            ]
            for work, rows in WORKS.items():
                inputs = {n: torch.randn(rows, n).to(dtype) for n in {each.in_features for each in packed}}
                yield (kind, form, work), partial(_multiply, kernels, packed, inputs)


def _multiply(kernels: "LayerKernels", packed: "list[PackedWeight]", inputs: "dict[int, Tensor]") -> None:
    for weight in packed:
        kernels.linear(inputs[weight.in_features], weight, None)
