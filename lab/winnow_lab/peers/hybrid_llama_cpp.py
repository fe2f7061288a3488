"""llama.cpp's server on random weights of a shape of lab/winnow_lab/speed/hybrid_decode.py, as that measures Winnow.

    LLAMA_SERVER=... python lab/winnow_lab/peers/hybrid_llama_cpp.py [--seqs 16] [--turns 20] [--json FILE]

Needs the package gguf and the program that llama_cpp_peer.py describes. The shape is granite-4-h-1b, in bfloat16.
"""

import argparse
import json
import random
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

from winnow.cli.flags.paths import check_json_path, write_json
from winnow.report.provenance import Machine, report_head
from winnow_lab.peers.llama_cpp_peer import find_version, server_command
from winnow_lab.peers.loopback import free_port, serving
from winnow_lab.peers.to_gguf import write_tokens
from winnow_lab.speed.hybrid_decode import ANSWER_TOKENS, SHAPES, USER_TOKENS

SHAPE = "granite-4-h-1b"
START_SECONDS = 120


def write_shape(writer: GGUFWriter, config: Any) -> list[bool]:
    """Write what the model is. Returns which layers attend."""
    attends = [kind == "full_attention" for kind in config.layer_types]
    head_dim = config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.shared_intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv([config.num_key_value_heads if each else 0 for each in attends])
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_ssm_conv_kernel(config.mamba_d_conv)
    writer.add_ssm_state_size(config.mamba_d_state)
    writer.add_ssm_group_count(config.mamba_n_groups)
    writer.add_ssm_inner_size(config.mamba_n_heads * config.mamba_d_head)
    writer.add_ssm_time_step_rank(config.mamba_n_heads)
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)
    write_tokens(writer, config.vocab_size)
    return attends


def write_weights(writer: GGUFWriter, config: Any, attends: list[bool]) -> None:
    """Write random matrices in bfloat16, and vectors in float32."""
    generator, size = np.random.default_rng(0), config.hidden_size
    keys = size // config.num_attention_heads * config.num_key_value_heads
    heads, groups = config.mamba_n_heads, config.mamba_n_groups
    inner = heads * config.mamba_d_head
    mixed = inner + 2 * groups * config.mamba_d_state

    def matrix(name: str, rows: int, columns: int) -> None:
        values = 0.02 * generator.standard_normal((rows, columns), dtype=np.float32)
        kind = GGMLQuantizationType.BF16
        writer.add_tensor(f"{name}.weight", quantize(values, kind), raw_dtype=kind)

    def filled(name: str, value: float, *shape: int) -> None:
        writer.add_tensor(name, np.full(shape, value, dtype=np.float32))

    matrix("token_embd", config.vocab_size, size)
    filled("output_norm.weight", 1.0, size)
    for layer, attending in enumerate(attends):
        block = f"blk.{layer}"
        filled(f"{block}.attn_norm.weight", 1.0, size)
        filled(f"{block}.ffn_norm.weight", 1.0, size)
        if attending:
            for name, rows in (("q", size), ("k", keys), ("v", keys), ("output", size)):
                matrix(f"{block}.attn_{name}", rows, size)
        else:
            matrix(f"{block}.ssm_in", inner + mixed + heads, size)
            filled(f"{block}.ssm_conv1d.weight", 0.25, mixed, config.mamba_d_conv)
            filled(f"{block}.ssm_conv1d.bias", 0.0, mixed)
            filled(f"{block}.ssm_dt.bias", 1.0, heads)
            filled(f"{block}.ssm_a", -1.0, heads, 1)
            filled(f"{block}.ssm_d", 1.0, heads, 1)
            filled(f"{block}.ssm_norm.weight", 1.0, groups, inner // groups)
            matrix(f"{block}.ssm_out", size, inner)
        for name in ("gate", "up"):
            matrix(f"{block}.ffn_{name}", config.shared_intermediate_size, size)
        matrix(f"{block}.ffn_down", size, config.shared_intermediate_size)


def complete(address: str, prompt: list[int], num_tokens: int) -> dict[str, Any]:
    """An answer, greedy; a conversation's last state may be continued."""
    asked = {"prompt": prompt, "n_predict": num_tokens, "temperature": 0.0, "ignore_eos": True}
    body = json.dumps(asked | {"cache_prompt": True, "return_tokens": True}).encode()
    request = urllib.request.Request(f"{address}/completion", body, {"Content-Type": "application/json"})  # noqa: S310
    with urllib.request.urlopen(request) as response:  # noqa: S310
        return dict(json.load(response))


def decode(address: str, vocab: int, seqs: int, prompt: int, num_tokens: int) -> float:
    """Seconds for a number of tokens of each sequence beyond its first, with prompts that are new."""

    def run(count: int, seed: int) -> float:
        seeds = range(seed * seqs, (seed + 1) * seqs)
        prompts = [random.Random(each).choices(range(300, vocab), k=prompt) for each in seeds]
        with ThreadPoolExecutor(seqs) as clients:
            start = time.perf_counter()
            list(clients.map(lambda tokens: complete(address, tokens, count), prompts))
            return time.perf_counter() - start

    run(1, 0)
    first = min(run(1, seed) for seed in (1, 2))
    return min(run(1 + num_tokens, seed) for seed in (3, 4)) - first


def converse(address: str, vocab: int, num_turns: int) -> list[dict[str, int]]:
    """Tokens of each turn's prompt: all, those that were in no turn before, those that were computed."""
    history, generator, turns = list[int](), random.Random(99), []
    for _ in range(num_turns):
        new = USER_TOKENS + (1 if history else 0)
        history += generator.choices(range(300, vocab), k=USER_TOKENS)
        answer = complete(address, history, ANSWER_TOKENS)
        turns.append({"prompt": len(history), "new": new, "computed": answer["timings"]["prompt_n"]})
        history += answer["tokens"]
    return turns


def main() -> None:
    """Measure, and print tokens per second."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("seqs", 16), ("tokens", 32), ("prompt", 16), ("turns", 20), ("threads", 2)):
        parser.add_argument(
            f"--{name}", type=int, default=default, metavar="N", help="(default: %(default)s)"
        )
    parser.add_argument("--json", type=Path, help="write what was measured to this file")
    options = parser.parse_args()
    check_json_path(options.json)
    config: Any = SHAPES[SHAPE]()
    with tempfile.TemporaryDirectory() as folder:
        writer = GGUFWriter(Path(folder) / "model.gguf", "granitehybrid")
        write_weights(writer, config, write_shape(writer, config))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        port = free_port()
        command = server_command(Path(folder), port, options.threads, options.seqs, 4096)
        with serving(command, port, "/health", START_SECONDS, own_group=False) as address:
            size = config.vocab_size
            seconds = decode(address, size, options.seqs, options.prompt, options.tokens)
            turns = converse(address, size, options.turns)
    rate = options.seqs * options.tokens / seconds
    machine = Machine.here()
    print(f"{machine}; {SHAPE}\nllama.cpp            {rate:8.1f} tokens/s")
    for number, turn in enumerate(turns, 1):
        print(
            f"turn {number:2}: {turn['prompt']:5} tokens, {turn['new']:3} new, {turn['computed']:3} computed"
        )
    head = report_head([Path(sys.argv[0]).name, *sys.argv[1:]], machine)
    measured = {"llama.cpp": find_version(), "tokens_per_second": {"llama.cpp": rate}, "turns": turns}
    write_json(options.json, head | measured)


if __name__ == "__main__":
    main()
