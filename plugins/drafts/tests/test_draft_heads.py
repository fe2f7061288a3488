"""Drafts of a checkpoint's own heads: those that transformers makes of them, and never another answer."""

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from draft_answers import answers
from safetensors.torch import load_file, save_file
from tiny_llama import save_tiny_llama
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4TextConfig,
    MellumConfig,
    PretrainedConfig,
    Qwen3_5TextConfig,
)
from transformers.cache_utils import MtpCache
from transformers.generation.candidate_generator import MTPCandidateGenerator
from transformers.modeling_layers import MtpModel

from winnow import LLM, SamplingParams
from winnow.errors import ConfigError
from winnow_drafts.sources import open_drafts

VOCAB, LAYERS = 12, 2
OPTIONS: dict[str, Any] = {"kv_memory": "1MiB", "block_size": 4, "max_num_seqs": 6, "prefill_chunk": 16}
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
}
MELLUM: dict[str, Any] = COMMON | {"num_experts": 4, "num_key_value_heads": 2, "head_dim": 16}
DENSE = {name: value for name, value in COMMON.items() if not name.startswith(("moe_", "num_experts"))}
CONFIGS: dict[str, PretrainedConfig] = {
    # layers with states, and a head without; transformers does not know what such configurations call it
    "qwen3.5": Qwen3_5TextConfig(
        **DENSE,
        num_key_value_heads=2,
        head_dim=16,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        layer_types=["linear_attention", "full_attention"],
        mtp_num_hidden_layers=1,
    ),
    "mellum": MellumConfig(
        **MELLUM, sliding_window=8, num_mtp_layers=1, layer_types=["sliding_attention", "full_attention"]
    ),
    "deepseek": DeepseekV3Config(
        **COMMON,
        num_key_value_heads=4,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        num_mtp_layers=2,
    ),
}
PROMPTS = [Random(seed).choices(range(2, VOCAB), k=14 + seed) for seed in range(3)]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
KINDS = [
    GREEDY,
    SamplingParams(temperature=0.8, top_p=0.9, n=2, seed=4, max_tokens=20, ignore_eos=True, logprobs=1),
    SamplingParams(temperature=0, max_tokens=30, frequency_penalty=0.5, stop_token_ids=[5]),
]


def published(name: str, parameter: Tensor, own: str) -> Iterator[tuple[str, Tensor]]:
    """A head's parameter under the names that checkpoints have for it; experts apart."""
    _, number, rest = name.split(".", 2)
    rest = rest.removeprefix("mtp_block.")
    if own in ("mellum", "qwen3.5"):
        ends = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden"}
        part = rest.split(".", maxsplit=1)[0]
        found = (ends | {"post_norm": "norm"}).get(part)
        rest = f"layers.{number}.{rest}" if found is None else rest.replace(part, found)
        name = f"mtp.{rest}"
    else:
        name = f"model.layers.{int(number) + LAYERS}.{rest.replace('post_norm.', 'shared_head.norm.')}"
    if "experts." not in name or name.endswith("weight"):
        yield name, parameter
        return
    for index, expert in enumerate(parameter):
        if name.endswith("gate_up_proj"):
            for kind, half in zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True):
                yield name.replace("gate_up_proj", f"{index}.{kind}.weight"), half.contiguous()
        else:
            yield name.replace("down_proj", f"{index}.down_proj.weight"), expert.contiguous()


