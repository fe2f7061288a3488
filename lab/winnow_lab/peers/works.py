"""The works: W1 on random weights, and those on real models, whose answers are right or wrong."""

import hashlib
import json
import re
import shutil
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from math import ceil
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from winnow.models.load.automatic import open_published
from winnow.process.digest import model_digest
from winnow_lab.bench.presets import PRESETS, LlamaShape, Workload, model_cache
from winnow_lab.evaluate.demo_tasks import Haystack
from winnow_lab.evaluate.metrics import score
from winnow_lab.evaluate.prompt import PromptMaker
from winnow_lab.evaluate.sample import Question, Sample
from winnow_lab.evaluate.tasks import load_task
from winnow_lab.evaluate.tasks.files import shipped_sentences
from winnow_lab.evaluate.tasks.in_prose import document_sample
from winnow_lab.evaluate.tasks.task import TaskSettings

TEXTS, FACTS = 10, 5
LICENCES = Path("/usr/share/common-licenses")
# The shorter ones first, as lengths rise.
NAMED = ("Apache-2.0", "MPL-2.0", "GPL-2", "GFDL-1.3", "LGPL-2.1", "GPL-3")
SUMMARISE = Question("\n\nSummarise the text above in three sentences.", (), "", max_tokens=128)
LONGEST_SENTENCE = 400


def manual_samples(settings: TaskSettings, _: int) -> list[Sample]:
    """Ten texts of lengths from the first to the second of `settings.tokens`, each with planted facts that are asked
    for; and the wish for a summary, whose question has no references, since nothing judges it."""
    low, high = settings.tokens
    samples = []
    for place, (name, text) in enumerate(islice(texts(), TEXTS)):
        length = low + (high - low) * place // (TEXTS - 1)
        haystack = Haystack.build(text, settings.count_tokens)
        sample = document_sample(replace(settings, questions=FACTS), haystack, name, length, place)
        samples.append(replace(sample, questions=(*sample.questions, SUMMARISE)))
    return samples


def texts() -> Iterator[tuple[str, list[str]]]:
    """Names and sentences: prose that ships with Winnow, licences that are here, the longest of Python's topics."""
    yield "prose", list(shipped_sentences())
    for path in (*(LICENCES / name for name in NAMED), Path(sysconfig.get_path("stdlib")) / "LICENSE.txt"):
        if path.is_file():
            yield path.name, sentences(path.read_text(encoding="utf-8"))
    for topic in sorted(topics, key=lambda name: (-len(topics[name]), name)):
        yield topic, sentences(topics[topic])


def sentences(text: str) -> list[str]:
    """Sentences of a text in lines, without those that are too long for one."""
    found = re.split(r"(?<=[.;:])\s+", " ".join(text.split()))
    return [sentence for sentence in found if 0 < len(sentence) <= LONGEST_SENTENCE]


@dataclass(frozen=True)
class Exam:
    """Questions with right answers, one behind each prompt; None: that prompt's answer is not judged."""

    tokenizer: Any
    questions: list[Question | None]
    ends: frozenset[int]
    """Tokens that end an answer, also where the work lets it run on, so that all are equally long."""

    def scores(self, answers: Sequence[Sequence[int]]) -> list[float]:
        """Of every judged answer, cut where it ends."""
        pairs = zip(self.questions, answers, strict=True)
        return [self._score(question, tokens) for question, tokens in pairs if question is not None]

    def _score(self, question: Question, tokens: Sequence[int]) -> float:
        end = next((place for place, token in enumerate(tokens) if token in self.ends), len(tokens))
        text = self.tokenizer.decode(tokens[:end], skip_special_tokens=True)
        text = text.lstrip()
        for stop in question.stop:
            text = text.partition(stop)[0]
        return score(question.metric, text, question.references, question.classes)


