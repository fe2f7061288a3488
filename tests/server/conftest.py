"""Servers that tests share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from tests.server.running import Running, running

from winnow import LLM


@pytest.fixture(scope="session")
def llm() -> Iterator[LLM]:
    with LLM(kv_memory="32MiB", max_num_seqs=16) as llm:
        yield llm


@pytest.fixture(scope="session")
def server(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One for tests that leave nothing behind."""
    files: Path = tmp_path_factory.mktemp("files")
    with running(llm, files_dir=str(files), metrics_compat="vllm") as server:
        yield server
