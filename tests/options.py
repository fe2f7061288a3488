"""Another value of every option of the engine, found from the dataclasses, so that a new option cannot be forgotten."""

import types
import typing
from dataclasses import Field, fields
from typing import Any

from winnow.config import PARTS
from winnow.values.units import parse_bytes

NAMES = [(part, each.name) for part, config in PARTS.items() for each in fields(config)]
"""Part and name of every option."""

OTHERS = {
    "model": "elsewhere",
    "revision": "v2",
    "eviction": "snapkv",
    "pool": 9,
    "device": "cpu",
    "generation_config": "winnow",
    "tokenizer": "elsewhere",
    "lora": "elsewhere",
    "documents": "passages",
    "reuse_separator": " # # ",
    "prefix_store": "elsewhere",
    "prefix_cache_dir": "cache",
    "watermark_low": 0.5,
    "tenants": '{"ada": {"weight": 2}}',
    "speculative_config": '{"method": "ngram"}',
    "kv_cache_dtype": "k=int8,v=int4",
    "gpu_memory_utilization": 0.5,
    "kv_group": 64,
    "engine": "padded",
    "kv_wide": "layers=1,recent=64",
    "value_tier": "host:L=1,N=64",
    "allowed_media_domains": "images.test",
    "allowed_local_media_path": "/",
}
"""Where the type does not tell what is valid."""


def base_options(part: str, name: str) -> dict[str, Any]:
    """What the option `name` of `part` needs beside it."""
    beside = {"batch_invariant": {"enable_prefix_caching": False}}
    return dict(beside.get(name, {}))


def other_value(part: str, name: str) -> Any:
    """A value that is valid and not the default."""
    config = PARTS[part]
    field = next(each for each in fields(config) if each.name == name)
    return _other(field, typing.get_type_hints(config)[name])


def as_flags(name: str, value: Any) -> list[str]:
    """The option as it is typed."""
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    return [f"--{flag}", str(value)]


def _other(field: "Field[Any]", hint: Any) -> Any:
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if field.name in OTHERS:
        return OTHERS[field.name]
    if "choices" in field.metadata:
        return next(each for each in field.metadata["choices"] if each != field.default)
    if field.metadata.get("parse") is parse_bytes:
        return 2**20
    if bool in kinds:
        return not field.default
    if float in kinds:
        return 2.0 if field.default is None else field.default * 0.95
    assert int in kinds, f"add another value of {field.name} to OTHERS"
    return 2 if field.default is None else field.default + 1