@dataclass(frozen=True)
class GivenWork:
    name: str
    model: Path
    """Directory with configuration, safetensors and tokenizer."""
    prompts: list[list[int]]
    new_tokens: int
    kv_seqs: int
    summary: str
    exam: Exam | None = None
    end_tokens: tuple[int, ...] = ()
    prefix_caching: bool = False
    sampling: list[dict[str, int]] = field(default_factory=list)
    """See `protocol.Work`."""
    contexts: int = 0
    """How many different ones the prompts have."""
    later: bool = False
    """Contexts are judged before their questions are known."""

    @property
    def longest(self) -> int:
        return max(map(len, self.prompts)) + self.new_tokens

    def identity(self) -> dict[str, Any]:
        digest = hashlib.sha256(json.dumps([self.prompts, self.sampling]).encode()).hexdigest()
        return {
            "work": self.name,
            "model": model_digest(self.model),
            "prompts": digest,
            "new_tokens": self.new_tokens,
            "kv_seqs": self.kv_seqs,
            "prefix_caching": self.prefix_caching,
        }


def save_with_tokenizer(shape: LlamaShape, folder: Path) -> Path:
    """Copy the model below `folder` and name its tokens, unless that has been done: converters want a tokenizer."""
    source = shape.save(model_cache())
    path = folder / source.name
    if not path.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as unfinished:
            copy = Path(unfinished) / "model"
            shutil.copytree(source, copy)
            names = {f"t{token}": token for token in range(shape.vocab_size)}
            words = Tokenizer(models.WordLevel(names, unk_token="t0"))  # noqa: S106
            # The ids that a Llama's configuration names for these by default.
            PreTrainedTokenizerFast(
                tokenizer_object=words,
                unk_token="t0",  # noqa: S106
                bos_token="t1",  # noqa: S106
                eos_token="t2",  # noqa: S106
            ).save_pretrained(copy)
            copy.rename(path)
    return path


def make_w1(workload: Workload, kv_seqs: int, folder: Path) -> GivenWork:
    preset = PRESETS["w1"]
    model = save_with_tokenizer(preset.shape, folder)
    what = f"{workload.requests} requests of {workload.prompt_tokens} + {workload.new_tokens} tokens"
    prompts = workload.prompts(preset.shape.vocab_size)
    return GivenWork("w1", model, prompts, workload.new_tokens, kv_seqs, what)


@dataclass(frozen=True)
class RealWork:
    """What is asked of a real model.

    Attributes:
        samples: settings, and how many prompts there will be -> contexts with their questions.
        lengths: of contexts and answers, in tokens.
        kv_seqs: KV memory for that number of whole sequences; None: for all.
        ends: whether the model's end of turn ends answers; else they run on to `new_tokens`.
        begun: the model gets the beginning of its answer, which then ends with its sentence; else it gets that only
            where it does not chat.
    """

    title: str
    samples: Callable[[TaskSettings, int], list[Sample]]
    lengths: tuple[int, ...]
    requests: int
    new_tokens: int
    kv_seqs: int | None
    ends: bool = True
    prefix_caching: bool = True
    later: bool = False
    begun: bool = True

    def make(self, name: str, model: "RealModel") -> GivenWork:
        """The work for that model: as many first questions as there are contexts, then second ones, all mixed."""
        samples = self.samples(model.settings(self.lengths), self.requests)
        asked = [(sample, place) for sample in samples for place in range(len(sample.questions))]
        asked.sort(key=lambda each: (each[1], each[0].name.rpartition("/")[2]))
        # Short and long ones side by side, as requests come.
        asked = sorted(asked[: self.requests], key=lambda each: _digest(f"{each[0].name} {each[1]}"))
        questions = [sample.questions[place] for sample, place in asked]
        if model.chats and not self.begun:
            questions = [replace(question, prefix="", stop=()) for question in questions]
        prompts = [
            model.maker.make(sample, question) for (sample, _), question in zip(asked, questions, strict=True)
        ]
        tokens = [list(prompt.token_ids) for prompt in prompts]
        sampling = [
            {
                **({"context_tokens": prompt.context_tokens} if self.later else {}),
                "template_tail": prompt.template_tail,
                "answer_prefix": prompt.answer_prefix,
            }
            for prompt in prompts
        ]
        judged = [question if question.references else None for question in questions]
        lengths = f"{min(map(len, tokens)):,} to {max(map(len, tokens)):,}"
        most = "at most " if self.ends else ""
        return GivenWork(
            name,
            model.folder,
            tokens,
            self.new_tokens,
            self.kv_seqs or len(tokens),
            f"{len(tokens)} prompts of {lengths} tokens ({sum(map(len, tokens)):,} in all) + {most}{self.new_tokens}, "
            f"KV memory for {self.kv_seqs or 'all'}",
            Exam(model.tokenizer, judged, model.ends),
            tuple(sorted(model.ends)) if self.ends else (),
            self.prefix_caching,
            sampling,
            len({sample.name for sample, _ in asked}),
            self.later,
        )


