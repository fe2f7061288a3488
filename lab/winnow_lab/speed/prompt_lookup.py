"""Speed of prompt lookup: one sequence that quotes its prompt, and one that does not, with drafts and without.

    python -m winnow_lab.speed.prompt_lookup MODEL --json FILE

Greedy decoding with the prompt in the prefix cache, so that only decoding counts. Settings take turns in each round;
the table shows the median. Drafts are worth it where one sequence or a few decode: a step reads the weights once for
all tokens that it checks.
"""

import statistics
import sys
import time
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from typing import Any

from winnow import LLM, SamplingParams
from winnow_lab.report.tables import TextTable
from winnow_lab.study import Result, StudyOptions, flag, in_turn, run_study

DRAFTS = (0, 3, 5, 8)  # tokens proposed in a step


@dataclass(frozen=True)
class Options(StudyOptions):
    """The model, and how long it is measured."""

    model: str = flag(positional=True)
    tokens: int = flag(160, "of an answer", least=1)
    rounds: int = flag(3, least=1)


def prompts() -> dict[str, str]:
    """Return a task that repeats its text, and one that has nothing to repeat."""
    text = files("winnow_lab.evaluate").joinpath("data/prose.txt").read_text(encoding="utf-8")[2000:4200]
    quote = f"Summarise this text, quoting its main sentences:\n{text}"
    return {
        name: f"<|im_start|>user\n{task}<|im_end|>\n<|im_start|>assistant\n"
        for name, task in (("quotes", quote), ("invents", "Tell a long story about a lighthouse."))
    }


def open_llm(model: str, drafts: int) -> LLM:
    """Open an engine for one sequence."""
    config = {"method": "ngram", "num_speculative_tokens": drafts} if drafts else None
    return LLM(model, kv_memory="256MiB", max_num_seqs=1, speculative_config=config)


def measure(llm: LLM, prompt: str, tokens: int) -> tuple[float, list[int], int, int]:
    """Return seconds, tokens, and how many drafts were proposed and accepted."""
    llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    before, start = llm.stats(), time.perf_counter()
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    answer = llm.generate([prompt], params, use_tqdm=False)[0].outputs[0]
    seconds, after = time.perf_counter() - start, llm.stats()
    proposed = after.num_draft_tokens - before.num_draft_tokens
    accepted = after.num_accepted_tokens - before.num_accepted_tokens
    return seconds, list(answer.token_ids), proposed, accepted


def study(options: Options) -> Result:
    """Both prompts with every number of drafts, in turn."""
    engines = {f"{drafts}": open_llm(options.model, drafts) for drafts in DRAFTS}
    rows: list[dict[str, Any]] = []
    for name, prompt in prompts().items():
        *_, runs = in_turn(engines, options.rounds, partial(measure, prompt=prompt, tokens=options.tokens))
        whole = statistics.median(run[0] for run in runs["0"])
        for drafts, found in runs.items():
            seconds = statistics.median(run[0] for run in found)
            _, token_ids, proposed, accepted = found[0]
            rows.append(
                {
                    "prompt": name,
                    "drafts": int(drafts),
                    "tokens_per_second": round(options.tokens / seconds, 1),
                    "speedup": round(whole / seconds, 2),
                    "accepted": round(accepted / proposed, 2) if proposed else None,
                    "same_tokens": token_ids == runs["0"][0][1],
                }
            )
    names = ("tokens_per_second", "speedup", "accepted", "same_tokens")
    lines = tuple(
        (f"{row['prompt']}, {row['drafts']} drafts", tuple(f"{row[name]}" for name in names)) for row in rows
    )
    return Result("Prompt lookup", [TextTable("Decoding", "", names, lines)], numbers={"rows": rows})


if __name__ == "__main__":
    sys.exit(run_study(Options, study))
