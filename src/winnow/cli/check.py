"""`winnow check`: whether a model can be served here, and how far its answers are from its own code's."""

import argparse
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from winnow.cli.flags.engine import COMMON, model_exists, silence_transformers
from winnow.cli.flags.llama_cpp_flags import add_llama_cpp_flags
from winnow.cli.flags.options import add_flags, add_model_argument, given
from winnow.cli.screen.terminal import facts_table
from winnow.config import ModelConfig
from winnow.models.load.hub import locate_model
from winnow.values.units import format_bytes

if TYPE_CHECKING:
    from winnow.models import LoadedModel

DESCRIPTION = """\
Load a model as `winnow run` would, compare it with its own code, and print what was found.

Compared are the logits of a short random prompt, computed by transformers with the model's own
layers and by Winnow as it will run; and which tokens each layer sees at the end of the context.
A model that differs is refused by name, with exit code 2, here and wherever it is loaded.
"""
EPILOG = """\
examples:
  winnow check path/to/model
  winnow check org/name --dtype bfloat16
  winnow check path/to/model --load-format dummy     (a config.json is enough)
"""
_SETTLED = ("engine", "tensor_parallel_size", "verify_model", "generation_config", "model_cache", "seed")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "winnow check [MODEL] [options]"
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    add_model_argument(parser)
    add_llama_cpp_flags(parser)
    add_flags(parser, ModelConfig, "model", _SETTLED, common=COMMON)


def execute(namespace: argparse.Namespace) -> int:
    # What was kept of an earlier load was compared then.
    config = ModelConfig(**given(namespace, ModelConfig) | {"model_cache": False})
    model_exists(config.model)
    silence_transformers()
    from winnow.models import load_model

    loaded = load_model(config, own_code=True)
    Console().print(facts_table("winnow check", _facts(loaded) | _stored(locate_model(config))))
    return 0


def _stored(path: Path) -> dict[str, str]:
    if not path.is_file():
        return {}
    from winnow.models.load.gguf.file import GgufFile

    kinds = GgufFile.open(path).weight_kinds
    total = max(1, sum(kinds.values()))
    return {"stored as": ", ".join(f"{kind} ({100 * count / total:.1f} %)" for kind, count in kinds.items())}


def _facts(loaded: "LoadedModel") -> dict[str, str]:
    from winnow.eviction import PAPER_POOL
    from winnow.models.model.tokens import text_pool

    geometry, verified = loaded.geometry, loaded.verified
    facts = {
        "model": type(loaded.model).__name__,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "device": str(loaded.device),
        "layers": f"{geometry.num_layers}, of {geometry.num_query_heads} query heads and {geometry.num_kv_heads} KV "
        f"heads of {geometry.head_dim}",
    }
    if states := geometry.states:
        nbytes, layers = sum(each.nbytes for each in states), len({each.layer for each in states})
        facts["states"] = f"{format_bytes(nbytes)} of each sequence, in {layers} layers, whatever its length"
    windows = Counter("none" if window is None else str(window) for window in geometry.windows)
    facts |= {
        "window": ", ".join(f"{window} ({count} layers)" for window, count in windows.items()),
        "context": f"{loaded.max_model_len} tokens",
        "pool=text": f"{text_pool(loaded.tokenizer)} tokens, for the text of {PAPER_POOL} in the papers",
        "computed by": _parts(loaded),
    }
    if loaded.unfused:
        facts["left to its own code"] = _unfused(loaded.unfused)
    if verified is None:
        facts["compared"] = "when it was packed"
    elif math.isnan(verified.difference):
        facts["compared"] = f"not: the model's own logits are no numbers in {facts['dtype']}; try bfloat16"
    else:
        facts["largest difference"] = (
            f"{verified.difference:.2g} of the logits' norm over {verified.num_tokens} tokens "
            f"({verified.tolerance:g} is allowed)"
        )
        facts["masks"] = (
            f"as the windows say, {verified.past} tokens back" if verified.past else "the model builds none"
        )
    facts["verdict"] = "served"
    return facts


def _unfused(reasons: Mapping[int, str]) -> str:
    layers: dict[str, list[str]] = {}
    for layer, reason in reasons.items():
        layers.setdefault(reason, []).append(str(layer))
    return "; ".join(f"layers {', '.join(numbers)}: {reason}" for reason, numbers in layers.items())


def _parts(loaded: "LoadedModel") -> str:
    model = loaded.forward_model
    counts = Counter(
        kind for module in model.modules() if "Linear" in (kind := type(module).__name__) or "Fused" in kind
    )
    parts = ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
    return f"{type(model).__name__}: {parts}" if parts else type(model).__name__
