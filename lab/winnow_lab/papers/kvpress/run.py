"""kvpress at work: its asks, its process, and its answers as cells of an evaluation."""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from winnow.report.journal import parse_object, whole_lines
from winnow.values.eviction_request import Amount
from winnow_lab.evaluate.cell import AGNOSTIC, AWARE, Cell
from winnow_lab.evaluate.metrics import score
from winnow_lab.evaluate.prompt import Prompt, PromptMaker
from winnow_lab.evaluate.requests import until_stop
from winnow_lab.evaluate.result import CellResult, Outcome, Refusal
from winnow_lab.evaluate.sample import Sample
from winnow_lab.peers.environment import Environment, PeerError, call

PACKAGE = "kvpress==0.5.5"
SOURCES = ("fire",)
"""What it needs that is published as source alone: pure Python."""


@dataclass(frozen=True)
class Press:
    """A press, or one around another: `classes` from the outside in, `options` of the innermost."""

    name: str
    classes: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return f"kvpress {self.name}"


_ALL = (
    Press("KeyDiff", ("KeyDiffPress",)),
    Press("AdaKV+SnapKV", ("AdaKVPress", "SnapKVPress")),
    Press("SnapKV", ("SnapKVPress",)),
    Press("PyramidKV", ("PyramidKVPress",)),
    Press("TOVA", ("TOVAPress",)),
    Press("ExpectedAttention", ("ExpectedAttentionPress",)),
    Press("AdaKV+ExpectedAttention", ("AdaKVPress", "ExpectedAttentionPress")),
    Press("LeverageScore", ("LeverageScorePress",)),
    Press("Compactor", ("CompactorPress",)),
    Press("KVzip", ("KVzipPress",)),
    Press("KVzip+", ("KVzipPress",), {"kvzip_plus_normalization": True}),
    Press("Merging+ExpectedAttention", ("MergingPress", "ExpectedAttentionPress")),
    Press("StreamingLLM", ("StreamingLLMPress",)),
    Press("Random", ("RandomPress",), {"seed": 0}),
)
PRESSES: dict[str, Press] = {press.name: press for press in _ALL}

_SCRIPT = Path(__file__).with_name("peer.py")
# More than any comparison takes; a killed one resumes where it stopped.
_SECONDS = 24 * 3600


@dataclass(frozen=True)
class PressCell:
    press: Press
    compression: float

    def ask(self, prompt: int, context: int, besides: int = 0) -> dict[str, Any]:
        """What peer.py is asked about one prompt; it keeps as many KVs as Winnow's budget.

        Args:
            besides: tokens that the budget counts too, and that are kept behind what is compressed.
        """
        kept = max(math.ceil((context + besides) / self.compression) - besides, 1)
        return {
            "classes": list(self.press.classes),
            "options": self.press.options,
            "kept": kept,
            "prompt": prompt,
        }

    def named(self, query: str) -> Cell:
        return Cell(self.press.label, Amount(self.compression), query)


@dataclass(frozen=True)
class _Shared:
    """Prompts that begin with the same `context` tokens; `besides`: what of the rest Winnow's budget counts."""

    sample: Sample
    places: tuple[int, ...]
    prompts: tuple[Prompt, ...]
    context: int
    besides: int = 0

    @property
    def work(self) -> dict[str, Any]:
        return {
            "context": list(self.prompts[0].token_ids[: self.context]),
            "questions": [
                {
                    "token_ids": list(prompt.token_ids[self.context :]),
                    "max_tokens": self.sample.questions[place].max_tokens,
                }
                for place, prompt in zip(self.places, self.prompts, strict=True)
            ],
        }


def _shared(sample: Sample, maker: PromptMaker, query: str) -> list[_Shared]:
    """Query-agnostic all questions share their context. Query-aware each is compressed with it, up to its last token;
    a press needs something behind what it compresses, and where no template leaves any that is the last token."""
    prompts = tuple(maker.make(sample, question) for question in sample.questions)
    if query == AGNOSTIC:
        context = min(prompt.context_tokens for prompt in prompts)
        return [_Shared(sample, tuple(range(len(prompts))), prompts, context)]
    tails = [max(prompt.template_tail, 1) for prompt in prompts]
    return [
        _Shared(sample, (place,), (prompt,), len(prompt.token_ids) - tail, tail)
        for place, (prompt, tail) in enumerate(zip(prompts, tails, strict=True))
    ]


