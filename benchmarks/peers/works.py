"""The works: W1 on random weights, and W2 on a real model, whose answers are right or wrong."""

import hashlib
import json
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizer import save_with_tokenizer

from winnow.bench.presets import PRESETS
from winnow.bench.workload import Workload
from winnow.errors import ConfigError
from winnow.evaluate.metrics import score
from winnow.evaluate.prompt import PromptMaker
from winnow.evaluate.sample import Question
from winnow.evaluate.tasks import load_task
from winnow.evaluate.tasks.task import TaskSettings
from winnow.models.published import Published, open_published
from winnow.report.fingerprint import model_digest

# Of W2: what SmolLM2 can do at all with its full cache, at lengths that an answer's room is part of.
CATEGORIES = ("niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1")
LENGTHS = (1024, 1536, 2048, 4096)
ANSWER_TOKENS = 64


@dataclass(frozen=True)
class Exam:
    """Questions with right answers, one behind each prompt."""

    tokenizer: Any
    questions: list[Question]
    ends: frozenset[int]
    """Tokens that end an answer; the work lets it run on, so that all are equally long."""

    def score(self, answers: Sequence[Sequence[int]]) -> float:
        """The mean score of the tokens that came, each cut where the answer ends."""
        return statistics.fmean(
            self._score(question, tokens) for question, tokens in zip(self.questions, answers, strict=True)
        )

    def _score(self, question: Question, tokens: Sequence[int]) -> float:
        end = next((place for place, token in enumerate(tokens) if token in self.ends), len(tokens))
        text = self.tokenizer.decode(tokens[:end], skip_special_tokens=True)
        return score(question.metric, text, question.references, question.classes)


@dataclass(frozen=True)
class GivenWork:
    """A work that is ready to be handed out."""

    name: str
    model: Path
    """Directory with configuration, safetensors and tokenizer."""
    prompts: list[list[int]]
    new_tokens: int
    kv_seqs: int
    summary: str
    exam: Exam | None = None

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and its answer."""
        return max(map(len, self.prompts)) + self.new_tokens

    def identity(self) -> dict[str, Any]:
        """What a journal of this work belongs to."""
        digest = hashlib.sha256(json.dumps(self.prompts).encode()).hexdigest()
        return {
            "work": self.name,
            "model": model_digest(self.model),
            "prompts": digest,
            "new_tokens": self.new_tokens,
        }


def make_w1(workload: Workload, kv_seqs: int, folder: Path) -> GivenWork:
    """Random prompts for a model of random weights."""
    preset = PRESETS["w1"]
    model = save_with_tokenizer(preset.shape, folder)
    what = f"{workload.requests} requests of {workload.prompt_tokens} + {workload.new_tokens} tokens"
    prompts = workload.prompts(preset.shape.vocab_size)
    return GivenWork("w1", model, prompts, workload.new_tokens, kv_seqs, what)


def make_w2(source: Path, requests: int, kv_seqs: int, folder: Path) -> GivenWork:
    """RULER's single needles and the one among others, equally many of each length, in an order that mixes them.

    Args:
        source: SmolLM2-135M-Instruct: a GGUF file, or a directory.
        requests: a multiple of the 16 pairs of category and length.

    Raises:
        ConfigError: it is no such multiple.
        UnsupportedModelError: the model cannot be read.
    """
    pairs = len(CATEGORIES) * len(LENGTHS)
    if requests < pairs or requests % pairs:
        raise ConfigError(f"requests of w2 must be a multiple of {pairs}, got {requests}")
    published = open_published(source)
    tokenizer = published.tokenizer()
    model = export(source, published, folder)
    maker, task = PromptMaker(tokenizer, "on"), load_task("ruler")

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))  # type: ignore[union-attr]

    settings = TaskSettings(
        count,
        lambda text, _: text,
        max(LENGTHS) * 2,
        samples=requests // pairs,
        tokens=LENGTHS,
        categories=CATEGORIES,
    )
    asked = [(sample, question) for sample in task.samples(settings) for question in sample.questions]
    # Short and long ones side by side, as requests come.
    asked.sort(key=lambda each: hashlib.sha256(each[0].name.encode()).digest())
    prompts = [list(maker.make(sample, question).token_ids) for sample, question in asked]
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    named = config.get("eos_token_id")
    ends = frozenset([*(named if isinstance(named, list) else [named]), *_ends(tokenizer)])
    exam = Exam(tokenizer, [question for _, question in asked], ends)
    lengths = f"{min(map(len, prompts)):,} to {max(map(len, prompts)):,}"
    what = f"{len(prompts)} prompts of {lengths} tokens ({sum(map(len, prompts)):,} in all) + {ANSWER_TOKENS}"
    return GivenWork("w2", model, prompts, ANSWER_TOKENS, kv_seqs, what, exam)


def _ends(tokenizer: Any) -> list[int]:
    return [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]


def export(source: Path, published: Published, folder: Path) -> Path:
    """The model as bfloat16 safetensors with its tokenizer, for engines that read nothing else; made once."""
    path = folder / f"{source.stem}-{model_digest(source)[:8]}"
    if path.is_dir():
        return path
    from transformers import AutoModelForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as unfinished:
        draft = Path(unfinished) / "model"
        with published.reading():
            model = AutoModelForCausalLM.from_pretrained(**published.weights(), dtype=torch.bfloat16)
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.save_pretrained(draft)
        published.tokenizer().save_pretrained(draft)  # type: ignore[union-attr]
        shutil.move(draft, path)
    return path
