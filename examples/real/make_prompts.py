"""Write the prompts of `make real-demo`: numbers and words hidden in prose, asked for in messages of a chat.

The prompts are RULER's recipes for needles over the prose that ships with Winnow. One JSON object a line: custom_id,
messages, max_tokens, temperature, reference, category, metric.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path

from transformers import AutoTokenizer

from winnow_lab.evaluate.tasks.ruler import RulerTask
from winnow_lab.evaluate.tasks.task import TaskSettings

# One number, one of several, and a number by a word: what a model of 135M parameters can be expected to find.
CATEGORIES = ("niah_single_1", "niah_single_2", "niah_multikey_1")
LENGTHS = (1024, 1280, 1536, 1792)
MAX_TOKENS = 48


def prompts(count_tokens: Callable[[str], int], each: int, seed: int) -> Iterator[dict[str, object]]:
    """`each` prompts of every category and length."""
    settings = TaskSettings(
        count_tokens=count_tokens,
        truncate=lambda text, tokens: text,
        max_model_len=2 * max(LENGTHS),
        samples=each,
        tokens=LENGTHS,
        categories=CATEGORIES,
        seed=seed,
    )
    for sample in RulerTask().samples(settings):
        question = sample.questions[0]
        # RULER has the answer begun for the model, which a chat does not need.
        asked = question.text[: question.text.rindex("?") + 1]
        yield {
            "custom_id": sample.name.replace("/", "-"),
            "messages": [{"role": "user", "content": sample.context + asked}],
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "reference": question.references[0],
            "category": sample.category,
            "metric": "match-all",
        }


def main() -> None:
    """Command line; see --help."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="GGUF file whose tokenizer counts")
    parser.add_argument("--out", type=Path, required=True, help="file to write, such as prompts.jsonl")
    parser.add_argument("--each", type=int, default=2, help="prompts of every category and length")
    parser.add_argument("--seed", type=int, default=2026, help="of numbers, places and questions")
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(
        arguments.model.parent, gguf_file=str(arguments.model.resolve())
    )

    def count_tokens(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False).input_ids)

    lines = [json.dumps(row) for row in prompts(count_tokens, arguments.each, arguments.seed)]
    arguments.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"wrote {len(lines)} prompts to {arguments.out}")


if __name__ == "__main__":
    main()
