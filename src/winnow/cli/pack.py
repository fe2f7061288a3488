"""`winnow pack`: a model as this processor reads it, in a directory of its own."""

import argparse
import time
from pathlib import Path

from winnow.cli.flags.engine import COMMON, silence_transformers
from winnow.cli.flags.options import add_flags, given
from winnow.config import ModelConfig
from winnow.values.units import format_bytes

DESCRIPTION = """\
Load a model, arrange its weights as the kernels of this processor read them, and write that to DIR.

Whatever takes a model takes DIR too (--model DIR). It starts without transformers' model classes:
in a second or two, with a hundred MiB less; and its weights stay in the file, so processes that
run it at the same time share them. DIR suits processors of this kind, --dtype and --weight-dtype
alone; where it does not, Winnow says so. Answers are the same.

Models of Llama's kind can be packed (Llama, Mistral, Qwen 2 and 3, Phi 3, Gemma 3); others are refused by name.
"""
EPILOG = """\
examples:
  winnow pack packed-model --model path/to/model --dtype bfloat16
  winnow generate "The capital of France is" --model packed-model
  winnow pack packed-int8 --model path/to/model --dtype bfloat16 --weight-dtype int8
"""
_SETTLED = (
    "engine", "tensor_parallel_size", "device", "load_format", "attention_backend", "optimize", "model_cache",
    "seed",
)  # fmt: skip


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "winnow pack DIR [--model DIR] [options]"
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument("out", metavar="DIR", type=Path, help="the directory to write, new or empty")
    add_flags(parser, ModelConfig, "model", _SETTLED, common=(*COMMON, "weight_dtype"))


def execute(namespace: argparse.Namespace) -> int:
    config = ModelConfig(**given(namespace, ModelConfig))
    silence_transformers()
    from winnow.models import pack_model

    start = time.monotonic()
    pack_model(config, namespace.out)
    size = sum(file.stat().st_size for file in namespace.out.iterdir())
    print(f"{namespace.out}: {format_bytes(size)}, packed in {time.monotonic() - start:.1f} s")
    return 0
