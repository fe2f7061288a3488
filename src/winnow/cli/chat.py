"""`winnow chat`: a conversation in the terminal, with a model here or on a server."""

import argparse
import io
import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Protocol

from winnow.cli.conversation_log import ConversationLog
from winnow.cli.flags.engine import (
    add_engine_flags,
    add_sampling_flags,
    engine_options,
    open_llm,
    sampling_options,
    say_sampling,
)
from winnow.cli.flags.options import add_model_argument
from winnow.cli.prompt import require_utf8
from winnow.cli.screen.banner import engine_lines
from winnow.errors import UsageError, WinnowError, known_names
from winnow.sampling import SamplingParams

DESCRIPTION = """\
Talk to a model in the terminal, here or, with --url, on a server of the OpenAI API.

--session NAME keeps the conversation and resumes it.
/reset begins a new one, /exit or Ctrl-D ends, /help lists these. Ctrl-C stops an answer.
"""
EPILOG = """\
examples:
  winnow chat path/to/model
  winnow chat --session holidays
  winnow chat --system "Answer in one sentence." --eviction winnow --compression 4
  winnow chat --url http://127.0.0.1:8000 --api-key $KEY
"""
_HELP = """\
/reset  begin a new conversation
/exit   end, as Ctrl-D does
/help   this list
Ctrl-C stops an answer. A question that begins with / needs a space before it."""
_COMMANDS = ("/reset", "/exit", "/help")
_NOT_SHOWN = ("n", "logprobs", "prompt_logprobs")
_DEFAULTS = {"max_tokens": 1024}


class Partner(Protocol):
    """Conversation partner that answers.

    Attributes:
        session: the name of the conversation; None: it has none.
    """

    session: str | None

    def introduction(self) -> list[str]:
        """Return lines that say who it is."""
        ...

    def answer(self, messages: list[dict[str, str]]) -> Iterator[str]:
        """Yield the pieces of an answer."""
        ...


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.usage = "winnow chat [MODEL] [options]"
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    add_model_argument(parser)
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument(
        "--session",
        metavar="NAME",
        help="keep the conversation under this name, or resume the one kept under it",
    )
    parser.add_argument("--url", metavar="URL", help="a server, in place of a model here")
    parser.add_argument("--api-key", metavar="KEY", help="the server's; also from WINNOW_API_KEY")
    add_engine_flags(parser)
    add_sampling_flags(parser, "sampling", skip=_NOT_SHOWN, defaults=_DEFAULTS)


def execute(namespace: argparse.Namespace) -> int:
    """Talk, and return the exit code."""
    typed, options = sampling_options(namespace), engine_options(namespace)
    if namespace.system is not None:
        require_utf8("--system", namespace.system)
    with ExitStack() as stack:
        partner: Partner
        if namespace.url is not None:
            if extra := sorted(set(options) - {"model"}):
                raise UsageError(
                    f"--{extra[0].replace('_', '-')} is an option of a model here, not of a server"
                )
            key = namespace.api_key or os.environ.get("WINNOW_API_KEY")
            partner = _Remote(namespace.url, key, options.get("model"), _DEFAULTS | typed)
        else:
            llm = stack.enter_context(open_llm(options))
            say_sampling(llm, _DEFAULTS | typed)
            partner = _Local(llm, typed)
        log = None if namespace.session is None else ConversationLog(namespace.session)
        partner.session = namespace.session
        for line in (*partner.introduction(), "winnow: /help lists commands, /exit or Ctrl-D ends"):
            print(line, file=sys.stderr)
        return _talk(partner, namespace.system, log)


def _talk(partner: Partner, system: str | None, log: ConversationLog | None = None) -> int:
    first = [] if system is None else [{"role": "system", "content": system}]
    messages = list(first)
    if log is not None and (kept := log.load()):
        _resume(kept, system)
        messages = kept
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # else a line that is no UTF-8 takes others with it
    failed = False  # which a program that pipes questions in must learn
    while True:
        try:
            text = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return int(failed and not sys.stdin.isatty())
        command = text.strip()
        if command == "/exit":
            return int(failed and not sys.stdin.isatty())
        if command == "/reset":
            messages = list(first)
            if log is not None:
                log.save(messages)
        elif command == "/help":
            print(_HELP, file=sys.stderr)
        elif text.startswith("/"):
            _complain(
                f"there is no command {command.split()[0]}; {known_names(command.split()[0], _COMMANDS)}"
            )
        elif command:
            failed = not _answer(partner, messages, text) or failed
            if log is not None:
                log.save(messages)


