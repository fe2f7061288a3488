"""`python -m winnow_lab`: all studies and pages; `--write` renews docs/results; `seeds` runs that study."""

import argparse
import sys

from winnow_lab.checkout import ROOT
from winnow_lab.study.index import listing, results_page
from winnow_lab.study.parts import with_titles


def main() -> None:
    if sys.argv[1:2] == ["seeds"]:
        from winnow_lab.seeds import Options, study
        from winnow_lab.study import run_study

        sys.exit(run_study(Options, study, sys.argv[2:]))
    parser = argparse.ArgumentParser(prog="python -m winnow_lab", description="List the studies of the lab.")
    parser.add_argument(
        "--write", action="store_true", help="write docs/results/README.md and titles of parts"
    )
    if parser.parse_args().write:
        for page in (ROOT / "docs/results").glob("*.md"):
            text = results_page() if page.stem == "README" else with_titles(page.read_text(encoding="utf-8"))
            page.write_text(text, encoding="utf-8")
    print(listing())


if __name__ == "__main__":
    main()
