"""The peer's side: runs in kvpress's environment, which has no Winnow, and answers what a file asks.

    python peer.py WORK.json

WORK.json: `model`, a directory; `dtype`, of weights and cache; `prompts`, each with the tokens that are compressed
(`context`) and its `questions`: tokens that follow (`token_ids`) and the most tokens of an answer (`max_tokens`);
`asks`, each with a press (`classes` from the outside in, `options`), the KVs per row to keep (`kept`) and the place of
its prompt; `answers`, the file that one JSON line per ask is added to.

As in kvpress's own pipeline, the press acts once, when the context is computed; each question sees the compressed
cache, at the positions that it has in the prompt, and leaves it as it was.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import kvpress
import torch
from transformers import AutoModelForCausalLM, DynamicCache


def make_press(ask: dict[str, Any], context: int) -> Any:
    """The press that keeps the given number of KVs; None: no compression."""
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
    """Compress the context, then answer each question greedily. Bytes are the most that the cache held at an end."""
    start = time.perf_counter()
    ids = torch.tensor([prompt["context"]])
    cache, press = DynamicCache(), make_press(ask, ids.shape[1])
    for layer in model.model.layers:
        layer.self_attn.masked_key_indices = None
    if press is None:
        model.model(input_ids=ids, past_key_values=cache)
    else:
        with press(model):
            model.model(input_ids=ids, past_key_values=cache)
    compressed = time.perf_counter() - start
    seen = seen_per_row(model, cache)
    lengths = [layer.keys.shape[2] for layer in cache.layers]
    answers, most = [], 0
    for question in prompt["questions"]:
        answers.append(go_on(model, cache, question, ids.shape[1]))
        most = max(most, cache_bytes(cache))
        for layer, length in zip(cache.layers, lengths, strict=True):
            layer.keys, layer.values = layer.keys[:, :, :length], layer.values[:, :, :length]
    return {
        "answers": answers,
        "seen": seen,
        "kv_bytes": most,
        "compress_seconds": compressed,
        "seconds": time.perf_counter() - start,
    }


def go_on(model: Any, cache: Any, question: dict[str, Any], position: int) -> list[int]:
    """The greedy answer to a question whose first token stands at `position`."""
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    step = torch.tensor([question["token_ids"]])
    found: list[int] = []
    while len(found) < question["max_tokens"]:
        places = torch.arange(position, position + step.shape[1])[None]
        logits = model(input_ids=step, past_key_values=cache, position_ids=places, logits_to_keep=1).logits
        position += step.shape[1]
        found.append(int(logits[0, -1].argmax()))
        if found[-1] in ends:
            break
        step = torch.tensor([[found[-1]]])
    return found


def main() -> None:
    """Answer every ask in turn; what is written survives this process."""
    work = json.loads(Path(sys.argv[1]).read_text())
    model = AutoModelForCausalLM.from_pretrained(
        work["model"], dtype=getattr(torch, work["dtype"]), attn_implementation="sdpa"
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
