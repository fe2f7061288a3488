"""`winnow chat`: a conversation in the terminal, with a model here or on a server."""

import argparse
import base64
import io
import json
import os
import re
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from winnow.cli.flags import engine
from winnow.cli.flags.options import add_model_argument
from winnow.cli.prompt import add_image_flag, read_image, read_prompt, require_utf8
from winnow.errors import UnsupportedModelError, UsageError, WinnowError, known_names
from winnow.process.resources import resident_bytes
from winnow.values.units import format_bytes

DESCRIPTION = """\
Talk to a model in the terminal, here or, with --url, on a server of the OpenAI API.

--session NAME keeps the conversation and resumes it; --continue resumes the last one without a name.
/file PATH puts a text before the next question, /image PATH an image, /stats shows what the conversation takes, /reset
begins a new one, /exit or Ctrl-D ends, /help lists these. Ctrl-C stops an answer, twice at an empty prompt ends.
"""
EPILOG = """\
examples:
  winnow chat path/to/model
  winnow chat path/to/model --file article.txt
  winnow chat path/to/vision-model --image photo.jpg
  winnow chat --session holidays
  winnow chat --system "Answer in one sentence." --eviction winnow --compression 4
  winnow chat --url http://127.0.0.1:8000 --api-key $KEY
"""
_HELP = """\
/file PATH  put a text before the next question
/image PATH put an image before it
/stats      tokens and memory of the conversation
/reset      begin a new conversation
/exit       end, as Ctrl-D does
/help       this list
Ctrl-C stops an answer; twice at an empty prompt ends. A question that begins with / needs a space before it."""
_COMMANDS = ("/file", "/image", "/stats", "/reset", "/exit", "/help")
_DEFAULTS = {"max_tokens": 1024}
_UNNAMED = ".last"  # no name that a user may give
_NAME = re.compile(r"(?!\.)[\w.-]{1,64}")


Message = dict[str, Any]


class Partner(ABC):
    """Conversation partner that answers."""

    session: str | None = None
    num_tokens: tuple[int, int] | None = None
    """Tokens of the last prompt, and of its answer."""

    @abstractmethod
    def introduction(self) -> list[str]: ...

    @abstractmethod
    def answer(self, messages: list[Message]) -> Iterator[str]: ...

    @abstractmethod
    def stats(self) -> list[str]:
        """Return lines on what it takes; the first has a few words."""


