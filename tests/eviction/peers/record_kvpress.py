"""Record which tokens NVIDIA's kvpress keeps, so that tests can compare with it and not install it.

kvpress admits only older transformers, so it gets an environment of its own:

    python3 -m venv kvpress-env
    kvpress-env/bin/pip install torch==2.13.0 kvpress==0.5.5
    OMP_NUM_THREADS=1 kvpress-env/bin/python tests/eviction/peers/record_kvpress.py

It writes `kvpress.json` beside this file, and `tiny_llama/` (a random LlamaForCausalLM) where that is missing or
`--new-model` asks for another. With the weights there, a second run writes the same file.

`kvpress.json`: `versions`; `prompts`, lists of token ids; `cases`, one for each prompt, press and `compression_ratio`
(the fraction removed) with

- `press`, `parameters`, `attention`: the class, all its fields, and the attention of transformers it ran with;
- `kept[layer][kv_head]`: the positions kept after the prompt, ascending; `n_kept[layer][kv_head]`: how many;
- `margin`: the smallest distance between a score that was kept and one that was not, over the largest magnitude of
  those that were not; null where positions alone decide. No case is recorded that rounding could tip.

The positions come from the pruned cache: each of its keys is found among the keys of a run without a press. Only
AdaKVPress leaves the cache whole and names what attention has to skip. Both are held against the scores.
"""

import argparse
import json
import random
import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import kvpress
import safetensors.torch
import torch
import transformers
from kvpress import AdaKVPress
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).parent
RATIOS = [0.5, 0.75]
PROMPT_LENGTHS = [160, 97]
VOCABULARY = 192
# Scores computed elsewhere differ by some 1e-6: another order of sums, another attention kernel.
LEAST_MARGIN = 1e-4

# Of each layer and KV head, ascending.
Positions = list[list[list[int]]]

# Name, classes from the outside in, and what differs from the default. Windows are scaled to the prompts' lengths.
SNAPKV = {"window_size": 16, "kernel_size": 5}
PRESSES: list[tuple[str, list[str], dict[str, Any], dict[str, Any]]] = [
    ("snapkv", ["SnapKVPress"], {}, SNAPKV),
    ("tova", ["TOVAPress"], {}, {}),
    ("streaming_llm", ["StreamingLLMPress"], {}, {"n_sink": 4}),
    ("knorm", ["KnormPress"], {}, {}),
    ("keydiff", ["KeyDiffPress"], {}, {}),
    ("observed_attention", ["ObservedAttentionPress"], {}, {}),
    ("pyramidkv", ["PyramidKVPress"], {}, SNAPKV | {"beta": 20}),
    # With beta 20 these prompts reach only the clamped pyramid and the fallback; 2 gives one that is neither.
    ("pyramidkv_gentle", ["PyramidKVPress"], {}, SNAPKV | {"beta": 2}),
    ("adakv_snapkv", ["AdaKVPress", "SnapKVPress"], {"alpha_safeguard": 0.2}, SNAPKV),
    # The window alone fills the default safeguard's share, which then guards nothing; this share bites.
    ("adakv_snapkv_guarded", ["AdaKVPress", "SnapKVPress"], {"alpha_safeguard": 0.95}, SNAPKV),
    ("adakv_knorm", ["AdaKVPress", "KnormPress"], {"alpha_safeguard": 0.2}, {}),
]


def make_press(classes: list[str], outer: dict[str, Any], inner: dict[str, Any], ratio: float) -> Any:
    press = getattr(kvpress, classes[-1])(compression_ratio=ratio, **inner)
    return getattr(kvpress, classes[0])(press=press, **outer) if len(classes) == 2 else press


