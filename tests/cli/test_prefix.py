"""`winnow prefix save` writes what other commands start from."""

import json
from pathlib import Path

import pytest

from winnow import LLM, SamplingParams
from winnow.cli.main import main

WORDS = ["--eviction", "winnow", "--compression", "4", "--kv-memory", "64MiB"]
QUESTIONS = ("\n\nQuestion: Who lived there?\nAnswer:", "\n\nQuestion: Why?\nAnswer:")


@pytest.fixture
def document(tmp_path: Path) -> Path:
    path = tmp_path / "document.txt"
    path.write_text(
        " ".join(f"The box of number {n} holds the key {n * 37 % 101}." for n in range(60)) + "\n"
    )
    return path


def answers(
    tmp_path: Path, name: str, text: str, context: int | None, *words: str
) -> list[dict[str, object]]:
    prompts, out = tmp_path / f"{name}.prompts.jsonl", tmp_path / f"{name}.jsonl"
    own = {} if context is None else {"context_tokens": context}
    lines = [
        json.dumps({"prompt": text + question, "temperature": 0, "return_kept": True} | own)
        for question in QUESTIONS
    ]
    prompts.write_text("\n".join(lines))
    assert main(["run", str(prompts), "-o", str(out), *WORDS, *words]) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_a_saved_document_answers_as_a_computed_one(
    document: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "new" / "store"
    assert main(["prefix", "save", str(document), "-o", str(store), *WORDS]) == 0
    said = capsys.readouterr()
    [file] = store.iterdir()
    assert said.out.startswith(f"{file}: ")
    context = int(said.out.removeprefix(f"{file}: ").split()[0])
    text = document.read_text().removesuffix("\n")
    found = answers(tmp_path, "found", text, None, "--prefix-store", str(store))
    computed = answers(tmp_path, "computed", text, context)
    assert [each["text"] for each in found] == [each["text"] for each in computed]
    kept = [[each["eviction"]["kept"] for each in those] for those in (found, computed)]  # type: ignore[index]
    assert kept[0] == kept[1]
    assert [each["eviction"]["policy"] for each in (*found, *computed)] == ["winnow-keys"] * 4  # type: ignore[index]


def test_a_run_that_uses_nothing_of_a_store_says_why(
    document: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "store"
    assert main(["prefix", "save", str(document), "-o", str(store), *WORDS]) == 0
    text = document.read_text().removesuffix("\n")
    with pytest.warns(UserWarning, match="no request used the prefix_store: .* context_tokens 9, and it has"):
        answers(tmp_path, "own", text, 9, "--prefix-store", str(store))


def test_a_chat_begins_with_a_saved_document(
    document: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prefix", "save", str(document), "-o", str(tmp_path / "store"), "--chat", *WORDS]) == 0
    context = int(capsys.readouterr().out.partition(": ")[2].split()[0])
    options = {
        "kv_memory": "64MiB",
        "eviction": "winnow",
        "compression": 4,
        "prefix_store": tmp_path / "store",
    }
    with LLM(**options) as llm:  # type: ignore[arg-type]
        text = document.read_text().removesuffix("\n") + QUESTIONS[0]
        [output] = llm.chat([{"role": "user", "content": text}], SamplingParams(max_tokens=4))
        assert output.num_cached_tokens == context


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "must leave less than all"),
        (["--eviction", "winnow", "--compression", "1"], "must leave less than all"),
    ],
    ids=["full", "all"],
)
def test_what_cannot_be_saved_is_refused(
    document: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], reason: str
) -> None:
    assert main(["prefix", "save", str(document), "-o", str(tmp_path / "store"), *words]) == 2
    assert reason in capsys.readouterr().err
    assert not list((tmp_path / "store").iterdir())


def test_a_missing_document_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prefix", "save", str(tmp_path / "none"), "-o", str(tmp_path / "store"), *WORDS]) == 2
    assert "No such file" in capsys.readouterr().err
    assert not (tmp_path / "store").exists()
