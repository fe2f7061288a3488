"""Time saved and answers lost where documents are computed once and reused anywhere in later prompts.

    python -m winnow_lab.memory.documents_anywhere FILE.jsonl -o PAGE

FILE has a question, its answers and its passage in each line, as the oracle files of nelson-liu/lost-in-the-middle do.
A job asks each question of several passages, its own among them, each passage in as many prompts, at places drawn anew.
It is run with the prefix cache alone, and with documents reused at several shares (`reuse_share`): one request after
the other, then once more for the nats of the right answer, which is forced. Processor seconds stand beside those of the
clock, which a busy machine spoils. Greedy.
"""

import gzip
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from winnow import LLM, Document, RequestOutput, SamplingParams
from winnow_lab.report.tables import TextTable
from winnow_lab.study import RealModelOptions, Result, flag, run_study

_HEAD = "Answer the question with a few words from the documents.\n\n"


@dataclass(frozen=True)
class Options(RealModelOptions):
    file: str = flag("", "JSON Lines, gzipped or not", positional=True)
    questions: int = flag(24, least=2)
    documents: int = flag(6, "of a prompt", least=2)
    shares: tuple[float, ...] = flag(
        (0.0, 0.15, 0.3, 1.0), "of reused tokens that are computed again", least=0
    )
    least: int = flag(500, "characters of a passage", least=1)
    seed: int = flag(1)
    threads: int = flag(0, "0: as the machine has", least=0)


class Asked(NamedTuple):
    prompt: list[str | Document]
    answers: list[str]


def job(options: Options) -> list[Asked]:
    path = Path(options.file)
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        rows = [json.loads(line) for line in lines]
    rng = random.Random(options.seed)
    rng.shuffle(rows)
    found: dict[str, tuple[str, list[str]]] = {}
    for row in rows:
        text = f"{row['ctxs'][0]['title']}: {row['ctxs'][0]['text']}\n\n"
        if len(text) >= options.least and any(each in text for each in row["answers"]):
            found.setdefault(text, (row["question"], [each for each in row["answers"] if each in text]))
    texts, count = list(found)[: options.questions], options.documents
    # Each passage stands in `documents` prompts: those of the passages that follow it in an order of each distance.
    steps = rng.sample(range(1, len(texts)), min(count, len(texts)) - 1)
    asked = []
    for number, text in enumerate(texts):
        shown = [text, *(texts[(number + step) % len(texts)] for step in steps)]
        rng.shuffle(shown)
        question, answers = found[text]
        ending = f"Question: {question}?\nAnswer:"
        asked.append(Asked([_HEAD, *map(Document, shown), ending], answers))
    return asked


def measure(options: Options, asked: Sequence[Asked], reuse: dict[str, Any]) -> dict[str, float]:
    engine: dict[str, Any] = {"model": options.model, "kv_memory": "2GiB", "threads": options.threads or None}
    with LLM(**engine, **reuse) as llm:
        llm.generate([[1] * 64], SamplingParams(max_tokens=4))  # what the first steps alone do
        llm.reset_prefix_cache()
        free = SamplingParams(temperature=0.0, max_tokens=16, stop="\n")
        start, cpu = time.perf_counter(), time.process_time()
        outputs = [llm.generate([each.prompt], free, use_tqdm=False)[0] for each in asked]
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        llm.reset_prefix_cache()
        nats = 0.0
        for each in asked:
            forced = llm.tokenize(f" {each.answers[0]}", add_special_tokens=False).token_ids
            params = SamplingParams(temperature=0.0, max_tokens=len(forced), forced_tokens=forced, logprobs=0)
            [output] = llm.generate([each.prompt], params, use_tqdm=False)
            of_tokens = [
                each[token].logprob
                for each, token in zip(output.outputs[0].logprobs or (), forced, strict=True)
                if each
            ]
            nats -= sum(of_tokens) / len(forced) / len(asked)
    firsts = sorted(output.metrics.time_to_first_token or 0.0 for output in outputs)
    return {
        "first token": sum(firsts) / len(firsts),
        "median first token": firsts[len(firsts) // 2],
        "job": seconds,
        "processor": cpu,
        "right": sum(_is_right(*pair) for pair in zip(outputs, asked, strict=True)) / len(asked),
        "nats": nats,
        "tokens": sum(len(output.prompt_token_ids) for output in outputs),
        "cached": sum(output.num_cached_tokens for output in outputs),
        "reused": sum(output.num_reused_tokens for output in outputs),
        "repaired": sum(output.num_repaired_tokens for output in outputs),
    }


def _is_right(output: RequestOutput, asked: Asked) -> bool:
    text = output.outputs[0].text.lower()
    return any(answer.lower() in text for answer in asked.answers)


def study(options: Options) -> Result:
    asked = job(options)
    rows = {"prefix cache": measure(options, asked, {})}
    for share in options.shares:
        rows[f"documents, {share:.0%}"] = measure(
            options, asked, {"reuse": "documents", "reuse_share": share}
        )
    base = rows["prefix cache"]
    columns = {
        "first token, s": lambda row: f"{row['first token']:.2f}",
        "median": lambda row: f"{row['median first token']:.2f}",
        "sooner": lambda row: f"{base['median first token'] / row['median first token']:.2f}x",
        "job, s": lambda row: f"{row['job']:.1f}",
        "processor s": lambda row: f"{row['processor']:.1f}",
        "less": lambda row: f"{base['processor'] / row['processor']:.2f}x",
        "right": lambda row: f"{row['right']:.0%}",
        "nats": lambda row: f"{row['nats']:.2f}",
        "reused": lambda row: f"{row['reused'] / row['tokens']:.0%}",
        "again": lambda row: f"{row['repaired'] / row['tokens']:.0%}",
    }
    length = f"{base['tokens'] / len(asked):.0f} tokens a prompt"
    title = f"{len(asked)} questions of {options.documents} passages each, {length}"
    notes = "nats: of the right answer, a token. reused: prompt tokens that were not computed; again: those repaired."
    return Result(
        "Documents that stand anywhere", [TextTable.of(title, "", rows, columns)], notes=notes, numbers=rows
    )


if __name__ == "__main__":
    sys.exit(run_study(Options, study))
