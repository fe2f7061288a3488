"""`winnow documents`: a folder of texts, computed ahead."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from winnow.cli.flags.engine import add_engine_flags, engine_options, open_llm, usual_model
from winnow.cli.prompt import read_prompt
from winnow.config import PREFIX_DISK, EvictionConfig
from winnow.errors import UsageError
from winnow.sampling import SamplingParams
from winnow.storage.folders import SavedDirectory
from winnow.values.reuse import DOCUMENTS, EXACT, LIBRARY, LIBRARY_FOLDER
from winnow.values.units import format_bytes

if TYPE_CHECKING:
    from winnow.llm import LLM

DESCRIPTION = """\
Compute the KVs of every .txt and .md file of a folder, and keep them there in .winnow. Prompts that
mark such a text as a document then take it from there, wherever it stands in them, but for the share
that is computed again (--reuse-share). What is there already, and whole, is not computed again.
"""
EPILOG = """\
examples:
  winnow documents add passages --model models/SmolLM2-135M-Instruct.Q4_1.gguf
  winnow documents add passages --compression 4 --eviction winnow-keys
  winnow serve models/SmolLM2-135M-Instruct.Q4_1.gguf --documents passages

With --compression N a text keeps an Nth of its KVs, chosen without knowing any question, in each
head: nothing of it is computed again, and it takes as much less of the disk and of memory.

The same model, number format and --kv-cache-dtype find them. One text is one document: cut long
ones into the passages that prompts show.
"""
_UNUSED = (
    *(
        "documents",
        "reuse",
        "reuse_share",
        "reuse_separator",
        "prefix_store",
        "enable_prefix_caching",
        *PREFIX_DISK,
    ),
    *(each.name for each in fields(EvictionConfig) if each.name not in ("eviction", "compression")),
)
_NO_LIMIT = 2**62


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "winnow documents add FOLDER [options]"
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument("action", choices=("add",), help="compute the texts that are not there yet")
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="of texts, searched with its folders")
    parser.add_argument(
        "--head", metavar="TEXT", help="before each; left out: what the chat template has before a message"
    )
    add_engine_flags(parser, skip=_UNUSED)


def execute(namespace: argparse.Namespace) -> int:
    options, folder = engine_options(namespace), namespace.folder
    paths = [path for path in sorted(folder.rglob("*")) if path.suffix in (".txt", ".md") and path.is_file()]
    if not paths:
        raise UsageError(f"FOLDER must be a directory with .txt or .md files, got {str(folder)!r}")
    texts = [read_prompt(None, str(path)) for path in paths]
    out = folder / LIBRARY_FOLDER
    out.mkdir(0o700, parents=True, exist_ok=True)
    saved = SavedDirectory(out)
    for name in saved.delete_damaged():
        print(f"winnow: {out / name} is damaged, and is deleted", file=sys.stderr)
    compresses = options.get("compression") is not None
    if compresses:
        options |= {"kv_floor": 1, "reuse": DOCUMENTS}
    else:
        options |= {"prefix_cache_dir": out, "prefix_cache_disk": _NO_LIMIT, "reuse": DOCUMENTS}
    with open_llm(usual_model(namespace, options, or_demo=True)) as llm:
        from winnow.prompt.chat import document_tokens

        if llm.tokenizer is None:
            model = options.get("model")
            raise UsageError(f"model: {model} has no tokenizer, and texts cannot be read without")
        if namespace.head is not None:
            head = llm.tokenize(namespace.head).token_ids
        else:
            head = document_tokens(llm.tokenizer, "", chat=bool(llm.tokenizer.chat_template))
        plain = [llm.tokenize(text, add_special_tokens=False).token_ids for text in texts]
        most = llm.max_model_len - len(head) - 1
        for path, token_ids in zip(paths, plain, strict=True):
            if len(token_ids) > most:
                raise UsageError(f"{path} must have at most {most} tokens, got {len(token_ids)}: cut it up")
        every = [head + token_ids for token_ids in plain]
        if compresses:
            return _compress(llm, every, len(head), saved, out)
        new = [each for each in every if not llm.holds_on_disk(each, tenant=LIBRARY)]
        # Texts that share a part are computed whole, each for itself.
        params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False, reuse=EXACT)
        outputs = llm.generate(new, params, tenant=LIBRARY) if new else []
        failed = [each.error for each in outputs if each.error]
        llm.write_prefixes()
        lost = sum(not llm.holds_on_disk(each, tenant=LIBRARY) for each in every)
    nbytes = sum(path.stat().st_size for path in out.iterdir())
    print(f"{folder}: {len(new)} of {len(every)} texts computed, {format_bytes(nbytes)} in {out}")
    if lost:
        print(f"winnow: {lost} were not written: {', '.join(failed) or 'see the warnings'}", file=sys.stderr)
    return int(lost > 0)


def _compress(llm: "LLM", every: Sequence[list[int]], head: int, saved: SavedDirectory, out: Path) -> int:
    """Save what eviction leaves of prompts, their first `head` tokens whole."""
    params = SamplingParams(protect=((0, head),) if head else (), reuse=EXACT)
    new, whole, nbytes = 0, 0, 0
    for token_ids in saved.unsaved(every, LIBRARY, llm.config.cache.block_size):
        nbytes += llm.save_prefix(token_ids, out, params, tenant=LIBRARY).stat().st_size
        new, whole = new + 1, whole + llm.kv_bytes(len(token_ids))
        print(f"winnow: {new} compressed", end="\r", file=sys.stderr)
    sizes = f"{format_bytes(nbytes)} of {format_bytes(whole)}"
    print(f"{out.parent}: {new} of {len(every)} texts compressed, {sizes} in {out}")
    return 0
