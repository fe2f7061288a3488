"""Plan of an evaluation, and its identity."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from winnow.errors import EvaluationError, known_names
from winnow.report.fingerprint import Fingerprint, fingerprint
from winnow_lab.evaluate.cell import Cell
from winnow_lab.evaluate.sample import Sample
from winnow_lab.evaluate.tasks.task import Task, TaskSettings

if TYPE_CHECKING:
    from winnow.llm import LLM

# Of `TaskSettings`: what a model brings, not a user.
_OF_THE_MODEL = ("count_tokens", "truncate", "max_model_len")


@dataclass(frozen=True)
class EvaluationPlan:
    """A task, how much of it, and the cells to run it in.

    Attributes:
        controls: presets among the cells that say which categories are uninformative.
        chat: "auto", "on" or "off"; see `PromptMaker`.
    """

    name: str
    task: Task
    settings: TaskSettings
    cells: tuple[Cell, ...]
    controls: tuple[str, ...] = ()
    chat: str = "auto"

    def make_samples(self) -> list[Sample]:
        """The task's samples; raises EvaluationError for a category that it does not have, or as the task does."""
        for category in self.settings.categories:
            if category not in self.task.categories:
                raise EvaluationError(
                    f"task {self.name} has no category {category!r}; {known_names(category, self.task.categories)}"
                )
        samples = self.task.samples(self.settings)
        if not samples:
            raise EvaluationError(f"task {self.name} has no samples with these settings")
        assert len({sample.name for sample in samples}) == len(samples), "a sample's name is its own"
        return samples

    def categories_of(self, samples: Sequence[Sample]) -> tuple[str, ...]:
        found = dict.fromkeys(sample.category for sample in samples)
        return tuple(dict.fromkeys(name for name in (*self.task.categories, *found) if name in found))

    def settings_json(self) -> dict[str, Any]:
        values = {name: value for name, value in vars(self.settings).items() if name not in _OF_THE_MODEL}
        return values | {"data": None if self.settings.data is None else str(self.settings.data)}

    def identity(self, llm: "LLM", samples: Sequence[Sample]) -> Fingerprint:
        """What must not change between the starts of an evaluation.

        Cells are left out: an evaluation may be continued with more of them. So is where model and data lie; their
        contents count.
        """
        settings = self.settings_json()
        del settings["data"]
        text = json.dumps([asdict(sample) for sample in samples], sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()
        return engine_identity(llm, digest, {"task": self.name, "chat": self.chat} | settings)


def engine_identity(llm: "LLM", input_sha256: str, settings: dict[str, Any]) -> Fingerprint:
    """The identity of work that a model does with these settings, which include those of its engine."""
    from winnow.models.load.loader import DEMO_MODEL

    engine = llm.config.settings()
    directory = Path(engine.pop("model") or DEMO_MODEL)
    # It follows from the cells, and an evaluation may be continued with more of them.
    del engine["num_accumulators"], engine["kv_bias"]
    engine["model_seed"] = engine.pop("seed")
    return fingerprint(input_sha256, directory, settings | engine)
