"""Objects that answer a body: `text_completion` and `chat.completion`."""

from typing import Any

from winnow.openai.logprobs import chat_logprobs, completion_logprobs
from winnow.openai.request import Endpoint
from winnow.outputs import CompletionOutput, RequestOutput


def completion_object(
    endpoint: Endpoint, output: RequestOutput, *, name: str, model: str, created: int
) -> dict[str, Any]:
    """Return the object for a finished request.

    Args:
        name: what follows the prefix of the object's id.
        model: the name that the object gives the model.
        created: Unix seconds.
    """
    chat = endpoint is Endpoint.CHAT
    choice = _chat_choice if chat else _completion_choice
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{name}",
        "object": "chat.completion" if chat else "text_completion",
        "created": created,
        "model": model,
        "choices": [choice(answer) for answer in output.outputs],
        "usage": usage(output),
    }


def usage(output: RequestOutput) -> dict[str, int]:
    """Tokens of the prompt and of all answers."""
    prompt = len(output.prompt_token_ids)
    answer = sum(len(answer.token_ids) for answer in output.outputs)
    return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}


def _chat_choice(answer: CompletionOutput) -> dict[str, Any]:
    return {
        "index": answer.index,
        "message": {"role": "assistant", "content": answer.text},
        "logprobs": chat_logprobs(answer),
        "finish_reason": answer.finish_reason,
    }


def _completion_choice(answer: CompletionOutput) -> dict[str, Any]:
    return {
        "index": answer.index,
        "text": answer.text,
        "logprobs": completion_logprobs(answer),
        "finish_reason": answer.finish_reason,
    }
