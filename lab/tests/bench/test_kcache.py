"""The study of KCache: settings, tables, and questions in turn."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from winnow import LLM, RequestOutput
from winnow.values.value_tier import ValueTier
from winnow_lab.papers.kcache.answers import Answered, prompt_lengths
from winnow_lab.papers.kcache.command import (
    answer_table,
    length_table,
    subject_table,
    throughput_table,
    traffic_table,
    turn_table,
)
from winnow_lab.papers.kcache.protocol import PAPER, SUBJECTS, Options, Setting, settings
from winnow_lab.papers.kcache.timed import Cell, conversations
from winnow_lab.tasks import load_task


def test_settings_are_those_of_the_paper() -> None:
    rows = list(settings((32, 64, 128), (0, 1, 2, 3), ("renormalize",)))
    assert {row.label for row in rows[:13]} == set(PAPER)
    assert rows[13].label == "N=32, L=1, renormalize"
    assert len({row.folder for row in rows}) == len(rows) == 16
    for row in rows[1:]:
        tier = ValueTier.parse(row.options["value_tier"])
        assert tier is not None and (tier.top_n, tier.layers) == (row.top_n, row.layers)


def test_tables() -> None:
    row = Answered(Setting(32), {"a": 0.5, "b": 1.0}, {"a": 0.1, "b": 0.0}, {"a": 4, "b": 4}, 0.9, 0.8, 12.0)
    [(name, entries)] = answer_table([row], "model").rows
    assert name == "N=32, L=1" and entries[2] == "0.750" and entries[-1] == "36.94 / 12.59 / 64.16"
    cells = [
        Cell("full", 1024, 1, 10.0, 2**20),
        Cell("full", 4096, 7, None),
        Cell("N=32, L=1", 1024, 1, 12.0, 2**19, 2**19, 32.0, 30.0, 0.001),
        Cell("N=32, L=1", 4096, 7, 30.0),
    ]
    rows = dict(throughput_table(cells, "model", "1GiB").rows)
    assert rows["1024 tokens, batch 1"] == ("10.0", "12.0 (1.20x)")
    assert rows["4096 tokens, batch 7"] == ("out of memory", "30.0")
    assert len(traffic_table(cells).rows) == 3


def test_subjects_have_a_table_beside_the_papers() -> None:
    scores, errors = {"snarks": 0.25, "other": 1.0}, {"snarks": 0.1, "other": 0.0}
    row = Answered(Setting(32), scores, errors, {"snarks": 4, "other": 4}, 0.9, 0.8, 12.0)
    assert dict(subject_table([row], "model").rows) == {"snarks": ("25.00 ± 10.00", "60.11, 67.98")}
    assert answer_table([row], "model").columns[0] == "other"
    assert len(SUBJECTS) == 27 and set(SUBJECTS) == set(load_task("bbh").categories)


def test_lengths_of_prompts() -> None:
    found = prompt_lengths(Options(lengths=("nq-open",), samples=3, kv_memory="16MiB"))
    [(task, entries)] = length_table(found, "model").rows
    [lengths] = found.values()
    assert task == "nq-open" and lengths == sorted(lengths) and 20 < lengths[0] <= lengths[2]
    assert entries == ("3", *(f"{lengths[i]:,}" for i in (0, 0, 1, 2, 2)))


def test_questions_in_turn_go_on_with_what_the_first_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = Options(questions=3, samples=1, tokens=(256,), top_n=(16,), kv_memory="16MiB", work=tmp_path)
    turns: list[tuple[list[int], RequestOutput]] = []
    generate = LLM.generate

    def watched(llm: LLM, prompts: list[list[int]], *given: Any, **named: Any) -> list[RequestOutput]:
        [output] = generate(llm, prompts, *given, **named)
        if "session_id" in named:
            turns.append((list(prompts[0]), output))
        return [output]

    monkeypatch.setattr(LLM, "generate", watched)
    found = list(conversations(arguments))
    assert [each.setting for each in found] == ["full", "N=16, L=1", "kv-compress 8x"]
    for start in (0, 3, 6):
        for (prompt, output), (later, answer) in pairwise(turns[start : start + 3]):
            known = [*prompt, *output.outputs[0].token_ids]
            assert later[: len(known)] == known
            # With a tier answers are read again: a prompt's tokens see all values.
            assert answer.num_cached_tokens >= len(prompt) - 1
    kept = [turns[start + 2][1].outputs[0].eviction for start in (0, 3, 6)]
    assert kept[:2] == [None, None] and kept[2] is not None
    again = list(conversations(arguments))
    assert again == found and len(turns) == 9
    assert dict(turn_table(found, "model").rows).keys() == {each.setting for each in found}