class KvpressRun:
    """kvpress on a list of samples; `query` says what is compressed, `folder` keeps the work and its answers."""

    def __init__(
        self,
        model: Path,
        samples: Sequence[Sample],
        maker: PromptMaker,
        folder: Path,
        *,
        dtype: str = "float32",
        query: str = AGNOSTIC,
    ) -> None:
        assert query in (AGNOSTIC, AWARE)
        self._query = query
        self._shared = [each for sample in samples for each in _shared(sample, maker, query)]
        self._work: dict[str, Any] = {
            "model": str(model.resolve()),
            "dtype": dtype,
            "prompts": [each.work for each in self._shared],
        }
        weights = sorted(path.stat().st_size for path in model.glob("*.safetensors"))
        identity = json.dumps([self._work, weights], sort_keys=True)
        digest = hashlib.sha256(identity.encode()).hexdigest()[:12]
        self._answers = folder / f"answers-{digest}.jsonl"
        self._work_file = folder / f"work-{digest}.json"

    def answer(self, environment: Environment, cells: Sequence[PressCell], threads: int) -> None:
        """Run the prompts that have no answer yet. Raises PeerError with the last output of a process that failed."""
        known = self._found()
        by_prompt = zip(*map(self._asks, cells), strict=True)
        asks = [ask for of_prompt in by_prompt for ask in of_prompt if _key(ask) not in known]
        if not asks:
            return
        self._answers.parent.mkdir(parents=True, exist_ok=True)
        self._end_at_a_whole_line()
        work = self._work | {"asks": asks, "answers": str(self._answers.resolve())}
        self._work_file.write_text(json.dumps(work), encoding="utf-8")
        variables = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        call([environment.python, _SCRIPT, self._work_file], "kvpress", _SECONDS, variables=variables)

    def _asks(self, cell: PressCell) -> list[dict[str, Any]]:
        return [cell.ask(place, each.context, each.besides) for place, each in enumerate(self._shared)]

    def has_answered(self, cell: PressCell) -> bool:
        known = self._found()
        return all(_key(ask) in known for ask in self._asks(cell))

    def results(self, cells: Sequence[PressCell], query: str, tokenizer: Any) -> list[CellResult]:
        """The cells' results, which tables show under `query`; raises PeerError where an answer is missing."""
        known = self._found()
        return [self._result(cell, query, tokenizer, known) for cell in cells]

    def _result(
        self, cell: PressCell, query: str, tokenizer: Any, known: dict[str, dict[str, Any]]
    ) -> CellResult:
        missing = [ask["prompt"] for ask in self._asks(cell) if _key(ask) not in known]
        if missing:
            raise PeerError(f"kvpress left {cell.press.name} unanswered on prompt {missing[0]}")
        reported = [known[_key(ask)] for ask in self._asks(cell)]
        errors = [each["error"] for each in reported if "error" in each]
        if errors:
            return CellResult(cell.named(query), (), Refusal(errors[0], len(errors)))
        outcomes = tuple(
            _outcome(cell.named(query), shared, each, found, tokenizer)
            for shared, found in zip(self._shared, reported, strict=True)
            for each in range(len(shared.places))
        )
        return CellResult(cell.named(query), outcomes)

    def seconds(self, cell: PressCell) -> tuple[float, float] | None:
        """Mean seconds until a context was computed and compressed, and until all its questions were answered; None
        where nothing was answered."""
        known = self._found()
        found = (known.get(_key(ask), {}) for ask in self._asks(cell))
        reported = [each for each in found if "answers" in each]
        if not reported:
            return None
        first, whole = (fmean(each[name] for each in reported) for name in ("compress_seconds", "seconds"))
        return first, whole

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


def _outcome(cell: Cell, shared: _Shared, place: int, reported: dict[str, Any], tokenizer: Any) -> Outcome:
    sample, answer = shared.sample, reported["answers"][place]
    question = sample.questions[shared.places[place]]
    text = until_stop(tokenizer.decode(answer, skip_special_tokens=True), question.stop)
    return Outcome(
        cell=cell.name,
        sample=sample.name,
        question=shared.places[place],
        category=sample.category,
        length=sample.length,
        score=score(question.metric, text, question.references, question.classes),
        answer=text,
        prompt_tokens=len(shared.prompts[place].token_ids),
        answer_tokens=len(answer),
        achieved_compression=shared.context / reported["seen"],
        kv_bytes=reported["kv_bytes"],
    )


def _key(ask: dict[str, Any]) -> str:
    return json.dumps([ask[name] for name in ("classes", "options", "kept", "prompt")])
