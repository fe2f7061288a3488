"""What static type checkers know of `LLM`'s keyword arguments is what `winnow.config` says."""

import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest

from winnow.config import EngineConfig
from winnow.options import EngineOptions
from winnow.values.units import parse_bytes

PARTS = [get_type_hints(EngineConfig)[part.name] for part in fields(EngineConfig)]
CONFIG = {field.name: field for part in PARTS for field in fields(part) if field.name != "model"}
CONFIG_TYPES = {
    name: hint for part in PARTS for name, hint in get_type_hints(part).items() if name != "model"
}
OPTIONS = get_type_hints(EngineOptions)


def written(hint: Any) -> str:
    """A type as it is written."""
    return hint.__name__ if isinstance(hint, type) else str(hint)


def members(hint: Any) -> set[Any]:
    return set(get_args(hint)) if get_origin(hint) in (Union, UnionType) else {hint}


def test_every_option_is_there() -> None:
    missing = [f"    {name}: {written(CONFIG_TYPES[name])}" for name in CONFIG if name not in OPTIONS]
    assert not missing, "add to EngineOptions in src/winnow/options.py:\n" + "\n".join(missing)
    unknown = [name for name in OPTIONS if name not in CONFIG]
    assert not unknown, f"no part of EngineConfig has these; take them out of EngineOptions: {unknown}"


@pytest.mark.parametrize("name", sorted(OPTIONS.keys() & CONFIG.keys()))
def test_types_agree(name: str) -> None:
    """But for sizes in bytes, which may be text, and what a configuration leaves open."""
    if CONFIG_TYPES[name] is Any:
        return
    expected = members(CONFIG_TYPES[name])
    if CONFIG[name].metadata.get("parse") is parse_bytes:
        expected |= {str}
    assert members(OPTIONS[name]) == expected, (
        f"{name} is {written(OPTIONS[name])} in EngineOptions, and {written(CONFIG_TYPES[name])} in winnow.config"
    )


@pytest.mark.slow
def test_a_checker_finds_misspelt_options(tmp_path: Path) -> None:
    snippet = tmp_path / "snippet.py"
    snippet.write_text(
        "from winnow import LLM\n"
        'LLM("model", kv_memory="1GiB", max_num_seqs=8, prefill_chunk=None)\n'
        'LLM("model", kv_memroy="1GiB")\n'
        'LLM("model", max_num_seqs="8")\n'
    )
    command = [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", "--no-error-summary"]
    checked = subprocess.run(
        [*command, str(snippet)], capture_output=True, text=True, cwd=Path(__file__).parent.parent
    )
    lines = checked.stdout.splitlines()
    errors = [line.rsplit("snippet.py:")[1] for line in lines if ": error:" in line]
    assert [error.split(":")[0] for error in errors] == ["3", "4"], checked.stdout + checked.stderr
    assert 'Unexpected keyword argument "kv_memroy"' in errors[0]
    assert '"max_num_seqs" to "LLM" has incompatible type "str"' in errors[1]
