"""llama.cpp's server on one piece of work, in this process: the package xllamacpp, whose wheel is built for AVX2.

Options: `slots` (requests answered at a time), `slot_tokens` (KVs of each), `kv_type` (their format).
"""

import json
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xllamacpp
from protocol import Answer, Tokens, Work, serve


def open_server(file: Path, threads: int, slots: int, slot_tokens: int, kv_type: str = "f16") -> Any:
    params = xllamacpp.CommonParams()
    params.model.path, params.verbosity = str(file), -1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.n_parallel, params.n_ctx = slots, slots * slot_tokens
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type[f"GGML_TYPE_{kv_type.upper()}"]
    params.cache_ram_mib = 0  # no cache of prompts beside the slots: prompts are computed as by all others
    return xllamacpp.Server(params)


def complete(server: Any, prompts: Sequence[list[int]], new_tokens: int, **options: Any) -> Tokens:
    """Return greedy answers to prompts that are all asked at once."""
    asked = {
        "n_predict": new_tokens,
        "temperature": 0.0,
        "return_tokens": True,
        "cache_prompt": False,
    } | options

    def answer(prompt: list[int]) -> list[int]:
        body = json.dumps({"prompt": prompt, **asked}).encode()
        request = urllib.request.Request(f"{server.listening_address}/completion", body)  # noqa: S310
        with urllib.request.urlopen(request) as response:  # noqa: S310
            return list(json.load(response)["tokens"])

    with ThreadPoolExecutor(len(prompts)) as clients:
        return list(clients.map(answer, prompts))


@contextmanager
def opened(work: Work) -> Iterator[Answer]:
    server = open_server(Path(work.model) / "model.gguf", work.threads, **work.options)
    options = {
        "ignore_eos": not work.end_tokens,
        "cache_prompt": work.prefix_caching,
    }  # the file names what ends answers
    yield lambda asked: complete(server, asked.prompts, asked.new_tokens, **options)


if __name__ == "__main__":
    serve(opened, packages=["xllamacpp"])
