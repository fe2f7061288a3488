"""Which of transformers' causal language models Winnow serves, tried out one by one, as a table.

Each class gets a tiny configuration with random weights. Both engines load it and answer prompts greedily; the tokens
must be those of the model's own eager forward, without a cache. What an engine refuses is listed with its reason.

    python -m winnow_lab.answers.architectures --write docs/architectures.md
    python -m winnow_lab.answers.architectures llama bart mamba
"""

import contextlib
import io
import logging
import multiprocessing
import random
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from winnow import LLM, SamplingParams
from winnow.errors import WinnowError
from winnow_lab.study import flag, parse

# Classes are tried one by one in forks of a process that has only imported what all of them need.
FORK = multiprocessing.get_context("fork")
NEEDED = ("transformers.models.llama.modeling_llama", "winnow.executor.build", "winnow_lab.padded.build")
VOCAB, LAYERS, WINDOW = 97, 4, 24
HEADS = ("head_dim", "attention_head_dim", "kv_channels", "query_pre_attn_scalar")
RANKS = ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
COMMON = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
LENGTHS = (1, 5, 23, 24, 47, 70)
MAX_TOKENS = 8
TOLERANCE = 1e-3
"""Largest difference of a token's logprob."""
Chosen = tuple[int, float]
"""A token and its logprob."""
MOST_PARAMETERS = 30_000_000
# Names under which configurations give their sizes, and what they are set to where they exist.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_size"), 32),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "d_ff", "ffn_hidden_size", "decoder_ffn_dim", "encoder_ffn_dim"), 48
    ),
    **dict.fromkeys(
        ("moe_intermediate_size", "shared_expert_intermediate_size", "intermediate_size_mlp"), 16
    ),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), LAYERS),
    **dict.fromkeys(("decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "n_head_kv", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "attention_head_dim", "kv_channels", "query_pre_attn_scalar"), 16),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("linear_num_value_heads", "mamba_n_heads", "mamba_num_heads"), 4),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_attention_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim"), 16),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size"), 8),
    **dict.fromkeys(("mamba_n_groups", "n_groups", "mamba_ngroups"), 1),
    **dict.fromkeys(("mamba_d_ssm", "attention_hidden_size"), 64),
    **dict.fromkeys(("mamba_expand", "n_mamba_heads"), 2),
    **{"mamba_dt_rank": 4, "router_hidden_size": 16, "rotary_dim": 8, "num_kv_shared_layers": 0},
    "sliding_window": WINDOW,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 512),
    "tie_word_embeddings": False,
    **{"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2},
}
_MIXED = ["linear_attention", "full_attention"] * 2
_BLOCKS = ["linear_attention", "moe", "full_attention", "linear_attention", "mlp", "full_attention"]
_PICTURES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_PICTURES |= {"image_size": 28, "patch_size": 14}
_SOUNDS = {
    **dict.fromkeys(("hidden_size", "ext_pw_out_channel", "depthwise_separable_out_channel"), 32),
    **dict.fromkeys(("nemo_conv_channels", "intermediate_size"), 32),
    "num_blocks": 1,
    "num_attention_heads": 4,
}
# What some kinds need beside: their layers of each kind, or sizes that follow from others. None: left out.
OWN: dict[str, dict[str, Any]] = {
    "bamba": {"layer_types": None, "attn_layer_indices": [1, 3]},
    "cohere_compass": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4}
            for kind in ("full_attention", "sliding_attention")
        },
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots1": {"n_shared_experts": 1},
    "falcon_h1": {"layer_types": None, "mamba_rms_norm": True},
    "git": {"vision_config": _PICTURES},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": WINDOW},
    "granitemoehybrid": {"layer_types": _MIXED},
    "jamba": {"layer_types": None, "attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "nemotron_h": {"layers_block_type": _BLOCKS, "num_hidden_layers": None, "n_groups": 2},
    "phi4_multimodal": {"vision_config": _PICTURES, "audio_config": _SOUNDS},
    "qwen3_5": {"layer_types": _MIXED},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "attention_head_dim": 32},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "use_shared_attention_adapter": True},
    "zaya": {"num_experts_per_tok": 1},
}


class Row(NamedTuple):
    model_type: str
    class_name: str
    paged: str
    padded: str

    @property
    def line(self) -> str:
        paged, padded = (cell.replace(f"{self.class_name} is not supported: ", "") for cell in self[2:])
        reported = "the same" if paged == padded != "served" else padded
        return f"| `{self.model_type}` | `{self.class_name}` | {paged} | {reported} |"


