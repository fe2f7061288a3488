"""The job of documents that stand anywhere."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

from winnow import Document
from winnow_lab.memory.documents_anywhere import Options, job, study

DEMO = str(Path(__file__).parents[3] / "src/winnow/models/demo")


def test_each_passage_stands_in_as_many_prompts_and_few_are_computed() -> None:
    options = Options(model=DEMO, questions=5, documents=3, shares=(0.2,), compression=(2.0,), tokens=150)
    shown = Counter(
        part.text for asked in job(options) for part in asked.prompt if isinstance(part, Document)
    )
    assert set(shown.values()) == {3}
    whole, reused, packed = study(options).numbers.values()
    assert whole["reused"] == whole["repaired"] == 0
    assert 0.3 * reused["tokens"] < reused["reused"] < reused["tokens"]
    assert 0 < reused["repaired"] < reused["reused"]
    assert packed["reused"] > 0.7 * packed["tokens"] and packed["repaired"] == 0 < packed["disk"]
    halves = job(replace(options, halves=True))[0].prompt
    assert len([part for part in halves if isinstance(part, Document)]) == 6


def test_old_texts_leave_a_session(tmp_path: Path) -> None:
    """The text behind the cleared documents is reused at its new position, unchanged."""
    file = tmp_path / "passages.json"
    names = ["Ada", "Bo", "Cyrus", "Dora"]
    paragraphs = [
        {
            "context": f"{name} lives in Town. " + f"{name} likes tea. " * 40,
            "qas": [{"question": f"Where does {name} live?", "answers": [{"text": "Town"}]}],
        }
        for name in names
    ]
    file.write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    options = Options(model=DEMO, file=str(file), questions=4, session=True, keep=2, shares=(0.2,), least=100)
    last = job(options)[-1].prompt
    assert isinstance(last, str) and last.count("[cleared]") == 2 and last.count("likes tea") == 2 * 40
    whole, reused = study(options).numbers.values()
    assert whole["reused"] == 0 and whole["tokens"] == reused["tokens"]
    assert reused["reused"] > 128 and reused["repaired"] > 0
