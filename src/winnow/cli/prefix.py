"""`winnow prefix`: compressed documents on disk."""

import argparse
import sys
from pathlib import Path

from winnow.cli.flags.engine import add_engine_flags, check_written, engine_options, open_llm
from winnow.cli.loading import show_loading
from winnow.cli.prompt import read_prompt
from winnow.config import PREFIX_DISK
from winnow.errors import UsageError
from winnow.values.units import format_bytes

DESCRIPTION = """\
Save what eviction leaves of a document, computed before any question is known. Prompts that begin
with the document then start from there, in any process that opens the same model with
--prefix-store DIR: nothing of the document is computed again, no replay either.
"""
EPILOG = """\
examples:
  winnow prefix save handbook.txt -o prefixes --eviction kvzip --compression 8
  winnow run questions.jsonl -o answers.jsonl --prefix-store prefixes --eviction kvzip --compression 8

A prompt takes what was saved if its first tokens are the document's, and policy and amount are the
same; the longest saved document counts. A line with a "context_tokens" of its own keeps to it.
"""
_UNUSED = ("prefix_store", "enable_prefix_caching", *PREFIX_DISK)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "winnow prefix save DOC -o DIR [options]"
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument("action", choices=("save",), help="compress a document and write what is left")
    parser.add_argument("document", metavar="DOC", help="a text file; - reads standard input")
    parser.add_argument(
        "-o", "--out", metavar="DIR", type=Path, required=True, help="directory to write to, made if missing"
    )
    parser.add_argument(
        "--chat", action="store_true", help="the prompts will be messages in the model's chat template"
    )
    parser.add_argument(
        "--tenant", metavar="NAME", help="whose requests alone may find it; left out: those without"
    )
    add_engine_flags(parser, skip=_UNUSED)


def execute(namespace: argparse.Namespace) -> int:
    options = engine_options(namespace)
    out: Path = namespace.out
    check_written({"--out": out}, options)
    text = read_prompt(None, namespace.document)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write --out {out}: {error.strerror}") from error
    with open_llm(options) as llm:
        if llm.tokenizer is None:
            raise UsageError(
                f"model: {options.get('model')} has no tokenizer, and DOC cannot be read without one"
            )
        from winnow.prompt.chat import document_tokens

        token_ids = document_tokens(llm.tokenizer, text, chat=namespace.chat)
        if not token_ids:
            raise UsageError("DOC must hold at least 1 token")
        name = f"{len(token_ids)} tokens"
        with show_loading(name, sys.stderr, doing="compressing", done="compressed", every=2.0):
            path = llm.save_prefix(token_ids, out, tenant=namespace.tenant)
        whole, saved = llm.kv_bytes(len(token_ids)), path.stat().st_size
    print(f"{path}: {len(token_ids)} tokens in {format_bytes(saved)}; uncompressed {format_bytes(whole)}")
    print("prompts that begin with them start from it under the same policy and amount", file=sys.stderr)
    return 0
