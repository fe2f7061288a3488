"""`winnow serve`: the OpenAI API over HTTP."""

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from winnow.cli.flags import engine
from winnow.cli.flags.options import add_flags, add_model_argument, given
from winnow.errors import UsageError
from winnow.process.extras import install_hint, require_plugin
from winnow.process.lazy import importing
from winnow.report.provenance import Machine
from winnow.server.access import Keys
from winnow.server.config import ServerConfig
from winnow.server.listening import bound_sockets
from winnow.values.foreign_names import translate
from winnow.vllm import names as vllm_names

log = logging.getLogger("winnow.server")

DESCRIPTION = """\
Serve a model under OpenAI's and Anthropic's APIs, with a chat at /chat and a dashboard at /: docs/serving.md.
It listens on this machine alone unless --host says otherwise.
"""
_PACKAGES = ("fastapi", "uvicorn", "pydantic", "prometheus_client")
_COMMON = {
    "host": "address to listen on",
    "port": "TCP port",
    "api_key": "what clients must send; may be repeated",
    "served_model_name": "what clients call the model",
}
EPILOG = """\
examples:
  winnow serve
  winnow serve path/to/model --kv-memory 2GiB --port 8080
  winnow serve org/name --api-key $KEY --eviction winnow --compression 4
  curl localhost:8000/v1/completions -H 'content-type: application/json' -d '{"prompt": "Once upon"}'
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "winnow serve [MODEL] [options]"
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    add_model_argument(parser)
    add_flags(parser, ServerConfig, "server", common=_COMMON)
    # The bounds of the engine's queue are the server's, which counts prompts that are being tokenised too.
    engine.add_engine_flags(parser)
    engine.add_foreign_flags(parser, vllm_names.SERVER)


def execute(namespace: argparse.Namespace) -> int:
    options, config = _options(namespace)
    for package in _PACKAGES:
        if find_spec(package) is None:
            raise UsageError(f"winnow serve needs the package {package}: {install_hint('serve')}")
    if config.kv_events_endpoint is not None:
        require_plugin("events", "--kv-events-endpoint")
    key = os.environ.get("WINNOW_API_KEY")
    if key == "":  # as a variable that is made of a missing secret
        raise UsageError("WINNOW_API_KEY must hold a key, got ''; unset it to serve without keys")
    keys = Keys.of((*config.api_key, *filter(None, [key])), config.api_keys_file)
    _begin_log(config.log_level)
    with (
        bound_sockets(config) as sockets,
        engine.open_llm(
            options := engine.usual_model(namespace, options, or_demo=True), announce=True
        ) as llm,
    ):
        log.info("starting the server")
        with importing():
            from winnow.server.server import serve
            from winnow.server.service import Service, load_reader, model_names

        service = Service(
            llm,
            config,
            keys,
            model_names(options.get("model"), config.served_model_name or _adapter_name(options)),
            load_reader(config.response_template, llm.tokenizer),
        )

        def started(address: str) -> None:
            lines = [*engine.engine_lines(llm, service.names[0]), f"winnow: {Machine.here(llm.device)}"]
            lines.append(engine.served_sampling(llm))
            if config.dashboard and config.uds is None:
                lines.append(f"winnow: a chat at {address}/chat, the dashboard at {address}/")
            for line in (*lines, f"listening on {address}"):
                log.info(line)

        return serve(service, sockets, started)


def _adapter_name(options: Mapping[str, Any]) -> tuple[str, ...]:
    name = str(options.get("lora") or "").partition("=")[2]
    return (name,) if name else ()


class _Line(logging.Formatter):
    """Form of all lines of the log: when, how grave, what; one line each, but for tracebacks."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging's name)
        record.message = record.message.removeprefix("winnow: ")
        return super().formatMessage(record)


def _begin_log(level: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Line("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("winnow").setLevel(level.upper())
    warnings.showwarning = lambda message, *_: log.warning("%s", " ".join(str(message).split()))


def _options(namespace: argparse.Namespace) -> tuple[dict[str, Any], ServerConfig]:
    options, values = engine.engine_options(namespace), given(namespace, ServerConfig)
    foreign = engine.foreign_values(namespace, vllm_names.SERVER)
    # Every form of tool calls has reasoning in it, so that flag comes first.
    for name in ("tool_call_parser", "reasoning_parser"):
        if foreign.get(name) in vllm_names.RESPONSE_TEMPLATES:
            values.setdefault("response_template", vllm_names.RESPONSE_TEMPLATES[foreign.pop(name)])
    translate(foreign, vllm_names.SERVER, (), UsageError, None)
    files = values.get("files_dir")
    if files is not None and Path(files).exists() and not Path(files).is_dir():
        raise UsageError(f"--files-dir must be a directory, got {files!r}")
    return options, ServerConfig(**values)
