"""The kernels compile for a GPU that this machine does not have."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
# Shared memory of one program, in bytes, at most: a card with 99 KiB, and one with 227.
MOST_SHARED = {86: 99 * 1024, 90: 227 * 1024}
# Compiling all takes more than a minute.
LONG = (
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() and "WINNOW_TEST_EXTRAS" not in os.environ,
        reason="needs a minute of compiling: make test-extras",
    ),
)


def compile_kernels(tmp_path: Path, capability: int, *wanted: str) -> list[dict[str, Any]]:
    """What `triton_compile.py` prints."""
    script = Path(__file__).with_name("triton_compile.py")
    done = subprocess.run(
        [sys.executable, str(script), str(capability), *wanted],
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("formats", "capability", "head_dim"),
    [
        pytest.param(*each, marks=LONG)
        for each in (
            (("bfloat16", "bfloat16"), 86, "128"),
            (("bfloat16", "k=float32,v=int3"), 90, "128"),
            (("float32", "k=bfloat16,v=int8"), 86, "128"),
            (("float16", "k=int4-outlier,v=fp8_e4m3"), 90, "128"),
            (("bfloat16", "bfloat16"), 90, "576"),  # latents
        )
    ],
)
def test_kernels_compile_and_fit(
    formats: tuple[str, str], capability: int, head_dim: str, tmp_path: Path
) -> None:
    """Of activations and of KVs."""
    dtype, kv_format = formats
    found = compile_kernels(tmp_path, capability, dtype, head_dim, kv_format)
    assert len({line["kernel"].partition("/")[0] for line in found}) == 16, "every kernel"
    for line in found:
        assert line["shared"] <= MOST_SHARED[capability], line


# Of a thread, by Triton 3.9's compiler: 168 let three programs of 128 threads share a multiprocessor, and 255 two. That
# of 3.6 takes up to 251 for codes.
MOST_REGISTERS = {
    ("attend_split", "bfloat16"): 150,
    ("attend_chunk", "bfloat16"): 200,
    ("attend_split", "int8"): 190,
    ("attend_split", "fp8_e4m3"): 190,
    ("attend_split", "int4"): 168,
    ("observe_decode", "bfloat16"): 80,
    ("write_kvs", "bfloat16"): 48,
    ("rotate_and_write_heads", "bfloat16"): 48,
    ("compare_keys", "bfloat16"): 104,
}
# What the interpreter takes and the compiler may refuse.
NO_LIMIT = ["attend_split/window", "rms_norm_rows"]
COUNTED = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9)
# Instructions of the longest loop, which is decoding's over tiles of 128 KVs, or a chunk's over its own; 3.6 takes up
# to twice as many.
MOST_INSTRUCTIONS = {"bfloat16": 800, "int8": 1650, "fp8_e4m3": 1750, "int4": 1650}


@pytest.mark.skipif(
    shutil.which("cuobjdump", path=str(TOOLS)) is None,
    reason="needs triton with its tools: pip install triton",
)
@pytest.mark.parametrize(
    ("kv_format", "wanted"),
    [
        ("bfloat16", ["attend_split", "attend_chunk", "rotate_and_write_heads", "compare_keys", *NO_LIMIT]),
        *(
            pytest.param(kv_format, [name for name, of in MOST_REGISTERS if of == kv_format], marks=LONG)
            for kv_format in MOST_INSTRUCTIONS
        ),
    ],
)
def test_kernels_keep_to_their_registers(kv_format: str, wanted: list[str], tmp_path: Path) -> None:
    """With aligned memory, as the JIT finds it, and nothing spilled but by fp8: what a Hopper GPU would run."""
    found = compile_kernels(tmp_path, 90, "bfloat16", "128", kv_format, *wanted)
    assert {line["kernel"] for line in found} == set(wanted)
    for line in (line for line in found if line["kernel"] not in NO_LIMIT):
        assert line["stack"] <= (16 if kv_format == "fp8_e4m3" else 0), line
        assert not COUNTED or line["registers"] <= MOST_REGISTERS[line["kernel"], kv_format], line
        assert max(line["loops"], default=0) <= MOST_INSTRUCTIONS[kv_format] * (1 if COUNTED else 2.1), line
