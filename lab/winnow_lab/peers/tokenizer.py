"""The model of the work, with a tokenizer beside it: converters ask for one, though prompts are token ids."""

import shutil
import tempfile
from pathlib import Path

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from winnow_lab.bench.presets import LlamaShape, model_cache


def save_with_tokenizer(shape: LlamaShape, folder: Path) -> Path:
    """Copy the model to a directory below `folder` and name its tokens, unless that has been done."""
    source = shape.save(model_cache())
    path = folder / source.name
    if not path.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as unfinished:
            copy = Path(unfinished) / "model"
            shutil.copytree(source, copy)
            names = {f"t{token}": token for token in range(shape.vocab_size)}
            words = Tokenizer(models.WordLevel(names, unk_token="t0"))  # noqa: S106
            # The ids that a Llama's configuration names for these by default.
            PreTrainedTokenizerFast(
                tokenizer_object=words,
                unk_token="t0",  # noqa: S106
                bos_token="t1",  # noqa: S106
                eos_token="t2",  # noqa: S106
            ).save_pretrained(copy)
            copy.rename(path)
    return path
