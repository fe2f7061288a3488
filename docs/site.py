"""Hook of mkdocs.yml: links that leave the folder of pages become plain text, since a site holds the pages alone."""

import re
from pathlib import Path
from typing import Any

_LINK = re.compile(r"(?<!!)\[([^\[\]]+)\]\(([^()\s#]+)(#[^()\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    docs = Path(config["docs_dir"]).resolve()

    def keep(link: re.Match[str]) -> str:
        if "://" in link[2] or link[2].startswith("mailto:"):
            return link[0]
        target = ((docs / page.file.src_uri).parent / link[2]).resolve()
        return link[0] if target.is_file() and target.is_relative_to(docs) else link[1]

    return _LINK.sub(keep, markdown)
