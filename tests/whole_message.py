"""The message of a chat's answer, from its deltas or its whole text."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from winnow.openai.answers import AnswerReader
from winnow.openai.request import CompletionRequest
from winnow.openai.response import ChunkStream, ResponseForm, fold
from winnow.outputs import CompletionOutput, RequestMetrics, RequestOutput
from winnow.prompt.chat import PLAIN
from winnow.sampling import SamplingParams


def message_of(
    reader: AnswerReader, prompt: str, deltas: Sequence[CompletionOutput], tools: Any, calls: Any
) -> dict[str, Any]:
    asked = CompletionRequest(
        (), [], SamplingParams(), None, template=replace(PLAIN, tools=tuple(tools or ())), calls=calls
    )
    form = ResponseForm(asked, reader, "x", "m", 1)
    chunks, metrics = ChunkStream(form), RequestMetrics(arrival_time=0.0)
    outputs = [RequestOutput("r", prompt, [1], [each], False, metrics) for each in deltas]
    [choice] = fold(chunk for each in outputs for chunk in chunks.push(0, each))
    message: dict[str, Any] = choice["message"]
    return {name: value for name, value in message.items() if name not in ("refusal", "annotations")}
