"""Run one client against a server of its own: `python -m winnow_lab.conformance openai`.

Each client is installed into an environment of its own under --environments. The server runs the demo model, or
--model. The exit code is the client's.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from winnow.errors import WinnowError
from winnow.models.load.hub import DEMO_MODEL
from winnow_lab.peers.environment import Environment

HERE = Path(__file__).parent
START_SECONDS = 300
CONTEXT = 1024
"""Tokens. Clients that set no limit get an answer up to the end of it."""


@dataclass(frozen=True)
class Client:
    """A client.

    Attributes:
        packages: what pip installs; torch comes with every environment.
        command: with {python}, {bin}, {url}, {model} (its name), {tokenizer} (its directory), {here} and {out}.
        known: what it is known not to find, and why.
        sources: names among what pip installs that are published as source alone.
        context: tokens that the server's requests may have.
    """

    packages: tuple[str, ...]
    command: tuple[str, ...]
    known: str = ""
    sources: tuple[str, ...] = ()
    context: int = CONTEXT


_COMPLY = (
    *("{bin}/llm-comply", "run", "--api-key", "none", "--timeout", "300", "--base-url", "{url}/v1"),
    *("--model", "{model}", "--format"),
)
_UNLIKE_OPENAI = (
    "images, for models of text are served; a body without model, which the one model that is served answers; answers "
    "that end by themselves, with the demo model: use --model SmolLM2-135M-Instruct.Q4_1.gguf"
)

CLIENTS = {
    "openai": Client(("openai", "httpx"), ("{python}", "{here}/openai_client.py", "{url}", "{model}")),
    "anthropic": Client(("anthropic",), ("{python}", "{here}/anthropic_client.py", "{url}", "{model}")),
    "schemathesis": Client(
        ("schemathesis",),
        (
            *("{bin}/schemathesis", "run", "{url}/openapi.json", "--max-examples", "500", "--seed", "1"),
            *("--phases", "coverage,fuzzing", "--request-timeout", "120", "--continue-on-failure"),
            *("--exclude-checks", "positive_data_acceptance"),
        ),
        "positive_data_acceptance: a schema cannot say what fits the model's context and vocabulary, which fields go "
        "together, or what a message's content needs; such bodies are refused with 400",
        context=128,  # most of its bodies set no limit, and it asks one after the other
    ),
    "lm-eval": Client(
        ("lm_eval[api]>=0.4.13,<0.5", "transformers>=5.17,<6"),
        (
            *("{bin}/lm_eval", "run", "--model", "local-completions", "--tasks", "conformance"),
            *("--include_path", "{here}", "--output_path", "{out}", "--model_args"),
            "model={model},base_url={url}/v1/completions,tokenizer={tokenizer},num_concurrent=4,max_retries=1",
        ),
        sources=("rouge-score", "sqlitedict", "word2number"),
    ),
    "vllm-bench": Client(
        ("vllm",),
        (
            *("{bin}/vllm", "bench", "serve", "--base-url", "{url}", "--model", "{model}", "--tokenizer"),
            *("{tokenizer}", "--dataset-name", "random", "--num-prompts", "32", "--random-input-len", "64"),
            *("--random-output-len", "32"),
        ),
        "vllm's wheels need CUDA builds of torch, which are not fetched: where they are the only ones, pip refuses",
    ),
    "guidellm": Client(
        ("guidellm",),
        (
            *(
                "{bin}/guidellm",
                "run",
                "--backend",
                "kind=openai_http,target={url},model={model}",
                "--tokenizer",
            ),
            *(
                "kind=huggingface_auto,model={tokenizer}",
                "--profile",
                "kind=concurrent,streams=4",
                "--constraint",
            ),
            *(
                "kind=max_requests,count=32",
                "--data",
                "kind=synthetic_text,prompt_tokens=64,output_tokens=32",
            ),
            *("--output", "kind=json,path={out}/guidellm.json", "--disable-progress"),
        ),
    ),
    "aiperf": Client(
        ("aiperf",),
        (
            *(
                "{bin}/aiperf",
                "profile",
                "--url",
                "{url}",
                "--model",
                "{model}",
                "--tokenizer",
                "{tokenizer}",
            ),
            *("--endpoint-type", "chat", "--streaming", "--concurrency", "4", "--request-count", "32"),
            *("--artifact-dir", "{out}/aiperf"),
        ),
    ),
    "llm-comply-chat": Client(("llm-comply",), (*_COMPLY, "openai-chat"), _UNLIKE_OPENAI),
    "llm-comply-responses": Client(
        ("llm-comply",),
        (*_COMPLY, "open-responses"),
        f"{_UNLIKE_OPENAI}; /v1/responses/compact, which is not served",
    ),
}


def main() -> int:
    """Run the client that was named, and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m winnow_lab.conformance", description=__doc__)
    parser.add_argument("client", choices=CLIENTS)
    parser.add_argument("--model", help="directory or GGUF file; left out: the demo model")
    parser.add_argument("--environments", type=Path, default=Path("runs/conformance"))
    parser.add_argument(
        "--python", type=Path, help="an interpreter that has the client, in place of a new one"
    )
    namespace = parser.parse_args()
    client: Client = CLIENTS[namespace.client]
    python = namespace.python
    if python is None:
        environment = Environment(namespace.environments / namespace.client)
        environment.path.parent.mkdir(parents=True, exist_ok=True)
        environment.prepare(client.packages, sources=client.sources)
        python = environment.python
    with (
        TemporaryDirectory() as out,
        running_server(namespace.model, Path(out) / "files", client.context) as url,
    ):
        name = "winnow-demo" if namespace.model is None else Path(namespace.model).resolve().name
        values = {
            "python": str(python),
            "bin": str(python.parent),
            "url": url,
            "model": name,
            "tokenizer": str(namespace.model or DEMO_MODEL),
            "here": str(HERE),
            "out": out,
        }
        command = [word.format(**values) for word in client.command]
        code = subprocess.run(command, check=False).returncode  # noqa: S603 (commands of this file)
    print(f"{namespace.client}: {'passed' if code == 0 else f'exit code {code}'}")
    if client.known:
        print(f"left out: {client.known}")
    return code


@contextmanager
def running_server(model: str | None, files: Path, context: int = CONTEXT) -> Iterator[str]:
    """A server in a process of its own, until the end; its address."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command = [sys.executable, "-m", "winnow", "serve", "--port", str(port), "--files-dir", str(files)]
    command += [
        "--kv-memory",
        "256MiB",
        "--max-model-len",
        str(context),
        *([] if model is None else ["--model", model]),
    ]
    process = subprocess.Popen(command, env=os.environ)  # noqa: S603
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_ready(process, url)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def wait_until_ready(process: "subprocess.Popen[bytes]", url: str) -> None:
    """Wait for the server's first answer.

    Raises:
        WinnowError: it has ended, or takes too long.
    """
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise WinnowError(f"the server ended with exit code {process.returncode}")
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=5):  # noqa: S310 (of this machine)
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise WinnowError(f"the server does not answer within {START_SECONDS} s")


if __name__ == "__main__":
    sys.exit(main())
