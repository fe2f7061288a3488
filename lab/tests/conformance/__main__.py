"""Run one client against a server of its own: `python lab/tests/conformance/__main__.py openai`.

Each client is installed into an environment of its own under --environments. The server runs the demo model, or
--model. The exit code is the client's.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from loopback import free_port, serving

from winnow.models.load.hub import DEMO_MODEL
from winnow_lab.peers.environment import Environment
from winnow_lab.study import flag, parse
from winnow_lab.study.options import Flags

HERE = Path(__file__).parent
START_SECONDS = 300
CONTEXT = 1024
"""Tokens. Clients that set no limit get an answer up to the end of it."""


@dataclass(frozen=True)
class Client:
    """A client.

    Attributes:
        command: words, with {python}, {bin}, {url}, {model} (its name), {tokenizer} (its directory), {here} and {out}.
        known: what it is known not to find, and why.
        sources: names among what pip installs that are published as source alone.
    """

    packages: tuple[str, ...]
    command: str
    known: str = ""
    sources: tuple[str, ...] = ()
    context: int = CONTEXT


_COMPLY = "{bin}/llm-comply run --api-key none --timeout 300 --base-url {url}/v1 --model {model} --format"
_UNLIKE_OPENAI = (
    "images, for models of text are served; a body without model, which the one model that is served answers; answers "
    "that end by themselves, with the demo model: use --model SmolLM2-135M-Instruct.Q4_1.gguf"
)

CLIENTS = {
    "openai": Client(("openai", "httpx"), "{python} {here}/openai_client.py {url} {model}"),
    "anthropic": Client(("anthropic",), "{python} {here}/anthropic_client.py {url} {model}"),
    "schemathesis": Client(
        ("schemathesis",),
        "{bin}/schemathesis run {url}/openapi.json --max-examples 500 --seed 1 --phases coverage,fuzzing "
        "--request-timeout 120 --continue-on-failure --exclude-checks positive_data_acceptance",
        "positive_data_acceptance: a schema cannot say what fits the model's context and vocabulary, which fields go "
        "together, or what a message's content needs; such bodies are refused with 400",
        context=128,  # most of its bodies set no limit, and it asks one after the other
    ),
    "lm-eval": Client(
        ("lm_eval[api]>=0.4.13,<0.5", "transformers>=5.17,<6"),
        "{bin}/lm_eval run --model local-completions --tasks conformance --include_path {here} --output_path {out} "
        "--model_args model={model},base_url={url}/v1/completions,tokenizer={tokenizer},num_concurrent=4,max_retries=1",
        sources=("rouge-score", "sqlitedict", "word2number"),
    ),
    "vllm-bench": Client(
        ("vllm",),
        "{bin}/vllm bench serve --base-url {url} --model {model} --tokenizer {tokenizer} --dataset-name random "
        "--num-prompts 32 --random-input-len 64 --random-output-len 32",
        "vllm's wheels need CUDA builds of torch, which are not fetched: where they are the only ones, pip refuses",
    ),
    "guidellm": Client(
        ("guidellm",),
        "{bin}/guidellm run --backend kind=openai_http,target={url},model={model} "
        "--tokenizer kind=huggingface_auto,model={tokenizer} --profile kind=concurrent,streams=4 "
        "--constraint kind=max_requests,count=32 --data kind=synthetic_text,prompt_tokens=64,output_tokens=32 "
        "--output kind=json,path={out}/guidellm.json --disable-progress",
    ),
    "aiperf": Client(
        ("aiperf",),
        "{bin}/aiperf profile --url {url} --model {model} --tokenizer {tokenizer} --endpoint-type chat --streaming "
        "--concurrency 4 --request-count 32 --artifact-dir {out}/aiperf",
    ),
    "llm-comply-chat": Client(("llm-comply",), f"{_COMPLY} openai-chat", _UNLIKE_OPENAI),
    "llm-comply-responses": Client(
        ("llm-comply",),
        f"{_COMPLY} open-responses",
        f"{_UNLIKE_OPENAI}; /v1/responses/compact, which is not served",
    ),
}


@dataclass(frozen=True)
class Options(Flags):
    client: str = flag(positional=True, choices=CLIENTS)
    model: str | None = flag(None, "directory or GGUF file (default: the demo model)")
    environments: Path = flag(Path("runs/conformance"))
    python: Path | None = flag(None, "an interpreter that has the client, in place of a new one")


def main() -> int:
    options = parse(Options, __doc__, prog="python lab/tests/conformance/__main__.py")
    client, python = CLIENTS[options.client], options.python
    if python is None:
        environment = Environment(options.environments / options.client)
        environment.path.parent.mkdir(parents=True, exist_ok=True)
        environment.prepare(client.packages, sources=client.sources)
        python = environment.python
    with (
        TemporaryDirectory() as out,
        running_server(options.model, Path(out) / "files", client.context) as url,
    ):
        name = "winnow-demo" if options.model is None else Path(options.model).resolve().name
        values = {
            "python": str(python),
            "bin": str(python.parent),
            "url": url,
            "model": name,
            "tokenizer": str(options.model or DEMO_MODEL),
            "here": str(HERE),
            "out": out,
        }
        command = [word.format(**values) for word in client.command.split()]
        code = subprocess.run(command, check=False).returncode
    print(f"{options.client}: {'passed' if code == 0 else f'exit code {code}'}")
    if client.known:
        print(f"left out: {client.known}")
    return code


@contextmanager
def running_server(model: str | None, files: Path, context: int = CONTEXT) -> Iterator[str]:
    """A server in a process of its own, until the end; its address."""
    port = free_port()
    command = [sys.executable, "-m", "winnow", "serve", "--port", str(port), "--files-dir", str(files)]
    command += ["--kv-memory", "256MiB", "--max-model-len", str(context)]
    command += ["--model", model or "demo"]
    with serving(command, port, "/ready", START_SECONDS) as url:
        yield url


if __name__ == "__main__":
    sys.exit(main())