class ConversationLog:
    """File of a conversation's messages, in XDG_STATE_HOME/winnow/chats; of the last without a name where it is None,
    and then as far as the disk allows. Raises UsageError: a wrong name."""

    def __init__(self, name: str | None) -> None:
        self._unnamed = name is None
        if name is not None and not _NAME.fullmatch(name):
            raise UsageError(
                f"--session must be 1 to 64 letters, digits, dots, dashes or underscores, got {name!r:.80}"
            )
        state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
        self.path = state / "winnow" / "chats" / f"{_UNNAMED if name is None else name}.json"

    def load(self) -> list[dict[str, Any]]:
        """Return its messages; none where there is no file. Raises UsageError: it cannot be read, or holds others."""
        try:
            messages = json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return []
        except (OSError, ValueError) as error:
            raise UsageError(f"--session: {self.path} cannot be read: {error}") from None
        if not isinstance(messages, list) or not all(
            isinstance(each, dict)
            and each.keys() == {"role", "content"}
            and isinstance(each["role"], str)
            and isinstance(each["content"], str | list)
            for each in messages
        ):
            raise UsageError(f"--session: {self.path} holds no conversation")
        return messages

    def save(self, messages: list[dict[str, Any]]) -> None:
        """Write messages in place of those before, whole or not at all; the owner alone can read them."""
        part = self.path.with_suffix(f".{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with open(descriptor, "w", encoding="utf-8") as file:
                json.dump(messages, file, ensure_ascii=False, indent=1)
            part.replace(self.path)
        except OSError as error:
            if not self._unnamed:
                raise UsageError(f"--session: {self.path} cannot be written: {error}") from None


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "winnow chat [MODEL] [options]"
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    add_model_argument(parser)
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument(
        "--session",
        metavar="NAME",
        help="keep the conversation under this name, or resume the one kept under it",
    )
    parser.add_argument(
        "--continue", action="store_true", dest="goes_on", help="resume the last conversation without a name"
    )
    parser.add_argument("--file", metavar="FILE", help="put this text before the first question")
    add_image_flag(parser, "put this image before the first question; may be repeated")
    parser.add_argument("--url", metavar="URL", help="a server, in place of a model here")
    parser.add_argument("--api-key", metavar="KEY", help="the server's; also from WINNOW_API_KEY")
    engine.add_engine_flags(parser)
    engine.add_sampling_flags(parser, "sampling", skip=engine.OF_SEVERAL, defaults=_DEFAULTS)


def execute(namespace: argparse.Namespace) -> int:
    typed, options = engine.sampling_options(namespace), engine.engine_options(namespace)
    if namespace.goes_on and namespace.session is not None:
        raise UsageError("--continue resumes one without a name; --session NAME resumes by itself")
    if namespace.system is not None:
        require_utf8("--system", namespace.system)
    text = None if namespace.file is None else read_prompt(None, namespace.file)
    images = [_image_uri(each) for each in namespace.image]
    with ExitStack() as stack:
        partner: Partner
        if namespace.url is not None:
            if extra := sorted(set(options) - {"model"}):
                raise UsageError(
                    f"--{extra[0].replace('_', '-')} is an option of a model here, not of a server"
                )
            key = namespace.api_key or os.environ.get("WINNOW_API_KEY")
            partner = _Remote(namespace.url, key, options.get("model"), typed)
        else:
            options = engine.usual_model(namespace, options)
            llm = stack.enter_context(engine.open_llm(options))
            _require_template(llm, options)
            partner = _Local(llm, engine.conversation_params(llm, _DEFAULTS, typed))
        # What a program pipes in is its own to keep.
        kept = namespace.session is not None or namespace.goes_on or sys.stdin.isatty()
        log = ConversationLog(namespace.session) if kept else None
        partner.session = namespace.session
        for line in (*partner.introduction(), "winnow: /help lists commands, /exit or Ctrl-D ends"):
            print(line, file=sys.stderr)
        resumes = namespace.session is not None or namespace.goes_on
        return _talk(partner, namespace.system, text, images, log, resumes=resumes)


def _require_template(llm: Any, options: Mapping[str, Any]) -> None:
    own, model = getattr(llm.tokenizer, "chat_template", None), options.get("model")
    # The file of a processor, where there is no template of the tokenizer.
    if model is not None and not own and not any(engine.model_path(options).glob("*chat_template*")):
        raise UnsupportedModelError(
            f"model: {model} has no chat template, as base models have none: `winnow generate` continues a text"
        )


def _talk(
    partner: Partner,
    system: str | None,
    document: str | None,
    images: list[str],
    log: ConversationLog | None,
    *,
    resumes: bool,
) -> int:
    first: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    messages = list(first)
    if resumes and log is not None and (kept := log.load()):
        _resume(kept, system)
        messages = kept
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # else a line that is no UTF-8 takes others with it
    failed = asked_to_end = False  # what a program that pipes questions in must learn; by a first Ctrl-C
    while True:
        try:
            text = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            text = "/exit"
        except KeyboardInterrupt:
            if asked_to_end or not sys.stdin.isatty():
                raise
            print("\nwinnow: Ctrl-C again ends, as Ctrl-D and /exit do", file=sys.stderr)
            asked_to_end = True
            continue
        asked_to_end = False
        command = text.strip()
        if command == "/exit":
            return int(failed and not sys.stdin.isatty())
        if command == "/reset":
            messages = list(first)
            if log is not None:
                log.save(messages)
        elif command == "/help":
            print(_HELP, file=sys.stderr)
        elif command == "/stats":
            print(*partner.stats(), sep="\n", file=sys.stderr)
        elif command.startswith("/file "):
            with _complaining():
                document = read_prompt(None, command[6:].strip())
                print(f"winnow: {len(document):,} characters go before the next question", file=sys.stderr)
        elif command.startswith("/image "):
            with _complaining():
                images.append(_image_uri(command[7:].strip()))
                print(f"winnow: {len(images)} images go before the next question", file=sys.stderr)
        elif text.startswith("/"):
            name = command.split()[0]
            _complain(f"there is no command {name}; {known_names(name, _COMMANDS)}")
        elif command:
            asked = text if document is None else f"{document}\n\n{text}"
            if _answer(partner, messages, asked, images):
                document, images = None, []
            else:
                failed = True
            if log is not None:
                log.save(messages)


def _image_uri(path: str) -> str:
    return f"data:;base64,{base64.b64encode(read_image(path)).decode()}"


def _resume(kept: list[Message], system: str | None) -> None:
    """Show what was said last. Raises UsageError where the system message would change it."""
    given = kept[0]["content"] if kept[0]["role"] == "system" else None
    if system is not None and system != given:
        raise UsageError("--system cannot change in a session that is resumed: /reset it, or name another")
    turns = sum(message["role"] == "user" for message in kept)
    print(f"winnow: resumed after {turns} questions; the last was", file=sys.stderr)
    for message in kept[-2:]:
        said = message["content"]
        if not isinstance(said, str):
            said = " ".join("[image]" if part["type"] == "image_url" else part["text"] for part in said)
        print("> " * (message["role"] == "user") + said, file=sys.stderr)


def _answer(partner: Partner, messages: list[Message], text: str, images: Sequence[str] = ()) -> bool:
    """Show the answer to a question and add both to `messages`; where there is none, add nothing and return False."""
    answer, began, first = "", time.monotonic(), None
    try:
        require_utf8("a question", text)
        parts = [{"type": "image_url", "image_url": {"url": each}} for each in images]
        content = [*parts, {"type": "text", "text": text}] if parts else text
        question: Message = {"role": "user", "content": content}
        with closing(partner.answer([*messages, question])) as pieces:  # type: ignore[type-var]
            for piece in pieces:
                first = first or time.monotonic()
                answer += piece
                print(piece, end="", flush=True)
    except KeyboardInterrupt:
        pass  # what was said stays said
    except WinnowError as error:
        _complain(str(error))
        return False
    print(flush=True)
    if first is not None and partner.num_tokens is not None:
        ended = time.monotonic()
        since = first if ended - first > 0.1 else began  # an answer in one piece has no speed of its own
        rate = partner.num_tokens[1] / max(ended - since, 1e-3)
        line = f"{partner.num_tokens[1]} tokens, {rate:.0f} tokens/s, first after {first - began:.2f} s"
        line = ", ".join((line, *partner.stats()[:1]))
        print(f"\x1b[90m{line}\x1b[0m" if sys.stderr.isatty() else f"winnow: {line}", file=sys.stderr)
    messages += [question, {"role": "assistant", "content": answer}]
    return True


def _complain(message: str) -> None:
    print("winnow: error:", " ".join(message.split()), file=sys.stderr)


@contextmanager
def _complaining() -> Iterator[None]:
    try:
        yield
    except WinnowError as error:
        _complain(str(error))


class _Local(Partner):
    def __init__(self, llm: Any, params: Any) -> None:
        self._llm, self._params, self._speed_shown = llm, params, False

    def introduction(self) -> list[str]:
        model = self._llm.config.model.model
        name = "the demo model" if model is None else Path(model).resolve().name
        return engine.engine_lines(self._llm, name)

    def answer(self, messages: list[Message]) -> Iterator[str]:
        shown, self.num_tokens = 0, None
        outputs: Any = self._llm.stream_chat(messages, self._params, session_id=self.session)
        shown_before, self._speed_shown = self._speed_shown, True
        with closing(outputs if shown_before else engine.with_speed(self._llm, outputs)) as answers:
            for output in answers:
                output.raise_for_error()
                self.num_tokens = len(output.prompt_token_ids), len(output.outputs[0].token_ids)
                text = output.outputs[0].text
                yield text[shown:]
                shown = len(text)

    def stats(self) -> list[str]:
        stats, took = self._llm.stats(), resident_bytes()
        memory = stats.kv_bytes_used, stats.kv_bytes_peak, stats.kv_bytes_budget
        now, most, whole = map(format_bytes, memory)
        return [
            *([] if took is None else [f"{format_bytes(took)} of memory"]),
            f"conversation: {sum(self.num_tokens or (0,))} of {self._llm.max_model_len} tokens of context",
            f"KV memory: {now} in use, at most {most} so far, of {whole}",
            f"computed so far: {stats.prompt_tokens} tokens of prompts, {stats.generated_tokens} of answers; "
            f"{stats.cached_tokens} more of prompts were there already",
        ]


class _Remote(Partner):
    def __init__(self, url: str, key: str | None, model: str | None, typed: dict[str, Any]) -> None:
        import httpx

        fault = f"--url must be the address of a server, as http://127.0.0.1:8000, got {url!r:.80}"
        if not url.startswith(("http://", "https://")):
            raise UsageError(fault)
        if not (key or "").isascii():
            raise UsageError("--api-key must be ASCII")
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        try:
            self._client = httpx.Client(
                base_url=url.rstrip("/").removesuffix("/v1"), headers=headers, timeout=600
            )
        except (httpx.InvalidURL, ValueError) as error:
            raise UsageError(f"{fault}: {error}") from None
        self._errors = httpx.HTTPError
        self._typed = typed
        self._body = _DEFAULTS | typed | ({} if model is None else {"model": str(model)})

    def introduction(self) -> list[str]:
        try:
            models = self._client.get("/v1/models").json()["data"]
            recommended = models[0].get("sampling_defaults")  # a server of another kind does not say
            self._body |= (recommended or {}) | self._typed
            names = f"{models[0]['id']}, context {models[0].get('max_model_len', '?')} tokens"
        except (self._errors, ValueError, LookupError, TypeError):  # the first question will say why
            names = "a server"
        return [f"winnow: {self._body.get('model', names)} at {self._client.base_url}"]

    def answer(self, messages: list[Message]) -> Iterator[str]:
        session = {} if self.session is None else {"session_id": self.session}
        usage = {"stream": True, "stream_options": {"include_usage": True}}
        body, self.num_tokens = {**self._body, **session, "messages": messages, **usage}, None
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
                        if spent := chunk.get("usage"):
                            self.num_tokens = spent["prompt_tokens"], spent["completion_tokens"]
                        for choice in chunk["choices"]:
                            ended = ended or choice.get("finish_reason") is not None
                            yield choice["delta"].get("content") or ""
        except self._errors as error:
            raise UsageError(f"the server does not answer: {error}") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"the server's answer is no chat of OpenAI's API: {error!r:.80}") from None
        if not ended:
            raise UsageError("the server's answer breaks off, or is no chat of OpenAI's API")

    def stats(self) -> list[str]:
        return [
            f"{sum(self.num_tokens or (0,))} tokens of context",
            f"the server's page: {self._client.base_url}",
        ]


def _message(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:300]
