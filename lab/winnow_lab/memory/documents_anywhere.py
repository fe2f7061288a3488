"""Time saved and answers lost where texts are computed once and reused anywhere in later prompts.

    python -m winnow_lab.memory.documents_anywhere [FILE] -o PAGE

Passages and questions are those of FILE, of SQuAD's form, as XQuAD's are; without it, the prose that ships with two
facts in each, of which one is asked for. A job asks each question of several passages, its own among them, each passage
in as many prompts, at places drawn anew. It is run with the prefix cache alone, and with documents reused at
several shares (`reuse_share`), one request after the other; each is asked once more for the nats of the right answer,
which is forced. With --compression passages are compressed before, each alone, by keys. With --halves each passage
is two documents, one behind the other, so that what the second says follows from the first. With --session the job is
an agent's: each question is answered from the text that a tool returns, and of older texts all but the last --keep are
cleared, so that what stands behind them moves. Processor seconds stand beside those of the clock, which a busy machine
spoils. Greedy.
"""

import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import mkdtemp
from typing import Any, NamedTuple

from winnow import LLM, Document, SamplingParams
from winnow.values.reuse import LIBRARY, LIBRARY_FOLDER
from winnow_lab.evaluate.demo_tasks import Haystack
from winnow_lab.evaluate.likelihood import read_likelihood
from winnow_lab.evaluate.tasks.files import shipped_sentences
from winnow_lab.evaluate.tasks.in_prose import document_sample
from winnow_lab.evaluate.tasks.task import TaskSettings
from winnow_lab.report.tables import TextTable
from winnow_lab.study import RealModelOptions, Result, flag, run_study

# Written as SmolLM2, Qwen and others read a conversation.
_HEAD = "<|im_start|>user\nAnswer the question with a few words from the documents.\n\n"


@dataclass(frozen=True)
class Options(RealModelOptions):
    file: str = flag("", "SQuAD's JSON", positional=True)
    questions: int = flag(60, least=2)
    documents: int = flag(6, "of a prompt", least=2)
    shares: tuple[float, ...] = flag(
        (0.0, 0.05, 0.15, 0.3, 1.0), "of reused tokens that are computed again", least=0
    )
    least: int = flag(0, "characters of a passage", least=0)
    tokens: int = flag(300, "of a passage, its question and answer, without FILE; about", least=100)
    compression: tuple[float, ...] = flag((), "of passages that are compressed before", least=1)
    halves: bool = flag(False, "cut each passage in two documents")
    session: bool = flag(False, "an agent's session, from which old texts leave")
    keep: int = flag(6, "texts of a session that stay", least=1)
    seed: int = flag(1)
    threads: int = flag(0, "0: as the machine has", least=0)


class Passage(NamedTuple):
    text: str
    question: str
    answers: list[str]
    begun: str = ""  # what an answer begins with, which the model is given


class Asked(NamedTuple):
    prompt: str | list[str | Document]
    passage: Passage


def _passages(options: Options) -> Iterator[Passage]:
    """Yield passages with a question each; one may come again with another."""
    if not options.file:

        def length(text: str) -> int:
            return len(text) // 4 + 1  # tokens, about, of any model

        settings = TaskSettings(length, lambda text, most: text, 2**20, questions=2, seed=options.seed)
        haystack = Haystack.build(shipped_sentences(), length)
        for number in range(2 * options.questions):
            sample = document_sample(settings, haystack, "facts", options.tokens, number)
            first = sample.questions[0]
            yield Passage(sample.context, first.text.strip(), list(first.references), first.prefix.strip())
        return
    for article in json.loads(Path(options.file).read_text())["data"]:
        for paragraph in article["paragraphs"]:
            for asked in paragraph["qas"]:
                answers = [each["text"] for each in asked["answers"]]
                yield Passage(paragraph["context"], asked["question"], answers)


def job(options: Options) -> list[Asked]:
    rng, rows = random.Random(options.seed), list(_passages(options))
    rng.shuffle(rows)
    found: dict[str, Passage] = {}
    asked_of = Counter(each.question for each in rows)
    for each in rows:
        if len(each.text) >= options.least and asked_of[each.question] == 1:
            found.setdefault(each.text, each)
    passages, count = list(found.values())[: options.questions], options.documents
    if options.session:
        return _session(passages, options.keep)
    # Each passage stands in `documents` prompts: those of the passages that follow it in an order of each distance.
    steps = rng.sample(range(1, len(passages)), min(count, len(passages)) - 1)
    asked = []
    for number, own in enumerate(passages):
        shown = [own.text, *(passages[(number + step) % len(passages)].text for step in steps)]
        rng.shuffle(shown)
        parts = [part for each in shown for part in (_halves(each) if options.halves else [each])]
        ending = f"{own.question}<|im_end|>\n<|im_start|>assistant\n{own.begun}"
        between: list[str | Document] = [each for part in parts for each in (Document(part), "\n\n")]
        asked.append(Asked([_HEAD, *between, ending], own))
    return asked


