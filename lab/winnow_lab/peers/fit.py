"""A model's directory with what `winnow fit` learns of it: `python fit.py MODEL OUT`."""

import os
import shutil
import sys

from winnow.cli.main import main

if __name__ == "__main__":
    model, out = sys.argv[1:]
    shutil.copytree(model, out, copy_function=os.link)
    sys.exit(main(["fit", out]))
