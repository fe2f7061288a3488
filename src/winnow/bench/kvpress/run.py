"""kvpress at work: its asks, its process, and its answers as cells of an evaluation."""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from winnow.bench.environment import Environment, PeerError, call
from winnow.bench.kvpress.presses import Press
from winnow.evaluate.cell import Cell
from winnow.evaluate.metrics import score
from winnow.evaluate.outcome import Outcome
from winnow.evaluate.prompt import PromptMaker
from winnow.evaluate.result import CellResult, Refusal
from winnow.evaluate.sample import Sample
from winnow.journal import parse_object, whole_lines

_SCRIPT = Path(__file__).with_name("peer.py")
# More than any comparison takes; a killed one goes on where it stood.
_SECONDS = 24 * 3600


@dataclass(frozen=True)
class PressCell:
    """One press at one compression."""

    press: Press
    compression: float

    def ask(self, prompt: int, context: int) -> dict[str, Any]:
        """What peer.py is asked about one prompt; it keeps as many KVs as Winnow's budget."""
        kept = math.ceil(context / self.compression)
        return {
            "classes": list(self.press.classes),
            "options": self.press.options,
            "kept": kept,
            "prompt": prompt,
        }

    def named(self, query: str) -> Cell:
        """For the tables."""
        return Cell(self.press.label, self.compression, query)


class KvpressRun:
    """kvpress on a list of samples of one question each.

    Args:
        model: directory.
        maker: makes the prompts that Winnow sees too.
        folder: for the work and its answers, which the same work finds again.
    """

    def __init__(self, model: Path, samples: Sequence[Sample], maker: PromptMaker, folder: Path) -> None:
        self._samples = samples
        self._prompts = [maker.make(sample, sample.questions[0]) for sample in samples]
        self._work: dict[str, Any] = {
            "model": str(model.resolve()),
            "prompts": [
                {
                    "token_ids": list(prompt.token_ids),
                    "context": prompt.context_tokens,
                    "max_tokens": sample.questions[0].max_tokens,
                }
                for sample, prompt in zip(samples, self._prompts, strict=True)
            ],
        }
        weights = sorted(path.stat().st_size for path in model.glob("*.safetensors"))
        identity = json.dumps([self._work, weights], sort_keys=True)
        digest = hashlib.sha256(identity.encode()).hexdigest()[:12]
        self._answers = folder / f"answers-{digest}.jsonl"
        self._work_file = folder / f"work-{digest}.json"

    def answer(self, environment: Environment, cells: Sequence[PressCell], threads: int) -> None:
        """Ask what has no answer yet.

        Raises:
            PeerError: the process failed; holds the end of what it said.
        """
        known = self._found()
        asks = [
            ask
            for place, prompt in enumerate(self._prompts)
            for cell in cells
            if _key(ask := cell.ask(place, prompt.context_tokens)) not in known
        ]
        if not asks:
            return
        self._answers.parent.mkdir(parents=True, exist_ok=True)
        self._end_at_a_whole_line()
        work = self._work | {"asks": asks, "answers": str(self._answers.resolve())}
        self._work_file.write_text(json.dumps(work), encoding="utf-8")
        variables = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        call([environment.python, _SCRIPT, self._work_file], "kvpress", _SECONDS, variables=variables)

    def results(self, cells: Sequence[PressCell], query: str, tokenizer: Any) -> list[CellResult]:
        """The cells' results.

        Raises:
            PeerError: an answer is missing.
        """
        known = self._found()
        return [self._result(cell, query, tokenizer, known) for cell in cells]

    def _result(
        self, cell: PressCell, query: str, tokenizer: Any, known: dict[str, dict[str, Any]]
    ) -> CellResult:
        told = []
        for place, prompt in enumerate(self._prompts):
            key = _key(cell.ask(place, prompt.context_tokens))
            if key not in known:
                raise PeerError(f"kvpress left {cell.press.name} unanswered on prompt {place}")
            told.append(known[key])
        errors = [each["error"] for each in told if "error" in each]
        if errors:
            return CellResult(cell.named(query), (), Refusal(errors[0], len(errors)))
        outcomes = tuple(
            self._outcome(cell.named(query), place, each, tokenizer) for place, each in enumerate(told)
        )
        return CellResult(cell.named(query), outcomes)

    def _outcome(self, cell: Cell, place: int, told: dict[str, Any], tokenizer: Any) -> Outcome:
        sample, prompt = self._samples[place], self._prompts[place]
        question = sample.questions[0]
        text = tokenizer.decode(told["token_ids"], skip_special_tokens=True)
        return Outcome(
            cell=cell.name,
            sample=sample.name,
            question=0,
            category=sample.category,
            length=sample.length,
            score=score(question.metric, text, question.references, question.classes),
            answer=text,
            prompt_tokens=len(prompt.token_ids),
            answer_tokens=len(told["token_ids"]),
            reached=prompt.context_tokens / told["seen"],
            kv_bytes=told["kv_bytes"],
        )

    def _found(self) -> dict[str, dict[str, Any]]:
        if not self._answers.exists():
            return {}
        with self._answers.open("rb") as file:
            rows = [row for line in whole_lines(file) if (row := parse_object(line)) is not None]
        return {_key(row): row for row in rows}

    def _end_at_a_whole_line(self) -> None:
        """What a process that was killed left half written would swallow the next answer."""
        if self._answers.exists():
            with self._answers.open("rb+") as file:
                file.truncate(sum(len(line) for line in whole_lines(file)))


def _key(ask: dict[str, Any]) -> str:
    return json.dumps([ask[name] for name in ("classes", "options", "kept", "prompt")])
