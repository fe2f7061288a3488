"""Pages of several studies: one begins with the part of its own name; each other part stands behind an anchor."""

import re
from pathlib import Path

from winnow_lab.study.index import PAGES


def read_parts(page: Path) -> dict[str, str]:
    """Return the Markdown of each part of a page by the name of its numbers, first that of the page's own name."""
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    first, *others = re.split(r'^<a id="(\w+)"></a>\n', text, flags=re.MULTILINE)
    found = [(page.stem, first), *zip(others[::2], others[1::2], strict=True)]
    return {name: part.strip("\n") + "\n" for name, part in found}


def write_part(page: Path, name: str, text: str) -> None:
    """Write a part of a page, whose other parts stay. A part takes its title from the index."""
    parts = read_parts(page)
    parts[name] = text if name == page.stem else re.sub("^#", "##", text, flags=re.MULTILINE)
    first = parts.pop(page.stem).strip("\n")
    others = (f'<a id="{each}"></a>\n{part}' for each, part in parts.items())
    page.write_text(with_titles("\n".join([f"{first}\n"] * bool(first) + [*others])), encoding="utf-8")


def with_titles(page: str) -> str:
    """Return a page whose parts have as titles what the index says that they settled."""

    def title(anchor: re.Match[str]) -> str:
        settled = PAGES[anchor[2]].settled
        return f"{anchor[1]}## {settled[0].upper()}{settled[1:]}"

    return re.sub(r'^(<a id="(\w+)"></a>\n)## .*', title, page, flags=re.MULTILINE)


def page_of(name: str) -> str:
    """Return the file of a part: the page that the index names, or one of its own."""
    return PAGES[name].file.partition("#")[0] if name in PAGES else f"{name}.md"
