"""`winnow eval reuse`: what reuse of KVs that others computed loses on one's own prompts."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from types import MappingProxyType
from typing import Any, ClassVar

from winnow.cli.flags.engine import open_llm
from winnow.config import PREFIX_DISK
from winnow.errors import UsageError
from winnow.values.reuse import ANYWHERE, EXACT
from winnow_lab.report.tables import TextTable, console, print_tables
from winnow_lab.study import EngineFlags, flag
from winnow_lab.study.options import options_of

SUMMARY = "your own prompts, with KVs reused that others computed"
ARGUMENTS = "--prompts FILE "
DESCRIPTION = """\
Answer a file of prompts one after the other, each computed whole and each with what --reuse takes of
those before it, and tell how far the answers are the same. No right answers are needed: the whole
computation's own answer is forced, and its nats under reuse stand beside those without. Greedy.
"""
EPILOG = """\
examples:
  winnow eval reuse --prompts asked.jsonl --reuse documents --documents passages --reuse-share 0.3
Lines are those of `winnow run`, in the order in which they come.
"""


@dataclass(frozen=True)
class Options(EngineFlags):
    prompts: Path = flag(text="JSON Lines with a prompt or messages each")
    max_tokens: int = flag(64, "of an answer", least=1)
    CHOSEN: ClassVar[tuple[str, ...]] = PREFIX_DISK
    SHOWN: ClassVar[Mapping[str, Any]] = MappingProxyType({"reuse": ANYWHERE})


def execute(namespace: argparse.Namespace) -> int:
    asked = options_of(Options, namespace)
    from winnow.batch.lines import BadLine, parse_line
    from winnow.batch.reader import read_lines

    options = {"reuse": ANYWHERE, **asked.engine}
    if options["reuse"] == EXACT:
        raise UsageError("--reuse must be documents or anywhere: exact is what they are compared with")
    jobs = [parse_line(raw, {}) for raw in read_lines(asked.prompts)]
    with open_llm(options) as llm:
        prompts = []
        for job in jobs:
            if isinstance(job, BadLine):
                raise UsageError(f"{asked.prompts}, line {job.number}: {job.error}")
            chat, template = job.asked.messages, job.asked.template
            prompts.append(
                llm.tokenize(job.asked.prompts[0]) if chat is None else llm.tokenize_chat(chat, template)
            )
        rows = compare(llm, prompts, asked.max_tokens)
    columns = {
        "first token, s": lambda row: f"{median(row['first']):.3f}",
        "same answers": lambda row: f"{fmean(row['same']):.0%}",
        "nats a token": lambda row: f"{fmean(row['nats']):.3f}",
        "reused": lambda row: f"{row['reused'] / row['tokens']:.0%}",
        "computed again": lambda row: f"{row['repaired'] / row['tokens']:.0%}",
    }
    rows = {"whole": rows[EXACT], options["reuse"]: rows[""]}
    print_tables(console(), [TextTable.of(f"{len(prompts)} prompts", "", rows, columns)])
    return 0


def compare(llm: Any, prompts: Sequence[Any], most: int) -> dict[str, dict[str, Any]]:
    """Answer prompts without reuse and with the engine's kind. Returns the figures of both, by `reuse`."""
    from winnow.sampling import SamplingParams
    from winnow_lab.evaluate.likelihood import read_likelihood

    params, whole = SamplingParams(temperature=0.0, max_tokens=most, logprobs=0), list[list[int]]()
    found: dict[str, dict[str, Any]] = {}
    for reuse in (EXACT, ""):
        llm.reset_prefix_cache()
        outputs, nats = [], []
        for index, prompt in enumerate(prompts):
            own = [replace(params, reuse=reuse or None)]
            if not reuse:  # once more, behind the same KVs, which the prefix cache has by then
                own.append(replace(params, forced_tokens=whole[index], max_tokens=len(whole[index])))
            for each in own:
                [output] = llm.driver.finish([llm.new_request(prompt, each, final_only=True)])
                output.raise_for_error()
                outputs += [output] * (each is own[0])
            if reuse:
                whole.append(list(output.outputs[0].token_ids))
            nats.append(-fmean(read_likelihood(output.outputs[0], len(whole[index])).logprobs))
        found[reuse] = {
            "first": [output.metrics.time_to_first_token or 0.0 for output in outputs],
            "same": [list(o.outputs[0].token_ids) == w for o, w in zip(outputs, whole, strict=True)],
            "nats": nats,
            "tokens": sum(len(output.prompt_token_ids) for output in outputs),
            "reused": sum(output.num_reused_tokens for output in outputs),
            "repaired": sum(output.num_repaired_tokens for output in outputs),
        }
    return found
