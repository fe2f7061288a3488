"""Files and batches: what goes in comes out once, also after a kill."""

import errno
import io
import json
import socket
import time
from functools import partial
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import httpx
import pytest
from forked import start
from tests.server.running import Running, eventually, running

from winnow import LLM
from winnow.batch.writer import ResultWriter

URL = "/v1/completions"


def lines_of(count: int, max_tokens: int = 4) -> list[dict[str, Any]]:
    body = {"max_tokens": max_tokens, "ignore_eos": True}
    return [
        {"custom_id": f"line-{i}", "method": "POST", "url": URL, "body": {"prompt": f"Number {i}", **body}}
        for i in range(count)
    ]


def upload(client: httpx.Client, lines: list[Any], **options: Any) -> str:
    data = "".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in lines)
    files = {"file": ("in.jsonl", io.BytesIO(data.encode()))}
    response = client.post("/v1/files", files=files, data={"purpose": "batch"}, **options)
    assert response.status_code == 200, response.text
    assert response.json()["bytes"] == len(data.encode())
    return str(response.json()["id"])


def create(client: httpx.Client, file: str, **options: Any) -> dict[str, Any]:
    body = {"input_file_id": file, "endpoint": URL, "completion_window": "24h", "metadata": {"a": "b"}}
    response = client.post("/v1/batches", json=body, **options)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def ended(client: httpx.Client, name: str, **options: Any) -> dict[str, Any]:
    batch: dict[str, Any] = {}

    def has_ended() -> bool:
        batch.update(client.get(f"/v1/batches/{name}", **options).json())
        return batch["status"] in ("completed", "failed", "cancelled")

    eventually(has_ended, "the batch does not end", 120)
    return batch


def content(client: httpx.Client, file: str | None, **options: Any) -> list[dict[str, Any]]:
    if file is None:
        return []
    return [json.loads(line) for line in client.get(f"/v1/files/{file}/content", **options).text.splitlines()]


def test_a_batch_from_end_to_end(server: Running) -> None:
    lines: list[Any] = lines_of(40)
    lines[3]["body"]["temperature"] = -1
    lines[5]["url"] = "/v1/chat/completions"
    lines[6]["body"]["n"] = 0
    lines[7] = '{"custom_id": "line-7", nope'
    file = upload(server.client, lines)
    batch = create(server.client, file)
    assert (batch["object"], batch["status"], batch["metadata"]) == ("batch", "validating", {"a": "b"})
    batch = ended(server.client, batch["id"])
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": 40, "completed": 36, "failed": 4}
    answers, errors = (
        content(server.client, batch["output_file_id"]),
        content(server.client, batch["error_file_id"]),
    )
    assert [each["custom_id"] for each in answers] == [
        f"line-{i}" for i in range(40) if i not in (3, 5, 6, 7)
    ]
    assert all(each["response"]["body"]["usage"]["completion_tokens"] == 4 for each in answers)
    assert [each["error"]["line"] for each in errors] == [4, 6, 7, 8]
    assert [each["response"]["status_code"] for each in errors] == [400] * 4
    listed = server.client.get("/v1/batches", params={"limit": 1}).json()
    assert listed["data"][0]["id"] == batch["id"]
    newest = [each["id"] for each in server.client.get("/v1/files").json()["data"]]
    oldest = server.client.get("/v1/files", params={"order": "asc", "after": newest[-1]}).json()
    assert [each["id"] for each in oldest["data"]] == newest[::-1][1:]
    assert "order must be asc or desc" in server.client.get("/v1/files?order=up").json()["error"]["message"]
    names = {each["id"] for each in server.client.get("/v1/files").json()["data"]}
    assert {file, batch["output_file_id"], batch["error_file_id"]} <= names
    assert server.client.delete(f"/v1/files/{file}").json()["deleted"]
    assert server.client.get(f"/v1/files/{file}").status_code == 404


def test_batches_that_cannot_run(server: Running) -> None:
    double = lines_of(3) + lines_of(1)
    batch = ended(server.client, create(server.client, upload(server.client, double))["id"])
    assert batch["status"] == "failed" and batch["errors"]["data"][0]["line"] == 4
    batch = ended(server.client, create(server.client, upload(server.client, []))["id"])
    assert batch["status"] == "failed"
    file = upload(server.client, lines_of(1))
    good = {"input_file_id": file, "endpoint": URL, "completion_window": "24h"}
    for change in (
        {"endpoint": "/v1/embeddings"},
        {"completion_window": "1h"},
        {"input_file_id": 7},
        {"metadata": {"a": 1}},
        {"x": 1},
    ):
        assert server.post("/v1/batches", good | change).status_code == 400, change
    for name in ("file-" + "0" * 32, "../../etc/passwd", "batch_" + "0" * 32):
        assert server.post("/v1/batches", good | {"input_file_id": name}).status_code == 404
    assert server.client.get("/v1/files/..%2f..%2fetc%2fpasswd/content").status_code == 404
    assert server.client.post("/v1/files", data={"purpose": "batch"}).status_code == 400
    wrong = {"file": ("a", b"x")}
    assert server.client.post("/v1/files", files=wrong, data={"purpose": "fine-tune"}).status_code == 400


