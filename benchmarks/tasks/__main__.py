"""`python -m benchmarks.tasks`: `winnow eval` with more tasks, from a checkout."""

import sys
from collections.abc import Sequence

from benchmarks.tasks import TASKS
from winnow.cli.eval import configure, execute
from winnow.cli.main import Parser, exit_code


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate what `argv` asks for and return the exit code."""
    parser = Parser(prog="python -m benchmarks.tasks")
    configure(parser, TASKS)
    return exit_code(lambda: execute(parser.parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