def _resume(kept: list[dict[str, str]], system: str | None) -> None:
    """Show what was said last. Raises UsageError where the system message would change it."""
    given = kept[0]["content"] if kept[0]["role"] == "system" else None
    if system is not None and system != given:
        raise UsageError("--system cannot change in a session that is resumed: /reset it, or name another")
    turns = sum(message["role"] == "user" for message in kept)
    print(f"winnow: resumed after {turns} questions; the last was", file=sys.stderr)
    for message in kept[-2:]:
        print("> " + message["content"] if message["role"] == "user" else message["content"], file=sys.stderr)


def _answer(partner: Partner, messages: list[dict[str, str]], text: str) -> bool:
    """Show the answer to a question and add both to `messages`; nothing is added where there is none, and False."""
    answer = ""
    try:
        require_utf8("a question", text)
        question = {"role": "user", "content": text}
        with closing(partner.answer([*messages, question])) as pieces:  # type: ignore[type-var]
            for piece in pieces:
                answer += piece
                print(piece, end="", flush=True)
    except KeyboardInterrupt:
        pass  # what was said stays said
    except WinnowError as error:
        _complain(str(error))
        return False
    print()
    messages += [question, {"role": "assistant", "content": answer}]
    return True


def _complain(message: str) -> None:
    print("winnow: error:", " ".join(message.split()), file=sys.stderr)


class _Local:
    def __init__(self, llm: Any, typed: dict[str, Any]) -> None:
        self.session: str | None = None
        self._llm = llm
        self._params = SamplingParams.from_mapping(_DEFAULTS | dict(llm.sampling_defaults) | typed)

    def introduction(self) -> list[str]:
        model = self._llm.config.model.model
        name = "the demo model (--model names another)" if model is None else Path(model).resolve().name
        return engine_lines(self._llm, name)

    def answer(self, messages: list[dict[str, str]]) -> Iterator[str]:
        shown = 0
        with closing(self._llm.stream_chat(messages, self._params, session_id=self.session)) as outputs:
            for output in outputs:
                output.raise_for_error()
                text = output.outputs[0].text
                yield text[shown:]
                shown = len(text)


class _Remote:
    def __init__(self, url: str, key: str | None, model: str | None, params: dict[str, Any]) -> None:
        import httpx

        self.session: str | None = None
        if not url.startswith(("http://", "https://")):
            raise UsageError(
                f"--url must be the address of a server, as http://127.0.0.1:8000, got {url!r:.80}"
            )
        if not (key or "").isascii():
            raise UsageError("--api-key must be ASCII")
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        try:
            self._client = httpx.Client(
                base_url=url.rstrip("/").removesuffix("/v1"), headers=headers, timeout=600
            )
        except (httpx.InvalidURL, ValueError) as error:
            raise UsageError(f"--url must be the address of a server, got {url!r:.80}: {error}") from None
        self._errors = httpx.HTTPError
        self._body = params | ({} if model is None else {"model": str(model)})

    def introduction(self) -> list[str]:
        try:
            models = self._client.get("/v1/models").json()["data"]
            names = ", ".join(
                f"{each['id']}, context {each.get('max_model_len', '?')} tokens" for each in models[:1]
            )
        except (self._errors, ValueError, KeyError, TypeError):  # the first question will say why
            names = "a server"
        return [f"winnow: {self._body.get('model', names)} at {self._client.base_url}"]

    def answer(self, messages: list[dict[str, str]]) -> Iterator[str]:
        session = {} if self.session is None else {"session_id": self.session}
        body = {**self._body, **session, "messages": messages, "stream": True}
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    response.read()
                    raise UsageError(_message(response.text))
                ended = False
                for line in response.iter_lines():
                    if line.startswith("data:") and line[5:].strip() != "[DONE]":
                        chunk = json.loads(line[5:])
                        if "error" in chunk:
                            raise UsageError(chunk["error"]["message"])
                        for choice in chunk["choices"]:
                            ended = ended or choice.get("finish_reason") is not None
                            yield choice["delta"].get("content") or ""
        except self._errors as error:
            raise UsageError(f"the server does not answer: {error}") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"the server's answer is no chat of OpenAI's API: {error!r:.80}") from None
        if not ended:
            raise UsageError("the server's answer breaks off, or is no chat of OpenAI's API")


def _message(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:300]
