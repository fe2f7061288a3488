"""Saving and restoring a run as safetensors: weights, optimiser state and the clock; and exporting the model."""

import json
from pathlib import Path

import torch
from model import TrainingLlama
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor


def save_run(
    path: Path,
    model: TrainingLlama,
    optimisers: list[torch.optim.Optimizer],
    step: int,
    tokens: int,
    elapsed: float,
) -> None:
    """Writes everything a run needs to resume; `elapsed` in seconds. The file is replaced whole or not at all."""
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for number, optimiser in enumerate(optimisers):
        for index, state in optimiser.state_dict()["state"].items():
            for key, value in state.items():
                tensors[f"optimiser.{number}.{index}.{key}"] = torch.as_tensor(value)
    metadata = {"step": str(step), "tokens": str(tokens), "elapsed": str(elapsed)}
    partial = path.with_suffix(".partial")
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, partial, metadata)
    partial.rename(path)


def load_run(
    path: Path, model: TrainingLlama, optimisers: list[torch.optim.Optimizer]
) -> tuple[int, int, float]:
    """Restores what `save_run` wrote; returns step, tokens and elapsed seconds."""
    tensors = load_file(path)
    model.load_state_dict(
        {name.removeprefix("model."): t for name, t in tensors.items() if name.startswith("model.")}
    )
    for number, optimiser in enumerate(optimisers):
        states: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            if name.startswith(f"optimiser.{number}."):
                _, _, index, key = name.split(".", 3)
                states.setdefault(int(index), {})[key] = tensor
        optimiser.load_state_dict({"state": states, "param_groups": optimiser.state_dict()["param_groups"]})
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    return int(metadata["step"]), int(metadata["tokens"]), float(metadata["elapsed"])


def export(folder: Path, model: TrainingLlama, dtype: torch.dtype) -> None:
    """Writes config.json, generation_config.json and model.safetensors for `LlamaForCausalLM.from_pretrained`."""
    folder.mkdir(parents=True, exist_ok=True)
    pad, bos, eos = 0, 1, 2
    config = model.shape.hugging_face_config(bos, eos, pad, str(dtype).removeprefix("torch."))
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    partial = folder / "model.safetensors.partial"
    save_file(model.to_hugging_face(dtype), partial, {"format": "pt"})
    partial.rename(folder / "model.safetensors")
