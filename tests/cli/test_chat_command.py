"""`winnow chat`, here and with a server."""

import io
import re
from pathlib import Path
from typing import Any

import pytest
from tests.cli.fake_llm import FakeLLM

from winnow.cli.main import main
from winnow.config import MediaConfig
from winnow.media import MediaLoader


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
    assert main(["chat", "--model", "demo", "--system", "s"]) == 0
    # The fake answers with the conversation's letters reversed: after /reset the first question is gone.
    assert capsys.readouterr().out.splitlines() == ["ba>resu<s>metsys<", "dc>resu<s>metsys<"]


def test_what_is_said_beside_answers(
    typed: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("winnow.llm.LLM", FakeLLM)
    typed("/help\n/rest\n/etc/passwd\n /reset \n /x?\n")
    assert main(["chat", "--model", "demo", "--kv-memory", "1MiB", "--temperature", "0"]) == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines() == ["?x/ >resu<"], "a question after a space may begin with /"
    lines = shown.err.splitlines()
    assert re.fullmatch(
        r"winnow: 10 tokens, \d+ tokens/s, first after 0.\d\d s, [\d.]+ .iB of memory", lines.pop()
    )
    assert re.fullmatch(r"winnow: Q4_1 as stored, fake(: about \d+ tokens/s)?", lines.pop())
    assert lines == [
        "winnow: the demo model, context 200 tokens",
        "winnow: layers Fake, attention NoBackend, KVs int8",
        "winnow: KV memory 1.0 MiB (1024 tokens uncompressed), at most 64 answers in a batch, 2048 tokens in a step",
        "winnow: memory: weights 3.0 MiB (bfloat16) + KVs up to 1.0 MiB + about 1.0 GiB for all else",
        "winnow: /help lists commands, /exit or Ctrl-D ends",
        "/file PATH  put a text before the next question",
        "/image PATH put an image before it",
        "/stats      tokens and memory of the conversation",
        "/reset      begin a new conversation",
        "/exit       end, as Ctrl-D does",
        "/help       this list",
        "Ctrl-C stops an answer; twice at an empty prompt ends. A question that begins with / needs a space before it.",
        "winnow: error: there is no command /rest; did you mean /reset? "
        "Known: /file, /image, /stats, /reset, /exit, /help",
        "winnow: error: there is no command /etc/passwd; Known: /file, /image, /stats, /reset, /exit, /help",
    ]


@pytest.mark.parametrize(
    ("recommended", "typed_flags", "sampled", "said"),
    [
        ({}, [], (0.3, 0.95, 0.05), True),
        ({"max_tokens": 9}, ["--top-p", "0.5"], (0.3, 0.5, 0.05), True),
        ({}, ["--temperature", "0"], (0.0, 0.95, 0.05), False),
        ({"temperature": 1.0}, [], (1.0, 1.0, 0.0), False),
        ({"top_k": 20}, [], (1.0, 1.0, 0.0), False),
    ],
)
def test_where_the_model_recommends_nothing_answers_are_sampled_narrowly(
    typed: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    recommended: dict[str, Any],
    typed_flags: list[str],
    sampled: tuple[float, float, float],
    said: bool,
) -> None:
    opened: list[FakeLLM] = []

    class Fake(FakeLLM):
        sampling_defaults = recommended

        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            opened.append(self)

    monkeypatch.setattr("winnow.llm.LLM", Fake)
    for command in (["chat", "--model", "demo"], ["generate", "ab", "--model", "demo"]):
        typed("ab\n")
        assert main([*command, *typed_flags]) == 0
        params = opened[-1].params["stream"]
        assert (params.temperature, params.top_p, params.min_p) == sampled
        assert capsys.readouterr().err.count("the model recommends no sampling: temperature 0.3") == said


def test_a_file_goes_before_the_next_question(
    typed: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("winnow.llm.LLM", FakeLLM)
    for name in ("a", "b"):
        (tmp_path / name).write_text(f"text {name}\n")
    typed(f"q\n/stats\n/reset\n/file {tmp_path}/none\n/file {tmp_path}/b\nr\n/reset\ns\n")
    assert main(["chat", "--model", "demo", "--file", str(tmp_path / "a")]) == 0
    shown = capsys.readouterr()
    assert shown.out == "".join(f"<user>{text}"[::-1] + "\n" for text in ("text a\n\nq", "text b\n\nr", "s"))
    assert "conversation: 30 of 200 tokens of context" in shown.err
    assert f"cannot read --file {tmp_path}/none" in shown.err and "6 characters go before" in shown.err


def test_images_go_before_the_next_question(
    typed: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    image = pytest.importorskip("PIL.Image")
    asked: list[Any] = []

    class Watched(FakeLLM):
        def stream_chat(self, messages: Any, *more: Any, **options: Any) -> Any:
            asked.append(messages)
            return super().stream_chat(messages, *more, **options)

    monkeypatch.setattr("winnow.llm.LLM", Watched)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    image.new("RGB", (2, 3), "red").save(tmp_path / "a.png")
    (tmp_path / "b.png").write_text("no image")
    typed(f"/image {tmp_path}/none\n/image {tmp_path}/b.png\n/image {tmp_path}/a.png\nq\nr\n")
    assert main(["chat", "--model", "demo", "--image", str(tmp_path / "a.png"), "--session", "trip"]) == 0
    kinds = [part["type"] for part in asked[0][-1]["content"]]
    assert kinds == ["image_url", "image_url", "text"] and asked[1][-1]["content"] == "r"
    assert load_images(asked[0][-1]["content"][:2]) == [(2, 3), (2, 3)]
    shown = capsys.readouterr().err
    assert "none: No such file" in shown and "b.png of 8 B is no image file" in shown
    assert "2 images go before the next question" in shown
    typed("/exit\n")
    assert main(["chat", "--model", "demo", "--session", "trip"]) == 0
    assert "resumed after 2 questions" in capsys.readouterr().err
    assert main(["chat", "--model", "demo", "--image", str(tmp_path / "b.png")]) == 2


def load_images(parts: list[Any]) -> list[Any]:
    return [
        each.size for each in MediaLoader(MediaConfig()).load([part["image_url"]["url"] for part in parts])
    ]


def test_a_base_model_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("winnow.llm.LLM", FakeLLM)
    (tmp_path / "config.json").write_text("{}")
    assert main(["chat", str(tmp_path)]) == 2
    assert "has no chat template, as base models have none" in capsys.readouterr().err


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_a_line_that_is_no_utf_8_is_one_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], errors: str
) -> None:
    monkeypatch.setattr("winnow.llm.LLM", FakeLLM)
    data = io.BytesIO(b"caf\xe9\nab\n\xc3\ncd")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(data, encoding="utf-8", errors=errors))
    assert main(["chat", "--model", "demo"]) == 1  # two questions were not answered
    shown = capsys.readouterr()
    # The lines that were refused are no part of the conversation.
    assert shown.out.splitlines() == ["<user>ab"[::-1], "<user>ab<assistant>ba>resu<<user>cd"[::-1]]
    assert shown.err.count("winnow: error: a question must be UTF-8 text") == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--system", "\udcff"), "--system must be UTF-8 text"),
        (("--stop", "\udcff"), "--stop: must be UTF-8 text"),
        (("--url", "\udcff"), "--url must be the address of a server"),
        (("--url", "http://a:b"), "--url must be the address of a server"),
        (("--url", "127.0.0.1:8000"), "--url must be the address of a server"),
        (("--url", "http://127.0.0.1:9", "--api-key", "\xe9"), "--api-key must be ASCII"),
    ],
)
def test_options_that_cannot_be_used(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    assert main(["chat", *words]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("winnow: error: ") and message in shown and shown.count("\n") == 1


def test_a_server_says_who_it_is(typed: Any, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("fastapi")
    from tests.server.running import running

    from winnow import LLM

    typed("Question: What is the hobby of Tom?\n")
    with LLM(kv_memory="16MiB") as llm, running(llm) as server:
        assert main(["chat", "--url", server.address, "--max-tokens", "4"]) == 0
        shown = capsys.readouterr()
        assert f"winnow: winnow-demo, context 4096 tokens at {server.address}" in shown.err
        assert shown.out.strip()


def test_options_of_a_model_here_mean_nothing_to_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", "http://127.0.0.1:9", "--kv-memory", "1GiB"]) == 2
    assert "option of a model here" in capsys.readouterr().err


def test_a_server_that_is_not_there(typed: Any, capsys: pytest.CaptureFixture[str]) -> None:
    typed("hello\n")
    assert main(["chat", "--url", "http://127.0.0.1:9"]) == 1
    assert "does not answer" in capsys.readouterr().err


def test_a_conversation_is_kept_and_resumed(
    typed: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("winnow.llm.LLM", FakeLLM)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    typed("ab\n")
    assert main(["chat", "--model", "demo", "--session", "trip", "--system", "s"]) == 0
    [kept] = (tmp_path / "winnow" / "chats").iterdir()
    assert kept.name == "trip.json" and kept.stat().st_mode & 0o077 == 0
    capsys.readouterr()
    typed("cd\n")
    assert main(["chat", "--model", "demo", "--session", "trip"]) == 0
    shown = capsys.readouterr()
    # The fake answers with the conversation's letters reversed: the first question is there again.
    assert shown.out.splitlines()[0].startswith("dc>resu<") and "ba>resu<s>metsys<" in shown.out
    assert "resumed after 1 questions" in shown.err and "> ab" in shown.err
    typed("")
    assert main(["chat", "--model", "demo", "--session", "trip", "--system", "other"]) == 2
    assert "--system cannot change" in capsys.readouterr().err
    kept.write_text("{}")
    for name, message in (("trip", "holds no conversation"), ("../x", "must be 1 to 64 letters")):
        assert main(["chat", "--model", "demo", "--session", name]) == 2
        assert message in capsys.readouterr().err


def test_a_conversation_without_a_name_goes_on(
    typed: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """On a terminal, where Ctrl-C at an empty prompt asks once."""

    def enter(*lines: str | type[BaseException]) -> None:
        left = iter(lines)

        def read(prompt: str) -> str:
            line = next(left)
            if isinstance(line, str):
                return line
            raise line

        monkeypatch.setattr("builtins.input", read)

    monkeypatch.setattr("winnow.llm.LLM", FakeLLM)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    typed("")
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    enter("ab", KeyboardInterrupt, "cd", KeyboardInterrupt, KeyboardInterrupt)
    assert main(["chat", "--model", "demo"]) == 130
    shown = capsys.readouterr()
    assert shown.err.count("Ctrl-C again ends") == 2 and shown.out.splitlines()[1].startswith("dc>")
    enter("ef", EOFError)
    assert main(["chat", "--model", "demo", "--continue"]) == 0
    assert "ba>resu<" in capsys.readouterr().out
    enter("gh", EOFError)
    assert main(["chat", "--model", "demo"]) == 0
    assert "ba>resu<" not in capsys.readouterr().out
    assert main(["chat", "--model", "demo", "--continue", "--session", "a"]) == 2
    # What a program pipes in is not kept, and a disk that takes nothing ends no conversation.
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null")
    enter("ab", EOFError)
    assert main(["chat", "--model", "demo"]) == 0
