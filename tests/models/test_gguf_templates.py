"""Chat templates and tokenizers of GGUF files alone: twenty conversations a family, as transformers renders them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from chat_families import CONVERSATIONS, FAMILIES
from tokenizer_kinds import EOS, UNKNOWN, byte_level
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from winnow.errors import InvalidRequestError
from winnow.models.load.automatic import open_published
from winnow.prompt.chat import TemplateOptions, apply_template

pytest.importorskip("gguf")
from gguf import GGUFWriter
from gguf_architectures import add_keys
from tiny_gguf import add_tokenizer


def reference(template: str, marks: tuple[str, ...]) -> PreTrainedTokenizerFast:
    """transformers' tokenizer of the same vocabulary, whose last tokens are `marks`, made of no file."""
    described = json.loads(byte_level().backend_tokenizer.to_str())
    model = described["model"]
    texts = [*sorted(model["vocab"], key=model["vocab"].__getitem__)[: -len(marks)], *marks]
    model["vocab"] = {text: token for token, text in enumerate(texts)}
    model["merges"] = [each for each in model["merges"] if {*each, "".join(each)} <= {*texts}]
    backend = Tokenizer.from_str(json.dumps(described))
    backend.add_special_tokens(list(marks))
    names: dict[str, Any] = {"bos_token": UNKNOWN, "eos_token": EOS, "unk_token": UNKNOWN}
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **names)


def for_transformers(messages: list[dict[str, Any]], template: str) -> list[dict[str, Any]]:
    """As transformers documents them: arguments are objects, and no content is an empty text."""
    found: list[dict[str, Any]] = json.loads(json.dumps(messages))
    for each in found:
        each["content"] = each["content"] or ""
        if each["role"] == "developer" and "developer" not in template:
            each["role"] = "system"
        for call in each.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"] or "{}")
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_conversations_as_transformers_renders_them(name: str, tmp_path: Path) -> None:
    template, marks = FAMILIES[name]
    writer = GGUFWriter(tmp_path / "tiny.gguf", name)
    add_keys(writer, name, len(byte_level()))
    add_tokenizer(writer, "gpt-2", tuple((mark, 3) for mark in marks), template)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    theirs, ours = reference(template, marks), open_published(tmp_path / "tiny.gguf").tokenizer()
    rendered = 0
    for messages, given in CONVERSATIONS:
        options = {"add_generation_prompt": not given.get("continue_final_message"), "tools": None, **given}
        try:
            text: Any = theirs.apply_chat_template(
                for_transformers(messages, template), tokenize=False, **options
            )
        except Exception as error:
            with pytest.raises(InvalidRequestError, match=re.escape(str(error)[:30])):
                apply_template(ours, messages, as_options(given))
            continue
        found = apply_template(ours, messages, as_options(given))
        assert found.text == text, messages
        assert found.token_ids == theirs.encode(text, add_special_tokens=False)
        rendered += 1
    assert len(CONVERSATIONS) == 20 and rendered >= 12


def as_options(given: dict[str, Any]) -> TemplateOptions:
    own = {name: given[name] for name in given if name in TemplateOptions.__dataclass_fields__}
    return TemplateOptions(**own, variables={name: each for name, each in given.items() if name not in own})
