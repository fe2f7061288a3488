"""A test that is skipped says what runs it."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# A command, the system that has what is asked, or a case that says nothing.
SAYS = re.compile(
    r"\bmake [a-z]|\binstall \S|\bgit \w|needs Linux|needs the network|every request met a choice"
)


def reasons() -> list[tuple[str, str]]:
    """Return where tests are skipped, with the reasons that they give; `importorskip` without one gives the package."""
    found = []
    for path in (
        each for part in ("tests", "lab/tests", "plugins") for each in (ROOT / part).rglob("test*.py")
    ):
        for call in ast.walk(ast.parse(path.read_text())):
            name = ast.unparse(call.func) if isinstance(call, ast.Call) else ""
            if not isinstance(call, ast.Call) or name not in (
                "pytest.skip",
                "pytest.mark.skipif",
                "pytest.importorskip",
            ):
                continue
            given = [each.value for each in call.keywords if each.arg == "reason"]
            given += call.args[:1] if name == "pytest.skip" else []
            assert given or name == "pytest.importorskip", f"{path}:{call.lineno} gives no reason"
            found += [(f"{path}:{call.lineno}", ast.unparse(each)) for each in given]
    return found


def test_a_reason_names_a_command() -> None:
    assert len(found := reasons()) > 10
    assert not [where for where, reason in found if not SAYS.search(reason)]


@pytest.mark.parametrize(("extras", "outcome"), [(False, "skipped"), (True, "failed")])
def test_a_package_that_lacks_is_named_with_what_brings_it(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, extras: bool, outcome: str
) -> None:
    """`make test-extras` does not pass without what it is for."""
    monkeypatch.delenv("WINNOW_TEST_EXTRAS", raising=False)
    if extras:
        monkeypatch.setenv("WINNOW_TEST_EXTRAS", "1")
    call = pytest.CallInfo.from_call(lambda: pytest.importorskip("torchvision.nothing"), "call")
    report = request.node.ihook.pytest_runtest_makereport(item=request.node, call=call)
    said = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
    assert report.outcome == outcome and "could not import 'torchvision" in said
    assert said.endswith(": make test-extras")
