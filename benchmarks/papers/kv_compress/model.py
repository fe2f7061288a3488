"""A model for contexts longer than the demo model's."""

from winnow.bench.presets import LlamaShape

RANDOM = LlamaShape(
    num_hidden_layers=6,
    hidden_size=256,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    intermediate_size=640,
    vocab_size=5120,
    max_position_embeddings=65536,
)
"""The demo model's shape with random weights: as fast, with room for 65,536 positions, and nothing to say."""
