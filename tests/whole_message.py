"""The message of a chat's answer, from its deltas or its whole text."""

from collections.abc import Sequence
from typing import Any

from winnow.openai.answers import AnswerReader
from winnow.openai.request import Endpoint
from winnow.openai.response import ResponseForm
from winnow.openai.stream import ChunkStream, fold
from winnow.outputs import CompletionOutput, RequestMetrics, RequestOutput


def message_of(
    reader: AnswerReader, prompt: str, deltas: Sequence[CompletionOutput], tools: Any, calls: Any
) -> dict[str, Any]:
    form = ResponseForm(
        Endpoint.CHAT, "x", "m", 1, new_parser=lambda output: reader.parser(output.prompt, tools, calls)
    )
    chunks, metrics = ChunkStream(form), RequestMetrics(arrival_time=0.0)
    outputs = [RequestOutput("r", prompt, [1], [each], False, metrics) for each in deltas]
    [choice] = fold(chunk for each in outputs for chunk in chunks.push(0, each))
    message: dict[str, Any] = choice["message"]
    return {name: value for name, value in message.items() if name not in ("refusal", "annotations")}
