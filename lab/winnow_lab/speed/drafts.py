"""Speed of drafts: answers that quote, edit or invent, by batch, source of drafts, and with their gate or without.

    python -m winnow_lab.speed.drafts MODEL -o docs/results

Greedy decoding with the prompts in the prefix cache, so that only decoding counts. The draft model is the model itself
with fewer layers: the first and the last ones. Engines take turns in each cell; the table shows tokens a second beside
those without drafts in the same round, the median of the rounds. In float32, so that answers are the same tokens. The
bar: with the gate never below .98 of no drafts.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from winnow import LLM, SamplingParams
from winnow.config import ModelConfig
from winnow.models import load_plain_model
from winnow_lab.report.tables import TextTable
from winnow_lab.study import Result, StudyOptions, flag, in_turn, run_study

BATCHES, KINDS = (1, 4, 16), ("quotes", "edits", "stories")
BAR = 0.98


@dataclass(frozen=True)
class Options(StudyOptions):
    model: str = flag(positional=True)
    method: str = flag("ngram", choices=("ngram", "draft_model"))
    kind: str = flag("all", "of answers", choices=("all", *KINDS))
    tokens: int = flag(48, "of an answer", least=2)
    rounds: int = flag(5, least=1)
    layers: int = flag(6, "of the draft model", least=2)
    seqs: int = flag(16, "that decode together, at most", least=1)
    least_seqs: int = flag(1, "at least", least=1)


def prompts(number: int) -> dict[str, list[str]]:
    """Return `number` tasks of each kind: one that quotes its text, one that edits code, one with nothing to repeat."""
    folder = files("winnow_lab.evaluate")
    text = folder.joinpath("data/prose.txt").read_text(encoding="utf-8")
    code = Path(statistics.__file__).read_text(encoding="utf-8")
    places = [2000 + 900 * index for index in range(number)]
    tasks = {
        "quotes": [
            f"Summarise this text, quoting its main sentences:\n{text[at : at + 1600]}" for at in places
        ],
        "edits": [
            f"Rename the variable x to value, and print all of the code:\n{code[at : at + 1200]}"
            for at in places
        ],
        "stories": [f"Tell a long story about lighthouse number {index + 1}." for index in range(number)],
    }
    return {
        name: [f"<|im_start|>user\n{task}<|im_end|>\n<|im_start|>assistant\n" for task in each]
        for name, each in tasks.items()
    }


def cut_down(model: str, layers: int, folder: Path) -> Path:
    """Write the model with its first and last layers alone, `layers` in all."""
    loaded = load_plain_model(ModelConfig(model=model, device="cpu", dtype="float32"))
    whole: Any = loaded.model
    kept = [*whole.model.layers[: layers - layers // 2], *whole.model.layers[-(layers // 2) :]]
    whole.model.layers = type(whole.model.layers)(kept)
    whole.config.num_hidden_layers = layers
    if getattr(whole.config, "layer_types", None):
        whole.config.layer_types = whole.config.layer_types[:layers]
    whole.save_pretrained(folder)
    assert loaded.tokenizer is not None, "a published model has one"
    loaded.tokenizer.save_pretrained(folder)
    return folder


def measure(llm: LLM, texts: list[str], tokens: int) -> dict[str, Any]:
    """Return tokens a second of decoding some prompts together, the tokens, and what became of drafts."""
    llm.generate(texts, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    before, start = llm.stats(), time.perf_counter()
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    outputs = llm.generate(texts, params, use_tqdm=False)
    seconds, after = time.perf_counter() - start, llm.stats()
    return {
        "rate": tokens * len(texts) / seconds,
        "drafts": after.num_draft_tokens - before.num_draft_tokens,
        "accepted": after.num_accepted_tokens - before.num_accepted_tokens,
        "answers": [list(output.outputs[0].token_ids) for output in outputs],
    }


def study(options: Options) -> Iterator[Result]:
    config: dict[str, Any] = {"method": options.method}
    with tempfile.TemporaryDirectory() as folder:
        if options.method == "draft_model":
            config["model"] = str(cut_down(options.model, options.layers, Path(folder)))
        settings = {"none": None, "gate": config, "always": config | {"adaptive": False}}
        engines = {
            name: LLM(
                options.model,
                dtype="float32",
                kv_memory="512MiB",
                max_num_seqs=options.seqs,
                speculative_config=each,
            )
            for name, each in settings.items()
        }
        rows = []
        tasks = prompts(options.seqs)
        for batch in (each for each in BATCHES if options.least_seqs <= each <= options.seqs):
            for kind in KINDS if options.kind == "all" else (options.kind,):
                texts = tasks[kind]
                run = partial(measure, texts=texts[:batch], tokens=options.tokens)
                *_, found = in_turn(engines, options.rounds, run)
                rows.append(_row(batch, kind, found))
                yield _result(options, rows)


def _result(options: Options, rows: list[dict[str, Any]]) -> Result:
    least = min(row["gate"] for row in rows)
    lines = []
    for row in rows:
        gains = f"{row['gate']:.2f} times | {row['always']:.2f} times"
        taken = " | ".join(f"{row['accepted'][name]} of {row['drafts'][name]}" for name in ("gate", "always"))
        begun = f"{row['kind']}, {row['batch']} | {row['tokens_per_second']:.1f}"
        lines.append(f"{begun} | {gains} | {taken} | {row['same']:.0%}")
    head = "answers, batch | none, tokens/s | gate | always | accepted, gate | accepted, always | same tokens"
    source = "what the prompt had" if options.method == "ngram" else f"itself with {options.layers} layers"
    facts = [
        f"{Path(options.model).name}, greedy, {options.tokens} tokens an answer, {options.rounds} rounds.",
        f"Drafts: {source}.",
        f"Least with the gate: {least:.3f} of no drafts (bar {BAR}: {'holds' if least >= BAR else 'missed'}).",
    ]
    notes = (
        "Gate and always: tokens a second beside no drafts. Same tokens: answers that are those without "
        "drafts."
    )
    table = TextTable.read(f"Decoding, {options.method}", head, lines)
    return Result("Drafts", [table], facts, notes, {"rows": rows, "least": least}, ok=least >= BAR)


def _row(batch: int, kind: str, found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    rates = {name: [run["rate"] for run in runs] for name, runs in found.items()}
    gains = {
        name: statistics.median(one / other for one, other in zip(each, rates["none"], strict=True))
        for name, each in rates.items()
    }
    answers = {name: runs[-1]["answers"] for name, runs in found.items()}
    same = [one == other for one, other in zip(answers["none"], answers["always"], strict=True)]
    return {
        "kind": kind,
        "batch": batch,
        "tokens_per_second": round(statistics.median(rates["none"]), 1),
        "gate": round(gains["gate"], 3),
        "always": round(gains["always"], 3),
        "drafts": {name: sum(run["drafts"] for run in runs) for name, runs in found.items()},
        "accepted": {name: sum(run["accepted"] for run in runs) for name, runs in found.items()},
        "same": sum(same) / len(same),
    }


if __name__ == "__main__":
    sys.exit(run_study(Options, study))