def _halves(text: str) -> list[str]:
    """Cut a text at the end of a sentence, as near to its middle as there is one."""
    ends = [place + 2 for place in range(len(text)) if text.startswith(". ", place)] or [len(text) // 2]
    cut = min(ends, key=lambda end: abs(end - len(text) / 2))
    return [text[:cut], text[cut:]]


def _session(passages: Sequence[Passage], keep: int) -> list[Asked]:
    """Return the prompts of a session's turns: all that was said before stands as it was, but for old texts."""
    turns = []
    for now in range(1, len(passages) + 1):
        prompt = "<|im_start|>system\nYou answer with a few words from what the tool returns.<|im_end|>\n"
        for number, (text, question, answers, begun) in enumerate(passages[:now]):
            shown = text if number >= now - keep else "[cleared]"
            prompt += (
                f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\nsearch({number})<|im_end|>\n"
                f"<|im_start|>tool\n{shown}<|im_end|>\n<|im_start|>assistant\n{begun}"
            )
            prompt += "" if number == now - 1 else f"{' ' if begun else ''}{answers[0]}<|im_end|>\n"
        turns.append(Asked(prompt, passages[now - 1]))
    return turns


def _compress(engine: dict[str, Any], asked: Sequence[Asked], compression: float) -> Path:
    """Save what keys alone leave of each passage, as `winnow documents add --compression` does. Returns the folder."""
    out = Path(mkdtemp(), LIBRARY_FOLDER)
    out.mkdir()
    with LLM(**engine, kv_floor=1) as llm:
        head = (0, len(llm.tokenize(_HEAD).token_ids))
        kept = SamplingParams(eviction="winnow-keys", compression=compression, protect=(head,))
        for part in {part for each in asked for part in each.prompt if isinstance(part, Document)}:
            prompt: list[str | Document] = [_HEAD, part]
            llm.save_prefix(prompt, out, kept, tenant=LIBRARY)
    return out.parent


def measure(
    options: Options, asked: Sequence[Asked], reuse: dict[str, Any], compression: float = 0
) -> dict[str, Any]:
    engine: dict[str, Any] = {"model": options.model, "kv_memory": "2GiB", "threads": options.threads or None}
    row: dict[str, Any] = {"first": [], "right": [], "nats": [], "job": 0.0, "processor": 0.0}
    free = SamplingParams(temperature=0.0, max_tokens=16, stop=["\n", "<|im_end|>"])
    outputs = []
    if compression:
        engine["documents"] = _compress(engine, asked, compression)
        row["disk"] = sum(path.stat().st_size for path in engine["documents"].rglob("*.safetensors"))
    with LLM(**engine, **reuse) as llm:
        llm.generate([[1] * 64], SamplingParams(max_tokens=4))  # what the first steps alone do
        llm.reset_prefix_cache()
        for each in asked:
            start, cpu = time.perf_counter(), time.process_time()
            [output] = llm.generate([each.prompt], free, use_tqdm=False)
            row["job"] += time.perf_counter() - start
            row["processor"] += time.process_time() - cpu
            row["first"].append(output.metrics.time_to_first_token or 0.0)
            text = output.outputs[0].text.lower()
            row["right"].append(any(known.lower() in text for known in each.passage.answers))
            outputs.append(output)
            # Once more, behind the same KVs, which the prefix cache has by now.
            answer = f"{' ' if each.passage.begun else ''}{each.passage.answers[0]}"
            forced = llm.tokenize(answer, add_special_tokens=False).token_ids
            params = SamplingParams(temperature=0.0, max_tokens=len(forced), forced_tokens=forced, logprobs=0)
            [output] = llm.generate([each.prompt], params, use_tqdm=False)
            row["nats"].append(-read_likelihood(output.outputs[0], len(forced)).total / len(forced))
    for name in ("cached", "reused", "repaired"):
        row[name] = sum(getattr(output, f"num_{name}_tokens") for output in outputs)
    return row | {"tokens": sum(len(output.prompt_token_ids) for output in outputs)}


def study(options: Options) -> Result:
    asked = job(options)
    rows = {"prefix cache": measure(options, asked, {})}
    reuse = "anywhere" if options.session else "documents"
    for share in options.shares:
        rows[f"{reuse}, {share:.0%}"] = measure(options, asked, {"reuse": reuse, "reuse_share": share})
    for compression in options.compression:
        rows[f"compressed {compression:g}x"] = measure(options, asked, {}, compression)
    base = rows["prefix cache"]
    later = options.keep if options.session else 0  # before, nothing was cleared

    def sooner(row: dict[str, Any]) -> float:
        return median(
            ours / own for ours, own in zip(base["first"][later:], row["first"][later:], strict=True)
        )

    def turned(row: dict[str, Any], was: bool) -> int:
        return list(zip(base["right"], row["right"], strict=True)).count((was, not was))

    columns = {
        "first token, s": lambda row: f"{median(row['first'][later:]):.2f}",
        "sooner": lambda row: f"{sooner(row):.2f}x",
        "job, s": lambda row: f"{row['job']:.1f}",
        "processor s": lambda row: f"{row['processor']:.1f}",
        "less": lambda row: f"{base['processor'] / row['processor']:.2f}x",
        "right": lambda row: f"{sum(row['right']) / len(asked):.0%}",
        "lost, won": lambda row: f"{turned(row, True)}, {turned(row, False)}",
        "nats": lambda row: f"{sum(row['nats']) / len(asked):.2f}",
        "reused": lambda row: f"{row['reused'] / row['tokens']:.0%}",
        "again": lambda row: f"{row['repaired'] / row['tokens']:.0%}",
    }
    title = f"{len(asked)} questions of {options.documents} passages each"
    if options.session:
        title = f"{len(asked)} turns of a session that shows {options.keep} texts"
    title += f", {base['tokens'] / len(asked):.0f} tokens a prompt"
    notes = (
        "first token: the median; sooner: the median of each prompt's ratio, of a session from the turn on that "
        "clears the first text. lost, won: answers right with the prefix cache alone, and with reuse alone. nats: of "
        "the right answer, a token. reused: prompt tokens that were not computed; again: those repaired."
    )
    return Result(
        "Documents that stand anywhere", [TextTable.of(title, "", rows, columns)], notes=notes, numbers=rows
    )


if __name__ == "__main__":
    sys.exit(run_study(Options, study))
