"""`winnow documents add` computes texts that other commands take."""

from dataclasses import replace
from pathlib import Path

import pytest

from winnow import LLM, Document, SamplingParams
from winnow.cli.main import main

TEXTS = [
    " ".join(f"The {place} of number {n} holds the key {n * 37 % 101}." for n in range(12))
    for place in ("box", "jar", "bag")
]
ASK = SamplingParams(temperature=0, max_tokens=4)


def test_a_folder_is_computed_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add = ["documents", "add", str(tmp_path), "--model", "demo", "--kv-memory", "64MiB"]
    assert main(add) == 2
    assert "FOLDER must be a directory with .txt or .md files" in capsys.readouterr().err
    for count in (2, 3):
        (tmp_path / "more").mkdir(exist_ok=True)
        for number, text in enumerate(TEXTS[:count]):
            (tmp_path / "more" / f"{number}.txt").write_text(text)
        assert main(add) == 0
        assert f"{[2, 1][count - 2]} of {count} texts computed" in capsys.readouterr().out
    marked = ["Read.\n", *map(Document, reversed(TEXTS)), "\nWhich key is in jar 3?"]
    plain = "\n\n".join(["Read:", *TEXTS[1:], *TEXTS[:1], "Which key is in jar 4?"])
    with LLM(kv_memory="64MiB", documents=tmp_path) as llm:
        for tenant, prompt in ((None, marked), ("ada", marked), ("bo", plain)):
            [exact] = llm.generate([prompt], replace(ASK, reuse="exact"), tenant=tenant)
            assert exact.num_reused_tokens == exact.num_cached_tokens == 0
            llm.reset_prefix_cache()
            [output] = llm.generate([prompt], ASK, tenant=tenant)
            assert output.num_cached_tokens == 0 and output.num_repaired_tokens
            assert output.num_reused_tokens + output.num_repaired_tokens > 0.9 * len(output.prompt_token_ids)
    with LLM(kv_memory="64MiB", documents=tmp_path, kv_cache_dtype="int8") as llm:  # another cache's
        [output] = llm.generate([plain], ASK)
        assert output.num_reused_tokens == 0


def test_texts_that_share_a_part_are_each_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also one that is like another that is there; a damaged file is computed anew."""
    add = ["documents", "add", str(tmp_path), "--model", "demo", "--kv-memory", "64MiB"]
    for number in (0, 1):
        (tmp_path / f"{number}.txt").write_text(f"Note {number}. {TEXTS[0]}")
    assert main(add) == 0
    (tmp_path / "2.txt").write_text(f"Another note. {TEXTS[0]}")
    assert main(add) == 0
    assert "1 of 3 texts computed" in capsys.readouterr().out
    damaged = max((tmp_path / ".winnow").glob("*.safetensors"))
    content = damaged.read_bytes()
    damaged.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    assert main(add) == 0
    out, err = capsys.readouterr()
    assert "1 of 3 texts computed" in out and f"{damaged} is damaged" in err
    assert damaged.stat().st_size == len(content) and damaged.read_bytes()[-9] != content[-9] ^ 1


def test_compressed_documents_stand_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each head has what it kept of each, and nothing of them is computed again."""
    for number, text in enumerate(TEXTS):
        (tmp_path / f"{number}.txt").write_text(text)
    add = ["documents", "add", str(tmp_path), "--model", "demo", "--kv-memory", "64MiB"]
    add += ["--compression", "2", "--eviction", "winnow-keys", "--dtype", "float32"]
    for new in (3, 0):
        assert main(add) == 0
        assert f"{new} of 3 texts compressed" in capsys.readouterr().out
    marked = [
        "Read.\n",
        *map(Document, reversed(TEXTS)),
        "\nQuestion: Which key does the jar of number 3 hold?\nAnswer:",
    ]
    with LLM(kv_memory="64MiB", documents=tmp_path, dtype="float32") as llm:
        llm.submit(marked, replace(ASK, max_tokens=8), final_only=True)
        held, outputs = [], []
        while not outputs:
            outputs = llm.step()
            llm.check_integrity()
            held.append(llm.driver.engine.memory.ledger.lengths.max(axis=0))
        length = len(outputs[0].prompt_token_ids)
        assert outputs[0].num_repaired_tokens == 0 and outputs[0].num_reused_tokens > 0.8 * length
        most = max(held, key=lambda lengths: int(lengths.sum()))
        assert most.mean() < 0.7 * length and most.min() != most.max()
        [answer] = outputs[0].outputs
        assert answer.text == " 10" and answer.eviction is not None
        assert answer.eviction.policy == "documents" and answer.eviction.mean_kept < 0.7 * length
