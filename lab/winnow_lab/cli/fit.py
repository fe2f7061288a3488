"""`winnow fit`: learn to predict which KVs a replay would keep, and save that beside the model."""

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from winnow.cli.flags.engine import COMMON, model_exists, open_llm, silence_transformers
from winnow.cli.flags.options import add_flags, given
from winnow.cli.flags.paths import require_distinct, require_writable
from winnow.config import ModelConfig
from winnow.errors import UsageError
from winnow.models.load.hub import is_repository, locate_model
from winnow.values.checks import check_integer
from winnow.values.units import format_bytes

DESCRIPTION = """\
Learn to predict KVzip's scores for one model, on this machine and in minutes.

KVzip asks the model to repeat a context and keeps the KVs that the repetition looks at, which costs
more than computing the context. Here that is done once, for some texts; a small function of what
attention is computed from learns what it says. The policies `fitted` and `fitted-pd` keep KVs by
it, without a repetition, within long prompts and while decoding too.

TEXTS are files that look like your prompts: .jsonl files with a field "text" (or "prompt") in each
line, any other file is one text. Without any, prose, articles, lists, code and filler that ship
with Winnow are taken, with names, numbers and keys hidden in them.
"""
EPILOG = """\
examples:
  winnow fit model.gguf --dtype bfloat16
  winnow fit path/to/model prompts.jsonl report.txt --tokens 2048
  winnow run prompts.jsonl -o answers.jsonl --model path/to/model --eviction fitted
"""
_SETTLED = ("engine", "tensor_parallel_size", "load_format", "generation_config")
_LEAST_TOKENS = 64


@dataclass(frozen=True)
class FitOptions:
    """Amounts to learn from.

    Attributes:
        tokens: tokens of a piece of text, each computed and repeated.
        max_texts: pieces of text at most; one of 4 judges what the others taught.
        hidden: units of the network of each layer; 0: a linear function.
        epochs: times that the network looks at each KV.
        chat: put texts into the model's chat template, where it has one.
        kv_memory: for the pieces, one at a time.
    """

    tokens: int = 1024
    max_texts: int = 32
    hidden: int = 32
    epochs: int = 12
    chat: bool = True
    kv_memory: str = "1GiB"

    def __post_init__(self) -> None:
        for name, low in {"tokens": _LEAST_TOKENS, "max_texts": 2, "hidden": 0, "epochs": 1}.items():
            check_integer(name, getattr(self, name), low)


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.usage = "winnow fit MODEL [TEXTS ...] [-o FILE] [options]"
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument(
        "words",
        metavar="MODEL [TEXTS ...]",
        nargs="*",
        help="the model, unless --model names it, and files to learn from",
    )
    parser.add_argument(
        "-o",
        "--out",
        metavar="FILE",
        type=Path,
        help="what to write (default: kv_scores.safetensors in the model's directory, or "
        "NAME.kv-scores.safetensors beside NAME.gguf, where the policies look for it)",
    )
    add_flags(parser, FitOptions, "fit")
    add_flags(parser, ModelConfig, "model", _SETTLED, common=COMMON)


def execute(namespace: argparse.Namespace) -> int:
    """Fit, write, print, and return the exit code."""
    options = FitOptions(**given(namespace, FitOptions))
    engine: dict[str, Any] = given(namespace, ModelConfig)
    texts = [Path(word) for word in namespace.words]
    if "model" not in engine:
        if not texts:
            raise UsageError("the following arguments are required: MODEL (see `winnow fit --help`)")
        engine["model"], texts = namespace.words[0], texts[1:]
    config = ModelConfig(**engine)
    model_exists(config.model)
    for path in texts:
        if not path.is_file():
            raise UsageError(f"TEXTS: there is no file {path}")
    if namespace.out is None and is_repository(config.model):
        raise UsageError(f"--out is needed: {config.model} lies in the Hub's cache, which is not written to")
    silence_transformers()
    from winnow.eviction.predictor import predictor_path

    out: Path = namespace.out or predictor_path(locate_model(config))
    require_distinct([("--out", out)], [("TEXTS", path) for path in texts])
    require_writable(out, "--out")
    return _fit(engine, options, texts, out)


def _fit(engine: dict[str, Any], options: FitOptions, paths: list[Path], out: Path) -> int:
    from winnow_lab.fitting.fit import fit, write
    from winnow_lab.fitting.texts import cut, read_texts, require_texts, shipped_texts
    from winnow_lab.fitting.train import Training

    start = time.monotonic()

    def tell(line: str) -> None:
        print(f"winnow: {time.monotonic() - start:.0f} s: {line}", file=sys.stderr, flush=True)

    seed = engine.get("seed", ModelConfig().seed)
    texts = read_texts(paths) if paths else shipped_texts(options.max_texts, options.tokens, seed)
    require_texts(texts, paths, 1)
    with open_llm({**engine, "kv_memory": options.kv_memory}) as llm:
        if llm.tokenizer is None:
            raise UsageError(
                f"model: {engine['model']} has no tokenizer, and texts cannot be read without one"
            )
        chat = options.chat and bool(llm.tokenizer.chat_template)
        # Of texts of one's own all pieces are welcome, of those that ship one each: others begin elsewhere.
        most = options.max_texts
        pieces = (
            cut(llm.tokenizer, texts, options.tokens, most)
            if paths
            else [piece for text in texts for piece in cut(llm.tokenizer, [text], options.tokens, 1)]
        )
        require_texts(pieces, paths, 2)
        training = Training(hidden=options.hidden, epochs=options.epochs, seed=seed)
        done = fit(llm, pieces, training, chat=chat, on_progress=tell)
    write(done.predictor, out)
    quality = done.quality
    print(
        f"of what KVzip keeps, {quality.recall_4x:.2f} found at 4x (chance 0.25), {quality.recall_8x:.2f} at 8x "
        f"(chance 0.12); rank correlation {quality.correlation:.2f}"
    )
    took = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in done.seconds.items())
    size = format_bytes(out.stat().st_size)
    print(f"{out}: {size}, from {done.num_texts} texts, {done.num_kvs} KVs of each row; {took}")
    return 0
