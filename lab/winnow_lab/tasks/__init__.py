"""Tasks that papers report beside those of `winnow eval`: `python -m winnow_lab.tasks --help`."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType

from winnow_lab.evaluate import tasks

TASKS: Mapping[str, str] = MappingProxyType(
    {
        **tasks.TASKS,
        "nq-open": "winnow_lab.tasks.nq_open:NQ_OPEN",
        "gsm8k": "winnow_lab.tasks.shots:GSM8K",
        "gsm8k-flexible": "winnow_lab.tasks.shots:GSM8K_FLEXIBLE",
        "summaries": "winnow_lab.tasks.shots:SUMMARIES",
        "summaries-rouge-2": "winnow_lab.tasks.shots:SUMMARIES_ROUGE_2",
        "bbh": "winnow_lab.tasks.bbh:BBH",
    }
)
DATA = Path(__file__).parent / "data"

load_task = partial(tasks.load_task, tasks=TASKS)
