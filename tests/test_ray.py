"""A pile of prompts over a Ray cluster of two machines, of which one is lost."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="Ray is an extra: make test-ray")

from ray.cluster_utils import Cluster  # noqa: E402

from winnow.batch.reader import WHOLE, read_lines  # noqa: E402
from winnow.batch.stream import OrderedWriter  # noqa: E402
from winnow.batch.tally import Tally  # noqa: E402
from winnow.cli.main import main  # noqa: E402
from winnow.ray import ProcessorConfig, build_processor  # noqa: E402
from winnow.ray.fleet import MAX_LOSSES, Fleet, Placement  # noqa: E402

OPTIONS = {"kv_memory": "16MiB", "threads": 1}
LINES = 2000


class Written(OrderedWriter):
    """Records in the order in which they were written."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[dict[str, Any]] = []

    def _write(self, index: int) -> None:
        self.records += [json.loads(line) for line in self._take_due()]

    def close(self) -> None: ...


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    ray.init(address=found.address, logging_level="error", log_to_driver=False)
    yield found
    ray.shutdown()
    found.shutdown()


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ray") / "prompts.jsonl"
    lines = [{"prompt": f"Tale {index}:", "max_tokens": 2, "temperature": 0} for index in range(LINES)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_every_line_is_answered_once_though_a_worker_and_a_machine_are_lost(
    cluster: Cluster, prompts: Path
) -> None:
    lost = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    placement = Placement.of(OPTIONS, None)
    assert (placement.workers, placement.threads) == (3, 1)
    fleet = Fleet(OPTIONS, {}, placement)
    written, tally, done = Written(), Tally(), []

    def disturb() -> None:
        done.append(tally.requests)
        if tally.requests >= LINES // 4 and not any(number >= LINES // 4 for number in done[:-1]):
            ray.kill(fleet._workers[0].actor)
        if tally.requests >= LINES // 2 and not any(number >= LINES // 2 for number in done[:-1]):
            cluster.remove_node(lost)

    fleet.run(read_lines(prompts), written, tally, WHOLE, disturb)
    fleet.close()
    assert [record["index"] for record in written.records] == list(range(LINES))
    assert all(record["usage"]["completion_tokens"] == 2 for record in written.records)
    assert tally.failed == 0 and fleet._losses_left == MAX_LOSSES * 3 - 2
    assert fleet.stats().generated_tokens == tally.generated_tokens


def test_a_run_over_a_cluster_answers_as_one_process(cluster: Cluster, prompts: Path) -> None:
    some, here, there = (prompts.with_name(f"{name}.jsonl") for name in ("some", "here", "there"))
    some.write_text("".join(prompts.read_text().splitlines(keepends=True)[:120]))
    same = ["--threads", "1", "--kv-memory", "16MiB"]
    ray.shutdown()
    assert main(["run", str(some), "-o", str(there), *same, "--ray", cluster.address]) == 0
    assert main(["run", str(some), "-o", str(here), *same]) == 0
    assert [json.loads(line)["text"] for line in there.open()] == [
        json.loads(line)["text"] for line in here.open()
    ]


def test_rows_of_a_dataset_are_answered(cluster: Cluster) -> None:
    processor = build_processor(
        ProcessorConfig(OPTIONS, batch_size=2, should_continue_on_error=True),
        preprocess=lambda row: {
            "n": row["n"],
            "messages": [{"role": "user", "content": f"Tale {row['n']}"}],
            "sampling_params": {"max_tokens": 4 if row["n"] else -1, "temperature": 0.0},
        },
        postprocess=lambda row: {**row, "generated_tokens": list(row["generated_tokens"])},
    )
    rows = processor(ray.data.from_items([{"n": index} for index in range(5)])).take_all()
    rows.sort(key=lambda row: row["n"])
    assert [len(row["generated_tokens"]) for row in rows] == [row["num_generated_tokens"] for row in rows]
    assert "max_tokens must be at least 1" in rows[0]["__inference_error__"]
    assert all(row["generated_text"] and not row["__inference_error__"] for row in rows[1:])
