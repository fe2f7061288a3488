"""The job of documents that stand anywhere."""

import json
from collections import Counter
from pathlib import Path

from winnow import Document
from winnow_lab.memory.documents_anywhere import Options, job, study


def test_each_passage_stands_in_as_many_prompts_and_few_are_computed(tmp_path: Path) -> None:
    file = tmp_path / "passages.jsonl"
    names = ["Ada", "Bo", "Cyrus", "Dora", "Emil"]
    rows = [
        {
            "question": f"where does {name} live",
            "answers": [f"Town {number}"],
            "ctxs": [
                {"title": name, "text": f"{name} lives in Town {number}. " + f"{name} likes tea. " * 20}
            ],
        }
        for number, name in enumerate(names)
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    demo = str(Path(__file__).parents[3] / "src/winnow/models/demo")
    options = Options(model=demo, file=str(file), questions=5, documents=3, shares=(0.2,), least=100)
    shown = Counter(
        part.text for asked in job(options) for part in asked.prompt if isinstance(part, Document)
    )
    assert set(shown.values()) == {3}
    whole, reused = study(options).numbers.values()
    assert whole["reused"] == whole["repaired"] == 0
    assert 0.3 * reused["tokens"] < reused["reused"] < reused["tokens"]
    assert 0 < reused["repaired"] < reused["reused"]
