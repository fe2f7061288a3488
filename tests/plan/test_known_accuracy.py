"""What a plan says of accuracy comes from results in the repository, and from nowhere else."""

import pytest

from benchmarks.real_eval.known import text
from winnow.plan.known_accuracy import FILE, known_accuracy


def test_the_file_is_what_the_results_say() -> None:
    assert FILE.read_text(encoding="utf-8") == text(), "run python -m benchmarks.real_eval.known"


@pytest.mark.parametrize(
    ("policy", "compression", "found"),
    [
        ("fitted-pd", 4.0, [("ruler 2048", 4.0, 0.944), ("documents 4096", 4.0, 0.789)]),
        ("fitted-pd", 4.1, [("ruler 2048", 4.0, 0.944), ("documents 4096", 4.0, 0.789)]),
        ("snapkv", 3.0, [("ruler 2048", 4.0, 0.431)]),
        ("h2o", 4.0, []),
    ],
)
def test_the_nearest_measurements(
    policy: str, compression: float, found: list[tuple[str, float, float]]
) -> None:
    assert [(e.tasks, e.compression, e.share) for e in known_accuracy(policy, compression)] == found


def test_neighbours_on_both_sides() -> None:
    later = [e for e in known_accuracy("kvzip", 11.0) if e.question == "later" and "2048" in e.tasks]
    assert [e.compression for e in later] == [8.0, 16.0]
