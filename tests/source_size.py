"""Lines of source of each distribution against its budget: `make size`."""

import sys
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
BUDGET = Path(__file__).with_suffix(".toml")
SOURCES = {
    "src/winnow": (".py", ".pyi", ".html"),
    "lab/winnow_lab": (".py",),
    "plugins/ray/winnow_ray": (".py",),
    "plugins/dynamo/winnow_dynamo": (".py",),
    "plugins/drafts/winnow_drafts": (".py",),
    "plugins/stores/winnow_stores": (".py",),
    "plugins/events/winnow_events": (".py",),
    "plugins/humming/winnow_humming": (".py",),
    "plugins/ollama/winnow_ollama": (".py",),
    "plugins/vllm/winnow_vllm": (".py",),
    "plugins/beams/winnow_beams": (".py",),
    "plugins/inspect/winnow_inspect": (".py", ".html"),
    "native": (".cpp", ".h"),
}


def count(root: Path = ROOT) -> dict[str, Counter[str]]:
    """Return lines of code of each source by its folders; what lies beside these stands under its own name."""
    found: dict[str, Counter[str]] = {}
    for source, kinds in SOURCES.items():
        folders = found[source] = Counter()
        for path in (root / source).rglob("*"):
            if path.suffix in kinds:
                inner = path.relative_to(root / source).parts[:-1]
                folders["/".join((source, *inner[:1]))] += len(path.read_text(encoding="utf-8").splitlines())
    return found


def over(found: dict[str, Counter[str]], budget: dict[str, int]) -> list[str]:
    """Return a sentence for each source that has more lines than its budget."""
    return [
        f"{source} has {folders.total()} lines, {budget.get(source, 0)} are its budget: delete unused code"
        for source, folders in found.items()
        if folders.total() > budget.get(source, 0)
    ]


def main() -> int:
    """Print the table and return 1 where a source is over its budget."""
    budget = tomllib.loads(BUDGET.read_text(encoding="utf-8"))["lines"]
    found = count()
    for source, folders in found.items():
        print(f"{source:30} {folders.total():6} of {budget[source]:6}")
        if len(folders) > 1:
            for folder, lines in folders.most_common():
                print(f"  {folder:28} {lines:6}")
    print(*over(found, budget), sep="\n")
    return int(bool(over(found, budget)))


if __name__ == "__main__":
    sys.exit(main())
