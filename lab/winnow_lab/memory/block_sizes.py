"""Block sizes by waste, speed and accuracy: kv-cache-memory's "Block Size Tradeoff", measured, and under eviction.

    python -m winnow_lab.memory.block_sizes --requests 16 --repeat 2

For each size an engine answers the same prompts, stretches of WikiText-2 of --tokens on average between half and one
and a half times as long, with the full cache and under a policy. A block holds KVs of one head and layer: a round of
KV-Compress frees whole blocks, so their size decides also what it can choose.

waste: part of the blocks held which is empty, over all steps of all requests.
tokens/s: new tokens, from the first submission to the last; the median of --repeat, sizes in turn.
perplexity: of the second halves of --windows windows of WikiText-2, the first halves cut before; the full cache's does
not depend on blocks and is measured once.
block_sizes.md has the table, with what the text prints beside it, and block_sizes.json every run.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Any

from winnow import LLM
from winnow.errors import ConfigError, UnsupportedModelError
from winnow_lab.bench.answering import answer_all, fixed_length
from winnow_lab.evaluate.cell import AGNOSTIC, Cell, amounts_of, engine_needs, plan_cells
from winnow_lab.evaluate.likelihood import Keeping
from winnow_lab.evaluate.perplexity import Perplexity, measure_perplexity
from winnow_lab.evaluate.wikitext import cut_windows, wikitext
from winnow_lab.papers.plan.memory_text import BLOCK_OVERHEADS
from winnow_lab.report.tables import TextTable
from winnow_lab.study import RealModelOptions, Result, flag, run_study

NOTES = """\
waste: part of the blocks held which is empty, over all steps. fewer bytes: of the blocks held under the policy, mean
over steps. Printed: `kv-cache-memory`, Llama 3 70B; its overhead in all adds page tables to what is unused. perplexity:
change over the full cache's, mean over windows.
"""


@dataclass(frozen=True)
class Options(RealModelOptions):
    sizes: tuple[int, ...] = flag((1, 2, 4, 8, 16, 32, 64, 128), "slots of a block", least=1)
    requests: int = flag(32, least=1)
    tokens: int = flag(800, "of a prompt, on average", least=2)
    new_tokens: int = flag(200, "of an answer, on average", least=1)
    eviction: str = flag("kv-compress")
    compression: float = flag(8.0, least=1)
    window_tokens: int = flag(1024, "of a window of text", least=2)
    windows: int = flag(8, "of text for perplexity", least=1)
    repeat: int = flag(3, least=1)
    dtype: str = flag("bfloat16")
    kv_memory: str = flag("2GiB")
    threads: int | None = flag(None, "of torch", least=1)
    seed: int = flag(0)


@dataclass(frozen=True)
class Answered:
    """Part of the blocks held that is empty, new tokens a second, and bytes of blocks held, mean over steps."""

    waste: float
    rate: float
    held: float


def prompts_of(llm: LLM, typed: Options) -> list[list[int]]:
    """Stretches of the text, one behind the other, from its beginning again where it ends."""
    chance = Random(typed.seed)
    tokenizer: Any = llm.tokenizer
    text: list[int] = tokenizer.encode(wikitext(None), add_special_tokens=False)
    prompts, start = [], 0
    for _ in range(typed.requests):
        length = chance.randint(typed.tokens // 2, typed.tokens + typed.tokens // 2)
        start = start if start + length <= len(text) else 0
        prompts.append(text[start : start + length])
        start += length
    return prompts


def answer(llm: LLM, prompts: Sequence[list[int]], typed: Options, cell: Cell) -> Answered:
    keeping, chance = Keeping.of(cell), Random(typed.seed)
    own = {"eviction": keeping.policy, "compression": keeping.amount.compression}
    lengths = [chance.randint(1, 2 * typed.new_tokens - 1) for _ in prompts]
    asked = [(prompt, fixed_length(each, **own)) for prompt, each in zip(prompts, lengths, strict=True)]
    filled: list[int] = []
    done = answer_all(llm, asked, lambda *_: filled.append(llm.occupancy().filled_bytes), final_only=True)
    held = [step.stats.kv_bytes_held for step in done.steps]
    return Answered(1 - sum(filled) / sum(held), sum(lengths) / done.seconds, fmean(held))


def measure(
    typed: Options, size: int, cells: Sequence[Cell], scored: Sequence[Cell]
) -> tuple[dict[str, Answered], dict[str, Perplexity]]:
    """Answer under each cell with blocks of one size, and score windows under those of `scored`."""
    with LLM(
        typed.model,
        dtype=typed.dtype,
        kv_memory=typed.kv_memory,
        threads=typed.threads,
        block_size=size,
        enable_prefix_caching=False,
        kv_floor=1,
        max_num_seqs=typed.requests,
        **engine_needs(cells),
    ) as llm:
        prompts = prompts_of(llm, typed)
        llm.generate([prompts[0][:64]], fixed_length(2))  # first steps cost more
        answered = {cell.label: answer(llm, prompts, typed, cell) for cell in cells}
        tokens, text = typed.window_tokens, wikitext(None)
        windows = cut_windows(llm.tokenizer, text, tokens, tokens // 2, typed.windows) if scored else []
        keepings = {cell.label: Keeping.of(cell) for cell in scored}
        found = measure_perplexity(llm, windows, keepings) if windows else []
        return answered, {each.name: each for each in found}


def table(
    runs: dict[int, list[dict[str, Answered]]],
    scores: dict[int, dict[str, Perplexity]],
    refused: dict[int, str],
    cells: Sequence[Cell],
) -> TextTable:
    """A line per size: waste, tokens/s and perplexity, the text's numbers beside them."""
    full, policy = (cell.label for cell in cells)
    whole = next((each[full] for each in scores.values() if full in each), None)
    lines = []
    for size, each in runs.items():
        said = BLOCK_OVERHEADS.get(size)
        unused, overhead = (f"{said.unused:g}%", f"{said.whole:g}%") if said else ("", "")
        waste = {name: median(run[name].waste for run in each) for name in (full, policy)}
        rate = {name: median(run[name].rate for run in each) for name in (full, policy)}
        held = median(run[policy].held for run in each) / median(run[full].held for run in each)
        score = scores[size].get(policy)
        change = score.over(whole) if score and whole else None
        error = f" ± {100 * change.error:.2f}" if change and change.error else ""
        changed = f"{100 * (change.ratio - 1):+.2f}{error} %" if change else ""
        wasted = f"{waste[full]:.1%} | {unused} | {waste[policy]:.1%} | {1 / held:.2f}x"
        lines.append(f"{size} | {wasted} | {rate[full]:,.0f} | {rate[policy]:,.0f} | {overhead} | {changed}")
    head = f"slots | waste | printed | waste, {policy} | fewer bytes | tokens/s | tokens/s, {policy}"
    head += f" | printed overhead in all | perplexity, {policy}"
    notes = [f"{size}: refused: {why}" for size, why in refused.items()]
    if whole is not None:
        notes.append(f"Perplexity of the full cache: {whole.value:.3f}.")
    return TextTable.read("Blocks by their size", head, lines, notes)


