"""What ends an answer, and what is logged where the model does not say it."""

import logging
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from winnow import LLM, SamplingParams
from winnow.prompt.chat import turn_end, warn_about_ends


def test_an_answer_to_the_end_of_the_context_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with LLM(kv_memory="16MiB", threads=1, max_model_len=24) as llm:
        for max_tokens, logged in ((4, 0), (None, 1), (None, 1)):
            params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
            [output] = llm.generate([[1, 300, 301]], params)
            assert output.outputs[0].finish_reason == "length"
            assert len(output.outputs[0].token_ids) == (max_tokens or 21)
            assert len(caplog.records) == logged
    assert "after 21 tokens: its finish_reason is length" in caplog.text
    assert "end token" not in caplog.text, "the demo model's template ends turns with its end token"


class _Tokenizer(SimpleNamespace):
    """Two special tokens: <end> is 7, <eos> is 9; any other letter is a token of its own."""

    added_tokens_decoder: ClassVar = {7: "<end>", 9: "<eos>"}

    def apply_chat_template(self, messages: Any, **_: Any) -> str:
        if self.chat_template == "fails":
            raise ValueError
        return "".join(f"{each['content']}{self.chat_template}" for each in messages)

    def encode(self, text: str, **_: Any) -> list[int]:
        return [{"<end>": 7, "<eos>": 9}.get(word, 100) for word in text.replace(">", "> ").split()]

    def convert_ids_to_tokens(self, token: int) -> str:
        return self.added_tokens_decoder[token]


@pytest.mark.parametrize(
    ("template", "end"),
    [("<end>", 7), ("<end>\n", 7), ("<eos>", 9), ("\n", None), ("fails", None), ("", None)],
)
def test_the_end_of_a_turn(template: str, end: int | None) -> None:
    assert turn_end(_Tokenizer(chat_template=template)) == end  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("template", "ends", "message"),
    [
        ("<end>", {9}, "ends a turn with '<end>' (token 7), which is no end token of the model (9)"),
        ("<end>", {7, 9}, None),
        ("\n", {9}, None),
        ("<end>", (), "neither model nor tokenizer names an end-of-text token"),
        (None, (), "neither model nor tokenizer names an end-of-text token"),
        (None, {9}, None),
    ],
)
def test_ends_that_are_not_known_are_logged(
    template: str | None, ends: Any, message: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    warn_about_ends(_Tokenizer(chat_template=template), ends)  # type: ignore[arg-type]
    assert (message in caplog.text) if message else not caplog.records
    assert all(record.levelno == logging.WARNING for record in caplog.records)