def test_batches_are_bounded(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("winnow.server.batches.MAX_LINES", 2)
    batch = ended(server.client, create(server.client, upload(server.client, lines_of(3)))["id"])
    assert batch["status"] == "failed" and batch["errors"]["data"][0]["code"] == "too_many_lines"


def test_cancelled_batches_keep_what_is_answered(server: Running) -> None:
    batch = create(server.client, upload(server.client, lines_of(200, max_tokens=60)))
    eventually(
        lambda: server.client.get(f"/v1/batches/{batch['id']}").json()["request_counts"]["completed"] > 0,
        "no line is answered", 60,
    )  # fmt: skip
    assert server.client.post(f"/v1/batches/{batch['id']}/cancel").json()["status"] == "cancelling"
    batch = ended(server.client, batch["id"])
    assert batch["status"] == "cancelled"
    answers, errors = (
        content(server.client, batch["output_file_id"]),
        content(server.client, batch["error_file_id"]),
    )
    assert len(answers) + len(errors) == 200 and answers and errors
    assert server.client.post(f"/v1/batches/{batch['id']}/cancel").status_code == 400


def test_a_disk_that_was_full_holds_no_later_batch_up(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More lines fail than the engine has places; what was answered before is kept."""
    write, full = ResultWriter._write, {"after": 20}

    def limited(self: ResultWriter, index: int) -> None:
        if index >= full["after"]:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, index)

    monkeypatch.setattr(ResultWriter, "_write", limited)
    with running(llm, files_dir=str(tmp_path)) as server:
        for _ in range(2):
            batch = ended(server.client, create(server.client, upload(server.client, lines_of(60)))["id"])
            assert batch["status"] == "failed" and batch["errors"]["data"][0]["code"] == "server_error"
            kept = content(server.client, batch["output_file_id"])
            assert [each["custom_id"] for each in kept] == [f"line-{i}" for i in range(len(kept))]
            assert batch["request_counts"] == {"total": 60, "completed": len(kept), "failed": 0}
        full["after"] = 10**9
        batch = ended(server.client, create(server.client, upload(server.client, lines_of(40)))["id"])
        assert batch["status"] == "completed" and batch["request_counts"]["completed"] == 40
        eventually(
            lambda: not list((tmp_path / "batches").glob("*.jsonl*")),
            "results of batches that have ended are left",
        )


def test_an_upload_that_does_not_fit_leaves_nothing(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    folder = server.service.config.files_dir
    before = sorted(Path(str(folder)).rglob("*"))
    monkeypatch.setattr("winnow.server.store.os.fsync", fsync)
    response = server.client.post("/v1/files", files={"file": ("a", b"{}")}, data={"purpose": "batch"})
    assert response.status_code == 500
    assert sorted(Path(str(folder)).rglob("*")) == before


def test_tenants_do_not_see_each_others_files(llm: LLM, tmp_path: Path) -> None:
    with running(llm, {"a": "key-a", "b": "key-b"}, files_dir=str(tmp_path)) as server:
        a, b = ({"headers": {"authorization": f"Bearer key-{name}"}} for name in "ab")
        file = upload(server.client, lines_of(2), **a)
        batch = ended(server.client, create(server.client, file, **a)["id"], **a)
        assert len(content(server.client, batch["output_file_id"], **a)) == 2
        for path in (f"files/{file}", f"files/{file}/content", f"batches/{batch['id']}"):
            assert server.client.get(f"/v1/{path}", **b).status_code == 404
        assert server.client.get("/v1/files", **b).json()["data"] == []
        assert server.client.delete(f"/v1/files/{file}", **b).status_code == 404


def has_answered(client: httpx.Client, name: str, least: int) -> bool:
    counts = client.get(f"/v1/batches/{name}").json()["request_counts"]
    return bool(counts["completed"] > least)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def serve(directory: Path, port: int, env: dict[str, str]) -> ForkProcess:
    words = ["serve", "demo", "--port", str(port), "--files-dir", str(directory)]
    process = start([*words, "--kv-memory", "16MiB", "--max-num-seqs", "4"], env)

    def is_up() -> bool:
        assert process.is_alive(), "the server ended"
        try:
            return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
        except httpx.HTTPError:
            return False

    eventually(is_up, "the server does not start", 120)
    return process


def test_kill_9_loses_and_repeats_no_line(tmp_path: Path, command_env: dict[str, str]) -> None:
    port = free_port()
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
        process = serve(tmp_path, port, command_env)
        try:
            file = upload(client, lines_of(40, max_tokens=40))
            batch = create(client, file)
            eventually(partial(has_answered, client, batch["id"], 6), "no line is answered", 60)
            assert client.delete(f"/v1/files/{file}").json()[
                "deleted"
            ]  # the batch keeps what it has been given
            process.kill()
            process.join()
            time.sleep(0.1)
            process = serve(tmp_path, port, command_env)
            batch = ended(client, batch["id"])
            found = content(client, batch["output_file_id"])
        finally:
            process.terminate()
            process.join(60)
    assert batch["status"] == "completed" and process.exitcode == 0
    assert not [*tmp_path.rglob("*.input")]
    assert [each["custom_id"] for each in found] == [f"line-{i}" for i in range(40)]
