"""Rows of a dataset, and requests of an application, over a Ray cluster."""

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

ray = pytest.importorskip("ray")

from ray.cluster_utils import Cluster  # noqa: E402

from winnow_ray import ProcessorConfig, build_processor  # noqa: E402

OPTIONS = {"kv_memory": "16MiB", "threads": 1}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    ray.init(address=found.address, logging_level="error", log_to_driver=False)
    yield found
    ray.shutdown()
    found.shutdown()


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


def test_an_application_of_ray_serve_grows_and_keeps_prefixes_together(cluster: Cluster) -> None:
    pytest.importorskip("grpc")
    from ray import serve

    from winnow_ray.serve import build_app

    if not ray.is_initialized():
        ray.init(address=cluster.address, logging_level="error", log_to_driver=False)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    serve.start(http_options={"port": port})
    quick = {"upscale_delay_s": 0.0, "look_back_period_s": 12.0}
    app = build_app(
        OPTIONS | {"max_num_seqs": 2},
        {"served_model_name": ("demo",)},
        max_replicas=2,
        target_queued_tokens=16,
        autoscaling=quick,
    )
    try:
        serve.run(app, logging_config={"log_level": "ERROR"})
        with httpx.Client(base_url=f"http://127.0.0.1:{port}/v1", timeout=120) as client:
            assert client.get("/models").json()["data"][0]["id"] == "demo"
            with ThreadPoolExecutor(24) as pool:  # more than one replica should hold
                asked = [pool.submit(complete, client, f"Tale {n}", 400) for n in range(24)]
                end = time.monotonic() + 60
                while running_replicas() < 2 and time.monotonic() < end:
                    time.sleep(0.5)
                assert running_replicas() == 2
                assert all(each.result()["usage"]["completion_tokens"] == 400 for each in asked)
            documents = [f"{name} was a {name} and went home. " * 12 for name in ("Anna", "Bob", "Cleo")]
            answers = [complete(client, documents[n % 3] + str(n), 1)["usage"] for n in range(12)]
            new = [each["prompt_tokens"] - each["prompt_tokens_details"]["cached_tokens"] for each in answers]
            assert min(new[:3]) > 90 and max(new[3:]) < 20, new
            body = {"prompt": "Once", "max_tokens": 5, "stream": True, "temperature": 0, "ignore_eos": True}
            with client.stream("POST", "/completions", json=body) as answer:
                lines = [line for line in answer.iter_lines() if line]
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert lines[-1] == "data: [DONE]" and len(lines) >= 5
            assert client.post("/completions", json={"prompt": "a", "max_tokens": -1}).status_code == 400
    finally:
        serve.shutdown()


def complete(client: httpx.Client, prompt: str, max_tokens: int) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    answer = client.post("/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()  # type: ignore[no-any-return]


def running_replicas() -> int:
    from ray import serve

    deployments = serve.status().applications["default"].deployments
    return int(deployments["Replica"].replica_states.get("RUNNING", 0))