class RealModel:
    """A model with its tokenizer, written below `folder` for engines that read safetensors alone."""

    def __init__(self, source: Path, folder: Path) -> None:
        published = open_published(source)
        self.name = source.stem
        tokenizer: Any = published.tokenizer()
        self.tokenizer = tokenizer
        self.chats = bool(tokenizer.chat_template)
        self.folder = export(source, published, folder)
        self.maker = PromptMaker(self.tokenizer, "on" if self.chats else "off")
        config = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))
        self._context = config["max_position_embeddings"]
        named = config.get("eos_token_id")
        ends = {*(named if isinstance(named, list) else [named]), tokenizer.eos_token_id}
        self.ends = frozenset(ends - {None})

    def settings(self, lengths: tuple[int, ...]) -> TaskSettings:
        def count(text: str) -> int:
            return len(self.tokenizer.encode(text, add_special_tokens=False))

        return TaskSettings(count, lambda text, _: text, self._context, tokens=lengths)


RULER = ("niah_single_2", "niah_multikey_1", "niah_multivalue", "niah_multiquery")
"""Of RULER's needles in prose, those that a small model finds at all."""
QUESTIONS = 20


def _ruler(settings: TaskSettings, requests: int) -> list[Sample]:
    each = ceil(requests / (len(RULER) * len(settings.tokens)))
    return load_task("ruler").samples(replace(settings, samples=each, categories=RULER))


def _documents(settings: TaskSettings, _: int) -> list[Sample]:
    return load_task("documents").samples(replace(settings, samples=16, questions=QUESTIONS))


def real_works(lengths: tuple[int, ...], requests: int | None) -> dict[str, RealWork]:
    """Works on a real model by name; `lengths` are of p1's prompts, `requests` the most of each (None: its own)."""
    once = RealWork(
        "one context, many questions", _documents, (4096,), 16 * QUESTIONS, 256, 2, ends=False, later=True
    )
    job = RealWork("chat about texts", manual_samples, (500, 4000), 60, 128, None, begun=False)
    works = {
        "p1": RealWork("the question is seen", _ruler, lengths, 40, 512, 2, ends=False, prefix_caching=False),
        "p2": once,
        # With p2, the two points of a line: seconds by questions.
        "p2, few": replace(once, title=f"{once.title}: the first two of each", requests=16 * 2),
        "p3": job,
        "p3, four": replace(job, title=f"{job.title}, memory for four", kv_seqs=4),
    }
    if requests is None:
        return works
    return {name: replace(work, requests=min(work.requests, requests)) for name, work in works.items()}


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def export(source: Path, published: Any, folder: Path) -> Path:
    """The model as bfloat16 safetensors with its tokenizer, for engines that read nothing else; made once."""
    path = folder / f"{source.stem}-{model_digest(source)[:8]}"
    if path.is_dir():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as unfinished:
        draft = Path(unfinished) / "model"
        with published.reading():
            model = AutoModelForCausalLM.from_pretrained(**published.weights(), dtype=torch.bfloat16)
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.save_pretrained(draft)
        published.tokenizer().save_pretrained(draft)
        shutil.move(draft, path)
    return path
