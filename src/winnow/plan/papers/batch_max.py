"""Batch-Max: eager transformers, layers spread over cards that compute in turn."""

from dataclasses import dataclass, replace

from winnow.plan.hardware import HARDWARE
from winnow.plan.models import MODELS, ModelShape
from winnow.plan.papers.comparison import EAGER, Comparison, comparison_table, times_batch
from winnow.plan.step_time import StepTimes, StepWork
from winnow.report.tables import TextTable

_PHI = replace(
    MODELS["llama-2-7b"],
    name="phi-3.5-mini",
    num_layers=32,
    num_query_heads=32,
    num_kv_heads=32,
    head_dim=96,
    hidden_size=3072,
    vocab_size=32064,
    num_params=3_821_079_552,
    active_params=3_722_578_944,
    lookup_params=98_500_608,
)
_BM_NEW = 512


@dataclass(frozen=True)
class _BatchMaxTask:
    """A task of its Tables 1 and 2: prompts of about `prompt` tokens; rows of method, batch, budget, tokens/s."""

    name: str
    model: ModelShape
    card: str
    prompt: int
    rows: tuple[tuple[str, int, int | None, float], ...]


_LLAMA_13B = MODELS["llama-2-13b"]
BATCH_MAX = (
    _BatchMaxTask(
        "13B CNN/DM",
        _LLAMA_13B,
        "V100",
        3000,
        (("ED", 4, 1, 42.0), ("FKV", 4, None, 30.3), ("BM", 32, 1024, 73.8), ("BM", 40, 896, 80.3)),
    ),
    _BatchMaxTask(
        "13B NarrativeQA",
        _LLAMA_13B,
        "V100",
        3000,
        (("ED", 4, 1, 40.0), ("FKV", 4, None, 26.4), ("BM", 15, 1792, 43.3), ("BM", 16, 1728, 46.2)),
    ),
    _BatchMaxTask(
        "13B GSM8K",
        _LLAMA_13B,
        "V100",
        2600,
        (("ED", 3, 1, 30.3), ("FKV", 3, None, 22.9), ("BM", 8, 1536, 39.3), ("BM", 10, 1408, 43.7)),
    ),
    _BatchMaxTask(
        "Phi-3.5 CNN/DM",
        _PHI,
        "TITAN-V",
        3300,
        (("ED", 2, 1, 29.0), ("FKV", 2, None, 27.0), ("BM", 5, 2176, 36.3)),
    ),
    _BatchMaxTask(
        "Phi-3.5 NarrativeQA",
        _PHI,
        "TITAN-V",
        3300,
        (("ED", 2, 1, 28.0), ("FKV", 2, None, 26.5), ("BM", 6, 1984, 37.4)),
    ),
    _BatchMaxTask(
        "Phi-3.5 GSM8K",
        _PHI,
        "TITAN-V",
        2800,
        (("ED", 2, 1, 28.4), ("FKV", 2, None, 27.1), ("BM", 8, 1664, 43.8)),
    ),
)


def batch_max_rate(task: _BatchMaxTask, batch: int, budget: int | None, every: int | None) -> float:
    """New tokens per second. `every`: tokens between rounds also within the prompt; None: the prompt is whole."""
    times = StepTimes(
        task.model,
        HARDWARE[task.card],
        2 * task.model.num_params,
        2 * task.model.kv_elements(),
        factors=EAGER,
    )
    held = task.prompt if budget is None else budget
    work = StepWork()
    chunks = [task.prompt] if every is None else [every] * (task.prompt // every)
    done = 0
    for count in chunks:
        kvs = min(done, held)
        one = StepWork.prefill(count, kvs)
        work = work.plus(times_batch(one, batch))
        if every is not None and done >= held:
            work = work.plus(StepWork(round_kvs=batch * held, rounds=1))
        done += count
    for step in range(_BM_NEW):
        kvs = task.prompt + step if budget is None else held
        work = work.plus(StepWork.decode(batch, kvs))
    return batch * _BM_NEW / times.seconds(work)


def batch_max() -> TextTable:
    """Tokens per second over those of ED, the bound of decoding-only eviction."""
    rows = []
    for task in BATCH_MAX:
        rates = [
            batch_max_rate(task, batch, budget, _BM_EVERY if method == "BM" and batch > 2 else None)
            for method, batch, budget, _ in task.rows
        ]
        for (method, batch, budget, printed), rate in zip(task.rows[1:], rates[1:], strict=True):
            label = f"{task.name}, {method} b={batch}" + (f" kv={budget}" if budget else "")
            rows.append(Comparison(label, printed / task.rows[0][3], rate / rates[0]))
    return comparison_table(
        "Batch-Max: throughput over ED (V100, TITAN V; 512 new tokens)",
        "ratio",
        rows,
        (
            "Closed form with eager transformers' costs, layers in turn on their cards. Cause of errors: mean prompt",
            "lengths are not printed (limit 3584; 2600 to 3300 assumed), and attention over its padded cache costs",
            "several times its bytes.",
        ),
    )


_BM_EVERY = 64
