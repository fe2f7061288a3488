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

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from winnow import LLM, SamplingParams
from winnow.config import WEIGHT_DTYPES, EngineConfig
from winnow.eviction import find_preset
from winnow_lab.bench.presets import PRESETS, Workload, kv_memory_for, model_cache
from winnow_lab.report.tables import TextTable
from winnow_lab.study import Result, StudyOptions, flag, run_study

PLAIN: dict[str, Any] = {"attention_backend": "reference", "optimize": False}


@dataclass(frozen=True)
class Options(StudyOptions):
    work: str = flag("w1", "model and work", choices=tuple(PRESETS))
    requests: int | None = flag(3, "prompts")
    prompt_tokens: int | None = flag(None, "in place of the work's own")
    new_tokens: int | None = flag(24, "of an answer")
    kv_seqs: int | None = flag(None, "KV memory, in whole sequences (default: the work's)")
    eviction: tuple[str, ...] = flag(("full", "batch-max", "kv-compress-pd"), "presets of eviction")
    compression: float = flag(4.0, "of those that evict")
    dtype: str = flag("float32", choices=("float32", "bfloat16", "float16"))
    weight_dtype: str = flag("auto", choices=WEIGHT_DTYPES)
    threads: int = flag(torch.get_num_threads(), "of torch", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.workload, "its numbers are checked"

    @property
    def workload(self) -> Workload:
        own = {name: getattr(self, name) for name in ("requests", "prompt_tokens", "new_tokens")}
        return PRESETS[self.work].workload.having(**own)

    def by_eviction(self, common: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """Options of `LLM` for each preset, `common` ones in them; all have the same KV memory."""
        config = EngineConfig.from_options(common | {"compression": self.compression})
        sequences = PRESETS[self.work].kv_seqs if self.kv_seqs is None else self.kv_seqs
        common = common | {"kv_memory": kv_memory_for(config, sequences, self.workload.sequence_tokens)}
        found = {}
        for eviction in self.eviction:
            find_preset(eviction)  # an unknown name is refused before anything is measured
            own = {} if eviction == "full" else {"eviction": eviction, "compression": self.compression}
            found[f"{eviction} {self.compression:g}x" if own else eviction] = common | own
        return found


@dataclass(frozen=True)
class Answered:
    tokens: Sequence[int]
    logprobs: Sequence[float]
    """Of each token."""
    rows: tuple[tuple[tuple[int, ...], ...], ...]
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
    columns: dict[str, Callable[[Agreement], str]] = {
        "equal tokens": lambda each: f"{each.equal_tokens:,} of {each.tokens:,}",
        "KVs in common": lambda each: f"{each.shared_kvs:,} of {each.kvs:,}",
        "log probability": lambda each: f"{each.difference:.1e} ({each.compared:,})",
    }
    note = "log probability: the largest difference over the tokens before KVs or tokens first differ, and their number"
    return TextTable.of(title, "configuration", found, columns, (note,))


def study(options: Options) -> Result:
    torch.set_num_threads(options.threads)
    preset, work, found = PRESETS[options.work], options.workload, {}
    model = str(preset.shape.save(model_cache()))
    common = {"model": model, "dtype": options.dtype, "weight_dtype": options.weight_dtype}
    prompts = work.prompts(preset.shape.vocab_size)
    for name, case in options.by_eviction(common).items():
        ours = answer(case, prompts, work.new_tokens)
        found[name] = Agreement.of(ours, answer(case | PLAIN, prompts, work.new_tokens))
        print(f"{name}: done", file=sys.stderr, flush=True)
    title = (
        f"{work.requests} requests of {work.prompt_tokens} + {work.new_tokens} tokens, {options.dtype}"
        f"{'' if options.weight_dtype == 'auto' else f', {options.weight_dtype} weights'}"
    )
    numbers = {"agreement": {name: asdict(each) for name, each in found.items()}}
    return Result("Answers beside those of plain torch", [table(title, found)], numbers=numbers)


if __name__ == "__main__":
    sys.exit(run_study(Options, study))