def candidates(model_type: str) -> Iterator[PretrainedConfig]:
    """Small configurations of a kind, from all known sizes to few: classes read some of them each in its own way."""
    headless = {name: SIZES[name] for name in SIZES if name not in HEADS}
    common = {name: SIZES[name] for name in COMMON}
    variants = [
        SIZES,
        SIZES | dict.fromkeys(HEADS, 8),
        headless,
        headless | {"qk_head_dim": 16, "rope_interleave": False},
        {name: headless[name] for name in headless if name not in RANKS},
        SIZES | dict.fromkeys(HEADS, 8) | {"num_key_value_heads": 4},  # latent attention has no groups
        common,
        {name: common[name] for name in common if name != "num_hidden_layers"},
    ]
    for sizes in variants:
        with contextlib.suppress(Exception):
            yield tiny(model_type, sizes)


def tiny(model_type: str, sizes: dict[str, Any]) -> PretrainedConfig:
    """A configuration of a kind: its own defaults, but for sizes that it knows."""
    kind = CONFIG_MAPPING[model_type]
    default = kind()
    text = default.get_text_config()
    sizes = {name: value for name, value in sizes.items() if hasattr(text, name)}
    if getattr(text, "is_decoder", None) is False:
        sizes["is_decoder"] = True  # BERT's kind generates text where its configuration says so
    if getattr(text, "sliding_window", None) is None:
        sizes.pop("sliding_window", None)
    layers = getattr(text, "layer_types", None)
    if layers and "num_hidden_layers" in sizes:
        every = sorted(set(layers), key=list(layers).index)
        sizes["layer_types"] = [every[i % len(every)] for i in range(LAYERS)]
    own = OWN.get(text.model_type.removesuffix("_text"), {})
    sizes = {name: value for name, value in (sizes | own).items() if value is not None}
    config = type(text)(**sizes)
    if type(text) is kind or type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return config
    default.text_config = config
    return default


