"""Tiny random models with layers that keep a state in place of KVs, or beside them: two of each kind or more.

And models with keys and values of two sizes, or layers of other heads than others.
"""

from typing import Any

from transformers import (
    BambaConfig,
    DeepseekV3Config,
    FalconH1Config,
    Gemma4TextConfig,
    GraniteMoeHybridConfig,
    JambaConfig,
    KimiLinearConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    MiniMaxConfig,
    NemotronHConfig,
    OlmoHybridConfig,
    PretrainedConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Zamba2Config,
    ZambaConfig,
)

VOCAB = 512
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
_LAYERS = ["linear_attention", "full_attention"] * 2
_SHORT = {"layer_types": ["conv", "full_attention"] * 2}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_SHARED = _EXPERTS | {"shared_expert_intermediate_size": 16}
_DELTA = {
    "layer_types": _LAYERS,
    "head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
_MAMBA = {"mamba_d_state": 8, "mamba_dt_rank": 4}
_FEW = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LATENT = _COMMON | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_NEMOTRON = {name: value for name, value in _COMMON.items() if name != "num_hidden_layers"}

HYBRIDS: dict[str, PretrainedConfig] = {
    # Gated DeltaNet
    "qwen3-next": Qwen3NextConfig(**_COMMON, **_DELTA, **_SHARED),
    "qwen3.5": Qwen3_5TextConfig(**_COMMON, **_DELTA),
    "qwen3.5-moe": Qwen3_5MoeTextConfig(
        **{n: v for n, v in _COMMON.items() if n != "intermediate_size"}, **_DELTA, **_SHARED
    ),
    "olmo-hybrid": OlmoHybridConfig(**_COMMON, **{n: v for n, v in _DELTA.items() if n != "head_dim"}),
    # Mamba-2
    "bamba": BambaConfig(**_COMMON, **_MAMBA2, attn_layer_indices=[1, 3]),
    "falcon-h1": FalconH1Config(**_COMMON, **_MAMBA2, mamba_d_ssm=64, mamba_rms_norm=True),
    "granite-4": GraniteMoeHybridConfig(**_COMMON, **_MAMBA2, layer_types=_LAYERS),
    "nemotron-h": NemotronHConfig(
        **_NEMOTRON,
        layers_block_type=["linear_attention", "moe", "full_attention"] * 2,
        head_dim=8,
        ssm_state_size=8,
        mamba_num_heads=4,
        mamba_head_dim=16,
        n_groups=2,
        n_routed_experts=4,
        moe_intermediate_size=16,
        moe_shared_expert_intermediate_size=16,
    ),
    "zamba2": Zamba2Config(
        **_COMMON | {"num_key_value_heads": 4},
        layers_block_type=["linear_attention", "hybrid"] * 2,
        mamba_d_state=8,
        n_mamba_heads=4,
        use_shared_attention_adapter=True,
    ),
    # Mamba
    "jamba": JambaConfig(
        **_COMMON, **_MAMBA, attn_layer_period=2, attn_layer_offset=1, num_experts=4, num_experts_per_tok=2
    ),
    "zamba": ZambaConfig(
        **_COMMON | {"num_key_value_heads": 4},
        **_MAMBA,
        layers_block_type=["linear_attention", "hybrid"] * 2,
        attention_head_dim=16,
    ),
    # lightning attention
    "minimax": MiniMaxConfig(
        **_COMMON, layer_types=_LAYERS, head_dim=16, num_local_experts=4, num_experts_per_tok=2
    ),
    # short convolutions
    "lfm2": Lfm2Config(**_COMMON, **_SHORT),
    "lfm2-moe": Lfm2MoeConfig(**_COMMON, **_SHORT, **_EXPERTS, num_dense_layers=1),
    # latent attention, which is computed with keys and values of two sizes
    "deepseek-v3": DeepseekV3Config(
        **_LATENT,
        head_dim=8,
        q_lora_rank=16,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        **_FEW,
        first_k_dense_replace=1,
    ),
    "kimi-linear": KimiLinearConfig(
        **_LATENT,
        layer_types=_LAYERS,
        linear_head_dim=8,
        linear_num_heads=4,
        num_experts=4,
        num_experts_per_token=2,
        moe_intermediate_size=16,
    ),
    # layers with a window have other heads
    "gemma4": Gemma4TextConfig(
        **_COMMON,
        head_dim=16,
        global_head_dim=32,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        sliding_window=24,
        layer_types=["sliding_attention", "full_attention"] * 2,
        hidden_size_per_layer_input=0,
        num_kv_shared_layers=0,
    ),
}
