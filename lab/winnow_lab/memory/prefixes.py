"""What the prefix cache saves: a system prompt that many share, and a document with many questions.

    python -m winnow_lab.memory.prefixes --json FILE

Two tables. Shared system prompt: requests with the same first tokens and a tail of their own, all at once. Document:
its questions come one after the other, none of them known before: under full cache and compressed, each with and
without prefix cache. Accuracy stands beside time and bytes. Greedy, one process.
"""

import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from winnow import LLM, RequestOutput, SamplingParams
from winnow.values.units import format_bytes
from winnow_lab.evaluate.metrics import score
from winnow_lab.evaluate.prompt import PromptMaker
from winnow_lab.evaluate.sample import Sample
from winnow_lab.evaluate.tasks import load_task
from winnow_lab.evaluate.tasks.task import settings_for
from winnow_lab.report.tables import TextTable
from winnow_lab.study import ModelOptions, Result, flag, run_study


@dataclass(frozen=True)
class Options(ModelOptions):
    kv_memory: str = flag("1GiB")
    requests: int = flag(64, "that share a system prompt", least=1)
    system: int = flag(2000, "tokens of the system prompt", least=1)
    tail: int = flag(40, "tokens of each request behind it", least=1)
    tokens: int = flag(4000, "tokens of the document with its longest question", least=1)
    questions: int = flag(50, least=1)
    task: str = flag("demo", "of `winnow eval`, with several questions on one context")
    category: str = flag("single")
    eviction: str = flag("kvzip")
    compression: float = flag(8.0, least=1)


@dataclass(frozen=True)
class Measured:
    """What some requests took.

    Attributes:
        computed: tokens of prompts, and of replays.
        found: prompt tokens that were not computed.
        peak_bytes: most of the KV memory that requests held at a time, tables left out.
        correct: part of the answers that are right; None: not asked for.
    """

    seconds: float
    computed: int
    found: int
    peak_bytes: int
    correct: float | None = None


def shared_system_prompt(options: dict[str, Any], requests: int, system: int, tail: int) -> Measured:
    """Requests that come at once, with the same first `system` tokens."""
    with LLM(**options) as llm:
        vocab, rng = range(10, 200), random.Random(0)
        first = rng.choices(vocab, k=system)
        prompts = [first + rng.choices(vocab, k=tail) for _ in range(requests)]
        params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
        llm.generate(rng.choices(vocab, k=tail), params)  # what the first step alone does
        return _measured(llm, lambda: llm.generate(prompts, params))[0]


def document(options: dict[str, Any], sample: Sample) -> Measured:
    with LLM(**options) as llm:
        make = PromptMaker(llm.tokenizer, "off").make

        def ask() -> list[RequestOutput]:
            outputs = []
            for question in sample.questions:
                prompt, most = make(sample, question), question.max_tokens
                params = SamplingParams(
                    temperature=0.0, max_tokens=most, stop="\n", context_tokens=prompt.context_tokens
                )
                outputs += llm.generate(list(prompt.token_ids), params)
            return outputs

        measured, outputs = _measured(llm, ask)
        scores = [
            score(question.metric, output.outputs[0].text, question.references, question.classes)
            for question, output in zip(sample.questions, outputs, strict=True)
        ]
        return replace(measured, correct=sum(scores) / len(scores))


def _measured(llm: LLM, run: Callable[[], list[RequestOutput]]) -> tuple[Measured, list[RequestOutput]]:
    before, start = llm.stats(), time.perf_counter()
    outputs = run()
    seconds, after = time.perf_counter() - start, llm.stats()
    computed = after.prompt_tokens - before.prompt_tokens + after.replay_tokens - before.replay_tokens
    found = sum(each.num_cached_tokens for each in outputs)
    return Measured(seconds, computed, found, after.kv_bytes_peak - before.kv_bytes_used), outputs


def one_document(options: dict[str, Any], typed: Options) -> Sample:
    with LLM(**options) as llm:
        tokens, categories = (typed.tokens,), (typed.category,)
        settings = settings_for(
            llm, samples=1, questions=typed.questions, tokens=tokens, categories=categories, seed=0
        )
        [sample] = load_task(typed.task).samples(settings)
        return sample


def table(title: str, rows: dict[str, Measured]) -> TextTable:
    """Each row with its ratio to the first."""
    base = next(iter(rows.values()))
    columns: dict[str, Callable[[Measured], str]] = {
        "s": lambda row: f"{row.seconds:.1f}",
        "faster": lambda row: f"{base.seconds / row.seconds:.2f}x",
        "tokens computed": lambda row: f"{row.computed:,}",
        "fewer": lambda row: f"{base.computed / max(row.computed, 1):.2f}x",
        "tokens found": lambda row: f"{row.found:,}",
        "peak of KVs": lambda row: format_bytes(row.peak_bytes),
        "less": lambda row: f"{base.peak_bytes / row.peak_bytes:.2f}x",
    }
    if base.correct is not None:
        columns["right"] = lambda row: f"{row.correct:.0%}"
    return TextTable.of(title, "", rows, columns)


def study(typed: Options) -> Result:
    plain: dict[str, Any] = {"model": typed.model, "kv_memory": typed.kv_memory, "kv_floor": 1}
    plain |= {"threads": typed.threads}
    caches = {"without": {"enable_prefix_caching": False}, "with": {}}
    shared = {
        f"{where} prefix cache": shared_system_prompt(plain | cache, typed.requests, typed.system, typed.tail)
        for where, cache in caches.items()
    }
    sample = one_document(plain, typed)
    compressed = {"eviction": typed.eviction, "compression": typed.compression}
    asked = {
        f"{what}, {where} prefix cache": document(plain | amount | cache, sample)
        for what, amount in (("full cache", {}), (f"{typed.eviction} {typed.compression:g}x", compressed))
        for where, cache in caches.items()
    }
    tables = [
        table(f"{typed.requests} requests with a system prompt of {typed.system:,} tokens", shared),
        table(f"{len(sample.questions)} questions on one document of {typed.tokens:,} tokens", asked),
    ]
    numbers = {
        name: {row: vars(each) for row, each in rows.items()}
        for name, rows in (("shared", shared), ("document", asked))
    }
    return Result("What the prefix cache saves", tables, numbers=numbers)


if __name__ == "__main__":
    sys.exit(run_study(Options, study))
