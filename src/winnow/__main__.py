"""`python -m winnow` is the command `winnow`."""

import sys

from winnow.cli.main import main

sys.exit(main())
