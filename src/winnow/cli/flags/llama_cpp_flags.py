"""Winnow's names of llama.cpp's flags, for the message about an unknown flag."""

import argparse
from collections.abc import Mapping

_SIZE = "--kv-memory SIZE holds the KVs of all requests, such as --kv-memory 2GiB"
FLAGS: Mapping[str, str] = {
    **dict.fromkeys(("-c", "--ctx-size"), "--max-model-len"),
    **dict.fromkeys(("-n", "--n-predict", "--predict"), "--max-tokens"),
    **dict.fromkeys(("-t", "--threads-batch", "-tb"), "--threads"),
    **dict.fromkeys(("-p", "--prompt"), "PROMPT, without a flag, of winnow generate"),
    **dict.fromkeys(("-f", "--file"), "`winnow generate - < FILE`, or winnow run for a file of prompts"),
    **dict.fromkeys(("-sys", "--system-prompt"), "--system of winnow chat"),
    **dict.fromkeys(("-b", "--batch-size"), "--max-num-batched-tokens"),
    **dict.fromkeys(("-ub", "--ubatch-size"), "--prefill-chunk"),
    **dict.fromkeys(("-np", "--parallel"), "--max-num-seqs"),
    **dict.fromkeys(("-ctk", "-ctv", "--cache-type-k", "--cache-type-v"), "--kv-cache-dtype k=int8,v=int4"),
    **dict.fromkeys(("-s",), "--seed"),
    **dict.fromkeys(("--temp",), "--temperature"),
    **dict.fromkeys(("--repeat-penalty",), "--repetition-penalty"),
    **dict.fromkeys(("-r", "--reverse-prompt"), "--stop"),
    **dict.fromkeys(("-j", "--json-schema", "--grammar"), "--structured-outputs of winnow generate"),
    **dict.fromkeys(("--alias", "-a"), "--served-model-name"),
    **dict.fromkeys(("--cache-ram", "-cram"), _SIZE),
    **dict.fromkeys(
        ("-fa", "--flash-attn", "-cb", "--cont-batching", "--mlock", "--no-mmap", "--jinja", "--no-warmup"),
        "not needed, leave it out",
    ),
}


def add_llama_cpp_flags(parser: argparse.ArgumentParser, *, device: bool = True) -> None:
    """Declare `--hf-file NAME`, a file of the model's repository, and, if `device`, `-ngl 0`, which is --device cpu;
    help shows neither."""
    names, hidden = ("-ngl", "--n-gpu-layers", "--gpu-layers"), argparse.SUPPRESS
    parser.add_argument("--hf-file", "-hff", default=hidden, help=hidden)
    if device:
        parser.add_argument(*names, dest="device", type=_device, default=hidden, help=hidden)


def _device(layers: str) -> str:
    if layers == "0":
        return "cpu"
    raise argparse.ArgumentTypeError(
        f"must be 0, which is --device cpu, got {layers!r}; --device cuda takes all layers"
    )


def llama_cpp_hint(flag: str) -> str:
    """Return the end of the message about an unknown flag that is llama.cpp's; empty: it is not."""
    ours = FLAGS.get(flag.partition("=")[0])
    return f"; llama.cpp's flag is in Winnow: {ours}" if ours else ""
