"""The peer's side: runs in kvpress's environment, which has no Winnow, and answers what a file asks.

    python peer.py WORK.json

WORK.json: `model`, a directory; `prompts`, each with `token_ids`, how many of them are compressed (`context`), and the
most tokens of an answer (`max_tokens`); `asks`, each with a press (`classes` from the outside in, `options`), the KVs
per row to keep (`kept`) and the place of its prompt; `answers`, the file that one JSON line per ask is added to.

As in kvpress's own pipeline, the press acts once, when the context is computed; what follows sees the compressed cache,
at the positions that it has in the prompt.
"""

import json
import sys
from pathlib import Path
from typing import Any

import kvpress
import torch
from transformers import AutoModelForCausalLM, DynamicCache


def make_press(ask: dict[str, Any], context: int) -> Any:
    """The press that keeps so many KVs; None: nothing is compressed."""
    if not ask["classes"]:
        return None
    *around, innermost = (getattr(kvpress, name) for name in ask["classes"])
    # A press keeps int(context * (1 - ratio)): half a KV more, so that rounding cannot lose one.
    ratio = 1.0 - (ask["kept"] + 0.5) / context
    press = innermost(compression_ratio=max(ratio, 0.0), **ask["options"])
    for outer in around:
        press = outer(press)
    return press


def cache_bytes(cache: Any) -> int:
    """Of all keys and values that the cache holds."""
    return sum(each.nbytes for layer in cache.layers for each in (layer.keys, layer.values))


def seen_per_row(model: Any, cache: Any) -> float:
    """KVs that a row attends to, on average: presses that choose by head leave the cache whole and mask."""
    rows = seen = 0
    for layer, held in zip(model.model.layers, cache.layers, strict=True):
        heads, length = held.keys.shape[1:3]
        masked = getattr(layer.self_attn, "masked_key_indices", None)
        rows += heads
        seen += heads * length - (0 if masked is None else len(masked[0]))
    return seen / rows


@torch.inference_mode()
def answer(model: Any, prompt: dict[str, Any], ask: dict[str, Any]) -> dict[str, Any]:
    """Compress the context, then go on greedily."""
    ids, context = torch.tensor([prompt["token_ids"]]), prompt["context"]
    cache, press = DynamicCache(), make_press(ask, context)
    for layer in model.model.layers:
        layer.self_attn.masked_key_indices = None
    if press is None:
        model.model(input_ids=ids[:, :context], past_key_values=cache)
    else:
        with press(model):
            model.model(input_ids=ids[:, :context], past_key_values=cache)
    seen = seen_per_row(model, cache)
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    step, position = ids[:, context:], context
    found: list[int] = []
    while len(found) < prompt["max_tokens"]:
        places = torch.arange(position, position + step.shape[1])[None]
        logits = model(input_ids=step, past_key_values=cache, position_ids=places, logits_to_keep=1).logits
        position += step.shape[1]
        found.append(int(logits[0, -1].argmax()))
        if found[-1] in ends:
            break
        step = torch.tensor([[found[-1]]])
    return {"token_ids": found, "seen": seen, "kv_bytes": cache_bytes(cache)}


def main() -> None:
    """Answer every ask in turn; what is written survives this process."""
    work = json.loads(Path(sys.argv[1]).read_text())
    model = AutoModelForCausalLM.from_pretrained(
        work["model"], dtype=torch.float32, attn_implementation="sdpa"
    )
    model.eval()
    with Path(work["answers"]).open("a") as answers:
        for ask in work["asks"]:
            try:
                found = answer(model, work["prompts"][ask["prompt"]], ask)
            # What a press refuses (a window longer than its share, say) is a result too.
            except (AssertionError, RuntimeError, ValueError) as error:
                found = {"error": f"{type(error).__name__}: {error}"}
            answers.write(json.dumps(ask | found) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
