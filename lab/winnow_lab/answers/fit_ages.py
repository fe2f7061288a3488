"""What a prefix loses that is compressed again and again: 16x at once, or by way of lower compressions.

Contexts of RULER, judged before their question, under `winnow-fit`; each round has a replay of its own behind the KVs
that the one before it left (`earlier_rounds`). Printed are the share of the points of the full cache, and nats a token
of the right answer. A journal keeps what is done: the same command continues where it was broken off.

    python -m winnow_lab.answers.fit_ages --model models/SmolLM2-135M-Instruct.Q4_1.gguf --journal ages.jsonl
"""

import argparse
import json
import math
import platform
import statistics
from dataclasses import replace
from pathlib import Path

import torch

from winnow import LLM, SamplingParams
from winnow.metrics import score
from winnow_lab.evaluate.prompt import Prompt, PromptMaker
from winnow_lab.evaluate.sample import Question
from winnow_lab.evaluate.settings import settings_for
from winnow_lab.tasks import load_task

CATEGORIES = tuple(
    f"niah_{name}" for name in ("single_1", "single_2", "single_3", "multikey_1", "multivalue", "multiquery")
)
WAYS: dict[str, tuple[float, ...]] = {
    "full cache": (),
    "at once": (16,),
    "4x, 16x": (4, 16),
    "2x, 4x, 8x, 16x": (2, 4, 8, 16),
}


def measure(llm: LLM, prompt: Prompt, question: Question, way: tuple[float, ...]) -> dict[str, float]:
    """Points of an answer, and nats a token of the right one, behind a context that went through rounds."""
    tokens, given = prompt.context_tokens, list(prompt.token_ids)
    budgets = [math.ceil(tokens / each) for each in way]
    asked = SamplingParams(temperature=0.0, max_tokens=1, eviction="full")
    for index, budget in enumerate(budgets):
        earlier = [(tokens, each) for each in budgets[:index]]
        asked = replace(
            asked, eviction="winnow-fit", context_tokens=tokens, kv_budget=budget, earlier_rounds=earlier
        )
        llm.generate([given], asked)
    right = llm.tokenizer.encode(" " + ", ".join(question.references), add_special_tokens=False)
    forced = replace(asked, max_tokens=len(right), forced_tokens=right, logprobs=0, ignore_eos=True)
    [told] = llm.generate([given], forced)
    [free] = llm.generate([given], replace(asked, max_tokens=question.max_tokens, stop=question.stop))
    logprobs = [entry[token].logprob for token, entry in zip(right, told.outputs[0].logprobs, strict=True)]
    points = score(question.metric, free.outputs[0].text, question.references, question.classes)
    return {"points": points, "nats": -statistics.fmean(logprobs)}


def print_table(done: dict[str, dict[str, dict[str, float]]]) -> None:
    """Means over the samples that all ways have, with standard errors."""
    whole = [each for each in done.values() if len(each) == len(WAYS)]
    full = statistics.fmean(each["full cache"]["points"] for each in whole)
    print(
        f"\n| {len(whole)} contexts, 16x | share of the full cache's points | nats a token |\n|---|---:|---:|"
    )
    for way in WAYS:
        points, nats = ([each[way][name] for each in whole] for name in ("points", "nats"))
        error = statistics.stdev(points) / math.sqrt(len(points)) if len(points) > 1 else math.nan
        share = f"{statistics.fmean(points) / full:.2f} ± {error / full:.2f}"
        print(f"| {way} | {share} | {statistics.fmean(nats):.3f} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--tokens", type=int, default=2_048)
    parser.add_argument("--samples", type=int, default=3, help="of each of six categories")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--journal", type=Path, required=True)
    arguments = parser.parse_args()
    print(
        f"{Path(arguments.model).name}, {arguments.dtype}, RULER at {arguments.tokens} tokens, seed {arguments.seed}; "
        f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    )
    arguments.journal.parent.mkdir(parents=True, exist_ok=True)
    known = arguments.journal.read_text().splitlines() if arguments.journal.exists() else []
    done: dict[str, dict[str, dict[str, float]]] = {}
    for entry in map(json.loads, known):
        done.setdefault(entry["sample"], {})[entry["way"]] = entry["found"]
    with (
        LLM(
            arguments.model,
            dtype=arguments.dtype,
            kv_memory="600MiB",
            kv_bias=True,
            kv_floor=1,
            num_accumulators=1,
        ) as llm,
        arguments.journal.open("a") as journal,
    ):
        options = {"tokens": (arguments.tokens,), "categories": CATEGORIES, "seed": arguments.seed}
        settings = settings_for(llm, samples=arguments.samples, **options)
        maker = PromptMaker(llm.tokenizer, "on")
        samples = sorted(load_task("ruler").samples(settings), key=lambda each: each.name.rpartition("/")[2])
        for sample in samples:
            [question] = sample.questions
            prompt = maker.make(sample, question)
            found = done.setdefault(sample.name, {})
            for way in [each for each in WAYS if each not in found]:
                found[way] = measure(llm, prompt, question, WAYS[way])
                print(json.dumps({"sample": sample.name, "way": way, "found": found[way]}), file=journal)
                journal.flush()
            llm.reset_prefix_cache()
    print_table(done)


if __name__ == "__main__":
    main()
