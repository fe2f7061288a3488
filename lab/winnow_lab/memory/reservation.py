"""What reserving blocks wastes: the paper's "Memory Waste in Contiguous Allocation", measured in the ledger.

    python -m winnow_lab.memory.reservation [--trace FILE,...]

For each of the paper's workloads (kv-cache-memory: average and longest sequence) requests with random lengths of that
average run through an engine under each `kv_reservation`. Their answers end by a stop token, as a rule before
`max_tokens`. Lengths, blocks and chunks are divided by `--scale`, and the model is a tiny Llama of random weights: what
is held does not depend on it. The pool holds `--seqs` sequences of the longest kind.

With --trace the lengths are those of Azure's or Mooncake's requests, as many of them as --requests, evenly spaced; and
a table says what the whole trace wastes at its requests' ends by allocator: whole buffers, buffers that double, blocks.

at the end: part of the slots that requests hold which is empty at their last steps (the paper's figure).
internal: the same over all steps of all requests together: they grow into what they hold.
external: part of the pool that is free while a request waits: what it would reserve does not fit, and with on-demand
what running ones will soon take is kept for them.
"""

import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import fmean

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from winnow import LLM, SamplingParams
from winnow.cache import CacheLayout, CacheSize
from winnow.config import KV_RESERVATIONS
from winnow_lab.bench.traces import read_trace
from winnow_lab.report.tables import TextTable
from winnow_lab.study import Result, StudyOptions, flag, run_study

VOCAB = 97
STOP, BLOCK = 3, 16
BLOCK_SIZES = (1, 4, 8, 16, 32, 64, 128)
"""The text's."""


@dataclass(frozen=True)
class Options(StudyOptions):
    requests: int = flag(32, least=1)
    scale: int = flag(8, "lengths, blocks and chunks are divided by it", least=1)
    seqs: int = flag(4, "sequences of the longest kind in the pool", least=1)
    seed: int = flag(0)
    trace: tuple[Path, ...] = flag((), "files whose requests' lengths are taken")
    max_len: int = flag(8192, "longer requests of a trace are left out", least=1)


@dataclass(frozen=True)
class Workload:
    name: str
    mean_len: int
    max_len: int
    waste: float | None = None
    """What the paper prints."""
    sizes: tuple[tuple[int, int], ...] = ()
    """Tokens of prompt and answer of each request of a trace; empty: they are drawn."""


WORKLOADS = (
    Workload("ShareGPT (chat)", 830, 4096, 0.80),
    Workload("Alpaca (instruction)", 380, 2048, 0.81),
    Workload("Code generation", 1200, 4096, 0.71),
    Workload("Summarization", 2800, 4096, 0.32),
)


@dataclass(frozen=True)
class Waste:
    """What one engine came to, as parts of 1; `running`: requests at a time, on average over steps."""

    at_end: float
    internal: float
    external: float
    running: float
    steps: int


def lengths(workload: Workload, requests: int, scale: int, seed: int) -> list[int]:
    """Tokens of each sequence, prompt and answer: random between 8 and the longest, with the workload's mean."""
    chance, longest = Random(seed), workload.max_len // scale
    share = workload.mean_len / workload.max_len
    # A beta distribution with this mean, broad as traces are.
    drawn = [chance.betavariate(2 * share, 2 * (1 - share)) for _ in range(requests)]
    factor = share / (sum(drawn) / len(drawn))
    return [min(max(round(each * factor * longest), 8), longest) for each in drawn]


def of_trace(path: Path, max_len: int) -> Workload:
    sizes = tuple((each.prompt_tokens, each.output_tokens) for each in read_trace(path))
    sizes = tuple(size for size in sizes if sum(size) <= max_len)
    return Workload(path.stem, round(fmean(map(sum, sizes))), max_len, sizes=sizes)