def study(typed: Options) -> Iterator[Result]:
    cells = plan_cells([typed.eviction], amounts_of([typed.compression]), [AGNOSTIC])
    runs: dict[int, list[dict[str, Answered]]] = {}
    scores: dict[int, dict[str, Perplexity]] = {}
    refused: dict[int, str] = {}
    fact = (
        f"{Path(typed.model).name}, {typed.dtype}; {typed.requests} prompts of {typed.tokens} tokens on average, "
        f"answers of {typed.new_tokens}; {typed.windows} windows of {typed.window_tokens:,} tokens. "
        f"Medians of {typed.repeat}."
    )
    for _ in range(typed.repeat):
        for size in (size for size in typed.sizes if size not in refused):
            scored = () if size in scores else cells[1:] if scores else cells
            try:
                answered, found = measure(typed, size, cells, scored)
            except (ConfigError, UnsupportedModelError) as error:
                refused[size] = str(error)
                continue
            runs.setdefault(size, []).append(answered)
            scores.setdefault(size, found)
            print(size, answered, {name: each.value for name, each in found.items()}, flush=True)
        sizes = [
            {
                "block_size": size,
                "runs": [{name: asdict(found) for name, found in run.items()} for run in each],
                "perplexity": [score.to_json() for score in scores[size].values()],
            }
            for size, each in runs.items()
        ]
        numbers, shown = (
            {"model": Path(typed.model).name, "sizes": sizes},
            table(runs, scores, refused, cells),
        )
        yield Result("Block sizes", [shown], [fact], NOTES, numbers, ("sizes",))


if __name__ == "__main__":
    sys.exit(run_study(Options, study))
