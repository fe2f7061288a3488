"""The flags of `winnow serve`, before anything is loaded."""

import argparse
from dataclasses import fields
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from winnow.cli import serve
from winnow.cli.main import Parser
from winnow.config import EngineConfig
from winnow.errors import ConfigError, UsageError
from winnow.server.access import Keys
from winnow.server.config import ServerConfig


def parsed(*arguments: str) -> argparse.Namespace:
    parser = Parser()
    serve.configure(parser)
    return parser.parse_args(arguments)


def test_every_option_has_a_flag() -> None:
    parser = Parser()
    serve.configure(parser)
    text = parser.format_help()
    for field in fields(ServerConfig):
        assert f"--{field.name.replace('_', '-')}" in text
    assert "--kv-memory" in text and "--pipeline-parallel-size" not in text


def test_model_and_options(model_dir: Path) -> None:
    options, config = serve._options(
        parsed(
            str(model_dir), "--port", "9", "--api-key", "a", "--api-key", "b", "--max-num-queued-reqs", "none"
        )
    )
    assert options["model"] == str(model_dir)
    assert (config.port, config.api_key, config.max_num_queued_reqs) == (9, ("a", "b"), None)
    with pytest.raises(UsageError, match="twice"):
        serve._options(parsed(str(model_dir), "--model", "other"))


@pytest.mark.parametrize(
    "arguments",
    [
        ("--tensor-parallel-size", "2"),
        ("--kv-cache-dtype", "auto"),
        ("--scheduling-policy", "priority"),
        ("-tp", "1"),
        ("--enforce-eager",),
        ("--no-trust-remote-code",),
        ("--swap-space", "0"),
        ("--dtype", "half"),
        ("--enable-chunked-prefill",),
        ("--swap-space", "4GiB"),
        ("--max-num-seqs", "8"),
        ("--enable-prefix-caching",),
        ("--kv-cache-dtype", "fp8"),
        ("--scheduling-policy", "fcfs"),
        ("--gpu-memory-utilization", "0.9"),
    ],
)
def test_flags_of_vllm_that_are_taken(arguments: tuple[str, ...]) -> None:
    serve._options(parsed(*arguments))


@pytest.mark.parametrize(
    ("arguments", "instead"),
    [
        (("--pipeline-parallel-size", "2"), "tensor_parallel_size"),
        (("--quantization", "bitsandbytes"), "weight_dtype"),
        (("--chat-template", "x.jinja"), "model's directory"),
        (("--tool-call-parser", "pythonic"), "--response-template"),
    ],
)
def test_flags_of_vllm_that_are_refused_say_what_to_do(arguments: tuple[str, ...], instead: str) -> None:
    with pytest.raises((ConfigError, UsageError), match=instead):
        serve._options(parsed(*arguments))


def test_parsers_of_vllm_name_a_response_template() -> None:
    _, config = serve._options(parsed("--reasoning-parser", "qwen3", "--tool-call-parser", "hermes"))
    assert config.response_template == "hermes"
    _, config = serve._options(parsed("--reasoning-parser", "deepseek_r1"))
    assert config.response_template == "think"


def test_bytes_may_be_given_as_vllm_does() -> None:
    options, _ = serve._options(parsed("--kv-cache-memory-bytes", "64MiB"))
    assert EngineConfig.from_options(options).cache.kv_memory == 64 * 2**20
    options, _ = serve._options(parsed("--swap-space", "4"))
    assert EngineConfig.from_options(options).cache.kv_offloading_size == 4 * 2**30
    with pytest.raises(ConfigError, match="mean the same"):
        serve._options(parsed("--kv-cache-memory-bytes", "1GiB", "--kv-memory", "1GiB"))


@pytest.mark.parametrize(
    "values",
    [
        {"port": 70000},
        {"max_body": "x"},
        {"api_key": ("",)},
        {"api_keys_file": "nowhere.json"},
        {"shutdown_timeout": -1},
    ],
)
def test_values_are_checked(values: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        ServerConfig(**values)  # type: ignore[arg-type]


def test_key_files(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text('{"alice": "secret"}')
    keys = Keys.of(["other"], str(path))
    assert keys.tenant("Bearer secret") == "alice"
    assert (keys.tenant("bearer other") or "").startswith("key-")
    assert "secret" not in repr(vars(keys))
    for text in ("[]", "{", '{"a": 5}', '{"a": ""}', '{"a": "x", "b": "x"}', '{"a": "\\u00e9"}'):
        path.write_text(text)
        with pytest.raises(ConfigError):
            Keys.of([], str(path))
