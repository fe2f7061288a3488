"""`python -m winnow_lab.tasks`: `winnow eval` with more tasks, from a checkout."""

import sys
from collections.abc import Sequence

from winnow.cli.main import Parser, exit_code
from winnow_lab.cli.eval import configure, execute
from winnow_lab.tasks import TASKS


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m winnow_lab.tasks")
    configure(parser, TASKS)
    return exit_code(lambda: execute(parser.parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
