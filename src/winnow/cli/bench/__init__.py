"""`winnow bench`: how fast, beside what the machine can do."""

import argparse

from winnow.cli.bench import batch_max, baton, h2h, kernel, kv_compress, kvpress, throughput

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
docs/benchmarks.md says what the columns mean, and how to compare with other engines.
"""
BENCHES = {
    "kernel": kernel,
    "throughput": throughput,
    "kv-compress": kv_compress,
    "batch-max": batch_max,
    "baton": baton,
    "h2h": h2h,
    "kvpress": kvpress,
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the benches and their arguments."""
    parser.usage = "winnow bench kernel|throughput|kv-compress|batch-max|baton|h2h|kvpress [options]"
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    benches = parser.add_subparsers(
        title="benches", metavar="BENCH", dest="bench", required=True, prog="winnow bench"
    )
    for name, bench in BENCHES.items():
        subparser = benches.add_parser(
            name, help=bench.SUMMARY, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
        )
        bench.configure(subparser)
        subparser.set_defaults(parser=subparser)


def execute(namespace: argparse.Namespace) -> int:
    """Measure, and return the exit code."""
    return BENCHES[namespace.bench].execute(namespace)
