"""What a decode step costs besides the model: schedule, lay out, sample, hand out.

    python -m winnow_lab.speed.host_time [--layers 32] [--kv-heads 8] [--sequences 64 256] [--steps 100]

Scheduler, cache accounting, executor, sampler and engine are the real ones; the model is a stand-in that returns the
same logits at once and attends to nothing. Greedy, no logprobs, no text: what every request pays.
"""

import argparse
import statistics
import time
from types import SimpleNamespace
from typing import Any

import torch

from winnow.attention import ReferenceBackend
from winnow.cache import CacheSize
from winnow.config import EngineConfig
from winnow.engine.assemble import assemble
from winnow.engine.engine import Engine
from winnow.engine.requests.new_request import NewRequest
from winnow.engine.served_model import ServedModel
from winnow.executor.torch_executor import TorchExecutor
from winnow.models import LoadedModel, ModelGeometry
from winnow.sampling import SamplingParams

VOCAB = 1024
PARTS = ("schedule", "execute", "output")


class NoModel:
    """Knows a model's size, and answers at once."""

    dtype = torch.bfloat16
    device = torch.device("cpu")

    def __init__(self) -> None:
        self._logits = torch.zeros(1, 65536, VOCAB, dtype=self.dtype)

    def __call__(self, logits_to_keep: torch.Tensor, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=self._logits[:, : len(logits_to_keep)])


def open_engine(layers: int, kv_heads: int, sequences: int, prompt: int) -> Engine:
    config = EngineConfig.from_options(
        {
            "kv_memory": "16GiB",  # never touched
            "max_num_seqs": sequences,
            "max_num_batched_tokens": max(2048, sequences),
        }
    )
    max_model_len = prompt + 1024
    model = LoadedModel(
        model=NoModel(),
        tokenizer=None,
        vocab_size=VOCAB,
        geometry=ModelGeometry(layers, kv_heads, kv_heads, 8, (None,) * layers),
        max_model_len=max_model_len,
        trained_len=max_model_len,
        eos_token_ids=frozenset(),
    )
    layout = model.kv_layout(config.cache, 1)
    size = CacheSize.fit(layout, config.cache.kv_memory, sequences, max_model_len)
    executor = TorchExecutor(model, config, ReferenceBackend(), layout, size)
    served = ServedModel(VOCAB, max_model_len, max_model_len)
    return assemble(executor, served, config, time.perf_counter)


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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--sequences", type=int, nargs="+", default=[32, 64, 256])
    parser.add_argument("--prompt", type=int, default=64, help="prompt tokens of each sequence")
    parser.add_argument("--steps", type=int, default=100)
    arguments = parser.parse_args()
    print(f"{arguments.layers} layers x {arguments.kv_heads} KV heads; milliseconds per decode step, median")
    print(f"{'sequences':>9} {'schedule':>9} {'execute':>9} {'output':>9} {'step':>9}")
    for sequences in arguments.sequences:
        engine = open_engine(arguments.layers, arguments.kv_heads, sequences, arguments.prompt)
        found = measure(engine, sequences, arguments.prompt, arguments.steps)
        columns = " ".join(f"{found[part] * 1e3:9.2f}" for part in (*PARTS, "step"))
        print(f"{sequences:9} {columns}")


if __name__ == "__main__":
    main()
