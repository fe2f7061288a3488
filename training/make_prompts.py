"""Write the sample prompts of `make demo`: every category of demo task over books that the demo model never saw.

One JSON object a line: custom_id, prompt, max_tokens, temperature, reference, category, metric.
"""

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

import corpus
from tokenizers import Tokenizer

from winnow_lab.evaluate.demo_tasks import CATEGORIES, CountTokens, Haystack, make_sample

LENGTHS = (1000, 1500, 2000, 3000, 4000)
# Room for the longest right answer of its kind, so that a wrong one is not cut short either.
ANSWER_ROOM = 8


def prompts(
    haystack: Haystack, count_tokens: CountTokens, each: int, seed: int
) -> Iterator[dict[str, object]]:
    """`each` prompts of every category, their lengths taken from `LENGTHS` in turn."""
    for category in CATEGORIES:
        for number in range(1, each + 1):
            rng = random.Random(f"{seed}/{category}/{number}")
            length = LENGTHS[(number - 1) % len(LENGTHS)]
            sample = make_sample(category, rng, haystack, count_tokens, length - ANSWER_ROOM)
            yield {
                "custom_id": f"{category}-{number:04d}",
                "prompt": sample.prompt,
                "max_tokens": count_tokens(" " + sample.answer) + ANSWER_ROOM,
                "temperature": 0,
                "reference": sample.answer,
                "category": sample.category,
                "metric": sample.metric,
            }


def main() -> None:
    """Command line; see --help."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with the held-out books")
    parser.add_argument("--tokenizer", type=Path, required=True, help="the demo model's tokenizer.json")
    parser.add_argument("--out", type=Path, required=True, help="file to write, such as prompts.jsonl")
    parser.add_argument("--each", type=int, default=9, help="prompts of every category")
    parser.add_argument("--seed", type=int, default=2026, help="of facts, places and questions")
    arguments = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(arguments.tokenizer))

    def count_tokens(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    haystack = Haystack.build(corpus.sentences(corpus.held_out_files(arguments.data)), count_tokens)
    lines = [json.dumps(row) for row in prompts(haystack, count_tokens, arguments.each, arguments.seed)]
    arguments.out.write_text("\n".join(lines) + "\n")
    print(f"wrote {len(lines)} prompts to {arguments.out}")


if __name__ == "__main__":
    main()
