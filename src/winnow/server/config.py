"""Options of the server, each once: the flags of `winnow serve` come from here."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from winnow.config import Effect, option, optional_int
from winnow.errors import ConfigError
from winnow.openai.response_templates import TEMPLATES
from winnow.values.checks import check_choice, check_integer, check_number
from winnow.values.units import parse_bytes

METRICS_COMPAT = ("none", "vllm")
LOG_LEVELS = ("critical", "error", "warning", "info", "debug")


def _served(default: Any, help: str, **extra: Any) -> Any:
    """Return an option of the server: none changes an answer."""
    return option(default, help, effect=Effect.NEVER, **extra)


@dataclass(frozen=True)
class ServerConfig:
    """Options of the server: where it listens, whom it serves, and how much it takes."""

    host: str = _served("127.0.0.1", "address to listen on; 0.0.0.0 for every interface")
    port: int = _served(8000, "TCP port; 0 for any free one")
    uds: str | None = _served(None, "path of a Unix socket to listen on, in place of host and port")
    api_key: tuple[str, ...] = _served(
        (), "key that clients must send as a bearer token; may be repeated; also from WINNOW_API_KEY"
    )
    api_keys_file: str | None = _served(
        None, "JSON file {tenant: key}: whose requests run on whose account; read once, at start"
    )
    served_model_name: tuple[str, ...] = _served(
        (), "what clients call the model; may be repeated; left out: the model's own name"
    )
    strict_model: bool = _served(
        False, "refuse requests that name another model with 404; else the one that is served answers them"
    )
    max_num_queued_reqs: int | None = _served(
        1024,
        "most answers that wait without KVs; more are refused with 503; none: no limit",
        parse=optional_int,
    )
    max_ttft: float | None = _served(
        None,
        "seconds: who would wait longer for a first token, by the measured speed of prompts and answers, is refused "
        "with 503 and Retry-After; left out: no limit",
    )
    max_reqs_per_tenant: int | None = _served(
        None,
        "most answers of one tenant in progress at a time; more are refused with 429; none: no limit",
        parse=optional_int,
    )
    max_body: int = _served(
        16 * 2**20,
        "largest body of a request, such as 16MiB; larger ones are refused with 413",
        parse=parse_bytes,
    )
    max_file: int = _served(
        512 * 2**20, "largest file that /v1/files takes, such as 512MiB", parse=parse_bytes
    )
    files_dir: str | None = _served(
        None,
        "directory of uploaded files and of batches, which are finished after a restart; left out: no /v1/files "
        "and no /v1/batches",
    )
    response_memory: int = _served(
        64 * 2**20,
        "host memory of responses of one tenant that previous_response_id may continue, such as 64MiB; the least "
        "recently used go first; 0: none are kept",
        parse=parse_bytes,
    )
    response_template: str | None = _served(
        None,
        f"how the model writes reasoning and tool calls: {', '.join(TEMPLATES)}, or a JSON file as transformers' "
        "response_template; left out: the tokenizer's own, else what its chat template shows",
    )
    open_metrics: bool = _served(False, "let /metrics be read without a key")
    metrics_compat: str = _served(
        "none", "serve metrics under another system's names too", choices=METRICS_COMPAT
    )
    kv_events_endpoint: str | None = _served(
        None,
        "ZeroMQ address on which to publish what the prefix cache learns and forgets, in vLLM's form, such as "
        "tcp://127.0.0.1:5557; left out: nothing is published",
    )
    kv_events_replay_endpoint: str | None = _served(
        None, "ZeroMQ address at which a subscriber asks for events that it has missed"
    )
    kv_events_topic: str = _served("", "topic of these events")
    docs: bool = _served(True, "serve /openapi.json, which describes every request")
    dashboard: bool = _served(True, "serve the dashboard at / and a page to chat at /chat")
    shutdown_timeout: float = _served(
        30.0, "seconds that requests in progress are given at SIGTERM; then they end with an error"
    )
    step_timeout: float = _served(
        300.0, "seconds after which a step that does not end counts as a failure of the engine in /health"
    )
    log_requests: bool = _served(
        False, "log a line for each request: who, what, status, seconds, tokens of prompts and answers"
    )
    log_level: str = _served("info", "what is logged", choices=LOG_LEVELS)

    def __post_init__(self) -> None:
        if self.kv_events_endpoint is None and self.kv_events_replay_endpoint is not None:
            raise ConfigError("kv_events_replay_endpoint needs kv_events_endpoint")
        check_integer("port", self.port, 0, 65535)
        for name in ("host", "uds"):
            # Empty, as a variable that is not set: it would mean every interface.
            if getattr(self, name) == "":
                raise ConfigError(f"{name} must not be empty, got ''")
        for name, least in (("max_num_queued_reqs", 0), ("max_reqs_per_tenant", 1)):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), least)
        for name in ("max_body", "max_file", "response_memory"):
            object.__setattr__(self, name, parse_bytes(getattr(self, name), name))
        for name in ("api_key", "served_model_name"):
            values = getattr(self, name)
            object.__setattr__(self, name, (values,) if isinstance(values, str) else tuple(values))
            if not all(getattr(self, name)):
                raise ConfigError(f"{name} must not be empty, got ''")
        if self.api_keys_file is not None and not Path(self.api_keys_file).is_file():
            raise ConfigError(f"api_keys_file must be a file, got {self.api_keys_file!r}")
        template = self.response_template
        if template is not None and template not in TEMPLATES and not Path(template).is_file():
            raise ConfigError(f"response_template must be {', '.join(TEMPLATES)} or a file, got {template!r}")
        if self.max_ttft is not None:
            check_number("max_ttft", self.max_ttft, 0.001)
        check_number("shutdown_timeout", self.shutdown_timeout, 0)
        check_number("step_timeout", self.step_timeout, 0.001)
        check_choice("metrics_compat", self.metrics_compat, METRICS_COMPAT)
        check_choice("log_level", self.log_level, LOG_LEVELS)
