"""A Llama as one GGUF file: `python to_gguf.py MODEL OUT [BF16|Q8_0|Q4_K_M]`; runs in the peer's environment.

llama.cpp's own converter is part of its sources, not of a package. Matrices are written in bfloat16; its program
`llama-quantize` makes the other kinds of them.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter, TokenType, get_tensor_name_map
from gguf.quants import quantize
from numpy.typing import NDArray
from safetensors.torch import load_file

# A tokenizer of that kind must have one token per byte; these follow unknown, beginning and end.
FIRST_BYTE, BYTES = 3, 256
# transformers' default.
ROPE_THETA = 10000.0


def write_shape(writer: GGUFWriter, config: Mapping[str, Any]) -> None:
    """Write the header: what the model is. `config` has transformers' names; head_dim may be missing."""
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
        writer.add_rope_dimension_count(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config.get("rope_parameters") or config
    writer.add_rope_freq_base(rope.get("rope_theta", ROPE_THETA))
    writer.add_vocab_size(config["vocab_size"])


def write_tokens(writer: GGUFWriter, count: int) -> None:
    """Names for tokens, which prompts of ids do without."""
    tokens = [f"t{token}" for token in range(count)]
    kinds = [TokenType.NORMAL] * count
    for byte in range(BYTES):
        tokens[FIRST_BYTE + byte] = f"<0x{byte:02X}>"
        kinds[FIRST_BYTE + byte] = TokenType.BYTE
    kinds[0], kinds[1], kinds[2] = TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * count)
    writer.add_token_types(kinds)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)


def interleaved(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of each head in llama.cpp's order: it rotates neighbours, transformers the two halves of a head."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def tensor_name(name: str, layers: int) -> str:
    """What llama.cpp calls a tensor of a model with that many layers that transformers calls `name`."""
    found = get_tensor_name_map(MODEL_ARCH.LLAMA, layers).get_name(name, (".weight",))
    assert found is not None, f"no tensor of a Llama: {name}"
    return str(found)


def in_llama_cpp_order(
    name: str, weight: NDArray[np.float32], config: Mapping[str, Any]
) -> NDArray[np.float32]:
    """The tensor that transformers calls `name` as llama.cpp stores it."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    count = next((count for part, count in heads.items() if part in name), None)
    return weight if count is None else interleaved(weight, count)


def find_program(name: str) -> str:
    """A program of llama.cpp on the path."""
    return shutil.which(name) or sys.exit(f"{name} is not on the path; build it from llama.cpp's sources")


def write_bfloat16(model: Path, file: Path) -> None:
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    writer = GGUFWriter(file, "llama")
    write_shape(writer, config)
    write_tokens(writer, config["vocab_size"])
    for name, tensor in load_file(model / "model.safetensors").items():
        weight = in_llama_cpp_order(name, tensor.float().numpy(), config)
        target = tensor_name(name, config["num_hidden_layers"])
        if weight.ndim == 1:
            writer.add_tensor(target, weight)
        else:
            kind = GGMLQuantizationType.BF16
            writer.add_tensor(target, quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main(model: Path, out: Path, kind: str = "BF16") -> None:
    out.mkdir()
    wide, file = out / "bfloat16.gguf", out / "model.gguf"
    write_bfloat16(model, wide)
    if kind == "BF16":
        wide.rename(file)
    else:
        subprocess.run([find_program("llama-quantize"), wide, file, kind], check=True)  # noqa: S603
        wide.unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
