"""What the prefix cache saves: a system prompt that many share, and a document with many questions.

    python -m winnow_lab.memory.prefixes [--model MODEL] [--requests 64] [--system 2000] [--tokens 4000]
        [--questions 50]

Two tables. Shared system prompt: requests with the same first tokens and a tail of their own, all at once. Document:
its questions come one after the other, none of them known before: under full cache and compressed, each with and
without prefix cache. Accuracy stands beside time and bytes. Greedy, one process.
"""

import argparse
import random
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from winnow import LLM, RequestOutput, SamplingParams
from winnow.metrics import score
from winnow.report.provenance import Machine, origin, report_head, typed_command
from winnow.values.json_values import dump_json
from winnow.values.units import format_bytes
from winnow_lab.evaluate.prompt import PromptMaker
from winnow_lab.evaluate.sample import Sample
from winnow_lab.evaluate.tasks import TaskSettings, load_task
from winnow_lab.report.tables import TextTable


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
        vocab = range(10, 200)
        rng = random.Random(0)
        first = rng.choices(vocab, k=system)
        prompts = [first + rng.choices(vocab, k=tail) for _ in range(requests)]
        params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
        llm.generate(rng.choices(vocab, k=tail), params)  # what the first step alone does
        return _measured(llm, lambda: llm.generate(prompts, params))[0]


def document(options: dict[str, Any], sample: Sample) -> Measured:
    """The questions of a document, one after the other."""
    with LLM(**options) as llm:
        make = PromptMaker(llm.tokenizer, "off").make

        def ask() -> list[RequestOutput]:
            outputs = []
            for question in sample.questions:
                prompt = make(sample, question)
                params = SamplingParams(
                    temperature=0.0,
                    max_tokens=question.max_tokens,
                    stop="\n",
                    context_tokens=prompt.context_tokens,
                )
                outputs += llm.generate(list(prompt.token_ids), params)
            return outputs

        measured, outputs = _measured(llm, ask)
        scores = [
            score(question.metric, output.outputs[0].text, question.references, question.classes)
            for question, output in zip(sample.questions, outputs, strict=True)
        ]
        return replace(measured, correct=sum(scores) / len(scores))


def _measured(llm: LLM, run: Any) -> tuple[Measured, list[RequestOutput]]:
    before, tables, start = llm.stats(), llm.stats().kv_bytes_used, time.perf_counter()
    outputs: list[RequestOutput] = run()
    seconds, after = time.perf_counter() - start, llm.stats()
    computed = after.prompt_tokens - before.prompt_tokens + after.replay_tokens - before.replay_tokens
    found = sum(each.num_cached_tokens for each in outputs)
    return Measured(seconds, computed, found, after.kv_bytes_peak - tables), outputs


def one_document(options: dict[str, Any], task: str, category: str, tokens: int, questions: int) -> Sample:
    with LLM(**options) as llm:
        tokenizer: Any = llm.tokenizer
        settings = TaskSettings(
            count_tokens=lambda text: len(tokenizer.encode(text)),
            truncate=lambda text, most: text,
            max_model_len=llm.max_model_len,
            samples=1,
            questions=questions,
            tokens=(tokens,),
            categories=(category,),
        )
        [sample] = load_task(task).samples(settings)
        return sample


def table(title: str, rows: dict[str, Measured], base: str) -> TextTable:
    """Each row with its ratio to the row `base`."""

    def entries(row: Measured) -> tuple[str, ...]:
        correct = () if row.correct is None else (f"{row.correct:.0%}",)
        return (
            f"{row.seconds:.1f}",
            f"{rows[base].seconds / row.seconds:.2f}x",
            f"{row.computed:,}",
            f"{rows[base].computed / max(row.computed, 1):.2f}x",
            f"{row.found:,}",
            format_bytes(row.peak_bytes),
            f"{rows[base].peak_bytes / row.peak_bytes:.2f}x",
            *correct,
        )

    columns: tuple[str, ...] = (
        "s",
        "faster",
        "tokens computed",
        "fewer",
        "tokens found",
        "peak of KVs",
        "less",
    )
    if rows[base].correct is not None:
        columns = (*columns, "right")
    return TextTable(title, "", columns, tuple((name, entries(row)) for name, row in rows.items()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model")
    parser.add_argument("--kv-memory", default="1GiB")
    parser.add_argument("--requests", type=int, default=64, help="that share a system prompt")
    parser.add_argument("--system", type=int, default=2000, help="tokens of the system prompt")
    parser.add_argument("--tail", type=int, default=40, help="tokens of each request behind it")
    parser.add_argument(
        "--tokens", type=int, default=4000, help="tokens of the document with its longest question"
    )
    parser.add_argument("--questions", type=int, default=50)
    parser.add_argument(
        "--task", default="demo", help="of `winnow eval`, with several questions on one context"
    )
    parser.add_argument("--category", default="single")
    parser.add_argument("--eviction", default="kvzip")
    parser.add_argument("--compression", type=float, default=8.0)
    parser.add_argument("--json", type=Path, help="write the numbers too")
    typed = parser.parse_args()
    plain: dict[str, Any] = {"model": typed.model, "kv_memory": typed.kv_memory, "kv_floor": 1}
    cold = {"enable_prefix_caching": False}
    compressed = {"eviction": typed.eviction, "compression": typed.compression}
    shared = {
        "without prefix cache": shared_system_prompt(plain | cold, typed.requests, typed.system, typed.tail),
        "with prefix cache": shared_system_prompt(plain, typed.requests, typed.system, typed.tail),
    }
    sample = one_document(plain, typed.task, typed.category, typed.tokens, typed.questions)
    name = f"{typed.eviction} {typed.compression:g}x"
    asked = {
        f"{what}, {where} prefix cache": document(plain | amount | cache, sample)
        for what, amount in (("full cache", {}), (name, compressed))
        for where, cache in (("without", cold), ("with", {}))
    }
    head = report_head(typed_command(), Machine.here())
    tables = [
        table(
            f"{typed.requests} requests with a system prompt of {typed.system:,} tokens",
            shared,
            "without prefix cache",
        ),
        table(
            f"{len(sample.questions)} questions on one document of {typed.tokens:,} tokens",
            asked,
            "full cache, without prefix cache",
        ),
    ]
    lines = [line for each in tables for line in (*each.markdown(), "")]
    print("\n".join([*lines, *origin(head)]))
    if typed.json is not None:
        numbers = {
            "shared": {row: vars(each) for row, each in shared.items()},
            "document": {row: vars(each) for row, each in asked.items()},
        }
        typed.json.write_text(dump_json(head | numbers, indent=2) + "\n")


if __name__ == "__main__":
    main()
