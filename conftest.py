"""Settings that hold for every test."""

import logging
import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

# Timing on shared machines says nothing about correctness, so no example has a deadline. WINNOW_EXAMPLES asks for more.
settings.register_profile(
    "winnow",
    max_examples=int(os.environ.get("WINNOW_EXAMPLES", "25")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("winnow")

# Where there is no GPU, Triton's kernels run in its interpreter. It asks for that when it is first imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


# Nothing is written into the home of who runs the tests, by them or by the commands that they start.
os.environ["WINNOW_MODEL_CACHE"] = "0"


def pytest_sessionstart() -> None:
    """End where `make test-gpu` finds no GPU."""
    if "WINNOW_TEST_GPU" in os.environ and not torch.cuda.is_available():
        pytest.exit(f"torch {torch.__version__} finds no GPU here; nothing was tested", returncode=2)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Hide GPUs from tests marked `cpu`, with their fixtures and the processes that they start."""
    with pytest.MonkeyPatch.context() as patch:
        if item.get_closest_marker("cpu"):
            patch.setattr(torch.cuda, "is_available", lambda: False)
            patch.setenv("CUDA_VISIBLE_DEVICES", "")
        return (yield)


# By the package that a skipped test lacks; what is not here comes with `make setup`.
BROUGHT_BY = {
    **dict.fromkeys(("torchvision", "humming"), "make test-extras"),
    **{"ray": "make test-ray", "grpc": "make test-ray", "dynamo": "make test-dynamo"},
}


def _with_command(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Name the command that runs a skipped test. Under `make test-extras` what it should have brought is a failure."""
    if not report.skipped or not isinstance(report.longrepr, tuple):
        return
    path, line, reason = report.longrepr
    if (lack := re.search(r"could not import '(\w+)", reason)) is not None:
        reason = f"{reason}: {BROUGHT_BY.get(lack[1], 'make setup')}"
    report.longrepr = (path, line, reason)
    if "WINNOW_TEST_EXTRAS" in os.environ and reason.endswith("make test-extras"):
        report.outcome, report.longrepr = "failed", f"{path}:{line}: {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    report = yield
    _with_command(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Iterator[None]:
    report = yield
    _with_command(report)
    return report


@pytest.fixture(autouse=True, scope="session")
def _silent_loading() -> Iterator[None]:
    """Let no line of a model's loading appear where it takes long on a busy machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("winnow.cli.loading.PATIENCE_SECONDS", 600.0)
        yield


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """Undo what a command that runs within a test, such as `winnow serve`, does to the process's log."""
    log, show = logging.getLogger("winnow"), warnings.showwarning
    handlers, levels = logging.root.handlers[:], (logging.root.level, log.level)
    yield
    added = [each for each in logging.root.handlers if each not in handlers]
    for handler in added:
        logging.root.removeHandler(handler)
    if added:
        logging.root.setLevel(levels[0])
        log.setLevel(levels[1])
        warnings.showwarning = show


@pytest.fixture(scope="session")
def command_env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the environment of commands that answer with the demo model: packed, it starts in a third of the time."""
    from winnow.config import ModelConfig
    from winnow.models import load_model

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.delenv("WINNOW_MODEL_CACHE")
        patch.setenv("OMP_NUM_THREADS", "1")
        load_model(ModelConfig())
        return dict(os.environ)


@pytest.fixture(scope="session")
def engine_name() -> str:
    """The engine of tests that hold for any; those of another one take its name in place of this."""
    return "paged"


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers, which no test changes."""
    from tiny_llama import save_tiny_llama

    return save_tiny_llama(tmp_path_factory.mktemp("model"), seed=3)


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A directory that looks like a model."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    return directory
