"""Python blocks of README and docs run, page by page, the demo model in place of a reader's own."""

import re
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from test_docs import PAGES, ROOT

from winnow import LLM, SamplingParams
from winnow.models import DEMO_MODEL

BLOCK = re.compile(r"^```python\n(.*?)^```(?:\n+```text\n(.*?)^```)?", re.MULTILINE | re.DOTALL)
BLOCKS = {str(page.relative_to(ROOT)): BLOCK.findall(page.read_text()) for page in PAGES}
# What stands on a page and cannot run wherever the suite does.
PACKAGES = {"docs/deploy.md": "ray", "docs/how-a-step-works.md": "winnow_lab"}
NEEDS_THE_NETWORK = {"docs/images.md"}
TOKENS = Random(0).choices(range(300, 1000), k=2048)
# What pages speak of before a block.
GIVEN = {"prompt": TOKENS[:300], "prompt_token_ids": TOKENS[:300], "document": TOKENS, "question": TOKENS[:9]}


@pytest.fixture
def on_the_demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Whatever model a block names, little memory holds the demo model."""
    opened, init = list[LLM](), LLM.__init__

    def open_demo(self: LLM, model: Any = None, **options: Any) -> None:
        init(self, DEMO_MODEL, **options | {"kv_memory": "128MiB"})
        opened.append(self)

    monkeypatch.setattr(LLM, "__init__", open_demo)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prefixes").mkdir()
    yield
    for llm in opened:
        llm.close()


@pytest.mark.parametrize("page", [page for page, blocks in BLOCKS.items() if blocks])
def test_blocks_run(page: str, on_the_demo: None, capsys: pytest.CaptureFixture[str]) -> None:
    """One after the other, with what the page before them says is there; printed is what the page prints behind."""
    if page in NEEDS_THE_NETWORK:
        pytest.skip(f"needs the network: copy the blocks of {page}")
    if page in PACKAGES:
        pytest.importorskip(PACKAGES[page])
    space: dict[str, Any] = GIVEN | {"LLM": LLM, "SamplingParams": SamplingParams}
    for block, expected in BLOCKS[page]:
        capsys.readouterr()
        exec(compile(block, page, "exec"), space)  # noqa: S102
        assert not expected or capsys.readouterr().out == expected