def save(folder: Path, name: str) -> Path:
    """Write a random model with heads, as it would be published."""
    config = CONFIGS[name]
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    if name == "qwen3.5":
        model.config.num_mtp_layers, model.config.mtp_layer_types = 1, ["full_attention"]
    heads = MtpModel(model, model.config.num_mtp_layers)
    for each in (model, heads.layers):
        for _, parameter in each.named_parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    state = load_file(file)
    for key, parameter in heads.layers.state_dict(prefix="layers.").items():
        state |= {each: part.clone() for each, part in published(key, parameter, name)}
    save_file(state, file, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module", autouse=True)
def joined() -> Iterator[None]:
    """The plug-in is found, whether or not it is installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("winnow.process.extras.find_plugin", lambda group: open_drafts)
        yield


@pytest.fixture(scope="module", params=list(CONFIGS))
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def pair(directory: Path) -> Iterator[tuple[LLM, LLM]]:
    """An engine without drafts, and one with as many as there are heads."""
    count = 2 if directory.name.startswith("deepseek") else 1
    config = {"method": "mtp", "num_speculative_tokens": count, "adaptive": False}
    with LLM(directory, **OPTIONS) as plain, LLM(directory, speculative_config=config, **OPTIONS) as llm:
        yield plain, llm


def noted_drafts(llm: LLM) -> list[tuple[list[int], list[int]]]:
    """A list that gets the tokens and the drafts of all proposals from now on."""
    source = llm._engine.scheduler.drafts._source
    propose, made = source.propose, list[tuple[list[int], list[int]]]()

    def noted(counts: Any) -> Any:
        found = propose(counts)
        made.extend((list(each.token_ids), drafts) for each, drafts in found.items())
        return found

    source.propose = noted
    return made


def opened(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The model by transformers, which can load its heads: classes name the layers of one published size alone."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    heads = [r"^mtp\.", *(rf"layers\.{LAYERS + number}\." for number in range(2))]
    monkeypatch.setattr(model, "_keys_to_ignore_on_load_unexpected", heads)
    model.generation_config.eos_token_id = None
    if directory.name.startswith("qwen"):
        model.config.num_mtp_layers, model.config.mtp_layer_types = 1, ["full_attention"]
    return model


@torch.inference_mode()
def test_drafts_are_those_of_transformers(
    directory: Path, pair: tuple[LLM, LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = noted_drafts(pair[1])
    answers(pair[1], GREEDY, PROMPTS)
    model = opened(directory, monkeypatch)
    heads = MtpModel.from_pretrained(model)
    for tokens, drafts in made[:: len(made) // 8]:
        known = torch.tensor([tokens])
        states = model(known[:, :-1], output_hidden_states=True).hidden_states[-1]
        position = torch.arange(1, len(tokens))[None]
        cache = MtpCache(config=model.config.get_mtp_config())
        found, *_ = heads(known[:, 1:], states, None, position, cache)
        assert drafts == found[0].tolist()[: len(drafts)]


@pytest.mark.parametrize("directory", ["mellum", "deepseek"], indirect=True)  # it drafts for none with states
def test_transformers_accepts_as_many(
    directory: Path, pair: tuple[LLM, LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    monkeypatch.setattr(
        MTPCandidateGenerator,
        "update_candidate_strategy",
        lambda self, tokens, scores, matches: counts.append(int(matches)),
    )
    model = opened(directory, monkeypatch)
    prompt = Random(9).choices(range(2, VOCAB), k=20)  # no part of it is known
    model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False, use_mtp=True, pad_token_id=0)
    before = pair[1].stats().num_accepted_tokens
    answers(pair[1], GREEDY, [prompt])
    assert pair[1].stats().num_accepted_tokens - before == sum(counts)


@pytest.mark.parametrize("params", KINDS)
def test_heads_change_no_answer(pair: tuple[LLM, LLM], params: SamplingParams) -> None:
    plain, llm = pair
    before = llm.stats()
    assert answers(llm, params, PROMPTS) == answers(plain, params, PROMPTS)
    after = llm.stats()
    assert before.num_accepted_tokens < after.num_accepted_tokens


@pytest.mark.parametrize(
    ("more", "message"), [({}, "its config.json names none"), ({"model": True}, "must be an assistant")]
)
def test_models_without_heads_are_refused(tmp_path: Path, more: dict[str, Any], message: str) -> None:
    model = save_tiny_llama(tmp_path, seed=1)
    config = {"method": "mtp", **{name: str(model) for name in more}}
    with pytest.raises(ConfigError, match=message):
        LLM(model, speculative_config=config, **OPTIONS)


def test_an_unknown_kind_of_assistant_is_named(tmp_path: Path) -> None:
    assistant = tmp_path / "assistant"
    assistant.mkdir()
    (assistant / "config.json").write_text('{"model_type": "muse_assistant"}', encoding="utf-8")
    config = {"method": "draft_model", "model": str(assistant)}
    with pytest.raises(
        ConfigError, match="is a muse_assistant, and assistants must be of a kind out of gemma4_"
    ):
        LLM(save_tiny_llama(tmp_path, seed=1), speculative_config=config, **OPTIONS)


GEMMA: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "sliding_window": 12,
    "max_position_embeddings": 256,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
}


@pytest.fixture(scope="module")
def assisted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model whose layers read those before, and its assistant, as they would be published."""
    torch.manual_seed(2)
    kinds = ["sliding_attention", "full_attention"]
    of_model = Gemma4TextConfig(
        **GEMMA | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB},
        num_attention_heads=4,
        num_hidden_layers=6,
        layer_types=3 * kinds,
        num_kv_shared_layers=2,
    )
    own = Gemma4TextConfig(
        **GEMMA, num_attention_heads=2, num_hidden_layers=2, layer_types=kinds, num_kv_shared_layers=2
    )
    made = (
        AutoModelForCausalLM.from_config(of_model),
        Gemma4AssistantForCausalLM(Gemma4AssistantConfig(text_config=own, backbone_hidden_size=32)),
    )
    folders = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("assistant")
    for model, folder in zip(made, folders, strict=True):
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.15)
        model.float().save_pretrained(folder)
    return folders


@torch.inference_mode()
def drafts_of_transformers(model: Any, assistant: Any, tokens: list[int], count: int) -> list[int]:
    """What the assistant drafts behind some tokens, of which the last is not computed yet."""
    known = torch.tensor([tokens])
    out = model(known[:, :-1], output_hidden_states=True, return_shared_kv_states=True)
    hidden, token = out.hidden_states[-1][:, -1:], known[:, -1:]
    found = []
    for _ in range(count):
        out_of_it = assistant(
            inputs_embeds=torch.cat([model.get_input_embeddings()(token), hidden], dim=-1),
            position_ids=torch.tensor([[len(tokens) - 1]]),
            shared_kv_states=out.shared_kv_states,
        )
        hidden, token = out_of_it.last_hidden_state, out_of_it.logits.argmax(dim=-1)
        found.append(int(token))
    return found


def test_an_assistant_reads_the_cache(assisted: tuple[Path, Path]) -> None:
    directory, other = assisted
    config = {"method": "mtp", "model": str(other), "num_speculative_tokens": 3, "adaptive": False}
    with LLM(directory, **OPTIONS) as plain, LLM(directory, speculative_config=config, **OPTIONS) as llm:
        made = noted_drafts(llm)
        for params in KINDS[:2]:
            assert answers(llm, params, PROMPTS) == answers(plain, params, PROMPTS)
            if params is GREEDY:
                proposed = list(made)
        assert llm.stats().num_accepted_tokens > 0
    model, assistant = (
        AutoModelForCausalLM.from_pretrained(each, dtype=torch.float32).eval() for each in (directory, other)
    )
    # Its mask lets two KVs more be seen than what the model's own token sees in the window, which may be gone.
    assistant.config.get_text_config().sliding_window -= 2
    for tokens, drafts in proposed[:: len(proposed) // 5]:
        assert drafts == drafts_of_transformers(model, assistant, tokens, len(drafts))
