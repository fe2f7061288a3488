"""The command line as a user types it: exit codes and messages, over an engine without a model."""

import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib import import_module
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Any

import pytest
from fake_llm import FakeLLM
from refusals import check_refused

from winnow import __version__
from winnow.cli.main import COMMANDS, OF_THE_LAB, Parser, exit_code, main
from winnow.errors import UsageError
from winnow.models.load.hub import is_repository
from winnow.models.load.loader import DEMO_MODEL
from winnow.models.load.named import NAMED_MODELS
from winnow.process.resources import HostMemory
from winnow.sampling.structured import StructuredOutputs
from winnow_lab import cli as lab
from winnow_lab.cli.bench import BENCHES

Write = Callable[[Iterable[Any]], Path]


@pytest.mark.parametrize("command", [(), ("run",), ("generate",)])
def test_help_teaches_by_example(command: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*command, "--help"])
    assert stop.value.code == 0
    assert "examples:\n  winnow" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "names"),
    [("", COMMANDS), ("bench", BENCHES), ("eval", ("demo", "lm-eval", "perplexity")), ("prefix", ("save",))],
)
def test_every_command_has_help(words: str, names: Iterable[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Also where a command's own flags stand beside those of the engine."""
    for name in names:
        with pytest.raises(SystemExit) as stop:
            main([*words.split(), name, "--help", "all"])
        assert stop.value.code == 0
        shown = capsys.readouterr().out
        assert shown.count("\n  --threads N") <= 1
        if name in ("run", "generate", "inspect", "throughput"):
            assert "--threads N" in shown


@pytest.mark.parametrize("words", ["run", "generate", "chat", "serve", "inspect", "tune", "check", "pack"])
def test_help_shows_the_flags_that_matter(
    words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = {}
    for extra in ((), ("all",)):
        with pytest.raises(SystemExit):
            main([words, "--help", *extra])
        text = capsys.readouterr().out
        shown[extra] = {word.strip(",") for word in text.split() if word.startswith("--")}
        assert ("--help all" in text) is not bool(extra)
        if words == "serve" and not extra:  # twelve flags, a line each
            lines = [line for line in text.splitlines() if line.startswith("  -")]
            assert len(lines) == 13 and not any(line.startswith(" " * 12) for line in text.splitlines())
    assert "--model" in shown[()] < shown["all",]
    assert "--threads" in shown["all",] - shown[()]
    assert not {"--pipeline-parallel-size", "--swap-space"} & shown["all",], "vLLM's words are not Winnow's"


@pytest.mark.parametrize(
    ("words", "listed"),
    [
        ("", "tune"),
        ("eval", "perplexity"),
        ("bench", "throughput"),
        ("tune", "--agreement"),
        ("prefix", "save"),
    ],
)
def test_a_command_typed_alone_lists_what_there_is(
    words: str, listed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 2
    shown = capsys.readouterr()
    assert listed in shown.out
    assert shown.err.startswith("winnow: error: the following arguments are required")


@pytest.mark.parametrize(
    "words", ["chat", "check", "serve", "eval demo", "bench throughput", "plan", "simulate"]
)
def test_the_model_may_be_given_by_position_or_by_flag(words: str) -> None:
    for given in (("DIR",), ("--model", "DIR"), ("DIR", "--model", "DIR")):
        assert parsed([*words.split(), *given]).model == "DIR"
    with pytest.raises(UsageError, match="given twice: DIR and --model OTHER"):
        parsed([*words.split(), "DIR", "--model", "OTHER"])


def parsed(words: list[str]) -> Any:
    """The namespace of a command line."""
    parser = Parser()
    choices = parser.add_subparsers()
    places = dict.fromkeys(OF_THE_LAB, "winnow_lab.cli") | {"inspect": "winnow_inspect"}
    module = import_module(f"{places.get(words[0], 'winnow.cli')}.{words[0]}")
    module.configure(choices.add_parser(words[0]))
    return parser.parse_args([*words, *(["--trace", "x"] if words[0] == "simulate" else [])])


def test_commands_of_the_lab_join_where_it_is_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert set(lab.COMMANDS) == OF_THE_LAB
    assert {point.value for point in entry_points(group="winnow.commands")} == {
        "winnow_lab.cli",
        "winnow_inspect",
    }
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert all(f"{name} {summary}" in shown for name, summary in lab.COMMANDS.items())
    monkeypatch.setattr("winnow.cli.main.entry_points", lambda group: ())
    assert main(["plan", "--help"]) == 2
    error = capsys.readouterr().err
    assert "`winnow plan` is part of winnow-lab" in error and "pip install ./lab" in error


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith("winnow 0.")


def test_help_needs_no_heavy_library() -> None:
    code = (
        "import sys; from winnow.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'transformers', 'rich'} & set(sys.modules)"
    )
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
    # It takes about 0.1 s; the rest is for a machine that does other work too.
    assert time.monotonic() - start < 3


USAGE_ERRORS = [
    ("", "the following arguments are required: COMMAND"),
    ("rum", "invalid choice: 'rum'"),
    ("run", "the following arguments are required: PROMPTS.jsonl, -o/--output"),
    ("run P -o O --kv-memry 1GiB", "unknown argument '--kv-memry'; did you mean --kv-memory?"),
    ("run P -o O --xyz", "unknown argument '--xyz'"),
    ("run P -o O --kv-memory 3q", "kv_memory must be a size such as 512MiB"),
    ("run P -o O --kv-offloading-size 3q", "kv_offloading_size must be a size such as 512MiB"),
    ("run P -o O --kv-offloading-size 0", "kv_offloading_size must be at least 1 byte"),
    ("run P -o O --pipeline-parallel-size 2", "pipeline_parallel_size='2': a model is cut over devices"),
    (
        "run P -o O --ctx-size 2048",
        "unknown argument '--ctx-size'; llama.cpp's flag is in Winnow: --max-model-len",
    ),
    ("run P -o O -ngl 20", "must be 0, which is --device cpu, got '20'; --device cuda takes all layers"),
    ("plan", "the following arguments are required: MODEL"),
    ("plan llama-3-8b --model llama-3-70b", "the model is given twice: llama-3-8b and --model llama-3-70b"),
    ("run P -o O --max-num-seqs 0", "max_num_seqs must be at least 1, got 0"),
    ("run P -o O --temperature -1", "temperature must be at least 0, got -1.0"),
    ("run P -o O --max-tokens many", "argument --max-tokens: must be an integer or none, got 'many'"),
    ("run nowhere.jsonl -o O", "cannot read the prompts nowhere.jsonl: No such file or directory"),
    (
        "run P -o O --model nowhere",
        "model must be a directory with config.json and weights, a GGUF file, or org/name",
    ),
    ("run P -o O --model .", "model must be a directory with a config.json"),
    ("run P -o P", "OUT.jsonl must not be PROMPTS.jsonl"),
    ("run P -o /dev/null", "OUT.jsonl must be a regular file"),
    ("run P -o O --summary /dev/null/x", "cannot write --summary"),
    ("generate", "the following arguments are required: PROMPT"),
    ("generate x --temperature -0.5", "temperature must be at least 0"),
    ("generate x --model nowhere", "model must be a directory"),
]


@pytest.mark.parametrize(("typed", "message"), USAGE_ERRORS)
def test_what_is_unusable_is_one_line_and_exit_code_2(
    typed: str,
    message: str,
    write_prompts: Write,
    llms: list[FakeLLM],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompts = write_prompts([{"prompt": "a"}])
    monkeypatch.chdir(prompts.parent)
    words = {"P": str(prompts), "O": "out.jsonl"}
    assert main([words.get(word, word) for word in typed.split()]) == 2
    shown = capsys.readouterr()
    assert bool(shown.out) is (typed in ("", "run", "generate")), "a command typed alone shows its help"
    assert shown.err.startswith("winnow: error: ")
    assert shown.err.count("\n") == 1
    assert message in shown.err
    assert llms == []
    assert not Path("out.jsonl").exists()


@pytest.mark.parametrize("prompt", ["", "\udcff"])
def test_generate_refuses_an_unusable_prompt(
    prompt: str, llms: list[FakeLLM], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", prompt]) == 2
    assert capsys.readouterr().err.startswith("winnow: error: PROMPT must ")
    assert llms == []


def test_generate_streams_the_answer(llms: list[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "abc", "--model", "demo", "--kv-memory", "1MiB"]) == 0
    assert capsys.readouterr().out == "cba\n"
    assert llms[0].config.cache.kv_memory == 2**20
    assert llms[0].params["stream"].max_tokens == 256


@pytest.mark.parametrize(
    ("typed", "recommended", "said"),
    [
        ((), {}, "temperature 0.3, top_p 0.95, min_p 0.05, up to 256 tokens (--temperature 0"),
        (("--max-tokens", "none"), {"repetition_penalty": 1.1}, "min_p 0.05, up to the end of the context"),
        (("--max-tokens", "none"), {"top_p": 0.5}, None),
        (("--temperature", "1"), {}, None),
        ((), {"temperature": 0.6}, None),
    ],
)
def test_how_tokens_are_sampled_is_said_where_it_was_not_chosen(
    typed: tuple[str, ...],
    recommended: dict[str, float],
    said: str | None,
    llms: list[FakeLLM],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FakeLLM, "sampling_defaults", recommended)
    assert main(["generate", "abc", "--model", "demo", *typed]) == 0
    shown = capsys.readouterr()
    assert shown.out == "cba\n"
    lines = [
        line
        for line in shown.err.splitlines()
        if not any(each in line for each in ("the demo model", "KVs up to", "as stored"))
    ]
    assert (len(lines) == 1 and said in lines[0]) if said else not lines


def test_generate_takes_what_one_request_alone_can_ask(llms: list[FakeLLM]) -> None:
    form = '{"choice": ["red", "blue"]}'
    assert (
        main(["generate", "abc", "--model", "demo", "--context-tokens", "2", "--structured-outputs", form])
        == 0
    )
    params = llms[0].params["stream"]
    assert params.context_tokens == 2 and params.form == StructuredOutputs(choice=("red", "blue"))


def test_generate_reads_standard_input_and_chats(
    llms: list[FakeLLM], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("añ\n".encode())))
    assert main(["generate", "-", "--model", "demo", "--chat"]) == 0
    assert capsys.readouterr().out == "ña>resu<\n"


def test_generate_leaves_out_marks_of_other_systems(
    llms: list[FakeLLM], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("\ufeffab\r\nc\r\n".encode())))
    assert main(["generate", "-", "--model", "demo"]) == 0
    assert capsys.readouterr().out == "c\nba\n"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(28, "No space left on device", "x"), "x: No space left on device"),
        (MemoryError(), "this machine's memory does not suffice"),
    ],
)
def test_what_the_machine_refuses_is_one_line(
    error: Exception, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(argv: object) -> int:
        raise error

    monkeypatch.setattr("winnow.cli.main._dispatch", fail)
    assert main([]) == 2
    assert capsys.readouterr().err == f"winnow: error: {message}\n"


def test_ctrl_c_tells_how_to_go_on(
    write_prompts: Write,
    model_dir: Path,
    llms: list[FakeLLM],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    prompts = write_prompts([{"prompt": "a" * index} for index in range(1, 9)])
    out = tmp_path / "the answers.jsonl"
    command = ["run", str(prompts), "-o", str(out), "--model", str(model_dir)]
    monkeypatch.setattr(FakeLLM, "interrupted_after", 3)
    for typed in (["--overwrite"], []):
        out.write_text("")
        monkeypatch.setattr("sys.argv", ["/usr/bin/winnow", *command, *typed])
        assert main([*command, *typed]) == 130
        hint = f"(finished answers are safe; resume with: {shlex.join(['winnow', *command])})"
        assert capsys.readouterr().err.endswith(f"winnow: interrupted {hint}\n")
    monkeypatch.setattr(FakeLLM, "interrupted_after", None)
    assert main(shlex.split(hint.removesuffix(")").partition("resume with: winnow ")[2])) == 0
    assert len(out.read_text().splitlines()) == 8
    assert len(llms[-1].submitted) < 8, "finished lines were computed again"


def test_ctrl_c_before_anything_is_written_promises_nothing(
    write_prompts: Write,
    model_dir: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """The output is another run's still: to resume it with these options would be refused."""

    def interrupted(options: Any, *, quiet: bool) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("winnow.cli.flags.engine.open_llm", interrupted)
    out = tmp_path / "out"
    out.write_text("another's\n")
    command = ["run", str(write_prompts([{"prompt": "a"}])), "-o", str(out), "--overwrite"]
    assert main([*command, "--model", str(model_dir)]) == 130
    assert capsys.readouterr().err == "winnow: interrupted\n" and out.read_text() == "another's\n"


@pytest.mark.parametrize(
    ("option", "message"),
    [("--eviction=bogus", "eviction must be one of"), ("--logprobs=999", "logprobs must be at most")],
)
def test_values_are_checked_before_what_is_there(
    write_prompts: Write, capsys: pytest.CaptureFixture[str], tmp_path: Path, option: str, message: str
) -> None:
    out = tmp_path / "out"
    out.write_text("another's\n")
    assert main(["run", str(write_prompts([{"prompt": "a"}])), "-o", str(out), option]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", [["generate", "ab"], ["chat"], ["serve", "--port", "0"]])
def test_without_a_model_it_is_smollm2_where_that_is_here(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def opened(options: dict[str, Any], **_: Any) -> None:
        raise UsageError(f"opened {options.get('model')}")

    cached: list[tuple[str, int]] = [("org/SmolLM2-135M", 1)]  # a base model
    monkeypatch.setattr("winnow.cli.flags.engine.open_llm", opened)
    monkeypatch.setattr("winnow.cli.flags.engine.fetched_repositories", lambda: cached)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    monkeypatch.chdir(tmp_path)
    assert main(command) == 2
    assert "`winnow pull smollm2` fetches it" in capsys.readouterr().err
    cached.append(("HuggingFaceTB/SmolLM2-135M-Instruct", 1))
    assert main(command) == 2
    assert "opened HuggingFaceTB/SmolLM2-135M-Instruct" in capsys.readouterr().err
    Path("models").mkdir()
    Path("models/SmolLM2-135M-Instruct.Q4_1.gguf").touch()
    assert main(command) == 2
    assert "opened models/SmolLM2-135M-Instruct.Q4_1.gguf" in capsys.readouterr().err
    assert main([*command, "--model", "demo"]) == 2
    assert "opened None" in capsys.readouterr().err


def test_pull_alone_lists_models(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    memory = HostMemory(limit=4 * 2**30, free=2**30)
    monkeypatch.setattr("winnow.cli.list.host_memory", lambda: memory)
    assert main(["pull"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 20 and all(len(re.split("  +", line)) == 4 for line in lines)
    fits = {line.split()[0]: "fits 4.0 GiB" in line for line in lines}
    # A GiB is left for KVs and all else.
    assert fits["smollm2"] and fits["Qwen/Qwen3-4B-GGUF:Q4_K_M"] and not fits["Qwen/Qwen3-8B-GGUF:Q4_K_M"]
    assert all(is_repository(name) or name in NAMED_MODELS for name in fits)


def test_generate_says_that_it_is_the_demo_model(
    model_dir: Path, llms: list[FakeLLM], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeLLM, "weight_dtype", "q8_0")
    assert main(["generate", "ab", "--temperature", "0", "--model", "demo"]) == 0
    shown = capsys.readouterr()
    demo, memory, *speed = shown.err.splitlines()
    assert shown.out == "ba\n" and "the demo model" in demo
    assert "weights 3.0 MiB (bfloat16, linear layers q8_0) + KVs" in memory
    assert main(["generate", "ab", "--temperature", "0", "--model", str(model_dir)]) == 0
    assert capsys.readouterr().err.splitlines() == [memory, *speed]


def test_a_message_of_several_lines_stays_one_line(
    llms: list[FakeLLM], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["run", "a\nb", "-o", str(tmp_path / "o")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_reader_that_leaves_is_no_error(model_dir: Path) -> None:
    code = (
        "import sys; from winnow.cli import main as m\n"
        "def broken(argv): print('x' * 100000); sys.stdout.flush()\n"
        "m._dispatch = broken\n"
        "sys.exit(m.main([]))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 1


@pytest.mark.parametrize(
    "words",
    [
        "generate The --model demo --max-tokens 4",
        "run P.jsonl -o -",
        "run P.jsonl -o O",
        "inspect The -o -",
        "policies",
        "--version",
        "run --help",
    ],
)
def test_what_standard_output_does_not_take_names_it(
    words: str, write_prompts: Write, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(write_prompts([{"prompt": "ab", "max_tokens": 1}]).parent)
    with suppress(OSError), open("/dev/full", "w", buffering=1) as full:
        monkeypatch.setattr("sys.stdout", full)
        code = main(words.replace("P.jsonl", "prompts.jsonl").split())
    lines = [
        line for line in capsys.readouterr().err.splitlines() if not line.startswith(("requests", "done"))
    ]
    assert lines[-1] == "winnow: error: cannot write to standard output: No space left on device"
    assert code == 2


def test_a_process_whose_output_is_not_taken_ends_with_its_code() -> None:
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "winnow", "--version"]
        process = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert process.stderr == "winnow: error: cannot write to standard output: No space left on device\n"
    assert process.returncode == 2


def test_what_is_read_is_never_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor one file that is written over another one."""
    model, data, page = tmp_path / "model", tmp_path / "data", tmp_path / "page"
    for directory in (model, data, page):
        directory.mkdir()
    shutil.copyfile(DEMO_MODEL / "config.json", model / "config.json")
    (model / "results.json").write_text("{}")
    (data / "test.txt").write_text("text")
    (tmp_path / "P").write_text('{"prompt": "ab"}\n')
    os.symlink(data, tmp_path / "link")
    monkeypatch.chdir(tmp_path)
    commands = {
        "run P -o model/config.json --overwrite --model model": "OUT.jsonl must not be a file of --model",
        "run P -o O --summary model/config.json --model model": "--summary must not be a file of --model",
        "inspect x -o model/config.json --model model": "--output must not be a file of --model",
        "eval perplexity --data data -o data --overwrite": "-o must not be --data",
        "eval longbench --data data -o link --overwrite": "-o must not be --data",
        "eval demo -o model --overwrite --model model": "-o must not be --model",
        "eval lm-eval --tasks x -o model --overwrite --model model": "-o must not be --model",
        "prefix save data/test.txt -o model --model model": "--out must not be --model",
        "bench throughput --json model/config.json --model model": "--json must not be a file of --model",
    }
    check_refused(main, commands, tmp_path, capsys)


def test_doctor_tells_what_a_report_needs_and_no_secret(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("HTTPS_PROXY", "http://me:secret@proxy")
    monkeypatch.setenv("HF_ENDPOINT", "http://mirror")
    assert main(["doctor"]) == 0
    printed = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert printed["winnow:"].startswith(__version__) and printed["HF_ENDPOINT:"] == "http://mirror"
    assert f"torch {version('torch')}" in printed["packages:"] and "ruff" not in printed["packages:"]
    assert {"kernels:", "memory:", "processor:", "python:"} <= printed.keys()
    assert "secret" not in str(printed) and printed["HF_TOKEN:"] == printed["HTTPS_PROXY:"] == "(set)"


def test_what_an_encoding_lacks_ends_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", out)

    def run() -> int:
        print("caf\u00e9", flush=True)
        return 0

    assert exit_code(run) == 0 and out.buffer.getvalue() == b"caf?\n"  # type: ignore[attr-defined]
