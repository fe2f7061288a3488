"""Flags that a user of vLLM types by reflex: taken where they mean something here, else refused with the reason."""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from winnow.errors import UsageError

# What changes nothing here, and is taken without a word: value -> whether it asks for what is so anyway.
Accepts = Callable[[str], bool]


@dataclass(frozen=True)
class Reflex:
    """A flag of vLLM's.

    Attributes:
        reason: why its other values are refused, and what to do instead.
        accepts: values that ask for what is so anyway.
        option: the engine's option that it stands for; None: it stands for none.
        switch: it takes no value.
        templates: values that stand for a `--response-template`, and its name.
    """

    reason: str
    accepts: Accepts = lambda text: False
    option: str | None = None
    switch: bool = False
    templates: Mapping[str, str] = field(default_factory=dict)


def _is(*values: str) -> Accepts:
    return lambda text: text.lower() in values


def _any(text: str) -> bool:
    return True


REFLEXES: Mapping[str, Reflex] = {
    "kv-cache-memory-bytes": Reflex("", option="kv_memory"),
    "gpu-memory-utilization": Reflex(
        "Winnow takes a size instead of a part of the memory: --kv-memory, such as --kv-memory 8GiB"
    ),
    "tensor-parallel-size": Reflex("a model runs on one device", _is("1")),
    "pipeline-parallel-size": Reflex("a model runs on one device", _is("1")),
    "data-parallel-size": Reflex("start a server for each device", _is("1")),
    "cpu-offload-gb": Reflex("weights stay on their device", _is("0")),
    "tokenizer": Reflex("the tokenizer is the one in the model's directory"),
    "tokenizer-mode": Reflex("tokenizers are transformers' own", _is("auto")),
    "quantization": Reflex("weights are read as they were stored: a GGUF file holds quantised ones"),
    "chat-template": Reflex("the chat template is the one in the model's directory"),
    "tool-call-parser": Reflex(
        "tool calls are read by the model's own response_template, or by --response-template NAME or FILE",
        templates={"hermes": "hermes", "qwen3_coder": "qwen3-coder", "qwen3_xml": "qwen3-coder"},
    ),
    "reasoning-parser": Reflex(
        "reasoning is read by the model's own response_template, or by --response-template NAME or FILE",
        templates={"deepseek_r1": "think", "qwen3": "think"},
    ),
    "download-dir": Reflex("models of the Hub go where HF_HOME says"),
    "distributed-executor-backend": Reflex("a model runs in one process", _is("uni")),
    "max-logprobs": Reflex("at most 64 logprobs are served", _any),
    "api-server-count": Reflex("one process serves", _is("1")),
    "uvicorn-log-level": Reflex("say --log-level", _any),
    "limit-mm-per-prompt": Reflex("models of text alone are served"),
    "speculative-config": Reflex("tokens are not speculated"),
    "enforce-eager": Reflex("", switch=True),
    "enable-chunked-prefill": Reflex("", switch=True),
    "disable-log-requests": Reflex("", switch=True),
    "disable-log-stats": Reflex("", switch=True),
    "enable-auto-tool-choice": Reflex("", switch=True),
    "trust-remote-code": Reflex("Winnow runs no code from a model's directory", switch=True),
    "enable-lora": Reflex("adapters are not served: merge them into the weights", switch=True),
}


def add_reflex_flags(parser: argparse.ArgumentParser) -> None:
    """Declare them, where the parser has none of the name; help does not show them."""
    for name, reflex in REFLEXES.items():
        flag = f"--{name}"
        if flag in parser._option_string_actions:
            continue
        extra: dict[str, Any] = {"action": "store_true"} if reflex.switch else {}
        parser.add_argument(
            flag, dest=_dest(name), default=argparse.SUPPRESS, help=argparse.SUPPRESS, **extra
        )


def translate_reflexes(
    namespace: argparse.Namespace, options: dict[str, Any], server: dict[str, Any]
) -> None:
    """Put what was typed into the engine's `options` and the server's.

    Raises:
        UsageError: a flag asks for what Winnow does not do; says why, and what it does instead.
    """
    for name, reflex in REFLEXES.items():
        value = getattr(namespace, _dest(name), None)
        if value is None:
            continue
        if reflex.option is not None:
            if reflex.option in options:
                raise UsageError(f"--{name} and --{reflex.option.replace('_', '-')} mean the same, give one")
            options[reflex.option] = value
        elif reflex.switch:
            if reflex.reason:
                raise UsageError(f"--{name}: {reflex.reason}")
        elif value in reflex.templates:
            # Every form of tool calls has reasoning in it, and that flag comes first.
            server.setdefault("response_template", reflex.templates[value])
        elif not reflex.accepts(value):
            raise UsageError(f"--{name} {value}: {reflex.reason}")


def _dest(name: str) -> str:
    return f"reflex_{name.replace('-', '_')}"
