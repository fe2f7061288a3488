"""What the `openai` client can ask, unmodified. Exit code 1 if a case fails.

Usage: openai_client.py URL MODEL
"""

import io
import json
import sys
import time
from typing import Any

import openai
from cases import run_cases

MESSAGES: list[Any] = [{"role": "user", "content": "What is the name of the dog?"}]
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}},
    "required": ["colour"],
    "additionalProperties": False,
}
TOOL: Any = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
}


class Cases:
    def __init__(self, url: str, model: str) -> None:
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        self.model = model

    def models(self) -> None:
        assert self.model in [each.id for each in self.client.models.list()]
        assert self.client.models.retrieve(self.model).id == self.model

    def chat(self) -> None:
        found = self.client.chat.completions.create(
            model=self.model,
            messages=MESSAGES,
            max_completion_tokens=8,
            n=2,
            seed=1,
            logprobs=True,
            top_logprobs=2,
        )
        assert len(found.choices) == 2 and found.usage is not None and found.usage.completion_tokens <= 16
        assert found.usage.prompt_tokens_details is not None
        logprobs = found.choices[0].logprobs
        assert (
            logprobs is not None
            and logprobs.content is not None
            and len(logprobs.content[0].top_logprobs) >= 2
        )

    def chat_stream(self) -> None:
        options: dict[str, Any] = {"model": self.model, "messages": MESSAGES, "max_tokens": 8, "seed": 1}
        whole = self.client.chat.completions.create(**options)
        chunks = list(
            self.client.chat.completions.create(
                **options, stream=True, stream_options={"include_usage": True}
            )
        )
        text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
        assert text == whole.choices[0].message.content and chunks[-1].usage is not None

    def completions(self) -> None:
        found = self.client.completions.create(
            model=self.model, prompt=["Once upon", "The king"], max_tokens=6, echo=True, logprobs=2
        )
        assert [each.index for each in found.choices] == [0, 1]
        assert found.choices[0].text.startswith("Once upon")
        stream = self.client.completions.create(model=self.model, prompt=[5, 6, 7], max_tokens=6, stream=True)
        assert list(stream)[-1].choices[0].finish_reason in ("stop", "length")

    def responses(self) -> None:
        found = self.client.responses.create(model=self.model, input="Hello", max_output_tokens=8)
        assert found.output_text and found.usage is not None and found.usage.output_tokens <= 8
        kinds = [each.type for each in self.client.responses.create(model=self.model, input="Hello", stream=True,
                 max_output_tokens=8)]  # fmt: skip
        assert kinds[0] == "response.created" and kinds[-1] in ("response.completed", "response.incomplete")
        more = self.client.responses.create(
            model=self.model, input="And?", previous_response_id=found.id, max_output_tokens=8
        )
        assert self.client.responses.retrieve(more.id).output_text == more.output_text
        assert len(list(self.client.responses.input_items.list(more.id))) == 3
        self.client.responses.delete(more.id)

    def structured_output(self) -> None:
        form: Any = {
            "type": "json_schema",
            "json_schema": {"name": "colour", "schema": SCHEMA, "strict": True},
        }
        found = self.client.chat.completions.create(
            model=self.model, messages=MESSAGES, max_tokens=64, response_format=form
        )
        assert json.loads(found.choices[0].message.content or "")["colour"] in ("red", "blue")
        text: Any = {"format": {"type": "json_schema", "name": "colour", "schema": SCHEMA}}
        answer = self.client.responses.create(
            model=self.model, input="Hello", text=text, max_output_tokens=64
        )
        assert json.loads(answer.output_text)["colour"] in ("red", "blue")

    def tools(self) -> None:
        found = self.client.chat.completions.create(
            model=self.model, messages=MESSAGES, tools=[TOOL], tool_choice="auto", max_tokens=8
        )
        assert found.choices[0].finish_reason in ("stop", "length", "tool_calls")

    def files_and_batches(self) -> None:
        body = {"model": self.model, "prompt": "Once upon", "max_tokens": 4}
        lines = [
            {"custom_id": str(index), "method": "POST", "url": "/v1/completions", "body": body}
            for index in range(5)
        ]
        data = "\n".join(map(json.dumps, lines)).encode()
        file = self.client.files.create(file=("in.jsonl", io.BytesIO(data)), purpose="batch")
        batch = self.client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        deadline = time.monotonic() + 120
        while batch.status not in ("completed", "failed") and time.monotonic() < deadline:
            time.sleep(0.2)
            batch = self.client.batches.retrieve(batch.id)
        assert batch.status == "completed" and batch.output_file_id is not None, batch
        answers = self.client.files.content(batch.output_file_id).text.splitlines()
        assert [json.loads(line)["custom_id"] for line in answers] == ["0", "1", "2", "3", "4"]
        assert any(each.id == batch.id for each in self.client.batches.list())
        assert self.client.files.delete(file.id).deleted

    def errors(self) -> None:
        for kind, change in (
            (openai.NotFoundError, {"model": "no-such-model"}),
            (openai.BadRequestError, {"temperature": -1.0}),
            (openai.BadRequestError, {"messages": []}),
        ):
            options: dict[str, Any] = {"model": self.model, "messages": MESSAGES, **change}
            try:
                self.client.chat.completions.create(**options)
            except kind as error:
                assert error.request_id and error.body is not None
            else:
                raise AssertionError(f"{change} was taken")


if __name__ == "__main__":
    sys.exit(run_cases(Cases(*sys.argv[1:3])))
