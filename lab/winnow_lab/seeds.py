"""The five texts' experiments on one card in twelve minutes.

    python -m winnow_lab seeds --device cuda
    python -m winnow_lab seeds --device cpu --small         # the same on toys, in two minutes

The page is docs/results/seeds.md, or seeds_small.md.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from winnow import LLM
from winnow.errors import WinnowError
from winnow_lab.bench.answering import Answered, answer_all, fixed_length
from winnow_lab.gpu.rows import Work
from winnow_lab.papers.baton.protocol import SHORT, draw_lengths
from winnow_lab.papers.judged import AskedTask, judged_prompts
from winnow_lab.report.tables import TextTable
from winnow_lab.study import RealModelOptions, Result, flag

_KINDS = ("niah_single_1", "niah_multikey_1", "niah_multiquery")
NOTES = """\
- **answers**: RULER, the question stands last; mean score and its standard error.
- **tokens/s**: of prompts and answers, or of answers alone where it says so; one run, after a first short request.
- Random weights say nothing of answers. A part that fails says why, and the others follow.
"""
Row = dict[str, str]


@dataclass(frozen=True)
class Options(RealModelOptions):
    device: str = flag("cuda", choices=("cuda", "cpu"))
    small: bool = flag(False, "toy shapes and few prompts")

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "name", self.name or ("seeds_small" if self.small else "seeds"))

    def size(self, whole: int, small: int) -> int:
        return small if self.small else whole

    def open(self, model: str | Path, **own: Any) -> LLM:
        """Open an engine on the device; prompts that come again are computed again."""
        options: dict[str, Any] = {"dtype": "bfloat16", "device": self.device, "enable_prefix_caching": False}
        return LLM(model, **options | {"verify_model": False} | own)


def _run(llm: LLM, prompts: Sequence[Sequence[int]], tokens: int, **own: Any) -> Answered:
    llm.generate(list(prompts[0][:200]), fixed_length(2))
    return answer_all(llm, [(each, fixed_length(tokens, **own)) for each in prompts])


def _all_tokens(done: Answered, prompts: Sequence[Sequence[int]]) -> str:
    return f"{(sum(map(len, prompts)) + sum(map(len, done.answers))) / done.seconds:.0f}"


def _batch(done: Answered) -> str:
    return f"{statistics.fmean(step.outputs for step in done.steps if step.outputs):.1f}"


def _random_model(options: Options) -> Path:
    return Work("toy" if options.small else "8b").directory()


def _random_prompts(count: int, length: int) -> list[list[int]]:
    return [[3 + (37 * place * (number + 7)) % 500 for place in range(length)] for number in range(count)]


def ruler(options: Options) -> Iterator[tuple[str, Row]]:
    """KV-Compress, figure 1a: scores and tokens per second at 1, 4, 16 and 64x."""
    length, each, new = options.size(4096, 700), options.size(16, 2), options.size(128, 32)
    own = {"kv_memory": options.size(4 << 30, 256 << 20), "max_model_len": length + new}
    for compression in (None, 4.0, 16.0, 64.0):
        eviction = {"eviction": "winnow-seen", "compression": compression} if compression else {}
        with options.open(options.model, **own, **eviction) as llm:
            asked = list(judged_prompts(llm, AskedTask(), _KINDS, length, each, 72, length + new))
            prompts = [prompt.token_ids for prompt in asked]
            done = _run(llm, prompts, new)
            found = [
                prompt.score(answer, llm.tokenizer) or 0.0
                for prompt, answer in zip(asked, done.answers, strict=True)
            ]
        error = statistics.stdev(found) / len(found) ** 0.5
        row = {"prompts": f"{len(found)}", "right": f"{statistics.fmean(found):.1%} ± {error:.1%}"}
        yield f"{compression or 1:g}x", row | {"tokens/s": _all_tokens(done, prompts)}


def throughput(options: Options) -> Iterator[tuple[str, Row]]:
    """KV-Compress, figure 1b: 8 billion random weights in the pool that an L4 has left, 6,000 + 500 tokens."""
    length, new, count = options.size(6000, 600), options.size(500, 50), options.size(32, 8)
    memory = options.size(5 << 30, 2 << 20)
    own = {"load_format": "dummy", "kv_memory": memory, "max_model_len": length + new}
    model, prompts = _random_model(options), _random_prompts(count, length)
    for compression in (None, 8.0, 64.0):
        kept: dict[str, Any] = {"kv_reservation": "prompt"}
        if compression:
            kept = {"eviction": "kv-compress", "compression": compression}
        with options.open(model, **own, **kept) as llm:
            done = _run(llm, prompts, new)
        row = {"tokens/s": _all_tokens(done, prompts), "batch": _batch(done)}
        yield f"{compression or 1:g}x", row | {"preempted": f"{done.counted('num_preemptions')}"}


def value_tier(options: Options) -> Iterator[tuple[str, Row]]:
    """KCache, table 3: values on the host at 4k and 15k tokens, batch 4 and 1; tokens of answers per second."""
    own = {"load_format": "dummy", "kv_memory": options.size(6 << 30, 64 << 20)}
    own |= {"max_model_len": options.size(16384, 4096)}
    model = _random_model(options)
    for length, count in ((options.size(4096, 500), 4), (options.size(15360, 1500), 1)):
        for tier in (None, "host:L=1,N=64"):
            with options.open(model, **own, value_tier=tier) as llm:
                done = _run(llm, _random_prompts(count, length), options.size(200, 30))
            first = next(step.seconds for step in done.steps if step.outputs == count)
            rate = sum(map(len, done.answers)) / (done.seconds - first)
            row = {"answer tokens/s": f"{rate:.1f}", "device": f"{done.kv_bytes_peak / 2**20:.1f} MiB"}
            yield f"{length} tokens, batch {count}, {tier or 'all values here'}", row


def batching(options: Options) -> Iterator[tuple[str, Row]]:
    """BATON, table 2: its short set in static padded batches and with vector embedding, batch 8."""
    lengths = draw_lengths(SHORT, 8, options.size(100, 15) / 100, 0)
    found = {}
    for mode in ("static", "embedding"):
        own = {"engine": f"padded:mode={mode}", "max_num_seqs": 8, "dtype": "float32"}
        memory = options.size(2 << 30, 256 << 20)
        with options.open(options.model, **own, max_model_len=512, kv_memory=memory) as llm:
            ids = _random_prompts(len(lengths), 512)
            asked = [
                (text[: each.prompt], fixed_length(each.answer))
                for text, each in zip(ids, lengths, strict=True)
            ]
            done = answer_all(llm, asked)
        found[mode] = done.seconds
        gain = f"{found['static'] / done.seconds:.2f}x"
        yield mode, {"seconds": f"{done.seconds:.2f}", "over static": gain}


def swapping(options: Options) -> Iterator[tuple[str, Row]]:
    """The memory text: preempted requests copied to the host or computed again."""
    length, new, count = options.size(1500, 300), options.size(500, 200), options.size(16, 8)
    memory = options.size(256 << 20, 40 << 20)
    for name, host in (("recompute", None), ("swap", "4GiB")):
        own = {"kv_memory": memory, "max_model_len": length + new, "kv_offloading_size": host}
        with options.open(options.model, **own) as llm:
            prompts = _random_prompts(count, length)
            done = _run(llm, prompts, new)
        row = {"tokens/s": _all_tokens(done, prompts), "preempted": f"{done.counted('num_preemptions')}"}
        row |= {"swapped": f"{done.counted('num_swaps')}"}
        yield name, row | {"computed again": f"{done.counted('recomputed_tokens')} tokens"}


Part = Callable[[Options], Iterator[tuple[str, Row]]]
PARTS: tuple[Part, ...] = (ruler, throughput, value_tier, batching, swapping)


def study(options: Options) -> Iterator[Result]:
    tables: list[TextTable] = []
    numbers: list[dict[str, Any]] = []
    for part in PARTS:
        start, rows, notes = time.perf_counter(), dict[str, Row](), []
        try:
            rows.update(part(options))
        except (WinnowError, RuntimeError) as error:
            notes.append(f"Failed: {error}")
        title = (part.__doc__ or "").strip().rstrip(".")
        heads = dict.fromkeys(head for row in rows.values() for head in row)
        columns = {head: (lambda row, head=head: row.get(head)) for head in heads}
        notes.append(f"{time.perf_counter() - start:.0f} s.")
        tables.append(TextTable.of(title, "", rows, columns, notes))
        numbers += [{"part": part.__name__, "row": name, **row} for name, row in rows.items()]
        shapes = "toy shapes" if options.small else "8 billion random weights"
        facts = [f"Device {options.device}; {Path(options.model).name}, and {shapes}."]
        yield Result("The texts' experiments on this machine", list(tables), facts, NOTES, {"rows": numbers})
