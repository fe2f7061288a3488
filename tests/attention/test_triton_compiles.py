"""The kernels compile for a GPU that this machine does not have."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

# Shared memory of one program, in bytes, at most: compute capability 8.6, the least of those with bfloat16.
SMALLEST = 99 * 1024


@pytest.mark.slow
@pytest.mark.parametrize(
    "formats",
    [
        ("bfloat16", "bfloat16"),
        ("bfloat16", "k=float32,v=int3"),
        ("float32", "k=bfloat16,v=int8"),
        ("float16", "k=int4-outlier,v=fp8_e4m3"),
    ],
)
def test_kernels_compile_for_hopper_and_fit_smaller_ones(formats: tuple[str, str], tmp_path: Path) -> None:
    """Of activations and of KVs."""
    dtype, kv_format = formats
    script = Path(__file__).with_name("triton_compile.py")
    done = subprocess.run(
        [sys.executable, str(script), "90", dtype, "128", kv_format],
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    shared = [line.split() for line in done.stdout.splitlines()]
    assert len({name for name, _ in shared}) == 8, "every kernel"
    for name, size in shared:
        assert int(size) <= SMALLEST, name
