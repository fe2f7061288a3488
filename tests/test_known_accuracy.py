"""What is said of accuracy comes from results in the repository, and from nowhere else."""

import pytest

from winnow.cli.flags.engine import open_llm
from winnow.cli.known_accuracy import FILE, PAGE, known_accuracy, lost_tasks, record, share_range
from winnow_lab.real.known import ROOT, page, rows, text

SMOL = "models/SmolLM2-135M-Instruct.Q4_1.gguf"


def test_record_and_page_are_what_the_results_say() -> None:
    found = rows()
    assert FILE.read_text(encoding="utf-8") == text(found), "run python -m winnow_lab.real.known"
    assert (ROOT / PAGE).read_text(encoding="utf-8") == page(found)
    keys = [(row["model"], row["policy"], row["compression"], row["question"], row["task"]) for row in found]
    assert len(set(keys)) == len(keys), "one row for each model, policy, compression and task"


@pytest.mark.parametrize(
    ("policy", "compression", "found"), [("snapkv", 3.0, [("ruler 2048", 4.0, 0.431)]), ("h2o", 4.0, [])]
)
def test_the_nearest_measurements(
    policy: str, compression: float, found: list[tuple[str, float, float]]
) -> None:
    assert [(e.task, e.compression, e.share) for e in known_accuracy(policy, compression)] == found


def test_neighbours_on_both_sides() -> None:
    later = [e for e in known_accuracy("kvzip", 11.0) if e.question == "later" and e.task == "ruler 2048"]
    assert [e.compression for e in later] == [8.0, 16.0]


def test_tasks_differ_and_the_model_at_hand_counts() -> None:
    seen = known_accuracy("winnow-window", 8.0, "SmolLM2-135M-Instruct-Q8_0.gguf")
    assert {e.task: e.share for e in seen} == {
        "needles, answers of 512 tokens": 0.934,
        "chat about texts": 0.927,
        "needle-chat 1024": 1.0,
        "ruler 2048": 0.844,
        "ruler 2048, five needles": 0.773,
    }
    assert share_range(seen) == "0.77 to 1.00" and share_range(seen[:1]) == "0.77"
    assert {e.model for e in known_accuracy("winnow-window", 8.0)} > {"gemma-3-270m", "winnow-demo"}
    assert not any(e.is_of("gemma-3-270m-it") for e in record()), "another model"
    assert [e.task for e in lost_tasks(SMOL, "snapkv", 4.0)] == ["ruler 2048"]
    assert [e.compression for e in lost_tasks(SMOL, "snapkv", 12.0)] == [4.0], "what is lost stays lost"
    assert [e.task for e in lost_tasks(SMOL, "winnow-window", 8.0)] == ["ruler 2048, five needles"]
    assert lost_tasks(SMOL, "winnow-window", 4.0) == [] == lost_tasks("llama-3-8b", "snapkv", 4.0)


def test_what_auto_takes_and_what_is_lost_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    for options, said in (
        ({"compression": "auto"}, "--compression auto: winnow-seen, up to 8x, where memory is short"),
        (
            {"eviction": "kvzip", "compression": 4.0},
            "keeps 0.75 of demo 2048 at 4x on this model (docs/results/known.md)",
        ),
        ({"eviction": "leverage", "compression": 4.0}, ""),
    ):
        open_llm({"kv_memory": "4MiB", **options}).close()
        lines = [
            line
            for line in capsys.readouterr().err.splitlines()
            if line[:8] == "winnow: " and "load" not in line
        ]
        assert len(lines) == bool(said) and said in "".join(lines)
