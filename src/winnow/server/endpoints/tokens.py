"""/tokenize and /detokenize."""

from typing import Any

from winnow.openai.errors import ApiError, invalid
from winnow.openai.request import read_messages, take_text
from winnow.openai.tools import read_template_options, read_tools
from winnow.server.forms import check_body
from winnow.server.service import Service
from winnow.values.json_values import json_kind

_TEXT_FIELDS = {"prompt", "add_special_tokens", "return_token_strs"}


async def tokenize(service: Service, body: dict[str, Any], tenant: str | None) -> dict[str, Any]:
    """Return the tokens of `prompt`, or of `messages` through the model's chat template. Raises ApiError,
    InvalidRequestError: a field is wrong."""
    service.check_model(take_text(body, "model"))
    names = body.pop("return_token_strs", False)
    if "messages" in body:
        messages = read_messages(body.pop("messages"))
        body.pop("add_special_tokens", None)
        tools, _ = read_tools(body)
        template = read_template_options(body, tools)
        _refuse(body, set())
        prompt = await service.tokenize_chat(messages, template, tenant)
        ids = prompt.token_ids
    else:
        _refuse(body, _TEXT_FIELDS)
        text = body.get("prompt")
        if not isinstance(text, str):
            raise invalid("prompt", f"must be text, got {json_kind(text)}")
        special = body.get("add_special_tokens", True)
        ids = (await service.tokenize(text, special=bool(special))).token_ids if text else []
    found: dict[str, Any] = {"count": len(ids), "max_model_len": service.llm.max_model_len, "tokens": ids}
    if names:
        found["token_strs"] = (
            service.llm.tokenizer.convert_ids_to_tokens(ids) if service.llm.tokenizer else []
        )
    return found


async def detokenize(service: Service, body: dict[str, Any]) -> dict[str, Any]:
    """Return the text of `tokens`. Raises ApiError: a field is wrong, or the model has no tokenizer."""
    check_body("/detokenize", body)
    service.check_model(body.get("model"))
    ids, tokenizer = body["tokens"], service.llm.tokenizer
    if tokenizer is None:
        raise ApiError("invalid_request", "the model has no tokenizer")
    if ids and max(ids) >= service.llm.vocab_size:
        raise invalid("tokens", f"must be below {service.llm.vocab_size}, got {max(ids)}")
    text = await service.off_loop(lambda: tokenizer.decode(ids, clean_up_tokenization_spaces=False))
    return {"prompt": text}


def _refuse(body: dict[str, Any], known: set[str]) -> None:
    for name in body:
        if name not in known:
            raise invalid(f"{name!r:.80}", "is not a field of this request", name[:80])
