"""Write chats about prose: one fact stands among other sentences, and the question behind them asks for it.

One JSON object a line, as `make_prompts.py` writes them. Compare the answers to see what is lost:

    python examples/real/make_chats.py -o chats.jsonl
    winnow run chats.jsonl -o whole.jsonl --model MODEL --kv-memory 128MiB
    winnow run chats.jsonl -o auto.jsonl --model MODEL --kv-memory 128MiB --compression auto
"""

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

from winnow_lab.evaluate.tasks.files import shipped_sentences

FACTS = (
    (
        "{who} hid the key of the boathouse behind the {where}.",
        "Where did {who} hide the key of the boathouse?",
    ),
    (
        "The painting that {who} bought in Lisbon hangs above the {where}.",
        "Above what does {who}'s painting hang?",
    ),
    ("At the fair {who} won a {what} in the last round.", "What did {who} win at the fair?"),
    ("Every winter {who} repairs a {what} for the neighbours.", "What does {who} repair every winter?"),
    ("The doctor told {who} to stay away from {food}.", "What should {who} stay away from?"),
    ("For the wedding {who} ordered forty plates of {food}.", "What did {who} order for the wedding?"),
    ("After the storm {who} moved to the village of {town}.", "Where did {who} move after the storm?"),
    ("The night train brought {who} to {town} without luggage.", "Where did the night train bring {who}?"),
)
WORDS = {
    "who": "Marta Oskar Yusuf Henrike Dolores Pavel Ingrid Tomasz Amara Leopold Sunniva Ravi Bettina Caspar",
    "where": "stove bookcase piano wardrobe fireplace mirror staircase cellar chimney dresser",
    "what": "clock violin bicycle lantern kettle saddle telescope compass ladder accordion",
    "food": "mushrooms walnuts lentils oysters cherries cabbage garlic honey cheese plums",
    "town": "Ardmore Kelsey Birkholm Tarnow Valdera Ostrava Linden Marwick Selby Corvino",
}
ASKED = "Answer in one sentence, then explain where the text says so."


def chats(count: int, words: int, seed: int) -> Iterator[dict[str, object]]:
    """Yield `count` chats of about `words` words each."""
    prose = shipped_sentences()
    for number in range(count):
        rng = random.Random(f"{seed}/{number}")  # noqa: S311  # no secret
        statement, question = FACTS[number % len(FACTS)]
        drawn = {name: rng.choice(choices.split()) for name, choices in WORDS.items()}
        lines, length = list[str](), 0
        while length < words:
            lines.append(rng.choice(prose).strip())
            length += len(lines[-1].split())
        lines.insert(rng.randrange(len(lines)), statement.format(**drawn))
        [asked_for] = [
            drawn[name] for name in ("where", "what", "food", "town") if f"{{{name}}}" in statement
        ]
        yield {
            "custom_id": f"chat-{number}",
            "messages": [
                {"role": "user", "content": f"{' '.join(lines)}\n\n{question.format(**drawn)} {ASKED}"}
            ],
            "max_tokens": 160,
            "temperature": 0,
            "reference": asked_for,
            "metric": "match-all",
        }


def main() -> None:
    """Command line; see --help."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--out", type=Path, required=True, help="file to write")
    parser.add_argument("--count", type=int, default=60, help="chats")
    parser.add_argument("--words", type=int, default=1050, help="of prose in each, about 1,500 tokens")
    parser.add_argument("--seed", type=int, default=1, help="of words, places and prose")
    arguments = parser.parse_args()
    lines = [json.dumps(row) for row in chats(arguments.count, arguments.words, arguments.seed)]
    arguments.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
