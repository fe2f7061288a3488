"""`winnow chat`: a conversation with a model in the terminal."""

import argparse
import base64
import io
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from winnow.cli.flags.engine import (
    add_engine_flags,
    add_sampling_flags,
    conversation_params,
    engine_options,
    model_path,
    open_llm,
    sampling_options,
)
from winnow.cli.flags.options import add_model_argument
from winnow.cli.prompt import read_image, read_prompt, require_utf8
from winnow.cli.screen.banner import engine_lines
from winnow.errors import UnsupportedModelError, WinnowError, known_names
from winnow.process.resources import resident_bytes
from winnow.values.units import format_bytes

DESCRIPTION = """\
Talk to a model in the terminal. A server has the same as a page, at /chat.

/file PATH puts a text before the next question, /image PATH an image, /stats shows what the conversation takes, /reset
begins a new one, /exit or Ctrl-D ends, /help lists these. Ctrl-C stops an answer.
"""
EPILOG = """\
examples:
  winnow chat path/to/model
  winnow chat path/to/model --file article.txt
  winnow chat path/to/vision-model --image photo.jpg
  winnow chat --system "Answer in one sentence." --eviction winnow --compression 4
"""
_HELP = """\
/file PATH  put a text before the next question
/image PATH put an image before it
/stats      tokens and memory of the conversation
/reset      begin a new conversation
/exit       end, as Ctrl-D does
/help       this list
Ctrl-C stops an answer. A question that begins with / needs a space before it."""
_COMMANDS = ("/file", "/image", "/stats", "/reset", "/exit", "/help")
# Metadata stands at the beginning of a GGUF file, and with the largest vocabularies takes less.
_METADATA_BYTES = 2**26
_NOT_SHOWN = ("n", "logprobs", "prompt_logprobs")
_DEFAULTS = {"max_tokens": 1024}


Message = dict[str, Any]


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.usage = "winnow chat [MODEL] [options]"
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    add_model_argument(parser)
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument("--file", metavar="FILE", help="put this text before the first question")
    parser.add_argument(
        "--image",
        metavar="FILE",
        action="append",
        default=[],
        help="put this image before the first question; may be repeated",
    )
    add_engine_flags(parser)
    add_sampling_flags(parser, "sampling", skip=_NOT_SHOWN, defaults=_DEFAULTS)


def execute(namespace: argparse.Namespace) -> int:
    """Talk, and return the exit code."""
    typed, options = sampling_options(namespace), engine_options(namespace)
    if namespace.system is not None:
        require_utf8("--system", namespace.system)
    text = None if namespace.file is None else read_prompt(None, namespace.file)
    images = [_image_uri(each) for each in namespace.image]
    if options.get("model") is not None:
        _require_template(model_path(options))
    with open_llm(options) as llm:
        partner = Partner(llm, conversation_params(llm, _DEFAULTS, typed))
        for line in (*partner.introduction(), "winnow: /help lists commands, /exit or Ctrl-D ends"):
            print(line, file=sys.stderr)
        return _talk(partner, namespace.system, text, images)


def _require_template(path: Path) -> None:
    """Refuse a model without a chat template before it is loaded.

    Raises:
        UnsupportedModelError: it has none.
    """
    if path.is_file():
        with path.open("rb") as file:
            found = b"tokenizer.chat_template" in file.read(_METADATA_BYTES)
    else:
        found = any(path.glob("*chat_template*")) or any(
            b"chat_template" in file.read_bytes()
            for file in path.glob("*.json")
            if file.name != "tokenizer.json"
        )
    if not found:
        raise UnsupportedModelError(
            f"model: {path} has no chat template, as base models have none: `winnow generate` continues a text"
        )


def _talk(partner: "Partner", system: str | None, document: str | None, images: list[str]) -> int:
    first: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    messages = list(first)
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
        elif command == "/help":
            print(_HELP, file=sys.stderr)
        elif command == "/stats":
            print(*partner.stats(), sep="\n", file=sys.stderr)
        elif command.startswith("/file "):
            try:
                document = read_prompt(None, command[6:].strip())
                print(f"winnow: {len(document):,} characters go before the next question", file=sys.stderr)
            except WinnowError as error:
                _complain(str(error))
        elif command.startswith("/image "):
            try:
                images.append(_image_uri(command[7:].strip()))
                print(f"winnow: {len(images)} images go before the next question", file=sys.stderr)
            except WinnowError as error:
                _complain(str(error))
        elif text.startswith("/"):
            _complain(
                f"there is no command {command.split()[0]}; {known_names(command.split()[0], _COMMANDS)}"
            )
        elif command:
            asked = text if document is None else f"{document}\n\n{text}"
            if _answer(partner, messages, asked, images):
                document, images = None, []
            else:
                failed = True


def _image_uri(path: str) -> str:
    return f"data:;base64,{base64.b64encode(read_image(path)).decode()}"


def _answer(partner: "Partner", messages: list[Message], text: str, images: Sequence[str] = ()) -> bool:
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
        rate = partner.num_tokens[1] / max(time.monotonic() - first, 1e-3)
        line = f"{partner.num_tokens[1]} tokens, {rate:.0f} tokens/s, first after {first - began:.2f} s"
        line = ", ".join((line, *partner.stats()[:1]))
        print(f"\x1b[90m{line}\x1b[0m" if sys.stderr.isatty() else f"winnow: {line}", file=sys.stderr)
    messages += [question, {"role": "assistant", "content": answer}]
    return True


def _complain(message: str) -> None:
    print("winnow: error:", " ".join(message.split()), file=sys.stderr)


class Partner:
    """Model that answers.

    Attributes:
        num_tokens: of the last prompt, and of its answer; None: there was none.
    """

    def __init__(self, llm: Any, params: Any) -> None:
        self.num_tokens: tuple[int, int] | None = None
        self._llm, self._params = llm, params

    def introduction(self) -> list[str]:
        """Return lines that say which model it is."""
        model = self._llm.config.model.model
        name = "the demo model (--model names another)" if model is None else Path(model).resolve().name
        return engine_lines(self._llm, name)

    def answer(self, messages: list[Message]) -> Iterator[str]:
        """Yield the pieces of an answer."""
        shown, self.num_tokens = 0, None
        with closing(self._llm.stream_chat(messages, self._params)) as outputs:
            for output in outputs:
                output.raise_for_error()
                self.num_tokens = len(output.prompt_token_ids), len(output.outputs[0].token_ids)
                text = output.outputs[0].text
                yield text[shown:]
                shown = len(text)

    def stats(self) -> list[str]:
        """Return lines on what the conversation takes; the first has a few words."""
        stats, took = self._llm.stats(), resident_bytes()
        now, most, whole = map(
            format_bytes, (stats.kv_bytes_used, stats.kv_bytes_peak, stats.kv_bytes_budget)
        )
        return [
            *([] if took is None else [f"{format_bytes(took)} of memory"]),
            f"conversation: {sum(self.num_tokens or (0,))} of {self._llm.max_model_len} tokens of context",
            f"KV memory: {now} in use, at most {most} so far, of {whole}",
            f"computed so far: {stats.prompt_tokens} tokens of prompts, {stats.generated_tokens} of answers; "
            f"{stats.cached_tokens} more of prompts were there already",
        ]
