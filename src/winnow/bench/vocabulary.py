"""How many tokens a model knows."""

from pathlib import Path

from transformers import AutoConfig


def vocab_size(model: Path) -> int:
    """Of the model in that directory, which has been loaded before."""
    config = AutoConfig.from_pretrained(model, local_files_only=True, trust_remote_code=False)
    return int(config.get_text_config().vocab_size)
