"""Whether codes of 4 bits and fewer should be symmetric around zero, which saves a min in 16 bits for each group.

    python -m winnow_lab.answers.symmetric_codes [--model DIR] [--tokens 1024] [-o docs/results]

Keys and values of a text are taken from a cache of float32 and encoded. What is compared at equal bytes is a symmetric
group of 32 channels (a scale) and an asymmetric one of 64 (a scale and a min), beside the default of 32 with both.
Error: that of what is decoded, as a share of the vectors' squared norm, mean over layers and heads. Keys are rotated
first, as the codecs do.
"""

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor

from winnow import LLM, SamplingParams
from winnow.cache.codec import rotation_block
from winnow.cache.formats import AffineFormat
from winnow.cache.packing import hadamard
from winnow.report.provenance import Machine, report_head
from winnow_lab.evaluate.wikitext import wikitext
from winnow_lab.papers.page import page, results_json
from winnow_lab.report.tables import TextTable


def symmetric(x: Tensor, bits: int, group: int) -> Tensor:
    """Decoded codes of -(2**(bits-1) - 1) to 2**(bits-1) - 1 times a float16 scale."""
    most = 2 ** (bits - 1) - 1
    grouped = x.unflatten(-1, (-1, group))
    scale = (grouped.abs().amax(dim=-1, keepdim=True) / most).half().float()
    code = (grouped / scale).nan_to_num(0.0).round().clamp(-most, most)
    return (code * scale).flatten(-2)


def asymmetric(x: Tensor, bits: int, group: int) -> Tensor:
    """What Winnow's codecs decode."""
    form = AffineFormat(group, bits)
    return form.decode(*form.encode(x))


def error(x: Tensor, decoded: Tensor) -> float:
    """The share of the squared norm of vectors, [rows, N, d], that is lost, in percent."""
    lost = (x - decoded).square().sum(dim=(1, 2)) / x.square().sum(dim=(1, 2))
    return 100 * float(lost.mean())


def vectors(model: str, tokens: int) -> tuple[Tensor, Tensor]:
    """Keys, rotated as they are stored, and values of a text: float32 [rows, N, d]."""
    with LLM(model, dtype="float32", kv_cache_dtype="float32", kv_memory="512MiB") as llm:
        text = list(llm.tokenize(wikitext(None)[: 8 * tokens]).token_ids[:tokens])
        llm.submit(text, SamplingParams(temperature=0.0, max_tokens=4))
        cache = llm._engine._executor.cache  # type: ignore[attr-defined]
        while cache.tables.host_lengths.max() < tokens:
            llm.step()
        slot = int(cache.tables.host_lengths.max(axis=(1, 2)).argmax())
        num_blocks = -(-tokens // cache.pool.layout.block_size)
        blocks = cache.tables.lookup_layers(torch.tensor([slot]), num_blocks)[:, 0].long()
        k, v = (
            read(blocks)[..., :tokens, :].flatten(0, 1) for read in (cache.pool.keys_of, cache.pool.values_of)
        )
    return hadamard(k, rotation_block(k.shape[-1])), v


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(
        prog="python -m winnow_lab.answers.symmetric_codes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("-o", "--output", type=Path, default=Path("docs/results"))
    arguments = parser.parse_args()
    sides = vectors(arguments.model, arguments.tokens)
    kinds = {
        "asymmetric, 32": (asymmetric, 32, 32),
        "asymmetric, 64": (asymmetric, 64, 32),
        "symmetric, 32": (symmetric, 32, 16),
    }
    rows = [
        {
            "bits": bits,
            "codes": name,
            "bits_a_channel": bits + extra / group,
            "k": error(sides[0], decode(sides[0], bits, group)),
            "v": error(sides[1], decode(sides[1], bits, group)),
        }
        for bits in (4, 3, 2)
        for name, (decode, group, extra) in kinds.items()
    ]
    command = ["python", "-m", "winnow_lab.answers.symmetric_codes", *sys.argv[1:]]
    head = report_head(command, Machine.here("cpu")) | {"model": Path(arguments.model).name}
    lines = tuple(
        (
            f"int{row['bits']} {row['codes']}",
            (f"{row['bits_a_channel']:.2f}", f"{row['k']:.2f} %", f"{row['v']:.2f} %"),
        )
        for row in rows
    )
    table = TextTable("Error of what is decoded", "codes", ("bits a channel", "keys", "values"), lines)
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "symmetric_codes.json").write_text(
        results_json(head | {"rows": rows}, ("rows",)), encoding="utf-8"
    )
    facts = [f"KVs of {arguments.tokens:,} tokens of WikiText-2 in {head['model']}."]
    note = "The share of the squared norm of vectors that is lost, mean over layers and heads; keys are rotated.\n"
    (arguments.output / "symmetric_codes.md").write_text(
        page("Symmetric codes of few bits", [head], facts, note, [table]), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
