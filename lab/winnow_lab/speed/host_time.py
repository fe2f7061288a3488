"""What a decode step costs besides the model: schedule, lay out, sample, hand out.

    python -m winnow_lab.speed.host_time [--sequences 64,256]

Scheduler, cache accounting, executor, sampler and engine are the real ones; the model is a stand-in that returns the
same logits at once and attends to nothing. Greedy, no logprobs, no text: what every request pays.
"""

import statistics
import sys
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from winnow.attention import ReferenceBackend
from winnow.cache import CacheSize
from winnow.config import EngineConfig
from winnow.engine.assemble import assemble
from winnow.engine.engine import Engine
from winnow.engine.executor import ServedModel
from winnow.engine.requests.new_request import NewRequest
from winnow.executor.torch_executor import TorchExecutor
from winnow.models import LoadedModel
from winnow.models.model.geometry import ModelGeometry
from winnow.sampling import SamplingParams
from winnow_lab.report.tables import TextTable
from winnow_lab.study import Result, StudyOptions, flag, run_study

VOCAB = 1024
PARTS = ("schedule", "execute", "output")


@dataclass(frozen=True)
class Options(StudyOptions):
    layers: int = flag(32, least=1)
    kv_heads: int = flag(8, least=1)
    sequences: tuple[int, ...] = flag((32, 64, 256), "of a step", least=1)
    prompt: int = flag(64, "prompt tokens of each sequence", least=1)
    steps: int = flag(100, "that are timed", least=1)
    kv_memory: str = flag("16GiB", "never touched but for what sequences hold")


class NoModel:
    """Knows a model's size, and answers at once."""

    dtype = torch.bfloat16
    device = torch.device("cpu")

    def __init__(self) -> None:
        self._logits = torch.zeros(1, 65536, VOCAB, dtype=self.dtype)

    def __call__(self, logits_to_keep: torch.Tensor, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=self._logits[:, : len(logits_to_keep)])


def open_engine(options: Options, sequences: int) -> Engine:
    limits = {"max_num_seqs": sequences, "max_num_batched_tokens": max(2048, sequences)}
    config = EngineConfig.from_options({"kv_memory": options.kv_memory, **limits})
    most, heads, layers = options.prompt + 1024, options.kv_heads, options.layers
    stand_in: Any = NoModel()
    model = LoadedModel(
        model=stand_in,
        tokenizer=None,
        vocab_size=VOCAB,
        geometry=ModelGeometry(layers, heads, heads, 8, (None,) * layers),
        max_model_len=most,
        trained_len=most,
        eos_token_ids=frozenset(),
    )
    layout = model.kv_layout(config.cache, 1)
    size = CacheSize.fit(layout, config.cache.kv_memory, sequences, most)
    executor = TorchExecutor(model, config, ReferenceBackend(), layout, size)
    return assemble(executor, ServedModel(VOCAB, most), config, time.perf_counter)


def measure(engine: Engine, sequences: int, prompt: int, steps: int) -> dict[str, float]:
    """Median seconds of each part of a step in which every sequence decodes."""
    params = SamplingParams(temperature=0.0, max_tokens=steps + 1, ignore_eos=True)
    for index in range(sequences):
        engine.add(NewRequest(str(index), None, list(range(3, 3 + prompt)), params))
    samples: dict[str, list[float]] = {part: [] for part in (*PARTS, "step")}
    while engine.has_unfinished:
        before = engine.stats()
        start = time.perf_counter()
        engine.step()
        elapsed = time.perf_counter() - start
        after = engine.stats()
        decodes = after.generated_tokens - before.generated_tokens
        if decodes == sequences and after.prompt_tokens == before.prompt_tokens:
            samples["step"].append(elapsed)
            for part in PARTS:
                samples[part].append(after.elapsed[part] - before.elapsed[part])
    return {part: statistics.median(seconds) for part, seconds in samples.items()}


def study(options: Options) -> Result:
    found = {
        f"{sequences}": measure(open_engine(options, sequences), sequences, options.prompt, options.steps)
        for sequences in options.sequences
    }
    rows = tuple((name, tuple(f"{1e3 * each:.2f}" for each in row.values())) for name, row in found.items())
    title = f"{options.layers} layers x {options.kv_heads} KV heads; milliseconds per decode step, median"
    return Result(
        "Host time", [TextTable(title, "sequences", (*PARTS, "step"), rows)], numbers={"seconds": found}
    )


if __name__ == "__main__":
    sys.exit(run_study(Options, study))
