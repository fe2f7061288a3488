"""Decoding with a model of recurrent layers: Winnow beside transformers' own generate, at the shape of Qwen3.5.

A random model in bfloat16, 16 sequences of 64 tokens, as many threads as torch takes. The limit by bytes is what this
machine needs to read the weights once and to read and write every state once, by a pass over as much memory.

    python benchmarks/hybrid_decode.py
"""

import argparse
import tempfile
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

from winnow import LLM, SamplingParams

VOCAB = 8192
KINDS = (["linear_attention"] * 3 + ["full_attention"]) * 2


def seconds_per_pass(nbytes: int) -> float:
    """The time in which this machine reads and writes that many bytes, each once: the best of five."""
    held, best = torch.ones(nbytes // 4), float("inf")
    for _ in range(5):
        start = time.perf_counter()
        held.add_(1.0)
        best = min(best, time.perf_counter() - start)
    return best


def main() -> None:
    """Measure, and print tokens per second."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seqs", type=int, default=16, metavar="N", help="sequences (default: %(default)s)")
    parser.add_argument(
        "--tokens", type=int, default=32, metavar="N", help="that each gets (default: %(default)s)"
    )
    options = parser.parse_args()
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=VOCAB,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=len(KINDS),
        layer_types=KINDS,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=128,
        linear_num_value_heads=16,
        linear_num_key_heads=8,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    prompts = torch.randint(3, VOCAB, (options.seqs, 64))
    with tempfile.TemporaryDirectory() as folder:
        model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16).eval()
        model.save_pretrained(folder)
        weights = sum(weight.nbytes for weight in model.parameters())
        states = 4 * options.seqs * KINDS.count("linear_attention") * 16 * 128 * 128

        def generate(own_model: Any, num_tokens: int) -> float:
            start = time.perf_counter()
            own_model.generate(prompts, max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False)
            return time.perf_counter() - start

        generate(model, 1)
        own = generate(model, 1 + options.tokens) - generate(model, 1)
        model = None  # its memory is free for the next
        with LLM(folder, dtype="bfloat16", kv_memory="600MiB", max_num_seqs=options.seqs) as llm:

            def answer(num_tokens: int) -> float:
                params = SamplingParams(
                    temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
                )
                start = time.perf_counter()
                llm.generate(prompts.tolist(), params)
                return time.perf_counter() - start

            answer(1)
            ours = answer(1 + options.tokens) - answer(1)
    # A pass reads and writes; weights are only read, at best in half of that.
    limit = seconds_per_pass(states) + seconds_per_pass(weights) / 2
    decoded = options.seqs * options.tokens
    print(f"threads {torch.get_num_threads()}, weights {weights / 1e6:.0f} MB, states {states / 1e6:.0f} MB")
    print(f"transformers {decoded / own:.1f} tokens/s")
    print(f"winnow       {decoded / ours:.1f} tokens/s")
    print(f"bytes' limit {options.seqs / limit:.1f} tokens/s")


if __name__ == "__main__":
    main()
