"""`winnow chat`, here and with a server."""

import io
from typing import Any

import pytest
from tests.cli.fake_llm import FakeLLM

from winnow.cli.main import main


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Any:
    def enter(text: str) -> None:
        monkeypatch.setattr("sys.stdin", io.StringIO(text))

    return enter


def test_a_conversation_here(
    typed: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("winnow.llm.LLM", FakeLLM)
    typed("ab\n\n/reset\ncd\n/exit\nnever\n")
    assert main(["chat", "--system", "s"]) == 0
    # The fake answers with the conversation's letters reversed: after /reset the first question is gone.
    assert capsys.readouterr().out.splitlines() == ["ba>resu<s>metsys<", "dc>resu<s>metsys<"]


def test_options_of_a_model_here_mean_nothing_to_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", "http://127.0.0.1:9", "--kv-memory", "1GiB"]) == 2
    assert "option of a model here" in capsys.readouterr().err


def test_a_server_that_is_not_there(typed: Any, capsys: pytest.CaptureFixture[str]) -> None:
    typed("hello\n")
    assert main(["chat", "--url", "http://127.0.0.1:9"]) == 0
    assert "does not answer" in capsys.readouterr().err
