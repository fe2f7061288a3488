"""Lines of source by folder against a budget that a commit raises on purpose: `make size`."""

import sys
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
BUDGET = Path(__file__).with_suffix(".toml")
SOURCES = {"src/winnow": (".py", ".pyi", ".html"), "native": (".cpp", ".h")}


def count(root: Path = ROOT) -> dict[str, int]:
    """Return lines of code by folder of `src/winnow`, of what lies beside these folders, and of `native`."""
    found: Counter[str] = Counter()
    for source, kinds in SOURCES.items():
        for path in (root / source).rglob("*"):
            if path.suffix in kinds:
                inner = path.relative_to(root / source).parts[:-1]
                folder = "/".join((source, *inner[:1])) if source.startswith("src") else source
                found[folder] += len(path.read_text(encoding="utf-8").splitlines())
    return dict(found)


def over(found: dict[str, int], budget: dict[str, int]) -> list[str]:
    """Return a sentence for each folder that has more lines than its budget, or none."""
    return [
        f"{folder} has {lines} lines, {budget.get(folder, 0)} are its budget: write less, or raise {BUDGET.name}"
        for folder, lines in sorted(found.items())
        if lines > budget.get(folder, 0)
    ]


def main() -> int:
    """Print the table and return 1 where a folder is over its budget."""
    budget = tomllib.loads(BUDGET.read_text(encoding="utf-8"))["lines"]
    found = count()
    for folder in sorted(found, key=found.__getitem__, reverse=True):
        print(f"{folder:24} {found[folder]:6} of {budget.get(folder, 0):6}")
    print(f"{'all':24} {sum(found.values()):6} of {sum(budget.values()):6}")
    print(*over(found, budget), sep="\n", end="")
    return int(bool(over(found, budget)))


if __name__ == "__main__":
    sys.exit(main())