def allocators(workload: Workload) -> Iterator[tuple[str, float]]:
    """What is held and empty at the ends of all requests, as part of what is held, by allocator."""
    used = [sum(size) for size in workload.sizes]
    held = {"whole buffers": workload.max_len * len(used)}
    held["buffers that double"] = sum(1 << (each - 1).bit_length() for each in used)
    for slots in BLOCK_SIZES:
        held[f"blocks of {slots}"] = sum(-(-each // slots) * slots for each in used)
    for name, slots in held.items():
        yield name, 1 - sum(used) / slots


def split(workload: Workload, arguments: Options) -> list[tuple[int, int]]:
    """Tokens of prompt and answer of each request, scaled: a trace's own, or an answer of a quarter."""
    scale, count = arguments.scale, arguments.requests
    if not workload.sizes:
        drawn = lengths(workload, count, scale, arguments.seed)
        return [(each - max(each // 4, 1), max(each // 4, 1)) for each in drawn]
    step = max(len(workload.sizes) // count, 1)
    return [(max(prompt // scale, 1), max(new // scale, 1)) for prompt, new in workload.sizes[::step][:count]]


def request(size: tuple[int, int], max_len: int, chance: Random) -> tuple[list[int], SamplingParams]:
    """A prompt, and an answer that stops before `max_tokens`."""
    prompt_tokens, answer = size
    prompt = chance.choices(range(4, VOCAB), k=prompt_tokens)
    return prompt, SamplingParams(
        temperature=0,
        max_tokens=min(max(max_len // 4, answer), max_len - len(prompt)),
        stop_token_ids=[STOP],
        logit_bias={STOP: 100.0},
        forced_tokens=chance.choices(range(4, VOCAB), k=answer - 1),
    )


def measure(model: Path, workload: Workload, mode: str, arguments: Options) -> Waste:
    """Serve a workload under a reservation, all requests waiting from the start."""
    scale, max_len = arguments.scale, workload.max_len // arguments.scale
    layout = CacheLayout.even(2, 2, 8, max(BLOCK // scale, 1), torch.float32, 1)
    blocks = arguments.seqs * layout.blocks_for(max_len)
    size = CacheSize.of_blocks(layout, blocks, arguments.requests, max_len)
    chance = Random(arguments.seed)
    sizes = split(workload, arguments)
    end_held = end_filled = 0
    held = filled = unused = waiting_steps = running = steps = 0
    with LLM(
        model,
        kv_memory=size.nbytes(layout),
        kv_reservation=mode,
        enable_prefix_caching=False,
        block_size=layout.block_size,
        max_model_len=max_len,
        max_num_seqs=arguments.requests,
        prefill_chunk=max(512 // scale, 1),
        num_accumulators=1,
    ) as llm:
        requests = [request(each, max_len, chance) for each in sizes]
        for prompt, params in requests:  # each alone: what is held at its last step is its own
            llm.submit(prompt, params)
            last = 0, 0
            while llm.has_unfinished:
                now = llm.stats().kv_bytes_held, llm.occupancy().filled_bytes
                last = now if now[0] else last
                llm.step()
            end_held, end_filled = end_held + last[0], end_filled + last[1]
        pool = size.num_blocks * layout.block_bytes
        for prompt, params in requests:
            llm.submit(prompt, params)
        while llm.has_unfinished:
            llm.step()
            stats = llm.stats()
            steps += 1
            held, filled = held + stats.kv_bytes_held, filled + llm.occupancy().filled_bytes
            running += stats.num_running
            if stats.num_waiting:
                unused, waiting_steps = unused + pool - stats.kv_bytes_held, waiting_steps + 1
    external = unused / max(waiting_steps * pool, 1)
    return Waste(1 - end_filled / end_held, 1 - filled / max(held, 1), external, running / steps, steps)


def ends(shown: Mapping[str, Mapping[str, float]]) -> TextTable:
    """What is held and empty by allocator, a column for each trace."""
    columns, found = tuple(shown), [*shown.values()]
    rows = tuple((name, tuple(f"{each[name]:.2%}" for each in found)) for name in found[0])
    return TextTable("Held and empty at the ends of all requests of a trace", "allocator", columns, rows)


def study(options: Options) -> Result:
    workloads = [of_trace(path, options.max_len) for path in options.trace] or WORKLOADS
    lines, rows = [], []
    with tempfile.TemporaryDirectory() as directory:
        model = tiny_llama(Path(directory), max(each.max_len for each in workloads) // options.scale)
        for workload in workloads:
            for mode in reversed(KV_RESERVATIONS):
                waste = measure(model, workload, mode, options)
                paper = "" if workload.waste is None else f"{workload.waste:.0%}"
                named = f"{workload.name} | {workload.mean_len} | {workload.max_len} | {paper}"
                parts = f"{waste.at_end:.1%} | {waste.internal:.1%} | {waste.external:.1%}"
                first = named if mode == "max" else " | | | "
                rows.append({"workload": workload.name, "reservation": mode, **vars(waste)})
                lines.append(f"{first} | {mode} | {parts} | {waste.running:.1f} | {waste.steps}")
    head = "workload|mean|longest|paper|reservation|at the end|internal|external|running|steps"
    title = f"KV memory that is held and empty; lengths divided by {options.scale}"
    table = TextTable.read(title, head, lines, words=(3,))
    traces = {
        f"{each.name}, {len(each.sizes):,} requests": dict(allocators(each))
        for each in workloads
        if each.sizes
    }
    shown = [ends(traces), table] if traces else [table]
    return Result("What reserving blocks wastes", shown, numbers={"rows": rows, "at_ends": traces})


def tiny_llama(path: Path, positions: int = 1024) -> Path:
    """Save a Llama of 2 layers, 4 query and 2 KV heads of 8; its random weights are large enough for varied answers."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        bos_token_id=0,
        eos_token_id=1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = LlamaForCausalLM(config)
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.data.normal_(0, 0.3)
    model.save_pretrained(path)
    return path


if __name__ == "__main__":
    sys.exit(run_study(Options, study))
