"""Questions in turn on one context: values that stay, beside KVs that the first question chose (the paper's motive)."""

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from winnow import LLM, SamplingParams
from winnow.metrics import score
from winnow_lab.evaluate.prompt import PromptMaker
from winnow_lab.evaluate.sample import Sample
from winnow_lab.evaluate.settings import settings_for
from winnow_lab.papers.kcache.protocol import Options, Setting
from winnow_lab.tasks import load_task


@dataclass(frozen=True)
class Turns:
    """One setting.

    Attributes:
        first, later: part of the answers that are right, of first questions and of those after.
        first_seconds, later_seconds: of a turn; the first reads the context.
        device_bytes: of blocks, at most.
    """

    setting: str
    first: float
    later: float
    first_seconds: float
    later_seconds: float
    device_bytes: int


def conversations(options: Options) -> Iterator[Turns]:
    """Measure what the journal does not have, setting by setting, and yield all of it."""
    journal = options.journal("turns")
    # As many words of value_tier as the engine's default has.
    settings: dict[str, dict[str, Any]] = {"full": {}}
    settings |= {f"N={n}, L=1": Setting(n, 1, "renormalize").options for n in options.top_n}
    evicted = {"eviction": "kv-compress", "compression": options.compression}
    for label, own in (settings | {f"kv-compress {options.compression:g}x": evicted}).items():
        if label not in journal.rows and not options.report:
            journal.add(label, asdict(_measure(label, own, options)))
        if label in journal.rows:
            yield Turns(**journal.row(label))


def _measure(label: str, own: dict[str, Any], options: Options) -> Turns:
    with options.open(**own) as llm:
        samples = load_task("documents").samples(
            settings_for(
                llm,
                samples=options.samples,
                tokens=options.tokens,
                questions=options.questions,
                seed=options.seed,
            )
        )
        llm.generate([list(range(3, 67))], SamplingParams(max_tokens=2))  # what only a first step does
        start, turns = llm.stats().kv_bytes_used, [_converse(llm, sample) for sample in samples]
        peak = llm.stats().kv_bytes_peak - start
    firsts, laters = [turn[0] for turn in turns], [each for turn in turns for each in turn[1:]]
    (first, first_seconds), (later, later_seconds) = (
        [fmean(column) for column in zip(*part, strict=True)] for part in (firsts, laters)
    )
    return Turns(label, first, later, first_seconds, later_seconds, peak)


def _converse(llm: LLM, sample: Sample) -> list[tuple[float, float]]:
    """Ask the questions of a sample one after the other, each behind all that was said before.

    Returns:
        Of each the score of its answer, and the seconds it took.
    """
    tokenizer: Any = llm.tokenizer
    prompt: list[int] = []
    found = []
    for number, question in enumerate(sample.questions):
        # Tokens of earlier turns stay as they are: a session continues behind what rounds left of these alone.
        if number == 0:
            prompt += PromptMaker(tokenizer, "off").make(sample, question).token_ids
        else:
            prompt += tokenizer.encode(question.plain, add_special_tokens=False)
        params = SamplingParams(temperature=0.0, max_tokens=question.max_tokens, stop=question.stop)
        begun = time.perf_counter()
        [output] = llm.generate([prompt], params, session_id=sample.name, use_tqdm=False)
        seconds, [answer] = time.perf_counter() - begun, output.outputs
        right = score(question.metric, answer.text, question.references, question.classes)
        found.append((right, seconds))
        prompt += answer.token_ids
    return found
