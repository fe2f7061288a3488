"""`python -m winnow_lab.papers`: the experiments of papers, from a checkout."""

import sys
from collections.abc import Sequence

from winnow.cli.main import Parser, exit_code, run_command

PROGRAM = "python -m winnow_lab.papers"
DESCRIPTION = """\
Repeat the experiments of papers on KV cache eviction and batching, and set the numbers beside theirs.

The first two run on the embedded demo model, or on another one with --model. KV-Compress' and Batch-Max' tables are
those of `python -m winnow_lab.papers.headline`.
"""
EPILOG = f"""\
examples:
  {PROGRAM} baton --sets short --batches 2,8 --modes static,embedding
docs/benchmarks.md says what the columns mean.
"""
STUDIES = {
    "baton": "padded batches that queries join and leave, beside static ones (BATON, Tables 1 and 2, Figures 5 to 7)",
    "kcache": "values that weigh most from the host: answers and tokens per second (KCache, Tables 2 and 3)",
    "plan": "what the texts print for their machines beside a planner fitted to some of it; runs nothing",
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog=PROGRAM, description=DESCRIPTION, epilog=EPILOG)
    typed = sys.argv[1:] if argv is None else argv
    return exit_code(lambda: run_command(parser, [(STUDIES, "winnow_lab.papers.{}.command")], typed))


if __name__ == "__main__":
    sys.exit(main())
