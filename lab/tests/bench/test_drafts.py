"""The study of drafts on the demo model."""

from winnow.models import DEMO_MODEL
from winnow_lab.speed.drafts import Options, study


def test_each_kind_of_answer_is_measured_with_and_without_the_gate() -> None:
    options = Options(model=str(DEMO_MODEL), method="draft_model", tokens=12, rounds=1, layers=2, seqs=1)
    *_, result = study(options)
    rows = result.numbers["rows"]
    assert [(row["kind"], row["batch"]) for row in rows] == [("quotes", 1), ("edits", 1), ("stories", 1)]
    assert all(row["drafts"]["always"] >= row["drafts"]["gate"] for row in rows)
    assert all(row["drafts"]["none"] == 0 < row["drafts"]["always"] for row in rows)
    assert result.numbers["least"] == min(row["gate"] for row in rows)
