"""Flags come from dataclasses, with nothing said twice."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import pytest

from winnow.cli.flags.engine import add_engine_flags, add_sampling_flags
from winnow.cli.flags.options import add_flags, given
from winnow.cli.main import Parser
from winnow.config import CacheConfig, EngineConfig, EvictionConfig, ModelConfig, SchedulerConfig
from winnow.errors import WinnowError
from winnow.sampling import SamplingParams
from winnow.sampling.params import READERS
from winnow.values.units import parse_bytes


@dataclass
class Example:
    """Options of every kind.

    Attributes:
        ratio: a number,
            at 100 % of its width.
        words: said with `--words`.

    Raises:
        ValueError: never.
    """

    size: int = field(default=2**20, metadata={"help": "a size", "parse": parse_bytes})
    mode: str = field(default="a", metadata={"help": "a mode", "choices": ("a", "b")})
    ratio: float = 0.5
    limit: int | None = 3
    words: str | Sequence[str] | None = ()
    ids: Sequence[int] | None = None
    weights: Mapping[int, float] | None = None
    loud: bool = False


def parse(typed: str = "", *more: str) -> dict[str, Any]:
    parser = Parser(prog="test")
    add_flags(parser, Example, "example")
    return given(parser.parse_args([*typed.split(), *more]), Example)


def test_what_is_not_typed_is_left_to_the_dataclass() -> None:
    assert parse() == {}


def test_every_kind_of_value() -> None:
    typed = "--size 2MiB --mode b --ratio 1 --limit none --words a --words b --ids 1 --ids 2 --loud"
    assert parse(typed, "--weights", '{"1": 2}') == {
        "size": 2**21,
        "mode": "b",
        "ratio": 1.0,
        "limit": None,
        "words": ["a", "b"],
        "ids": [1, 2],
        "loud": True,
        "weights": {"1": 2},
    }
    assert parse("--limit 4 --no-loud") == {"limit": 4, "loud": False}


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("--size 3q", "argument --size: .* must be a size such as 512MiB"),
        ("--mode c", "argument --mode: invalid choice: 'c'"),
        ("--ratio x", "argument --ratio: must be a number, got 'x'"),
        ("--limit x", "argument --limit: must be an integer or none, got 'x'"),
        ("--ids x", "argument --ids: must be an integer"),
        ("--weights x", "argument --weights: must be a JSON object, got 'x'"),
    ],
)
def test_unreadable_values_name_the_flag(typed: str, message: str) -> None:
    with pytest.raises(WinnowError, match=message):
        parse(typed)


def test_help_comes_from_metadata_or_docstring_and_shows_defaults() -> None:
    parser = Parser(prog="test")
    add_flags(parser, Example, "example")
    text = " ".join(parser.format_help().split())
    assert "--size SIZE a size (default: 1.0 MiB)" in text
    assert "--ratio X a number, at 100 % of its width (default: 0.5)" in text
    assert "--words TEXT said with --words" in text
    assert "(default: off)" in text


def test_every_option_of_the_engine_has_a_flag_with_help() -> None:
    parser = Parser(prog="test")
    add_engine_flags(parser)
    add_sampling_flags(parser, "sampling")
    actions = {action.dest: action for action in parser._actions}
    for config in (ModelConfig, CacheConfig, SchedulerConfig, EvictionConfig, SamplingParams):
        for option in fields(config):
            if option.name not in (
                "detokenize",
                "output_kind",
                "context_tokens",
                "template_tail",
                "answer_prefix",
                "protect",
                "forced_tokens",
                "structured_outputs",
                *READERS,
            ):
                assert "--" + option.name.replace("_", "-") in actions[option.name].option_strings
                assert actions[option.name].help
    typed = ["--kv-memory", "1GiB", "--prefill-chunk", "none", "--max-model-len", "128"]
    options = given(parser.parse_args(typed), ModelConfig, CacheConfig, SchedulerConfig)
    config = EngineConfig.from_options(options)
    assert (config.cache.kv_memory, config.scheduler.prefill_chunk, config.model.max_model_len) == (
        2**30,
        None,
        128,
    )


def test_flags_are_not_abbreviated() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser, Example, "example")
    _, unknown = parser.parse_known_args(["--siz", "1"])
    assert unknown == ["--siz", "1"]
