"""A Hub of one repository on this machine: the requests that huggingface_hub makes to list and to fetch files."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

REPOSITORY = "some/tiny-GGUF"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class LocalHub:
    """`files` are served by their paths; those of `broken` break off halfway the first time that they are asked for."""

    files: dict[str, Path]
    broken: set[str] = field(default_factory=set)
    ranges: list[str] = field(default_factory=list)
    """Ranges of bytes that were asked for."""
    fetched: list[str] = field(default_factory=list)
    tokens: set[str | None] = field(default_factory=set)
    """What clients showed to be let in."""


@contextmanager
def serving(hub: LocalHub, cache: Path) -> Iterator[LocalHub]:
    """Let huggingface_hub of this process ask it in place of its own Hub, with `cache` for its files."""
    from huggingface_hub import constants

    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    thread = Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    with pytest.MonkeyPatch.context() as patch:
        # What HF_ENDPOINT and HF_HUB_CACHE set when it is imported.
        patch.setattr(constants, "ENDPOINT", address)
        patch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}"
        )
        patch.setattr(constants, "HF_HUB_CACHE", str(cache))
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        patch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 2**10)  # what is lost of a file that breaks off
        patch.setenv("HF_TOKEN", "hf_ours")
        try:
            yield hub
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


def _handler(hub: LocalHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self._file(body=False)

        def do_GET(self) -> None:
            hub.tokens.add(self.headers.get("Authorization"))
            path = self.path.partition("?")[0]
            if not path.startswith("/api/models/"):
                self._file(body=True)
            elif path.startswith(f"/api/models/{REPOSITORY}/tree/"):
                sizes = {name: file.stat().st_size for name, file in hub.files.items()}
                self._json([{"type": "file", "path": x, "size": n, "oid": _oid(x)} for x, n in sizes.items()])
            elif path in (f"/api/models/{REPOSITORY}", f"/api/models/{REPOSITORY}/revision/main"):
                siblings = [{"rfilename": name} for name in hub.files]
                self._json({"id": REPOSITORY, "sha": COMMIT, "siblings": siblings})
            else:
                self._json({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})

        def _json(self, value: object, status: int = 200, headers: dict[str, str] | None = None) -> None:
            body = json.dumps(value).encode()
            self.send_response(status)
            for name, text in {**(headers or {}), "Content-Length": str(len(body))}.items():
                self.send_header(name, text)
            self.end_headers()
            self.wfile.write(body)

        def _file(self, *, body: bool) -> None:
            name = self.path.partition("?")[0].removeprefix(f"/{REPOSITORY}/resolve/").partition("/")[2]
            if name not in hub.files:
                self._json({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
                return
            data = hub.files[name].read_bytes()
            start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0])
            self.send_response(206 if start else 200)
            self.send_header("ETag", f'"{_oid(name)}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Content-Length", str(len(data) - start))
            if start:
                hub.ranges.append(name)
                self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
            self.end_headers()
            if body:
                hub.fetched.append(name)
                cut = name in hub.broken
                hub.broken.discard(name)
                self.wfile.write(data[start : len(data) // 2] if cut else data[start:])
                self.close_connection = cut

    return Handler


def _oid(name: str) -> str:
    return hashlib.sha1(name.encode(), usedforsecurity=False).hexdigest()
