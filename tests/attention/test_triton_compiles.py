"""The kernels compile for a GPU that this machine does not have."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# Shared memory of one program, in bytes, at most: a card with 99 KiB, and one with 227.
MOST_SHARED = {86: 99 * 1024, 90: 227 * 1024}


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


@pytest.mark.slow
@pytest.mark.parametrize("capability", MOST_SHARED)
@pytest.mark.parametrize(
    "formats",
    [
        ("bfloat16", "bfloat16"),
        ("bfloat16", "k=float32,v=int3"),
        ("float32", "k=bfloat16,v=int8"),
        ("float16", "k=int4-outlier,v=fp8_e4m3"),
    ],
)
def test_kernels_compile_and_fit(formats: tuple[str, str], capability: int, tmp_path: Path) -> None:
    """Of activations and of KVs."""
    dtype, kv_format = formats
    found = compile_kernels(tmp_path, capability, dtype, "128", kv_format)
    assert len({line["kernel"] for line in found}) == 8, "every kernel"
    for line in found:
        assert line["shared"] <= MOST_SHARED[capability], line
