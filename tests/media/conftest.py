"""What tests of images share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from winnow import LLM


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    vision = pytest.importorskip("tests.media.vision")
    path = tmp_path_factory.mktemp("pictures")
    (path / "first.png").write_bytes(vision.png(vision.FIRST))
    return path


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    vision = pytest.importorskip("tests.media.vision")
    path = tmp_path_factory.mktemp("vision")
    vision.save_model(path)
    return path


@pytest.fixture(scope="session")
def llm(model: Path, folder: Path) -> Iterator[LLM]:
    with LLM(
        model, kv_memory="4MiB", block_size=4, limit_mm_per_prompt=2, allowed_local_media_path=folder
    ) as llm:
        yield llm
