"""Tasks that papers report beside those of `winnow eval`: `python -m benchmarks.tasks --help`."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType

from winnow.evaluate import tasks

TASKS: Mapping[str, str] = MappingProxyType(
    {
        **tasks.TASKS,
        "babi": "benchmarks.tasks.babi:BABI",
        "nq-open": "benchmarks.tasks.nq_open:NQ_OPEN",
        "gsm8k": "benchmarks.tasks.gsm8k:GSM8K",
        "gsm8k-flexible": "benchmarks.tasks.gsm8k:GSM8K_FLEXIBLE",
        "summaries": "benchmarks.tasks.summaries:SUMMARIES",
        "summaries-rouge-2": "benchmarks.tasks.summaries:SUMMARIES_ROUGE_2",
        "bbh": "benchmarks.tasks.bbh:BBH",
    }
)
DATA = Path(__file__).parent / "data"

load_task = partial(tasks.load_task, tasks=TASKS)
