"""Random models with recurrent layers, latents or experts: decoding beside transformers' generate, and a conversation.

Decoding is of some sequences at once, in bfloat16. Beside it stand two limits of this machine: by bytes, the time in
which it reads weights and KVs once and reads and writes every state once, from a pass over as much memory; by
arithmetic, the time in which it multiplies as many rows with the weights, from a product of 512 rows. The conversation
counts the tokens of each turn's prompt that are computed; none should be that was there before.

    python -m winnow_lab.speed.hybrid_decode [--shape qwen3.5-1b] [--turns 20] [--json FILE]
"""

import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    GraniteMoeHybridConfig,
    PretrainedConfig,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
)

from winnow import LLM
from winnow.models.fast.fused.kernels import LayerKernels
from winnow.process.native import Kernels, instruction_sets
from winnow_lab.bench.answering import fixed_length
from winnow_lab.report.tables import TextTable
from winnow_lab.study import Result, StudyOptions, flag, run_study

USER_TOKENS, ANSWER_TOKENS = 100, 32
COMMON: dict[str, Any] = {"tie_word_embeddings": True, "max_position_embeddings": 32768}
COMMON |= {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
DELTA: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128}
DELTA |= {"linear_num_value_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
NO_EXPERTS = {"num_local_experts": 0, "num_experts_per_tok": 0}


def sizes(vocab: int, hidden: int, layers: int, **more: Any) -> dict[str, Any]:
    common = COMMON | {"vocab_size": vocab, "hidden_size": hidden, "num_hidden_layers": layers}
    return common | more


def attends(layers: int, every: int) -> dict[str, list[str]]:
    """Return kinds of layers, each `every`-th of which attends."""
    attends = (layer % every == every - 1 for layer in range(layers))
    return {"layer_types": ["full_attention" if each else "linear_attention" for each in attends]}


SHAPES: dict[str, Callable[[], PretrainedConfig]] = {
    "small": lambda: Qwen3_5TextConfig(
        **sizes(8192, 1024, 8, intermediate_size=3072, linear_num_key_heads=8), **attends(8, 4), **DELTA
    ),
    "qwen3.5-1b": lambda: Qwen3_5TextConfig(
        **sizes(32768, 1536, 24, intermediate_size=4608, linear_num_key_heads=16), **attends(24, 4), **DELTA
    ),
    "granite-4-h-1b": lambda: GraniteMoeHybridConfig(  # but for its vocabulary of 100,352
        **sizes(
            32768, 1536, 40, intermediate_size=4096, shared_intermediate_size=4096, num_attention_heads=12
        ),
        **{"num_key_value_heads": 4, "mamba_n_heads": 48, "mamba_d_head": 64, "mamba_d_state": 128},
        **{"mamba_n_groups": 1, **attends(40, 10), **NO_EXPERTS},
    ),
    "deepseek-v2-small": lambda: DeepseekV2Config(  # latents of V2-Lite's size, layers without experts
        **sizes(8192, 1024, 8, intermediate_size=3072, num_attention_heads=16, num_key_value_heads=16),
        **{"q_lora_rank": None, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128},
        **{"v_head_dim": 128, "first_k_dense_replace": 8},
    ),
    "qwen3-moe-small": lambda: Qwen3MoeConfig(  # experts of a third of the 30B's width, a quarter as many
        **sizes(8192, 1024, 12, moe_intermediate_size=256, num_attention_heads=16, num_key_value_heads=4),
        **{"head_dim": 64, "num_experts": 32, "num_experts_per_tok": 8},
    ),
}


@dataclass(frozen=True)
class Options(StudyOptions):
    shape: str = flag("small", choices=tuple(SHAPES))
    seqs: int = flag(16, "sequences", least=1)
    tokens: int = flag(32, "that each gets", least=1)
    prompt: int = flag(16, "tokens of a prompt", least=1)
    turns: int = flag(0, "of a conversation; 0: none", least=0)
    no_peer: bool = flag(False, "without transformers' generate")


def sequence_bytes(config: Any) -> tuple[int, int]:
    """Bytes of a sequence's recurrent states, and of its KVs by token in 16 bits."""
    if isinstance(config, DeepseekV2Config):
        return 0, 2 * (config.kv_lora_rank + config.qk_rope_head_dim) * config.num_hidden_layers
    if isinstance(config, Qwen3MoeConfig):
        return 0, 4 * config.num_key_value_heads * config.head_dim * config.num_hidden_layers
    if isinstance(config, Qwen3_5TextConfig):
        size = config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim
        head_dim = config.head_dim
    else:
        size = config.mamba_n_heads * config.mamba_d_head * config.mamba_d_state
        head_dim = config.hidden_size // config.num_attention_heads
    kvs = 4 * config.num_key_value_heads * head_dim * config.layer_types.count("full_attention")
    return 4 * size * config.layer_types.count("linear_attention"), kvs


def best_of(times: int, run: Callable[[], Any]) -> float:
    found = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return min(found)


def seconds_per_pass(nbytes: int) -> float:
    """The time in which this machine reads and writes that many bytes, each once."""
    held = torch.ones(max(nbytes // 4, 1))
    return best_of(5, lambda: held.add_(1.0))


def products_per_second() -> float:
    """Multiplications of two bfloat16 per second in a product whose weight is read once for many rows."""
    kernels = LayerKernels(Kernels(instruction_sets()[-1]))
    weight = kernels.pack(torch.randn(2048, 2048).bfloat16())
    x = torch.randn(512, 2048).bfloat16()
    return 512 * 2048 * 2048 / best_of(5, lambda: kernels.linear(x, weight, None))


def decode(llm: LLM, prompts: list[list[int]], num_tokens: int) -> float:
    """Seconds for a number of tokens of each sequence beyond its first."""
    llm.generate(prompts, fixed_length(1))
    first = best_of(2, lambda: llm.generate(prompts, fixed_length(1)))
    return best_of(2, lambda: llm.generate(prompts, fixed_length(1 + num_tokens))) - first


def converse(llm: LLM, num_turns: int, vocab: int) -> list[dict[str, int]]:
    """Tokens of each turn's prompt: all, those that were in no turn before, those that were computed."""
    history: list[int] = []
    turns = []
    for _ in range(num_turns):
        # The last token of an answer was sampled, and is not computed yet.
        new = USER_TOKENS + (1 if history else 0)
        history += torch.randint(3, vocab, (USER_TOKENS,)).tolist()
        [output] = llm.generate([history], fixed_length(ANSWER_TOKENS))
        computed = len(history) - output.num_cached_tokens
        turns.append({"prompt": len(history), "new": new, "computed": computed})
        history += output.outputs[0].token_ids
    return turns


def rival_seconds(model: Any, prompts: torch.Tensor, tokens: int, *, experts: bool) -> dict[str, float]:
    """Seconds of transformers' decoding, by how it computes experts."""

    def generate(num_tokens: int) -> Any:
        return model.generate(prompts, max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False)

    found = {}
    for loops in (False, True) if experts else (False,):
        if loops:
            model.set_experts_implementation("eager")
        generate(1)
        name = "transformers, a loop" if loops else "transformers"
        found[name] = best_of(2, lambda: generate(1 + tokens)) - best_of(2, lambda: generate(1))
    return found


def study(options: Options) -> Result:
    torch.manual_seed(0)
    config: Any = SHAPES[options.shape]()
    prompts = torch.randint(3, config.vocab_size, (options.seqs, options.prompt))
    with tempfile.TemporaryDirectory() as folder:
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        model.save_pretrained(folder)
        weights = sum(weight.nbytes for weight in model.parameters())
        experts = sum(weight.nbytes for name, weight in model.named_parameters() if ".experts." in name)
        own = {} if options.no_peer else rival_seconds(model, prompts, options.tokens, experts=experts > 0)
        model = None  # its memory is free for the next
        with LLM(folder, dtype="bfloat16", kv_memory="2GiB", max_num_seqs=options.seqs) as llm:
            ours = decode(llm, prompts.tolist(), options.tokens)
            turns = converse(llm, options.turns, config.vocab_size)
    states, kvs = (options.seqs * each for each in sequence_bytes(config))
    kvs *= options.prompt + options.tokens // 2
    active: float = weights
    if experts:
        idle = 1 - config.num_experts_per_tok / config.num_experts
        active = weights - idle * experts  # of a token; those of all sequences together are read
        weights -= int(idle**options.seqs * experts)
    # A pass reads and writes; what is only read takes half of that, at best.
    by_bytes = seconds_per_pass(states) + seconds_per_pass(weights + kvs) / 2
    by_arithmetic = options.seqs * active / 2 / products_per_second()
    decoded = options.seqs * options.tokens
    rates = {
        **{name: decoded / seconds for name, seconds in own.items()},
        "winnow": decoded / ours,
        "limit by bytes": options.seqs / by_bytes,
        "limit by arithmetic": options.seqs / by_arithmetic,
    }
    sizes = {"weights": weights, "states": states, "KVs": kvs}
    fact = ", ".join(f"{name} {each / 1e6:.0f} MB" for name, each in sizes.items())
    lines = [f"{name} | {rate:.1f}" for name, rate in rates.items()]
    tables = [TextTable.read(f"Decoding {options.shape}", " | tokens/s", lines)]
    if turns:
        lines = [" | ".join(map(str, (number, *turn.values()))) for number, turn in enumerate(turns, 1)]
        tables.append(TextTable.read("Conversation", "turn | tokens | new | computed", lines))
    numbers = {"bytes": sizes, "tokens_per_second": rates, "turns": turns}
    return Result("Decoding with recurrent layers, latents and experts", tables, [fact], numbers=numbers)


if __name__ == "__main__":
    sys.exit(run_study(Options, study))
