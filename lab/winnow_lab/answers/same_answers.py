"""That no speed is bought by skipping work: answers as Winnow comes beside those of plain torch.

    python -m winnow_lab.answers.same_answers
    python -m winnow_lab.answers.same_answers --requests 8 --new-tokens 64 --eviction full,leverage-pd --compression 8
    python -m winnow_lab.answers.same_answers --dtype bfloat16 --json runs/same.json

The same prompts are answered twice: as everybody gets them, and with `attention_backend="reference", optimize=False`,
which is transformers' own layers over attention in plain torch. Compared are the tokens, the KVs that are left after
the prompt, and log probabilities as far as KVs and tokens agree. Where something was left out, these would differ by
more than sums in another order do: in float32, the default, by the seventh digit. The weights are random and attend to
all tokens alike, so now and then that digit decides which KV stays, and what follows differs. With int8 weights both
sides quantize alike, and that digit now and then decides an activation's code, which differs by more.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from winnow import LLM, SamplingParams
from winnow.cli.flags.paths import check_json_path, write_json
from winnow.config import WEIGHT_DTYPES
from winnow.errors import WinnowError
from winnow.inspect.inspection import Rows
from winnow.report.provenance import Machine, report_head
from winnow_lab.bench.presets import PRESETS, model_cache
from winnow_lab.peers.work_arguments import (
    add_eviction_arguments,
    add_work_arguments,
    options_by_eviction,
    take_work,
)
from winnow_lab.report.console import console, print_tables
from winnow_lab.report.tables import TextTable

PLAIN: dict[str, Any] = {"attention_backend": "reference", "optimize": False}
REQUESTS, NEW_TOKENS = 3, 24


@dataclass(frozen=True)
class Answered:
    """One answer, and what is left of its prompt."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    """Of each token."""
    rows: Rows
    """By layer and head: prompt tokens whose KVs are held once the prompt's last round is over."""


def answer(options: dict[str, Any], prompts: list[list[int]], new_tokens: int) -> list[Answered]:
    """All prompts answered at once, and each by itself to be looked into."""
    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, logprobs=1)
    with LLM(**options) as llm:
        answers = [output.outputs[0] for output in llm.generate(prompts, params)]
        rows = [llm.inspect(prompt, params).after_prompt.rows for prompt in prompts]
    outcomes = []
    for each, held in zip(answers, rows, strict=True):
        entries = zip(each.token_ids, each.logprobs or (), strict=True)
        outcomes.append(
            Answered(each.token_ids, [e[token].logprob for token, e in entries if e is not None], held)
        )
    return outcomes


@dataclass
class Agreement:
    """What two sides have in common."""

    tokens: int = 0
    equal_tokens: int = 0
    kvs: int = 0
    """Held after the prompts by the second side."""
    shared_kvs: int = 0
    """Held by both."""
    compared: int = 0
    """Tokens up to which KVs and tokens agree."""
    difference: float = 0.0
    """The largest between log probabilities of these."""

    @classmethod
    def of(cls, ours: Sequence[Answered], plain: Sequence[Answered]) -> "Agreement":
        """Count over all answers."""
        found = cls()
        for one, other in zip(ours, plain, strict=True):
            found._add(one, other)
        return found

    def _add(self, ours: Answered, plain: Answered) -> None:
        pairs = list(zip(ours.tokens, plain.tokens, strict=True))
        self.tokens += len(pairs)
        self.equal_tokens += sum(a == b for a, b in pairs)
        for layer, plain_layer in zip(ours.rows, plain.rows, strict=True):
            for row, plain_row in zip(layer, plain_layer, strict=True):
                self.kvs += len(plain_row)
                self.shared_kvs += len(set(row).intersection(plain_row))
        if ours.rows != plain.rows:
            return
        for (a, b), x, y in zip(pairs, ours.logprobs, plain.logprobs, strict=True):
            self.compared += 1
            self.difference = max(self.difference, abs(x - y))
            if a != b:
                break


def table(title: str, found: dict[str, Agreement]) -> TextTable:
    """A line for each configuration."""
    rows = tuple(
        (
            name,
            (
                f"{each.equal_tokens:,} of {each.tokens:,}",
                f"{each.shared_kvs:,} of {each.kvs:,}",
                f"{each.difference:.1e} ({each.compared:,})",
            ),
        )
        for name, each in found.items()
    )
    notes = ("log probability: the largest difference as far as KVs and tokens agree, of so many tokens",)
    return TextTable(
        title, "configuration", ("equal tokens", "KVs in common", "log probability"), rows, notes
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments, checked; `workload` holds the preset's with what was typed in its place."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_work_arguments(parser)
    parser.set_defaults(requests=REQUESTS, new_tokens=NEW_TOKENS)
    add_eviction_arguments(parser)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--weight-dtype", choices=WEIGHT_DTYPES, default="auto")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch")
    parser.add_argument("--json", type=Path, help="write what was found to this file")
    arguments = parser.parse_args(argv)
    take_work(parser, arguments)
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    """Answer with every configuration on both sides, print the table."""
    arguments = parse(argv)
    torch.set_num_threads(arguments.threads)
    preset, work = PRESETS[arguments.work], arguments.workload
    found = {}
    try:
        check_json_path(arguments.json)
        options = {
            "model": str(preset.shape.save(model_cache())),
            "dtype": arguments.dtype,
            "weight_dtype": arguments.weight_dtype,
        }
        prompts = work.prompts(preset.shape.vocab_size)
        cases = options_by_eviction(
            arguments.eviction, arguments.compression, options, arguments.kv_seqs, work.sequence_tokens
        )
        for name, case in cases.items():
            ours = answer(case, prompts, work.new_tokens)
            found[name] = Agreement.of(ours, answer(case | PLAIN, prompts, work.new_tokens))
            print(f"{name}: done", file=sys.stderr, flush=True)
    except WinnowError as error:
        raise SystemExit(f"error: {error}") from None
    machine = Machine.here()
    head = report_head([Path(sys.argv[0]).name, *(sys.argv[1:] if argv is None else argv)], machine)
    title = (
        f"{machine}; commit {head['commit']}, {head['date']}; "
        f"{work.requests} requests of {work.prompt_tokens} + {work.new_tokens} tokens, {arguments.dtype}"
        f"{'' if arguments.weight_dtype == 'auto' else f', {arguments.weight_dtype} weights'}"
    )
    print_tables(console(), [table(title, found)])
    write_json(arguments.json, head | {"agreement": {name: asdict(each) for name, each in found.items()}})


if __name__ == "__main__":
    main()