def save(config: PretrainedConfig, path: Path) -> Any:
    """A model whose weights are large enough for an error to change a token."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:
                weight.add_(0.3 * torch.randn_like(weight))
            elif weight.is_floating_point():
                weight.normal_(0.0, 0.25 if "embed" not in name else 1.0)
    model.save_pretrained(path)
    return model


@torch.inference_mode()
def expected(model: Any, prompts: list[list[int]]) -> list[list[Chosen]]:
    """The model's own greedy answers, one prompt at a time, each token from a forward pass over all before it.

    They end at a token for padding: some classes count positions without it.
    """
    found = []
    for prompt in prompts:
        tokens = list(prompt)
        chosen: list[Chosen] = []
        while len(chosen) < MAX_TOKENS and tokens[-1] != SIZES["pad_token_id"]:
            logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits
            logprobs = logits[0, -1].float().log_softmax(dim=-1)
            tokens.append(int(logprobs.argmax()))
            chosen.append((tokens[-1], float(logprobs.max())))
        found.append(chosen)
    return found


@torch.inference_mode()
def cache_error(model: Any, prompts: list[list[int]], wanted: list[list[Chosen]]) -> float:
    """The most by which a class's logprobs differ between its code with a cache and without (Mamba-2's two do)."""
    worst = 0.0
    for prompt, own in zip(prompts, wanted, strict=True):
        options = {"max_new_tokens": len(own), "do_sample": False, "eos_token_id": None}
        more = {"output_logits": True, "return_dict_in_generate": True}
        logits = model.generate(torch.tensor([prompt]), **options, **more).logits
        for row, (token, logprob) in zip(logits, own, strict=True):
            worst = max(worst, abs(float(row[0].float().log_softmax(dim=-1)[token]) - logprob))
    return worst


def alike(found: list[list[Chosen]], wanted: list[list[Chosen]], tolerance: float) -> bool:
    return all(
        a[0] == b[0] and abs(a[1] - b[1]) <= tolerance
        for answer, own in zip(found, wanted, strict=True)
        for a, b in zip(answer[: len(own)], own, strict=True)
    )


def answers(path: Path, engine: str, prompts: list[list[int]]) -> list[list[Chosen]]:
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=1)
    with LLM(
        path, engine=engine, kv_memory="8MiB", max_model_len=128, prefill_chunk=16, max_num_seqs=8
    ) as llm:
        found = []
        for output in llm.generate(prompts, params):
            answer = output.outputs[0]
            logprobs = zip(answer.token_ids, answer.logprobs or (), strict=True)
            found.append([(token, each[token].logprob) for token, each in logprobs if each])
        return found


def attempt(model_type: str) -> Row:
    prompts = [random.Random(n).choices(range(3, VOCAB), k=n) for n in LENGTHS]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        wanted: list[list[Chosen]] | None = None
        tolerance = TOLERANCE
        trouble = ""
        for config in candidates(model_type):
            try:
                with torch.device("meta"):
                    size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
                if size > MOST_PARAMETERS:
                    raise ValueError(f"{size:,} parameters")
                model = save(config, path)
                wanted = expected(model, prompts)
                with contextlib.suppress(Exception):  # no cache, or one that takes no prompt like these
                    tolerance = TOLERANCE + cache_error(model, prompts, wanted)
                break
            except Exception as error:  # whatever a class stumbles over
                trouble = trouble or f"not tried, no tiny model runs: {_short(error)}"
        trouble = "" if wanted is not None else trouble or "not tried, no tiny configuration"
        if wanted is None:  # is its kind refused? Without weights, or a model of full size would be made up.
            path = path / "kind"
            with contextlib.suppress(Exception):
                CONFIG_MAPPING[model_type]().save_pretrained(path)
        cells = []
        for engine in ("paged", "padded"):
            try:
                found = answers(path, engine, prompts)
                cells.append(
                    trouble if wanted is None else "served" if alike(found, wanted, tolerance) else "DIFFERS"
                )
            except WinnowError as error:
                refusal = _short(error, path)
                cells.append(
                    f"refused: {refusal}" if "is not supported" in refusal or not trouble else trouble
                )
            except Exception as error:
                cells.append(f"FAILS: {_short(error)}")
    return Row(model_type, class_of(model_type), *cells)


def attempt_in_time(model_type: str, seconds: float) -> Row:
    """As `attempt`, in a process of its own, which is ended after `seconds`."""
    receive, send = FORK.Pipe(duplex=False)
    process = FORK.Process(target=_send_attempt, args=(model_type, send))
    process.start()
    send.close()
    try:
        if receive.poll(seconds):
            row: Row = receive.recv()
            return row
        trouble = f"not tried, it took more than {seconds:g} s"
    except EOFError:
        trouble = "not tried, the process ended"
    finally:
        process.kill()
        process.join()
        receive.close()
    return Row(model_type, class_of(model_type), trouble, trouble)


def _send_attempt(model_type: str, send: Connection) -> None:
    with contextlib.redirect_stderr(io.StringIO()):
        send.send(attempt(model_type))


def class_of(model_type: str) -> str:
    named = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    return named if isinstance(named, str) else named[0]


def _short(error: BaseException, path: Path | None = None) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    text = text if isinstance(error, WinnowError) else f"{type(error).__name__}: {text}"
    text = text.removeprefix("model: ").replace(str(path), "DIR")
    return text[:240].replace("|", "/")


def page(rows: list[Row]) -> str:
    paged = sum(row.paged == "served" for row in rows)
    padded = sum("served" in row for row in rows) - paged
    untried = sum("not tried" in row.paged and "served" not in row for row in rows)
    wrong = sum(cell.startswith(("DIFFERS", "FAILS")) for row in rows for cell in row[2:])
    lines = [
        "# Architectures",
        "",
        f"Every causal language model of transformers {transformers.__version__}, tried in float32 with a tiny "
        f"random model: greedy tokens of {len(LENGTHS)} prompts, up to {max(LENGTHS)} tokens long and prefilled in "
        f"chunks, must equal those of the model's own eager forward without a cache, their logprobs to {TOLERANCE:g}, "
        "and what that class's own answers with a cache differ by (Mamba-2 computes in two ways). "
        "This page is the output, "
        f"with torch {torch.__version__}, of",
        "",
        "    python -m winnow_lab.answers.architectures --write docs/architectures.md",
        "",
        f"**Of {len(rows)} the paged engine serves {paged}, and the padded one {padded} more. "
        f"{len(rows) - paged - padded - untried} are refused by name when they are loaded, {untried} could not be "
        f"tried, and {wrong} answers are wrong.**",
        "",
        "| model_type | class | engine=paged | engine=padded |",
        "|---|---|---|---|",
        *(row.line for row in rows),
    ]
    return "\n".join(lines) + "\n"


_BY_HAND = "\n## Images\n"
"""Heading of the section that regenerating the page leaves as it is."""


@dataclass(frozen=True)
class Options:
    model_types: tuple[str, ...] = flag((), "all, if none is given", positional=True)
    write: Path | None = flag(None, "write the table to this file")
    seconds: float = flag(120.0, "that a class may take", least=0)


def main() -> None:
    options = parse(Options, __doc__)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    for name in NEEDED:
        import_module(name)
    rows = []
    for model_type in options.model_types or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        rows.append(attempt_in_time(model_type, options.seconds))
        print(rows[-1].line, flush=True)
    if options.write is not None:
        kept = options.write.read_text(encoding="utf-8") if options.write.exists() else ""
        images = "".join(kept.partition(_BY_HAND)[1:])
        options.write.write_text(page(rows) + images, encoding="utf-8")


if __name__ == "__main__":
    main()
