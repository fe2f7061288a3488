"""`winnow inspect`: which tokens of one prompt survive eviction, as a page to look at."""

import argparse
import json
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from winnow.cli.flags import engine
from winnow.cli.flags.paths import STANDARD, require_distinct, require_writable, write_text
from winnow.cli.prompt import add_image_flag, read_image, read_prompt
from winnow.cli.screen.terminal import facts_table, show
from winnow.errors import UsageError
from winnow.sampling import SamplingParams
from winnow.values.json_values import dump_json
from winnow_inspect import Inspection

DESCRIPTION = """\
Answer one prompt and show which of its tokens survive eviction, in which layer and head.

The page is one HTML file that opens in any browser: the text, each token coloured by the share
of rows that hold it, as a whole or for a single layer and head. A row is one KV head of one layer.
"""
EPILOG = """\
examples:
  winnow inspect --file article.txt --eviction snapkv --compression 8
  winnow inspect --file article.txt --eviction kv-compress --kv-budget 64 -o page.html --json kept.json
  winnow inspect "What stands on the sign?" --image photo.jpg --model path/to/vision-model --compression 8
  cat article.txt | winnow inspect - --eviction h2o --max-tokens 100
Short prompts keep everything unless --kv-budget or --kv-floor is below their length.
"""

# Policies are compared on the same answer.
_DEFAULTS = {"max_tokens": 64, "temperature": 0.0}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "winnow inspect (PROMPT | --file FILE) [-o PAGE.html] [options]"
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument(
        "prompt", metavar="PROMPT", nargs="?", help="the prompt; - reads it from standard input"
    )
    parser.add_argument("--file", metavar="FILE", help="read the prompt from this file; - for standard input")
    add_image_flag(
        parser,
        "an image before the prompt, which then is a question in the model's chat template; may be repeated",
    )
    page, text = Path("inspect.html"), "the page to write; - for standard output"
    parser.add_argument("-o", "--output", metavar="PAGE.html", type=Path, default=page, help=text)
    parser.add_argument(
        "--json", metavar="OUT.json", type=Path, help="write token indices by layer and head as JSON too"
    )
    engine.add_engine_flags(parser)
    engine.add_sampling_flags(parser, "sampling", skip=engine.OF_SEVERAL, defaults=_DEFAULTS)


def execute(namespace: argparse.Namespace) -> int:
    options = engine.engine_options(namespace)
    typed = engine.sampling_options(namespace)
    prompt: Any = read_prompt(namespace.prompt, namespace.file)
    if namespace.image:
        images = [{"type": "image", "image": read_image(each)} for each in namespace.image]
        prompt = [{"role": "user", "content": [*images, {"type": "text", "text": prompt}]}]
    named = (("--output", namespace.output), ("--json", namespace.json))
    written = [(name, path) for name, path in named if path is not None and str(path) != STANDARD]
    read = [] if namespace.file is None else [("--file", Path(namespace.file))]
    require_distinct(written, [*read, *engine.model_files(options)])
    for _, path in written:
        if path.exists() and not path.is_file():
            raise UsageError(f"cannot write {path}: it is no regular file")
        require_writable(path, str(path))
    with engine.open_llm(options) as llm:
        params = SamplingParams.from_mapping(dict(llm.sampling_defaults) | _DEFAULTS | typed)
        inspection = llm.inspect(prompt, params)
    _write(namespace.output, inspection.to_html())
    if namespace.json is not None:
        _write(namespace.json, dump_json(inspection.to_json(), ensure_ascii=False) + "\n")
    printed = any(str(path) == STANDARD for path in (namespace.output, namespace.json))
    # As JSON writes it: a terminal obeys some of the characters that a model may say.
    facts = inspection.facts() | {"text": json.dumps(inspection.answer, ensure_ascii=False)}
    show(facts_table("winnow inspect", facts), "", _rows(inspection), "", stderr=printed)
    for _, path in written:
        # A path that is broken into lines could not be copied.
        show(Text(f"written: {path}"), stderr=printed, soft_wrap=True)
    return 0


def _write(path: Path, text: str) -> None:
    if str(path) == STANDARD:
        print(text, end="")
    else:
        write_text(path, text, str(path))


def _rows(inspection: Inspection) -> Table:
    """Return KVs of each layer, head by head, at both moments, and what biases add to them."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("layer", justify="right")
    table.add_column("KVs of its heads after the prompt")
    table.add_column("at the end of the answer")
    moments = (inspection.after_prompt.labels, inspection.at_end.labels)
    for layer, labels in enumerate(zip(*moments, strict=True)):
        table.add_row(str(layer), *map(" ".join, labels))
    return table
