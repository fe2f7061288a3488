"""llama.cpp's server on one piece of work; the server is `llama-server` on the path, or what LLAMA_SERVER names.

No wheel holds that program built for this processor. From llama.cpp's sources, which are also in `vendor/llama.cpp` of
the source distribution of llama-cpp-python (`pip download --no-binary :all: --no-deps llama-cpp-python`):
    cmake -B build -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=OFF
    cmake --build build --target llama-server llama-quantize

Options: `slots` (requests answered at a time), `slot_tokens` (KVs of each).
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from loopback import free_port, serving
from protocol import Answers, Work, emit

START_SECONDS = 120
HTTP_THREADS = 64


def find_server() -> str:
    """The program.

    Raises:
        RuntimeError: there is none.
    """
    wanted = os.environ.get("LLAMA_SERVER", "llama-server")
    found = shutil.which(wanted)
    if found is None:
        raise RuntimeError(
            f"{wanted} is not on the path; build llama.cpp's server, and name it in LLAMA_SERVER"
        )
    return found


def server_command(model: Path, port: int, threads: int, slots: int, slot_tokens: int) -> list[str | Path]:
    """Of a server on the loopback address; `model` is the directory that to_gguf.py made."""
    command: list[str | Path] = [find_server(), "--model", model / "model.gguf"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--threads", str(threads), "--threads-batch", str(threads)]
    # A connection occupies one; of more connections than threads some are closed unanswered.
    command += ["--threads-http", str(HTTP_THREADS)]
    # No prompt cache: prompts are computed as by all others.
    return [*command, "--parallel", str(slots), "--ctx-size", str(slots * slot_tokens), "--cache-ram", "0"]


def complete(address: str, prompt: list[int], new_tokens: int) -> list[int]:
    """The answer's tokens."""
    asked: dict[str, Any] = {
        "prompt": prompt,
        "n_predict": new_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "cache_prompt": False,
        "return_tokens": True,
    }
    request = urllib.request.Request(  # noqa: S310
        f"{address}/completion", json.dumps(asked).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:  # noqa: S310
        tokens: list[int] = json.load(response)["tokens"]
    return tokens


def run(work: Work) -> Answers:
    """Start the server, warm up with one tiny request, hand in all prompts at once."""
    process = subprocess.run([find_server(), "--version"], capture_output=True, text=True, check=True)  # noqa: S603
    version = re.search(r"version: (\S+)", process.stderr + process.stdout)
    port, slots = free_port(), work.options["slots"]
    command = server_command(Path(work.model), port, work.threads, slots, work.options["slot_tokens"])
    with (
        serving(command, port, "/health", START_SECONDS, own_group=False) as address,
        ThreadPoolExecutor(len(work.prompts)) as clients,
    ):
        complete(address, work.prompts[0][:8], 2)
        start = time.perf_counter()
        answers = clients.map(lambda prompt: complete(address, prompt, work.new_tokens), work.prompts)
        tokens = list(answers)
        seconds = time.perf_counter() - start
    return Answers(seconds, tokens, {"llama.cpp": version[1] if version else "unknown"})


if __name__ == "__main__":
    emit(run(Work.read(Path(sys.argv[1]))))