def make_model(directory: Path, seed: int) -> None:
    """Write a Llama of three layers whose attention is far from flat."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        initializer_range=0.15,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
        dtype="float32",
    )
    torch.manual_seed(seed)
    weights = LlamaForCausalLM(config).state_dict()
    directory.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(directory)
    safetensors.torch.save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def load_model(directory: Path, attention: str) -> LlamaForCausalLM:
    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation=attention)
    return model.eval()


@torch.no_grad()
def prefill(model: LlamaForCausalLM, prompt: list[int]) -> list[torch.Tensor]:
    """Run the prompt; returns the cached keys `[kv_heads, tokens, head_dim]` of each layer."""
    cache = DynamicCache()
    model(torch.tensor([prompt]), past_key_values=cache)
    return [layer.keys[0] for layer in cache.layers]


def positions_of(pruned: torch.Tensor, keys: torch.Tensor) -> list[list[int]]:
    """Positions in `keys` of the rows of `pruned`, both `[kv_heads, tokens, head_dim]`, bit for bit."""
    matches = (pruned[:, :, None] == keys[:, None]).all(-1)
    if not bool((matches.sum(-1) == 1).all()):
        raise SystemExit("a kept key is not exactly one of the prompt's keys")
    return [sorted(head.int().argmax(-1).tolist()) for head in matches]


def unmasked(model: LlamaForCausalLM, layer: int, length: int) -> list[list[int]]:
    """The positions that attention of `layer` still sees after an AdaKVPress."""
    _, heads, positions = model.model.layers[layer].self_attn.masked_key_indices
    kept = [set(range(length)) for _ in range(model.config.num_key_value_heads)]
    for head, position in zip(heads.tolist(), positions.tolist(), strict=True):
        kept[head].remove(position)
    return [sorted(head) for head in kept]


def smallest_gap(scores: torch.Tensor, kept: list[list[int]], safe: int | None) -> float | None:
    """How far the scores `[kv_heads, tokens]` of one layer are from keeping others; negative: they would.

    `safe` is the number that each head keeps whatever the others' scores are, for presses in which heads compete.
    """
    is_kept = torch.zeros_like(scores, dtype=torch.bool)
    for head, positions in enumerate(kept):
        is_kept[head, positions] = True
    pairs = [(row[mask].min(), row[~mask].max()) for row, mask in zip(scores, is_kept, strict=True)]
    if safe is not None:
        competing = is_kept & torch.tensor([len(head) > safe for head in kept])[:, None]
        pairs.append((scores[competing].min(), scores[~is_kept].max()))
    scale = float(scores[~is_kept].abs().max())
    return min(float(low - high) for low, high in pairs) / scale if scale else None


def observe(model: LlamaForCausalLM, press: Any, prompt: list[int]) -> tuple[Positions, float | None]:
    """What `press` keeps of `prompt`: positions per layer and KV head, and the margin."""
    scorer = press.press if isinstance(press, AdaKVPress) else press
    seen: list[torch.Tensor] = []
    score = scorer.score

    def watched(*args: Any, **kwargs: Any) -> torch.Tensor:
        scores = score(*args, **kwargs)
        seen.append(scores[0].clone())
        return scores

    scorer.score = watched
    keys = prefill(model, prompt)
    with press(model):
        pruned = prefill(model, prompt)

    margins = []
    kept = []
    for layer, scores in enumerate(seen):
        safe = None
        if isinstance(press, AdaKVPress):
            kept.append(unmasked(model, layer, len(prompt)))
            safe = max(1, int(int(len(prompt) * (1 - press.compression_ratio)) * press.alpha_safeguard))
        else:
            kept.append(positions_of(pruned[layer], keys[layer]))
        margins.append(smallest_gap(scores, kept[-1], safe))
    if len(kept) != model.config.num_hidden_layers:
        raise SystemExit("not every layer was scored")
    return kept, None if None in margins else min(margins)


def record(directory: Path, seed: int) -> dict[str, Any]:
    generator = random.Random(seed)
    # No token twice: RoPE keeps norms, so in the first layer the keys of a repeated token tie for KnormPress.
    prompts = [generator.sample(range(VOCABULARY), length) for length in PROMPT_LENGTHS]
    models = {attention: load_model(directory, attention) for attention in ("eager", "sdpa")}
    cases = []
    for name, classes, outer, inner in PRESSES:
        # AdaKVPress refuses eager attention, and ObservedAttentionPress needs its probabilities.
        usable = ["sdpa"] if classes[0] == "AdaKVPress" else ["eager", "sdpa"]
        usable = ["eager"] if classes[0] == "ObservedAttentionPress" else usable
        for ratio in RATIOS:
            for index, prompt in enumerate(prompts):
                found = []
                for attention in usable:
                    press = make_press(classes, outer, inner, ratio)
                    parameters = asdict(press)
                    found.append(observe(models[attention], press, prompt))
                kept, margin = found[0]
                where = f"{name} at {ratio}, prompt {index}, seed {seed}"
                if any(other != kept for other, _ in found):
                    raise SystemExit(f"{where}: attention implementations disagree")
                if margin is not None and margin < LEAST_MARGIN:
                    raise SystemExit(f"{where}: margin {margin:.1e} < {LEAST_MARGIN:.0e}; try another --seed")
                cases.append(
                    {
                        "name": name,
                        "press": "(".join(classes) + ")" * (len(classes) - 1),
                        "parameters": parameters,
                        "attention": usable[0],
                        "compression_ratio": ratio,
                        "prompt": index,
                        "margin": None if margin is None else float(f"{margin:.2g}"),
                        "n_kept": [[len(head) for head in layer] for layer in kept],
                        "kept": kept,
                    }
                )
    versions = {name: version(name) for name in ("kvpress", "torch", "transformers")}
    return {"versions": versions, "model": directory.name, "prompts": prompts, "cases": cases}


def write(recorded: dict[str, Any], path: Path) -> None:
    """JSON with one case a line, so that a change shows which case it touched."""
    dump = json.JSONEncoder(separators=(",", ":")).encode
    head = "".join(f"{dump(key)}:{dump(recorded[key])},\n" for key in recorded if key != "cases")
    cases = ",\n".join(dump(case) for case in recorded["cases"])
    path.write_text(f'{{{head}"cases":[\n{cases}\n]}}\n')


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=HERE / "tiny_llama", help="directory of the tiny model")
    parser.add_argument("--out", type=Path, default=HERE / "kvpress.json", help="file to write")
    parser.add_argument("--seed", type=int, default=15, help="seed of the prompts, and of a new model")
    parser.add_argument("--new-model", action="store_true", help="draw new weights even if there are some")
    options = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    if options.new_model or not (options.model / "model.safetensors").exists():
        make_model(options.model, options.seed)
    recorded = record(options.model, options.seed)
    write(recorded, options.out)
    least = min(case["margin"] for case in recorded["cases"] if case["margin"] is not None)
    sys.stdout.write(f"{options.out}: {len(recorded['cases'])} cases, smallest margin {least:.1e}\n")


if __name__ == "__main__":
    main()
