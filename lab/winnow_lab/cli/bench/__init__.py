"""`winnow bench`: how fast, beside what the machine can do."""

import argparse

from winnow_lab.cli.bench import agents, kernel, pressure, serve, throughput

DESCRIPTION = """\
Measure how fast Winnow is here, with the machine's own limits beside it.

A number means something next to another one that was measured in the same run: compare side by
side, on a machine that does nothing else, and look at the medians.
"""
EPILOG = """\
examples:
  winnow bench kernel
  winnow bench throughput --preset w1
  winnow bench throughput --help
  winnow bench pressure TRACE --kv-memory 4MiB
  winnow bench serve --request-rate 4        (beside `winnow serve`)
  winnow bench agents MODEL --kv-memory 1GiB --prefix-cache-dir cache
docs/benchmarks.md says what the columns mean, and how to compare with other engines. The experiments of
the KV-Compress, Batch-Max and BATON papers, and policies beside each other and beside kvpress, run from
a checkout: python -m winnow_lab.papers --help
"""
BENCHES = {"kernel": kernel, "throughput": throughput, "serve": serve, "agents": agents, "pressure": pressure}


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the benches and their arguments."""
    parser.usage = "winnow bench kernel|throughput|serve|agents|pressure [options]"
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    benches = parser.add_subparsers(
        title="benches", metavar="BENCH", dest="bench", required=True, prog="winnow bench"
    )
    for name, bench in BENCHES.items():
        subparser = benches.add_parser(name, help=bench.SUMMARY)
        bench.configure(subparser)
        subparser.set_defaults(parser=subparser)


def execute(namespace: argparse.Namespace) -> int:
    """Measure, and return the exit code."""
    return BENCHES[namespace.bench].execute(namespace)
