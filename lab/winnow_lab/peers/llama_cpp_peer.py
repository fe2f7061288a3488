"""llama.cpp's server on one piece of work; the server is `llama-server` on the path, or what LLAMA_SERVER names.

No wheel holds that program built for this processor. From llama.cpp's sources, which are also in `vendor/llama.cpp` of
the source distribution of llama-cpp-python (`pip download --no-binary :all: --no-deps llama-cpp-python`):
    cmake -B build -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=OFF
    cmake --build build --target llama-server llama-quantize

Options: `slots` (requests answered at a time), `slot_tokens` (KVs of each), `kv_type` (their format).
"""

import json
import os
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from loopback import free_port, serving
from protocol import Answer, Tokens, Work, serve

START_SECONDS = 120
HTTP_THREADS = 64


def find_server() -> str:
    wanted = os.environ.get("LLAMA_SERVER", "llama-server")
    found = shutil.which(wanted)
    if found is None:
        raise RuntimeError(
            f"{wanted} is not on the path; build llama.cpp's server, and name it in LLAMA_SERVER"
        )
    return found


def server_command(
    model: Path, port: int, threads: int, slots: int, slot_tokens: int, kv_type: str = "f16"
) -> list[str | Path]:
    """Of a server on the loopback address; `model` is the directory that to_gguf.py made."""
    command: list[str | Path] = [find_server(), "--model", model / "model.gguf"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--threads", str(threads), "--threads-batch", str(threads)]
    # A connection occupies one; of more connections than threads some are closed unanswered.
    command += ["--threads-http", str(HTTP_THREADS)]
    command += ["--cache-type-k", kv_type, "--cache-type-v", kv_type]
    # No cache of prompts beside the slots: prompts are computed as by all others.
    return [*command, "--parallel", str(slots), "--ctx-size", str(slots * slot_tokens), "--cache-ram", "0"]


def complete(address: str, prompt: list[int], work: Work) -> list[int]:
    asked: dict[str, Any] = {
        "prompt": prompt,
        "n_predict": work.new_tokens,
        "temperature": 0.0,
        "ignore_eos": not work.end_tokens,  # the file names the one that ends answers
        "cache_prompt": work.prefix_caching,
        "return_tokens": True,
    }
    request = urllib.request.Request(  # noqa: S310
        f"{address}/completion", json.dumps(asked).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:  # noqa: S310
        tokens: list[int] = json.load(response)["tokens"]
    return tokens


@contextmanager
def opened(work: Work) -> Iterator[Answer]:
    """A server, which gets all prompts at once."""
    port, options = free_port(), work.options
    command = server_command(Path(work.model), port, work.threads, **options)
    with (
        serving(command, port, "/health", START_SECONDS, own_group=False) as address,
        ThreadPoolExecutor(len(work.prompts)) as clients,
    ):

        def answer(asked: Work) -> Tokens:
            return list(clients.map(lambda prompt: complete(address, prompt, asked), asked.prompts))

        yield answer


def find_version() -> str:
    process = subprocess.run([find_server(), "--version"], capture_output=True, text=True, check=True)  # noqa: S603
    found = re.search(r"version: (\S+)", process.stderr + process.stdout)
    return found[1] if found else "unknown"


if __name__ == "__main__":
    serve(opened, packages=[], **{"llama.cpp": find_version()})
