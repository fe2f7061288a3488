"""Run that fits a predictor to a model and writes its file."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from winnow.errors import InvalidRequestError
from winnow.eviction.predictor import Predictor
from winnow.llm import LLM
from winnow_lab.fitting.collect import collect
from winnow_lab.fitting.quality import Quality, judge
from winnow_lab.fitting.train import Training, train

HELD_OUT = 4
"""One text in this many is held out for evaluation."""

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Fit:
    """The result of fitting.

    Attributes:
        quality: on texts that `predictor` did not learn from.
        seconds: duration of each phase.
    """

    predictor: Predictor
    quality: Quality
    num_texts: int
    num_kvs: int
    seconds: dict[str, float]


def fit(llm: LLM, texts: Sequence[str], training: Training, *, chat: bool, on_progress: Progress) -> Fit:
    """Collect scores, train a predictor and evaluate it.

    Args:
        texts: at least 2; one in 4, and at least 1, is held out.
        chat: put each text into the model's chat template as a user message.
        on_progress: called with each line of progress.

    Raises:
        InvalidRequestError: the model does not support replays, or a text does not fit.
    """
    start = time.monotonic()
    collected = []
    for number, text in enumerate(texts, start=1):
        collected.append(collect(llm, text, chat=chat))
        on_progress(f"text {number} of {len(texts)}: {collected[-1].num_kvs} KVs in each row")
    # Kinds of texts alternate, so the last texts cover as many kinds as possible.
    held = max(1, len(texts) // HELD_OUT)
    learnt, judged = collected[:-held], collected[-held:]
    collecting = time.monotonic()
    layers = len(collected[0].scores)

    def on_layer(layer: int) -> None:
        if (layer + 1) % 10 == 0 or layer + 1 == layers:
            on_progress(f"layer {layer + 1} of {layers}")

    predictor = train(learnt, training, on_layer)
    quality = judge(predictor, judged)
    num_kvs = sum(each.num_kvs for each in learnt)
    notes = {
        "held_out": quality.to_json(),
        "texts": len(texts),
        "kvs_of_a_row": num_kvs,
        "training": asdict(training),
    }
    seconds = {"collecting": collecting - start, "training": time.monotonic() - collecting}
    return Fit(replace(predictor, notes=notes), quality, len(texts), num_kvs, seconds)


def write(predictor: Predictor, path: Path) -> None:
    """Write a predictor atomically, where `path` leads if it is a link.

    Raises:
        InvalidRequestError: the file cannot be written.
    """
    path = Path(os.path.realpath(path))
    partial = path.with_name(f".{path.name}.partial")
    try:
        predictor.save(partial)
        partial.replace(path)
    except OSError as error:
        raise InvalidRequestError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        partial.unlink(missing_ok=True)
