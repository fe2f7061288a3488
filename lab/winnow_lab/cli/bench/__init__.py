"""`winnow bench`: how fast, beside what the machine can do."""

import argparse

from winnow.cli.flags.engine import add_foreign_flags, check_foreign
from winnow.cli.flags.options import add_model_argument
from winnow.vllm import names as vllm_names
from winnow_lab.cli.bench import agents, formats, kernel, pressure, serve, throughput
from winnow_lab.study import perform
from winnow_lab.study.options import EngineOptions, add_options, options_of

DESCRIPTION = """\
Measure how fast Winnow is here, with the machine's own limits beside it.

A number means something next to another one that was measured in the same run: compare side by
side, on a machine that does nothing else, and look at the medians.
"""
EPILOG = """\
examples:
  winnow bench kernel
  winnow bench formats
  winnow bench throughput --preset w1
  winnow bench throughput --help
  winnow bench pressure TRACE --kv-memory 4MiB
  winnow bench serve --request-rate 4        (beside `winnow serve`)
  winnow bench agents MODEL --kv-memory 1GiB --prefix-cache-dir cache
docs/benchmarks.md says what the columns mean, and how to compare with other engines. The experiments of
the KV-Compress, Batch-Max and BATON papers, and policies beside each other and beside kvpress, run from
a checkout: python -m winnow_lab.papers --help
"""
BENCHES = {
    "kernel": kernel, "formats": formats, "throughput": throughput, "serve": serve, "agents": agents,
    "pressure": pressure,
}  # fmt: skip
_LIKE_VLLM = ("throughput", "serve")
"""Benches that vLLM has too: its flags are understood."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "winnow bench kernel|formats|throughput|serve|agents|pressure [options]"
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    benches = parser.add_subparsers(
        title="benches", metavar="BENCH", dest="bench", required=True, prog="winnow bench"
    )
    for name, bench in BENCHES.items():
        own = benches.add_parser(name, help=bench.SUMMARY)
        own.usage = f"winnow bench {name} {bench.ARGUMENTS}[options]"
        own.description, own.epilog = bench.DESCRIPTION, bench.EPILOG
        if bench.ARGUMENTS == "[MODEL] ":
            add_model_argument(own)
        add_options(own, bench.Options)
        if name in _LIKE_VLLM:
            add_foreign_flags(own, vllm_names.BENCH)
        own.set_defaults(parser=own)


def execute(namespace: argparse.Namespace) -> int:
    bench = BENCHES[namespace.bench]
    if namespace.bench in _LIKE_VLLM:
        check_foreign(namespace, vllm_names.BENCH)
    options = options_of(bench.Options, namespace)
    if isinstance(options, EngineOptions):
        from winnow.cli.flags.engine import silence_transformers

        silence_transformers()
    return perform(options, bench.measure, options.name or f"bench_{namespace.bench}")
