"""The entry point of `python -m winnow_lab.real`."""

import sys

from winnow_lab.real.command import main

if __name__ == "__main__":
    sys.exit(main())
